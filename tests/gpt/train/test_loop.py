"""The loop learns, undoes its warm-up, keeps its clock, and computes the same on any number of ranks."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from birdie.errors import ConfigError, WeightsError
from birdie.gpt.train.average import Average
from birdie.gpt.train.loop import Trainer, tensors_of
from birdie.gpt.train.optimizers import Optimizers
from birdie.gpt.train.plan import Plan
from birdie.gpt.train.settings import AverageSettings, OptimizerSettings
from birdie.gpt.train.training import Training
from birdie.system.distributed import World
from tests.tiny_run import (
    CHUNKS,
    LENGTH,
    OPTIMIZERS,
    SEQUENCES,
    TinyBatches,
    save,
    tiny_model,
    tiny_settings,
    tiny_training,
    trained_model,
)


def start(optimizers: OptimizerSettings = OPTIMIZERS, **changes: Any) -> Training:
    return tiny_training(tiny_model(), TinyBatches(), tiny_settings(**changes), optimizers)


def losses(run: Training) -> list[float]:
    return [step.loss for step in run]


def test_a_script_that_puts_the_parts_together_trains_as_training_does() -> None:
    model = tiny_model()
    model.fuse_loss(True, compiled=False)
    optimizers = Optimizers(model, OPTIMIZERS, newton_schulz_dtype=torch.float32, world=World())
    average = Average(AverageSettings("ema"), tensors_of(model))
    trainer = Trainer(model, TinyBatches(), Plan(tiny_settings(iterations=4), OPTIMIZERS), optimizers, average)
    list(trainer.rehearse([0.0, 1.0]))
    assert [step.loss for step in trainer] == losses(start(iterations=4))


def test_steps_report_what_happened() -> None:
    steps = list(start(iterations=10, warmdown_iters=5))
    assert [step.number for step in steps] == list(range(1, 11))
    assert [step.stopping for step in steps] == [False] * 9 + [True]
    assert {step.tokens for step in steps} == {CHUNKS * SEQUENCES * LENGTH}
    assert [step.lr_multiplier for step in steps] == pytest.approx([1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert steps[0].momentum == OPTIMIZERS.muon_momentum_warmup_start
    assert all(step.grad_norm > 0 for step in steps)
    assert all(a.train_ms < b.train_ms for a, b in pairwise(steps))


def test_the_same_run_twice_is_bit_identical() -> None:
    assert losses(start(iterations=4)) == losses(start(iterations=4))


class Time:
    """A clock that advances by 10 ms whenever it is read, and where the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.01
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr("birdie.gpt.train.loop.time", clock)
    return clock


@pytest.mark.usefixtures("clock")
def test_warm_up_is_not_on_the_clock() -> None:
    (step,) = start(warmup_steps=5, iterations=1)
    assert step.train_ms == 10


def test_the_clock_stands_still_at_a_yield(clock: Time) -> None:
    times = []
    for step in start(iterations=3):
        times.append(step.train_ms)
        clock.now += 9.0
    assert times == [10, 20, 30]


def test_the_time_of_another_rank_at_a_yield_is_not_on_the_clock(clock: Time) -> None:
    """A barrier precedes each step, and the clock starts after it."""

    class Late(World):
        def barrier(self) -> None:
            clock.now += 9.0

    run = tiny_training(tiny_model(), TinyBatches(), tiny_settings(iterations=3), world=Late())
    assert [step.train_ms for step in run] == [10, 20, 30]


@pytest.mark.usefixtures("clock")
def test_the_cap_ends_the_run_after_the_step_that_reaches_it() -> None:
    steps = list(start(iterations=10**6, max_wallclock_seconds=0.095, warmdown_iters=5))
    assert [step.stopping for step in steps] == [False] * 9 + [True]
    assert [step.train_ms for step in steps[-2:]] == [90, 100]
    assert steps[-1].lr_multiplier < 1


def test_a_stop_during_a_step_makes_it_the_last(tmp_path: Path) -> None:
    run = tiny_training(tiny_model(), (batches := TinyBatches()), tiny_settings(), stop=lambda: batches.position > 9)
    steps = list(run)
    assert [step.stopping for step in steps] == [False, False, True]  # a step takes 4 chunks
    assert run.interrupted
    assert list(run) == []
    save(run, tmp_path)


def test_a_stop_during_warm_up_leaves_the_run_at_its_start() -> None:
    done: list[int] = []
    run = tiny_training(
        tiny_model(),
        TinyBatches(),
        tiny_settings(warmup_steps=5),
        stop=lambda: done[-1:] == [2],
    )
    run.warm_up(lambda step, _: done.append(int(step)))
    assert list(run) == []
    assert done == [1, 2]
    assert run.interrupted
    assert (run.number, run.clock.ms) == (0, 0)
    plain = start().state()
    assert all(torch.equal(value, plain.weights[name]) for name, value in run.state().weights.items())
    assert run.state().loader == plain.loader


def test_accumulation_does_not_change_the_gradient() -> None:
    """Four chunks one by one, and the same four side by side in one micro-step."""

    class Joined(TinyBatches):
        def next(self) -> tuple[torch.Tensor, torch.Tensor]:
            chunks = [super(Joined, self).next() for _ in range(CHUNKS)]
            return torch.cat([x for x, _ in chunks]), torch.cat([y for _, y in chunks])

    joined = tiny_training(tiny_model(), Joined(), tiny_settings(accumulation=1))
    assert losses(joined) == pytest.approx(losses(start()), abs=1e-4)


def test_clipping_bounds_the_gradient_that_the_optimizers_see() -> None:
    run = start(optimizers=OptimizerSettings(grad_clip_norm=0.01), iterations=1)
    (step,) = run
    norm = torch.stack([p.grad.norm() for p in trained_model(run).parameters() if p.grad is not None]).norm()
    assert step.grad_norm > 0.01
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_a_loss_that_is_not_finite_ends_the_run_before_the_update() -> None:
    run = start()
    steps = iter(run)
    next(steps)
    model = trained_model(run)
    with torch.no_grad():
        model.skip_weights[0, 0] = float("nan")
    weight = model.tok_emb.weight.detach().clone()
    with pytest.raises(ConfigError, match="loss of step 2 is nan"):
        next(steps)
    assert torch.equal(model.tok_emb.weight, weight)
    with pytest.raises(WeightsError, match="inside step 2"):
        run.state()


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"iterations": -1}, "iterations is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"accumulation": 0}, "accumulation is 0"),
        ({"max_wallclock_seconds": float("inf")}, "max_wallclock_seconds is inf"),
        ({"train_batch_tokens": 100}, "train_batch_tokens 100 .* 16 tokens"),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(change: dict[str, Any], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        tiny_settings(**change)


def test_ranks_that_do_not_divide_the_accumulation_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 ranks .* accumulation 4"):
        tiny_training(tiny_model(), TinyBatches(), tiny_settings(), world=World(size=3))
