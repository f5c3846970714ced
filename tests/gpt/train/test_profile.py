"""Reports of a run: where a step goes, and which graphs were compiled when."""

import gzip
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from birdie.gpt.train.compile_report import CompileReport
from birdie.gpt.train.profile import RECORDED, profile
from birdie.gpt.train.training import Training
from tests.tiny_run import CHUNK_TOKENS, TinyBatches, tiny_model, tiny_settings, tiny_training

CPU = torch.device("cpu")


def start(**changes: int) -> Training:
    settings = tiny_settings(accumulation=1, train_batch_tokens=CHUNK_TOKENS, **changes)
    return tiny_training(tiny_model(), TinyBatches(), settings)


def test_a_profiled_run_is_the_same_run(tmp_path: Path) -> None:
    plain, profiled = start(warmup_steps=2, iterations=3), start(warmup_steps=2, iterations=3)
    profiled.warm_up()
    ranges = profile(profiled, CPU, tmp_path / "profile")
    assert (profiled.number, profiled.clock.ms) == (0, 0)
    assert [step.loss for step in plain] == [step.loss for step in profiled]
    one, other = plain.state().weights, profiled.state().weights
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert ranges is not None
    assert next(iter(ranges)) == "step"
    tops = {"data", "forward", "backward", "optimizer", "bookkeeping"}
    assert tops <= ranges.keys()
    assert sum(ranges[name] for name in tops) <= ranges["step"]
    assert "optimizer" in (tmp_path / "profile" / "table.txt").read_text()
    events = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("step") == RECORDED


def test_a_requested_stop_ends_the_profile(tmp_path: Path) -> None:
    batches = TinyBatches()
    run = tiny_training(tiny_model(), batches, tiny_settings(), stop=lambda: batches.position > 9)
    assert profile(run, CPU, tmp_path) is None
    assert (run.number, batches.position) == (0, 0)
    assert list(run) == []
    assert run.interrupted
    assert not list(tmp_path.iterdir())


@pytest.fixture
def graphs_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch.compile trace and count graphs without compiling them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
