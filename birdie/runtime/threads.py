"""Threads that share a machine: the memory of work that is in flight, and one thread in NumPy's matrix products.

OpenBLAS hands a product of a few hundred rows to threads that go on spinning when they are done. Between the many small
products of a compression that takes more processor time than everything else.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from threadpoolctl import threadpool_limits


class Room:
    """Room of a size. Work that is larger than all of it is done alone."""

    def __init__(self, size: int) -> None:
        self._size, self._used, self._changed = size, 0, threading.Condition()

    @contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Wait until there is room for `amount`, and take it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + amount <= self._size)
            self._used += amount
        try:
            yield
        finally:
            with self._changed:
                self._used -= amount
                self._changed.notify_all()


def one_thread() -> AbstractContextManager[object]:
    """Limit BLAS to one thread in this process for a while; within the block of another thread it does nothing."""
    limits: AbstractContextManager[object] = threadpool_limits(1, user_api="blas")
    return limits
