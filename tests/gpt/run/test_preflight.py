"""Preflight checks find missing resources before the clock starts: a failure is one sentence, a warning one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from birdie.errors import ConfigError
from birdie.gpt.data.shards import write_shard
from birdie.gpt.run import preflight
from birdie.gpt.run.events import Checked, PreflightCheck
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.preflight import (
    PreflightFacts,
    collect_facts,
    require_no_failure,
    run_checks,
)
from birdie.gpt.run.recipe_registry import find
from birdie.gpt.run.recipe_settings import Recipe, RunSettings
from birdie.gpt.run.run_estimate import parameters
from birdie.gpt.train.plan import require_divisible
from birdie.system.context import Context

CPU = torch.device("cpu")
RECIPE = Recipe.from_dict(
    {
        "data": {"tokenizer": "bytes"},
        "model": {"vocab_size": 260, "num_layers": 2, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1},
        "train": {
            "train_batch_tokens": 256,
            "train_seq_len": 32,
            "accumulation": 4,
            "iterations": 10,
            "warmup_steps": 0,
            "max_wallclock_seconds": 0,
            "compute_dtype": "float32",
        },
        "validation": {"max_tokens": 500},
    }
)
PLENTY = PreflightFacts(
    device="cpu",
    ranks=2,
    local_ranks=2,
    cores=8,
    memory=10**11,
    disk=10**12,
    train_tokens=10**9,
    compiles=False,
    coder_s=0.5,
)


def results(recipe: Recipe = RECIPE, **changes: Any) -> dict[str, PreflightCheck]:
    return {check.name: check for check in run_checks(recipe, replace(PLENTY, **changes))}


def training(**changes: Any) -> Recipe:
    return replace(RECIPE, train=replace(RECIPE.train, **changes))


def test_all_checks_pass_with_enough_resources() -> None:
    assert {check.state for check in results().values()} == {"pass"}
    assert list(results()) == ["ranks", "memory", "disk", "text", "coder"]
    require_no_failure(list(results().values()))


@pytest.mark.parametrize(
    ("name", "state", "changes", "message"),
    [
        ("ranks", "fail", {"ranks": 3}, "3 ranks do not divide accumulation 4"),
        ("ranks", "warn", {"cores": 1}, "1 core"),
        ("memory", "fail", {"memory": 1000}, "choose a smaller model or more ranks"),
        ("memory", "pass", {"memory": None}, "is not known"),
        ("disk", "fail", {"disk": 1000}, "choose another --folder"),
        ("text", "warn", {"train_tokens": 512}, "5.0 epochs"),
        ("coder", "fail", {"coder_s": None}, "no artifact could be exported"),
    ],
)
def test_a_missing_resource_gives_its_check_a_warning_or_failure(
    name: str, state: str, changes: dict[str, Any], message: str
) -> None:
    check = results(**changes)[name]
    assert check.state == state
    assert message in check.says
    assert check.line == f"preflight {state}: {name}: {check.says}"
    assert all(other.state == "pass" for other in results(**changes).values() if other.name != name)


def test_memory_warns_between_the_exact_and_the_estimated_need() -> None:
    needed = preflight._memory_estimate(RECIPE, PLENTY)
    fixed = needed.fixed
    assert fixed >= 3 * 4 * parameters(RECIPE)  # weights, gradients and at least one moment in float32
    for memory, state in ((fixed - 1, "fail"), (fixed, "warn"), (needed.total - 1, "warn"), (needed.total, "pass")):
        assert results(memory=memory)["memory"].state == state


def test_the_disk_must_hold_checkpoints_float_weights_and_export() -> None:
    count = parameters(RECIPE)
    assert results(disk=40 * count)["disk"].state == "fail"  # two that are kept and a new one, 3 float32 a weight
    assert results(disk=47 * count)["disk"].state == "pass"
    one = replace(RECIPE, run=RunSettings(keep_checkpoints=1))
    assert results(one, disk=35 * count)["disk"].state == "pass"
    chain = replace(RECIPE, run=RunSettings(checkpoint_every=10, checkpoint_deltas=True))
    assert results(chain, disk=60 * count)["disk"].state == "warn"  # as many checkpoints as the run takes
    assert results(chain, disk=10**12)["disk"].state == "pass"


def test_too_few_tokens_pass_if_the_time_cap_may_end_the_run_first() -> None:
    check = results(training(iterations=10**7, max_wallclock_seconds=60.0), train_tokens=2560)["text"]
    assert check.state == "pass"
    assert "last for 10 steps" in check.says
    assert results(training(iterations=10), train_tokens=2560)["text"].state == "pass"
    assert results(training(iterations=11), train_tokens=2560)["text"].state == "warn"


def test_all_failures_are_listed_in_one_sentence() -> None:
    with pytest.raises(ConfigError) as raised:
        require_no_failure(list(results(memory=1, disk=1).values()))
    assert "smaller model" in str(raised.value)
    assert "--folder" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_collecting_facts_does_not_change_the_random_state(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.arange(50, dtype=np.uint16))
    state = torch.get_rng_state()
    run_checks(RECIPE, collect_facts(RECIPE, tmp_path, 50, Context(CPU)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    data = tmp_path / "data"
    data.mkdir()
    tokens = np.random.default_rng(0).integers(4 + 97, 4 + 123, 4000).astype(np.uint16)
    for split in ("train", "val"):
        write_shard(data / f"x_{split}_000000.bin", tokens)
    return Run(replace(RECIPE, data=replace(RECIPE.data, path=str(data))), tmp_path / "run")


def test_the_first_event_of_a_run_is_its_preflight(run: Run) -> None:
    first = next(iter(run.train()))
    assert isinstance(first, Checked)
    assert [check.name for check in first.checks] == [
        "ranks",
        "memory",
        "disk",
        "text",
        "coder",
    ]
    assert run.checks == list(first.checks)


def test_a_failed_check_ends_a_run_before_it_trains(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_memory", lambda _device, _ranks: 1000)
    monkeypatch.setattr("birdie.gpt.run.pipeline.Training", pytest.fail)
    with pytest.raises(ConfigError, match="weights, gradients and optimizer take"):
        list(run.train())
    assert not (run.folder / "checkpoints").exists()


def test_ranks_that_do_not_divide_a_step_are_told_the_flag() -> None:
    """The preset `smoke` of most recipes has one chunk, which two ranks cannot share."""
    train = find("baseline").recipe("smoke").train
    with pytest.raises(ConfigError, match=r"2 ranks do not divide accumulation 1.*give --train\.accumulation 2"):
        require_divisible(train, 2)
    require_divisible(replace(train, accumulation=2), 2)
    with pytest.raises(ConfigError, match="the chunks of a step; choose another number of ranks"):
        require_divisible(train, 7)
