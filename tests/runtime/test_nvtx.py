"""Ranges reach whoever looks, nest, and are nothing when nobody does or inside a compiled graph."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import profile

from birdie.runtime import nvtx as ranges
from birdie.runtime.nvtx import attached, listening, move, on_gradient, recording, span


class Heard:
    """What a recorder is told, one word for each begin and end."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.open: list[str] = []

    def begin(self, name: str) -> None:
        self.open.append(name)
        self.words.append(f"+{name}")

    def end(self) -> None:
        self.words.append(f"-{self.open.pop()}")


@pytest.fixture(autouse=True)
def _nobody_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ranges.INJECTED:
        monkeypatch.delenv(name, raising=False)
    ranges._nvtx.cache_clear()
    yield
    ranges._nvtx.cache_clear()


def test_nobody_looking_there_is_one_shared_nothing() -> None:
    assert not listening()
    assert span("a") is span("b")
    with span("a"):
        move("a/1")
    assert not ranges._open


def test_a_recorder_hears_spans_and_moves_in_order() -> None:
    with recording(heard := Heard()):
        with span("forward"):
            move("forward/embedding")
            with span("forward/embedding/table"):
                pass
            move("forward/head")
        move("nowhere")
        with span("backward"):
            pass
    with span("unheard"):
        pass
    assert heard.words == [
        *("+forward", "+forward/embedding", "+forward/embedding/table", "-forward/embedding/table"),
        *("-forward/embedding", "+forward/head", "-forward/head", "-forward", "+backward", "-backward"),
    ]


def test_an_error_ends_all_ranges_it_leaves() -> None:
    def fails() -> None:
        with span("a"):
            move("a/1")
            raise KeyError

    with recording(heard := Heard()), pytest.raises(KeyError):
        fails()
    assert heard.words == ["+a", "+a/1", "-a/1", "-a"]
    assert not ranges._open


def test_backward_moves_on_as_gradients_come_to_be() -> None:
    x = torch.ones(3, requires_grad=True)
    early = x * 2
    late = early * 3
    on_gradient(early, "backward/early")
    on_gradient(late, "backward/late")
    on_gradient(torch.ones(3), "backward/never")
    with recording(heard := Heard()), span("backward"):
        late.sum().backward()
    assert heard.words == [
        *("+backward", "+backward/late", "-backward/late", "+backward/early", "-backward/early", "-backward"),
    ]


def test_torch_profilers_see_the_names() -> None:
    with profile() as seen, span("optimizer"):
        move("optimizer/adam")
        torch.ones(3).sum()
    assert {"optimizer", "optimizer/adam"} <= {event.name for event in seen.events()}
    assert not listening()


def test_a_compiled_graph_stays_whole() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with span("a"):
            y = x.sin()
        move("b")
        with span("b"):
            return y + 1

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    with recording(heard := Heard()), span("around"):
        assert torch.equal(compiled(torch.ones(2)), function_alone(torch.ones(2)))
    assert heard.words == ["+around", "-around"]
    torch._dynamo.reset()


def function_alone(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@pytest.mark.parametrize("name", ranges.INJECTED)
def test_an_injected_profiler_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not attached()
    monkeypatch.setenv(name, "something")
    assert attached()
    assert listening() == torch.cuda.is_available()  # without CUDA there is no NVTX to write to


class FakeNvtx:
    """NVTX's calls, in words."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def range_push(self, name: str) -> int:
        self.words.append(f"push {name}")
        return 0

    def range_pop(self) -> int:
        self.words.append("pop")
        return 0

    def range_start(self, name: str) -> str:
        self.words.append(f"start {name}")
        return name

    def range_end(self, name: str) -> None:
        self.words.append(f"end {name}")


@contextmanager
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvtx]:
    fake = FakeNvtx()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranges, "nvtx", fake)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    ranges._nvtx.cache_clear()
    yield fake


def test_nsight_gets_nvtx_ranges_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with nvtx(monkeypatch) as fake, span("forward"):
        move("forward/layer 0")
        move("forward/layer 1")
    assert fake.words == [
        *("push forward", "start forward/layer 0", "end forward/layer 0"),
        *("start forward/layer 1", "end forward/layer 1", "pop"),
    ]
