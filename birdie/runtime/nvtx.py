"""Named ranges of a training step for profilers: Nsight (through NVTX), torch.profiler and a recorder in the process.

    with nvtx_range("optimizer/adam"):            # anywhere outside a compiled graph
        adam.step()

Without a profiler, `nvtx_range` returns one shared null context, which costs about a microsecond. Inside a graph of
torch.compile it does nothing, so `fullgraph=True` still works. Nothing has to be switched on: NVTX ranges are written
when a profiler that injects itself started the process, torch's ranges while one of its profilers runs.

A name is a path: "forward/layer 3/attention" is a part of "forward". A step consists of

    data · transfer · forward/… · backward/… · reduce/… · clip · optimizer/… · average · techniques · bookkeeping

with optimizer/adam and, of Muon, optimizer/muon/momentum, /orthogonalize, /exchange and /apply. Ranges of the same name
add up, nested ones too. `next_range` is for parts that follow one another without a block of their own, such as the
layers of a forward pass: each ends the previous part, and the last part ends with the enclosing range.
Only the training thread opens ranges; other threads, such as the loader's, do not.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.cuda import nvtx

INJECTED = (
    "NSYS_PROFILING_SESSION_ID",  # Nsight Systems, for the processes it starts
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE",  # Nsight Compute
    "NVTX_INJECTION64_PATH",  # any tool that reads NVTX
    "CUDA_INJECTION64_PATH",  # any tool that hooks CUDA
)
"""Environment variables that profilers set in the processes they inject themselves into."""


class Recorder(Protocol):
    """Receiver of ranges within this process."""

    def begin(self, name: str) -> None:
        """Open a range inside the innermost open range."""
        ...

    def end(self) -> None:
        """Close the innermost open range."""
        ...


def profiler_attached() -> bool:
    """Return whether a profiler outside this process is attached to it."""
    return any(os.environ.get(name) for name in INJECTED)


def profiling() -> bool:
    """Return whether ranges have a receiver: an attached profiler, one of torch's, or a recorder."""
    return _recorder is not None or _nvtx() or profiler._is_profiler_enabled


def nvtx_range(name: str) -> AbstractContextManager[None]:
    """Return a context that is the range `name`; a null context without a profiler or inside a compiled graph."""
    if torch.compiler.is_compiling() or not profiling():
        return _NULL
    return _Range(name)


def next_range(name: str) -> None:
    """End the range that the last `next_range` within the enclosing range began, and begin `name`.

    The new range ends with the enclosing one at the latest. Outside any range the call does nothing.
    """
    if torch.compiler.is_compiling() or not _open:
        return
    enclosing = _open[-1]
    if enclosing.sequential:
        _open.pop().close()
        enclosing = _open[-1]
    _Range(name, sequential=True, thread=enclosing.thread).__enter__()


def next_range_on_gradient(tensor: Tensor, name: str) -> None:
    """Call `next_range(name)` when backward has the gradient of `tensor`, so enters the module that computed it."""
    if tensor.requires_grad:
        tensor.register_hook(lambda _: next_range(name))  # type: ignore[no-untyped-call]


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Send all ranges of the block to `recorder`; an inner block replaces the outer recorder."""
    global _recorder
    previous, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = previous


@cache
def _nvtx() -> bool:
    return profiler_attached() and torch.cuda.is_available()


class _Range:
    """An open range. It closes for the receivers it was opened for, even if they have stopped listening since."""

    __slots__ = ("_function", "_name", "_nvtx_id", "_recorder", "sequential", "thread")

    def __init__(self, name: str, *, sequential: bool = False, thread: int | None = None) -> None:
        self._name, self.sequential = name, sequential
        self.thread = threading.get_ident() if thread is None else thread
        self._recorder: Recorder | None = None
        self._function: Any = None
        self._nvtx_id: Any = None

    def __enter__(self) -> None:
        _open.append(self)
        if _nvtx():
            # On CUDA, backward runs in another thread, and NVTX keeps a stack per thread: sequential ranges, which may
            # end in another thread than they began in, use start/end instead of push/pop.
            self._nvtx_id = (nvtx.range_start if self.sequential else nvtx.range_push)(self._name)
        elif profiler._is_profiler_enabled and threading.get_ident() == self.thread:
            self._function = profiler.record_function(self._name)
            self._function.__enter__()
        if _recorder is not None:
            self._recorder = _recorder
            self._recorder.begin(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while (last := _open.pop()) is not self:
            last.close()
        self.close()

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.end()
        if self._function is not None:
            self._function.__exit__(None, None, None)
        if self._nvtx_id is not None:
            if self.sequential:
                nvtx.range_end(self._nvtx_id)
            else:
                nvtx.range_pop()  # type: ignore[no-untyped-call]


_NULL = nullcontext()
_open: list[_Range] = []
_recorder: Recorder | None = None
