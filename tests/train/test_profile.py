"""A profile accounts for the time of a step by named parts, writes a trace, and does not change the run."""

import gzip
import itertools
import json
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from birdie.model.gpt import GPT
from birdie.runtime import nvtx as ranges
from birdie.runtime.nvtx import nvtx_range, recording
from birdie.train import profile as profiling
from birdie.train.loop import Fit, fit
from birdie.train.profile import Capture, Timeline, account, layer_ranges, profile
from tests.model.technique_table import blocks_of
from tests.tiny_run import EVERYTHING, OPTIMIZERS, TinyBatches, tiny_model, tiny_settings, trained_model

CPU = torch.device("cpu")
TOPS = {"data", "transfer", "forward", "backward", "clip", "optimizer", "techniques", "bookkeeping"}


def start(model: GPT | None = None, **changes: int) -> Fit:
    return fit(model or tiny_model(), TinyBatches(), tiny_settings(**changes), OPTIMIZERS)


Tree = list[tuple[str, int, "Tree"]]
trees: st.SearchStrategy[Tree] = st.recursive(
    st.just([]),
    lambda below: st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), below), max_size=3),
    max_leaves=12,
)


@given(steps=st.lists(st.tuples(st.integers(1, 9), trees), min_size=1, max_size=3), outside=st.integers(0, 9))
@settings(deadline=None)
def test_parts_and_unattributed_time_sum_to_the_step(steps: list[tuple[int, Tree]], outside: int) -> None:
    """With a clock that the test advances, every tick is counted once."""
    now = 0
    ticks_of: dict[str, int] = {}

    def play(name: str, ticks: int, within: Tree) -> None:
        nonlocal now
        with nvtx_range(name):
            now += ticks
            ticks_of[name] = ticks_of.get(name, 0) + ticks
            for part in within:
                play(*part)

    timeline = Timeline(lambda: now, lambda first, later: float(later - first))
    with recording(timeline):
        for ticks, within in steps:
            play("step", ticks, within)
            now += outside
            with nvtx_range("validation"):
                now += outside
    result = account(timeline.events())
    assert result.steps == len(steps)
    assert result.step_ms == pytest.approx(sum(ticks_of.values()) / len(steps))
    assert result.unattributed_ms == pytest.approx(ticks_of.pop("step") / len(steps))
    expected = {name: ticks / len(steps) for name, ticks in ticks_of.items()}
    assert {part.name: part.ms for part in result.parts} == pytest.approx(expected)
    assert sum(part.ms for part in result.parts) + result.unattributed_ms == pytest.approx(result.step_ms)
    tops = [ms for name, ms in result.rows() if "/" not in name]
    assert sum(tops) == pytest.approx(result.step_ms)


def test_unattributed_time_is_reported() -> None:
    result = account([("step", 0), ("data", 1), (None, 3), (None, 8)])
    assert (result.step_ms, result.unattributed_ms) == (8, 6)
    assert result.attributed == pytest.approx(0.25)
    assert result.rows() == [("data", 2), ("unattributed", 6)]
    assert "25.0% of it attributed" in result.text()


def test_only_complete_steps_are_counted() -> None:
    with pytest.raises(ValueError, match="no complete step"):
        account([("data", 0), (None, 1)])


def test_a_step_of_training_is_made_of_named_parts() -> None:
    """Every time stamp is one tick after the last, so unattributed time counts the gaps between parts."""
    ticks = itertools.count()
    timeline = Timeline(lambda: next(ticks), lambda first, later: float(later - first))
    run, model = start(), tiny_model()
    with layer_ranges(run._model, enabled=True), recording(timeline):
        next(iter(run))
    result = account(timeline.events())
    names = {part.name for part in result.parts}
    assert {name.partition("/")[0] for name in names} == TOPS
    assert {"forward/head", "backward"} <= names
    for way in ("forward", "backward"):
        assert f"{way}/embedding" in names
        for index in range(len(model.blocks)):
            assert {f"{way}/layer {index}/attention", f"{way}/layer {index}/mlp"} <= names
    rows = dict(result.rows())
    for top in ("forward", "backward"):
        assert rows[top] == pytest.approx(sum(ms for name, ms in rows.items() if name.startswith(f"{top}/")))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trained_model(run).modules())


def test_backward_has_the_reverse_order_of_forward() -> None:
    names = [part.name for part in _parts_of_one_step(tiny_model())]
    forward = [name.partition("/")[2] for name in names if name.startswith("forward/")]
    backward = [name.partition("/")[2] for name in names if name.startswith("backward/")]
    assert backward == [name for name in reversed(forward) if name != "head"]


def test_a_model_with_all_techniques_has_all_layers() -> None:
    model = tiny_model(num_layers=5, **EVERYTHING)
    names = {part.name for part in _parts_of_one_step(model)}
    assert {f"{way}/layer {i}/mlp" for way in ("forward", "backward") for i in range(5)} <= names


def _parts_of_one_step(model: GPT) -> tuple[profiling.Part, ...]:
    run = start(model)
    timeline = profiling.timeline(CPU)
    with layer_ranges(run._model, enabled=True), recording(timeline):
        next(iter(run))
    return account(timeline.events()).parts


def test_a_model_without_blocks_has_no_layer_ranges() -> None:
    model = nn.Linear(2, 2)
    with layer_ranges(model, enabled=True):
        assert not model._forward_hooks


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_a_profiled_run_is_the_same_run(warmup_steps: int, tmp_path: Path) -> None:
    plain, profiled = start(warmup_steps=warmup_steps), start(warmup_steps=warmup_steps)
    profiled.warm_up()
    result = profile(profiled, trained_model(profiled), CPU, tmp_path / "profile")
    assert (profiled.step, profiled.train_ms) == (0, 0)
    assert [step.loss for step in plain] == [step.loss for step in profiled]
    a, b = plain.state(), profiled.state()
    assert a.loader == b.loader
    for one, other in ((a.weights, b.weights), (a.optimizer, b.optimizer), (a.rng, b.rng)):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert result is not None
    table = json.loads((tmp_path / "profile" / "table.json").read_text())
    assert table == result.to_dict()
    assert table["steps"] == profiling.RECORDED
    assert sum(part["ms"] for part in table["parts"]) + table["unattributed_ms"] == pytest.approx(table["step_ms"])
    assert result.title in (tmp_path / "profile" / "table.txt").read_text()
    events = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("step") == profiling.TRACED
    assert {"forward/layer 0/attention", "backward/layer 2/mlp", "optimizer"} <= set(names)


def test_a_requested_stop_ends_the_profile(tmp_path: Path) -> None:
    batches = TinyBatches()
    run = fit(tiny_model(), batches, tiny_settings(), OPTIMIZERS, stop=lambda: batches.position > 9)
    assert profile(run, trained_model(run), CPU, tmp_path) is None
    assert (run.step, batches.position) == (0, 0)
    assert list(run) == []
    assert run.interrupted
    assert not list(tmp_path.iterdir())


def test_an_attached_profiler_gets_ten_steps_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    with Capture() as capture:
        for step in range(1, 30):
            capture.before_step()
            calls.append(str(step))
    assert calls[calls.index("start") : calls.index("stop") + 1] == ["start", *map(str, range(4, 14)), "stop"]
    assert (calls.count("start"), calls.count("stop")) == (1, 1)
    calls.clear()
    with Capture() as capture:
        for _ in range(5):
            capture.before_step()
    assert calls == ["start", "stop"]  # the run was shorter than the range


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_have_ranges_where_a_profiler_is_attached_and_nothing_is_compiled(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranges.profiler_attached() is False
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    run = start(compile=compiled)
    steps = iter(run)
    assert isinstance(steps, Generator)
    next(steps)
    hooks = blocks_of(trained_model(run))[0].attn._forward_hooks
    assert bool(hooks) is not compiled
    steps.close()
    assert not hooks


def test_no_capture_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.profiler, "start", pytest.fail)
    with Capture() as capture:
        for _ in range(20):
            capture.before_step()
