"""Named ranges of a training step, for whoever looks: Nsight through NVTX, torch.profiler, a recorder of ours.

    with span("optimizer/adam"):            # anywhere outside a compiled graph
        adam.step()

Nobody looking, `span` gives back one shared context that does nothing, about a microsecond each; inside a graph of
torch.compile it vanishes, so that `fullgraph` stays possible. Nothing has to be switched on: NVTX ranges are there when
the process was started by a profiler that injects itself, torch's when one of its profilers is running.

Names are paths by what they are part of: "forward/layer 3/attention" lies in "forward". A step is made of

    data · transfer · forward/… · backward/… · reduce/… · clip · optimizer/… · average · techniques · bookkeeping

with optimizer/adam and, of Muon, optimizer/muon/momentum, /orthogonalize, /exchange and /apply. A part that is opened
again, or within itself, counts as one. `move` is for parts that follow one another without a block of their own, such
as the layers of a pass: each ends the one before, and the last ends with the span around it.
Spans are of the thread that trains; other threads (a loader's) leave them alone.
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
    "NSYS_PROFILING_SESSION_ID",  # Nsight Systems, for what it started
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE",  # Nsight Compute
    "NVTX_INJECTION64_PATH",  # any tool that listens to NVTX
    "CUDA_INJECTION64_PATH",  # any tool that listens to CUDA
)
"""Environment variables by which a profiler gets into a process."""


class Recorder(Protocol):
    """What listens to ranges within this process."""

    def begin(self, name: str) -> None:
        """A range begins within the one begun last and not ended."""
        ...

    def end(self) -> None:
        """The range begun last ends."""
        ...


def attached() -> bool:
    """Whether a profiler outside this process looks into it."""
    return any(os.environ.get(name) for name in INJECTED)


def listening() -> bool:
    """Whether anybody looks: a profiler outside, one of torch's, or a recorder."""
    return _recorder is not None or _nvtx() or profiler._is_profiler_enabled


def span(name: str) -> AbstractContextManager[None]:
    """The range `name`, from entering to leaving; nothing at all when nobody looks or within a compiled graph."""
    if torch.compiler.is_compiling() or not listening():
        return _NOTHING
    return _Range(name)


def move(name: str) -> None:
    """End what the last `move` within the current span began, and begin `name`, which ends with the span at latest."""
    if torch.compiler.is_compiling() or not _open:
        return
    around = _open[-1]
    if around.moving:
        _open.pop().close()
        around = _open[-1]
    _Range(name, moving=True, thread=around.thread).__enter__()


def on_gradient(tensor: Tensor, name: str) -> None:
    """`move` to `name` when the gradient of `tensor` is there: backward comes to what made it."""
    if tensor.requires_grad:
        tensor.register_hook(lambda _: move(name))  # type: ignore[no-untyped-call]


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let `recorder` hear all ranges until the end of the block; one at a time."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


@cache
def _nvtx() -> bool:
    return attached() and torch.cuda.is_available()


class _Range:
    """An open range; it ends where it began, even if nobody looks any more."""

    __slots__ = ("_function", "_mark", "_name", "_recorder", "moving", "thread")

    def __init__(self, name: str, *, moving: bool = False, thread: int | None = None) -> None:
        self._name, self.moving = name, moving
        self.thread = threading.get_ident() if thread is None else thread
        self._recorder: Recorder | None = None
        self._function: Any = None
        self._mark: Any = None

    def __enter__(self) -> None:
        _open.append(self)
        if _nvtx():
            # backward runs in a thread of its own on CUDA: what moves on there cannot be a range of a thread's stack
            self._mark = (nvtx.range_start if self.moving else nvtx.range_push)(self._name)
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
        if self._mark is not None:
            if self.moving:
                nvtx.range_end(self._mark)
            else:
                nvtx.range_pop()  # type: ignore[no-untyped-call]


_NOTHING = nullcontext()
_open: list[_Range] = []
_recorder: Recorder | None = None
