"""A profile accounts for all of a step, names its parts, leaves a trace, and changes nothing of the run."""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime import nvtx as ranges
from birdie.runtime.nvtx import nvtx_range, recording
from birdie.train import profile as profiling
from birdie.train.loop import Fit, fit
from birdie.train.profile import Capture, Timeline, account, layers, profile
from tests.tiny_run import EVERYTHING, OPTIMIZERS, VOCAB, TinyBatches, tiny_model, tiny_settings

CPU = torch.device("cpu")
TOPS = {"data", "transfer", "forward", "backward", "clip", "optimizer", "techniques", "bookkeeping"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(model: GPT | None = None, **changes: int) -> Fit:
    return fit(model or tiny_model(), TinyBatches(), tiny_settings(**changes), OPTIMIZERS)


Tree = list[tuple[str, int, "Tree"]]
trees = st.recursive(
    st.just([]),
    lambda below: st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), below), max_size=3),
    max_leaves=12,
)


@given(steps=st.lists(st.tuples(st.integers(1, 9), trees), min_size=1, max_size=3), outside=st.integers(0, 9))
@settings(deadline=None)
def test_parts_and_what_has_no_name_sum_to_the_step(steps: list[tuple[int, Tree]], outside: int) -> None:
    """With a clock that only moves where the test says so, every tick is found again, once."""
    now = 0
    own: dict[str, int] = {}

    def play(name: str, ticks: int, within: Tree) -> None:
        nonlocal now
        with nvtx_range(name):
            now += ticks
            own[name] = own.get(name, 0) + ticks
            for each in within:
                play(*each)

    seen = Timeline(lambda: now, lambda first, later: float(later - first))
    with recording(seen):
        for ticks, within in steps:
            play("step", ticks, within)
            now += outside
            with nvtx_range("validation"):
                now += outside
    found = account(seen.events())
    assert found.steps == len(steps)
    assert found.step_ms == pytest.approx(sum(own.values()) / len(steps))
    assert found.unattributed_ms == pytest.approx(own.pop("step") / len(steps))
    assert {part.name: part.ms for part in found.parts} == pytest.approx({k: v / len(steps) for k, v in own.items()})
    assert sum(part.ms for part in found.parts) + found.unattributed_ms == pytest.approx(found.step_ms)
    tops = [ms for name, ms in found.rows() if "/" not in name]
    assert sum(tops) == pytest.approx(found.step_ms)


def test_what_no_part_claims_is_reported() -> None:
    found = account([("step", 0), ("data", 1), (None, 3), (None, 8)])
    assert (found.step_ms, found.unattributed_ms) == (8, 6)
    assert found.attributed == pytest.approx(0.25)
    assert found.rows() == [("data", 2), ("unattributed", 6)]
    assert "25.0% of it attributed" in found.text()


def test_only_whole_steps_are_accounted_for() -> None:
    with pytest.raises(ValueError, match="no whole step"):
        account([("data", 0), (None, 1)])


def test_a_step_of_training_is_made_of_named_parts() -> None:
    """Every stamp is one tick after the last, so the share without a name counts the gaps between parts."""
    ticks = itertools.count()
    seen = Timeline(lambda: next(ticks), lambda first, later: float(later - first))
    run, model = start(), tiny_model()
    with layers(run._model, wanted=True), recording(seen):
        next(iter(run))
    found = account(seen.events())
    names = {part.name for part in found.parts}
    assert {name.partition("/")[0] for name in names} == TOPS
    assert {"forward/head", "backward"} <= names
    for way in ("forward", "backward"):
        assert f"{way}/embedding" in names
        for index in range(len(model.blocks)):
            assert {f"{way}/layer {index}/attention", f"{way}/layer {index}/mlp"} <= names
    rows = dict(found.rows())
    for top in ("forward", "backward"):
        assert rows[top] == pytest.approx(sum(ms for name, ms in rows.items() if name.startswith(f"{top}/")))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in run._model.modules())


def test_the_order_of_backward_is_that_of_forward_turned_round() -> None:
    names = [part.name for part in _parts_of_one_step(tiny_model())]
    forward = [name.partition("/")[2] for name in names if name.startswith("forward/")]
    backward = [name.partition("/")[2] for name in names if name.startswith("backward/")]
    assert backward == [name for name in reversed(forward) if name != "head"]


def test_all_techniques_at_once_have_their_layers() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCAB, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2, **EVERYTHING))
    names = {part.name for part in _parts_of_one_step(model)}
    assert {f"{way}/layer {i}/mlp" for way in ("forward", "backward") for i in range(5)} <= names


def _parts_of_one_step(model: GPT) -> tuple[profiling.Part, ...]:
    run = start(model)
    seen = profiling.timeline(CPU)
    with layers(run._model, wanted=True), recording(seen):
        next(iter(run))
    return account(seen.events()).parts


def test_a_model_without_blocks_has_passes_as_a_whole() -> None:
    model = nn.Linear(2, 2)
    with layers(model, wanted=True):
        assert not model._forward_hooks


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_a_profiled_run_is_the_same_run(warmup_steps: int, tmp_path: Path) -> None:
    plain, profiled = start(warmup_steps=warmup_steps), start(warmup_steps=warmup_steps)
    profiled.prime()
    found = profile(profiled, profiled._model, CPU, tmp_path / "profile")
    assert (profiled.step, profiled.train_ms) == (0, 0)
    assert [step.loss for step in plain] == [step.loss for step in profiled]
    mine, theirs = plain.state(), profiled.state()
    assert mine.loader == theirs.loader
    for one, other in ((mine.weights, theirs.weights), (mine.optimizer, theirs.optimizer), (mine.rng, theirs.rng)):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert found is not None
    table = json.loads((tmp_path / "profile" / "table.json").read_text())
    assert table == found.to_dict()
    assert table["steps"] == profiling.RECORDED
    assert sum(part["ms"] for part in table["parts"]) + table["unattributed_ms"] == pytest.approx(table["step_ms"])
    assert found.title in (tmp_path / "profile" / "table.txt").read_text()
    events = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    called = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert called.count("step") == profiling.TRACED
    assert {"forward/layer 0/attention", "backward/layer 2/mlp", "optimizer"} <= set(called)


def test_a_stop_asked_for_ends_the_profile(tmp_path: Path) -> None:
    batches = TinyBatches()
    run = fit(tiny_model(), batches, tiny_settings(), OPTIMIZERS, stop=lambda: batches.position > 9)
    assert profile(run, run._model, CPU, tmp_path) is None
    assert (run.step, batches.position) == (0, 0)
    assert list(run) == []
    assert run.interrupted
    assert not list(tmp_path.iterdir())


def test_an_attached_profiler_gets_ten_steps_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(profiling.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiling.torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(profiling.torch.cuda.profiler, "stop", lambda: said.append("stop"))
    with Capture() as capture:
        for step in range(1, 30):
            capture.before_step()
            said.append(str(step))
    assert said[said.index("start") : said.index("stop") + 1] == ["start", *map(str, range(4, 14)), "stop"]
    assert (said.count("start"), said.count("stop")) == (1, 1)
    said.clear()
    with Capture() as capture:
        for _ in range(5):
            capture.before_step()
    assert said == ["start", "stop"]  # the run was shorter than the range


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_are_told_apart_where_a_profiler_is_attached_and_nothing_is_compiled(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranges.profiler_attached() is False
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    run = start(compile=compiled)
    steps = iter(run)
    next(steps)
    hooks = run._model.blocks[0].attn._forward_hooks
    assert bool(hooks) is not compiled
    steps.close()
    assert not hooks


def test_no_capture_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling.torch.cuda.profiler, "start", pytest.fail)
    with Capture() as capture:
        for _ in range(20):
            capture.before_step()
