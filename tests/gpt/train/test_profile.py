"""A profile accounts for the time of a step by named parts, writes a trace, and does not change the run."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from birdie.gpt.train import profile as profiling
from birdie.gpt.train.profile import Range, account, layer_ranges, named_ranges, profile
from birdie.gpt.train.training import Training
from birdie.system.ranges import named_range
from tests.gpt.model.technique_table import blocks_of
from tests.tiny_run import (
    CHUNK_TOKENS,
    EVERYTHING,
    TinyBatches,
    tiny_model,
    tiny_settings,
    tiny_training,
    trained_model,
)

CPU = torch.device("cpu")
TOPS = {"data", "transfer", "forward", "backward", "clip", "optimizer", "average", "techniques", "bookkeeping"}


def start(model_changes: dict[str, Any] | None = None, **changes: Any) -> Training:
    settings = tiny_settings(**({"accumulation": 1, "train_batch_tokens": CHUNK_TOKENS} | changes))
    return tiny_training(tiny_model(**(model_changes or {})), TinyBatches(), settings)


Tree = list[tuple[str, int, "Tree"]]
trees: st.SearchStrategy[Tree] = st.recursive(
    st.just([]),
    lambda below: st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), below), max_size=3),
    max_leaves=12,
)


@given(steps=st.lists(st.tuples(st.integers(1, 9), trees), min_size=1, max_size=3), outside=st.integers(1, 9))
@settings(deadline=None)
def test_parts_and_unattributed_time_sum_to_the_step(steps: list[tuple[int, Tree]], outside: int) -> None:
    """With a clock that the test advances, every tick is counted once."""
    now = 0
    ticks_of: dict[str, int] = {}
    ranges: list[Range] = []

    def play(name: str, ticks: int, within: Tree) -> None:
        nonlocal now
        begin = now
        now += ticks
        ticks_of[name] = ticks_of.get(name, 0) + ticks
        for part in within:
            play(*part)
        ranges.append((name, begin, now))

    for ticks, within in steps:
        play("step", ticks, within)
        ranges.append(("validation", now, now + outside))
        now += outside
    result = account(ranges)
    assert result.steps == len(steps)
    assert result.step_ms == pytest.approx(sum(ticks_of.values()) / len(steps))
    assert result.unattributed_ms == pytest.approx(ticks_of.pop("step") / len(steps))
    expected = {name: ticks / len(steps) for name, ticks in ticks_of.items()}
    assert {part.name: part.ms for part in result.parts} == pytest.approx(expected)
    assert sum(part.ms for part in result.parts) + result.unattributed_ms == pytest.approx(result.step_ms)
    tops = [ms for name, ms in result.rows() if "/" not in name]
    assert sum(tops) == pytest.approx(result.step_ms)


def test_unattributed_time_is_reported() -> None:
    result = account([("step", 0, 8), ("data", 1, 3)])
    assert (result.step_ms, result.unattributed_ms) == (8, 6)
    assert result.attributed == pytest.approx(0.25)
    assert result.rows() == [("data", 2), ("unattributed", 6)]
    assert "25.0% of it attributed" in result.text()


def test_a_part_ends_with_the_one_around_it() -> None:
    result = account([("step", 0, 8), ("backward", 0, 4), ("backward/mlp", 1, 9), ("clip", 4, 8)])
    assert {part.name: part.ms for part in result.parts} == {"backward": 1, "backward/mlp": 3, "clip": 4}


def test_without_a_step_there_is_no_profile() -> None:
    with pytest.raises(ValueError, match="no complete step"):
        account([("data", 0, 1)])


def test_without_a_profiler_a_range_is_nothing() -> None:
    assert named_range("a") is named_range("b")


def parts_of_one_step(**model: Any) -> list[str]:
    """Return the names of the parts of a step, in the order in which they first begin."""
    run = start(model, iterations=1)
    with layer_ranges(run.model, enabled=True), torch.profiler.profile() as recorded:
        next(iter(run))
    modules = trained_model(run).modules()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    return [part.name for part in account(named_ranges(recorded, CPU)).parts]


@pytest.mark.parametrize("model", [{}, {"num_layers": 5, **EVERYTHING}])
def test_a_step_of_training_is_made_of_named_parts(model: dict[str, Any]) -> None:
    names = parts_of_one_step(**model)
    assert {name.partition("/")[0] for name in names} == TOPS
    for way in ("forward", "backward"):
        assert f"{way}/embedding" in names
        for index in range(len(blocks_of(tiny_model(**model)))):
            assert {f"{way}/layer {index}/attention", f"{way}/layer {index}/mlp"} <= {*names}


def test_backward_has_the_reverse_order_of_forward() -> None:
    names = parts_of_one_step()
    forward = [name.partition("/")[2] for name in names if name.startswith("forward/")]
    backward = [name.partition("/")[2] for name in names if name.startswith("backward/")]
    assert backward == forward[::-1]


def test_a_model_without_blocks_has_no_layer_ranges() -> None:
    model = nn.Linear(2, 2)
    with layer_ranges(model, enabled=True):
        assert not model._forward_hooks


def test_a_profiled_run_is_the_same_run(tmp_path: Path) -> None:
    plain, profiled = start(warmup_steps=2, iterations=3), start(warmup_steps=2, iterations=3)
    profiled.warm_up()
    result = profile(profiled, CPU, tmp_path / "profile")
    assert (profiled.number, profiled.clock.ms) == (0, 0)
    assert [step.loss for step in plain] == [step.loss for step in profiled]
    one, other = plain.state().weights, profiled.state().weights
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert result is not None
    table = json.loads((tmp_path / "profile" / "table.json").read_text())
    assert table == result.to_dict()
    assert table["steps"] == profiling.RECORDED
    assert sum(part["ms"] for part in table["parts"]) + table["unattributed_ms"] == pytest.approx(table["step_ms"])
    assert result.title in (tmp_path / "profile" / "table.txt").read_text()
    events = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("step") == profiling.RECORDED
    assert {"forward/layer 0/attention", "backward/layer 2/mlp", "optimizer"} <= set(names)


def test_a_requested_stop_ends_the_profile(tmp_path: Path) -> None:
    batches = TinyBatches()
    run = tiny_training(tiny_model(), batches, tiny_settings(), stop=lambda: batches.position > 9)
    assert profile(run, CPU, tmp_path) is None
    assert (run.number, batches.position) == (0, 0)
    assert list(run) == []
    assert run.interrupted
    assert not list(tmp_path.iterdir())
