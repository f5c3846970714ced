"""Ranges reach every receiver and nest; without a receiver, or inside a compiled graph, they do nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import profile

from birdie.runtime import nvtx as ranges
from birdie.runtime.nvtx import (
    next_range,
    next_range_on_gradient,
    nvtx_range,
    profiler_attached,
    profiling,
    recording,
)


class EventLog:
    """A recorder that keeps one event for each begin (+) and end (-)."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.open: list[str] = []

    def begin(self, name: str) -> None:
        self.open.append(name)
        self.events.append(f"+{name}")

    def end(self) -> None:
        self.events.append(f"-{self.open.pop()}")


@pytest.fixture(autouse=True)
def _no_attached_profiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ranges.INJECTED:
        monkeypatch.delenv(name, raising=False)
    ranges._nvtx.cache_clear()
    yield
    ranges._nvtx.cache_clear()


def test_without_a_profiler_all_ranges_are_one_shared_null_context() -> None:
    assert not profiling()
    assert nvtx_range("a") is nvtx_range("b")
    with nvtx_range("a"):
        next_range("a/1")
    assert not ranges._open


def test_a_recorder_receives_nested_and_sequential_ranges_in_order() -> None:
    with recording(log := EventLog()):
        with nvtx_range("forward"):
            next_range("forward/embedding")
            with nvtx_range("forward/embedding/table"):
                pass
            next_range("forward/head")
        next_range("outside")
        with nvtx_range("backward"):
            pass
    with nvtx_range("unrecorded"):
        pass
    assert log.events == [
        *("+forward", "+forward/embedding", "+forward/embedding/table", "-forward/embedding/table"),
        *("-forward/embedding", "+forward/head", "-forward/head", "-forward", "+backward", "-backward"),
    ]


def test_an_error_closes_all_ranges_it_leaves() -> None:
    def fails() -> None:
        with nvtx_range("a"):
            next_range("a/1")
            raise KeyError

    with recording(log := EventLog()), pytest.raises(KeyError):
        fails()
    assert log.events == ["+a", "+a/1", "-a/1", "-a"]
    assert not ranges._open


def test_backward_enters_the_next_range_when_a_gradient_is_computed() -> None:
    x = torch.ones(3, requires_grad=True)
    early = x * 2
    late = early * 3
    next_range_on_gradient(early, "backward/early")
    next_range_on_gradient(late, "backward/late")
    next_range_on_gradient(torch.ones(3), "backward/never")
    with recording(log := EventLog()), nvtx_range("backward"):
        late.sum().backward()
    assert log.events == [
        *("+backward", "+backward/late", "-backward/late", "+backward/early", "-backward/early", "-backward"),
    ]


def test_torch_profiler_records_the_names() -> None:
    with profile() as trace, nvtx_range("optimizer"):
        next_range("optimizer/adam")
        torch.ones(3).sum()
    assert {"optimizer", "optimizer/adam"} <= {event.name for event in trace.events()}
    assert not profiling()


def test_ranges_do_not_break_a_compiled_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with nvtx_range("a"):
            y = x.sin()
        next_range("b")
        with nvtx_range("b"):
            return y + 1

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    with recording(log := EventLog()), nvtx_range("enclosing"):
        assert torch.equal(compiled(torch.ones(2)), sine_plus_one(torch.ones(2)))
    assert log.events == ["+enclosing", "-enclosing"]
    torch._dynamo.reset()


def sine_plus_one(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@pytest.mark.parametrize("name", ranges.INJECTED)
def test_an_injected_profiler_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not profiler_attached()
    monkeypatch.setenv(name, "something")
    assert profiler_attached()
    assert profiling() == torch.cuda.is_available()  # without CUDA there is no NVTX to write to


class FakeNvtx:
    """A stand-in for torch.cuda.nvtx that lists its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def range_push(self, name: str) -> int:
        self.calls.append(f"push {name}")
        return 0

    def range_pop(self) -> int:
        self.calls.append("pop")
        return 0

    def range_start(self, name: str) -> str:
        self.calls.append(f"start {name}")
        return name

    def range_end(self, name: str) -> None:
        self.calls.append(f"end {name}")


@contextmanager
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvtx]:
    fake = FakeNvtx()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranges, "nvtx", fake)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    ranges._nvtx.cache_clear()
    yield fake


def test_nsight_gets_nvtx_ranges_without_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    with nvtx(monkeypatch) as fake, nvtx_range("forward"):
        next_range("forward/layer 0")
        next_range("forward/layer 1")
    assert fake.calls == [
        *("push forward", "start forward/layer 0", "end forward/layer 0"),
        *("start forward/layer 1", "end forward/layer 1", "pop"),
    ]
