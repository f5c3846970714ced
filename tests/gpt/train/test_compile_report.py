"""Compiled graphs are counted, and compiled before the clock."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from birdie.gpt.train.compile_report import CompileReport, compiled_graphs, eager_pass
from birdie.system.torch_compile import CompiledOrEager
from tests.tiny_run import LENGTH, TinyBatches, tiny_model, tiny_settings, tiny_training

CPU = torch.device("cpu")


@pytest.fixture
def graphs_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch.compile trace and count graphs without compiling them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("graphs_only")
def test_an_eager_pass_saves_a_graph() -> None:
    """The rotary tables exist before the trace, so that one graph serves all steps."""

    def graphs(eager_first: bool) -> int:
        torch._dynamo.reset()
        start, model = compiled_graphs(), tiny_model(num_layers=1)
        if eager_first:
            eager_pass(model, LENGTH, CPU)
        loss = torch.compile(model.loss, dynamic=False)
        for _ in range(2):
            loss(*TinyBatches().next()).backward()
        return compiled_graphs() - start

    assert (graphs(False), graphs(True)) == (2, 1)


@pytest.mark.usefixtures("graphs_only")
def test_a_compiled_run_compiles_only_before_its_clock() -> None:
    lines: list[str] = []
    run = tiny_training(
        tiny_model(num_layers=1), TinyBatches(), tiny_settings(warmup_steps=2, iterations=2, compile=True)
    )
    report = CompileReport(lines.append)
    run.warm_up()
    report.end_warmup()
    losses = [step.loss for step in run]
    report.end_run()
    assert report.late_graphs == 0
    assert lines == [
        "torch.compile: 1 graph compiled before the clock",
        "active: torch.compile: no graph compiled inside the clock",
    ]
    plain = tiny_training(tiny_model(num_layers=1), TinyBatches(), tiny_settings(iterations=2))
    assert losses == pytest.approx([step.loss for step in plain], abs=1e-5)


@pytest.mark.usefixtures("graphs_only")
def test_a_graph_inside_the_clock_is_reported() -> None:
    lines: list[str] = []
    report = CompileReport(lines.append)
    report.end_warmup()
    settings = tiny_settings(warmup_steps=0, iterations=2, compile=True)
    list(tiny_training(tiny_model(num_layers=1), TinyBatches(), settings))
    report.end_run()
    assert report.late_graphs == 2
    assert "2 graphs compiled inside the clock; more warmup_steps" in lines[-1]


@pytest.mark.usefixtures("graphs_only")
def test_every_one_of_many_shapes_has_a_graph() -> None:
    """Not only the eight that torch allows by default, after which it silently runs the rest eagerly."""
    lines: list[str] = []
    start, twice = compiled_graphs(), CompiledOrEager(lambda x: 2 * x.sin(), lines.append)
    for size in range(2, 14):
        twice(torch.zeros(size))
    assert compiled_graphs() - start == 12
    assert lines == []
