"""A profile has the time of the named ranges of a step, writes a trace, and does not change the run."""

import gzip
import json
from pathlib import Path

import torch

from birdie.gpt.train.profile import RECORDED, profile
from birdie.gpt.train.training import Training
from birdie.system.ranges import named_range
from tests.tiny_run import CHUNK_TOKENS, TinyBatches, tiny_model, tiny_settings, tiny_training

CPU = torch.device("cpu")


def start(**changes: int) -> Training:
    settings = tiny_settings(accumulation=1, train_batch_tokens=CHUNK_TOKENS, **changes)
    return tiny_training(tiny_model(), TinyBatches(), settings)


def test_without_a_profiler_a_range_is_nothing() -> None:
    assert named_range("a") is named_range("b")


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
