"""Named ranges of a training step for torch's profiler, and through `torch.autograd.profiler.emit_nvtx` for Nsight.

    with named_range("optimizer/adam"):
        adam.step()

A name is a path: "optimizer/adam" is a part of "optimizer". A step consists of

    data · transfer · forward/… · backward/… · reduce/… · clip · optimizer/… · average · techniques · bookkeeping
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function


def named_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that is the range `name` while a profiler of torch runs."""
    # `record_function` alone takes some microseconds without a profiler, of which a step would have fifty
    return record_function(name) if profiler._is_profiler_enabled else _NULL


_NULL = nullcontext()
