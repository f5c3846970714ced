"""Threads of NumPy's matrix products: one while tensors are compressed, several at a time.

OpenBLAS hands a product of a few hundred rows to threads that go on spinning when they are done. Between the many small
products of a compression that takes more processor time than everything else.
"""

from contextlib import AbstractContextManager

from threadpoolctl import threadpool_limits


def one_thread() -> AbstractContextManager[object]:
    """Limit BLAS to one thread in this process for a while; within the block of another thread it does nothing."""
    limits: AbstractContextManager[object] = threadpool_limits(1, user_api="blas")
    return limits
