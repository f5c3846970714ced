"""Schedules: of rates, of sizes, and of the bandit that multiplies a rate."""

import json
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birdie.errors import ConfigError, WeightsError
from birdie.gpt.train.bandit import Bandit
from birdie.gpt.train.plan import decay_multiplier, fraction_done, muon_momentum
from birdie.gpt.train.plan import lr_multiplier as scheduled
from birdie.gpt.train.settings import BanditSettings, TrainSettings
from birdie.gpt.train.training import Training
from tests.tiny_run import CHUNK_TOKENS, TinyBatches, tiny_model, tiny_settings, tiny_training


def lr_multiplier(step: int, elapsed_ms: float, *, cap_ms: float | None, **settings: Any) -> float:
    return scheduled(TrainSettings(max_wallclock_seconds=(cap_ms or 0) / 1000, **settings), step, elapsed_ms)


def by_steps(step: int, iterations: int = 100, warmdown: int = 20) -> float:
    return lr_multiplier(step, 123.0, iterations=iterations, warmdown_iters=warmdown, cap_ms=None)


def by_time(step: int, elapsed_ms: float, cap_ms: float = 10_000, warmdown: int = 20) -> float:
    return lr_multiplier(step, elapsed_ms, iterations=10**9, warmdown_iters=warmdown, cap_ms=cap_ms)


def test_without_a_cap_the_last_steps_fall_linearly_to_zero() -> None:
    assert [by_steps(step) for step in (0, 79, 80)] == [1, 1, 1]
    assert [by_steps(step) for step in (81, 90, 99, 100)] == pytest.approx([0.95, 0.5, 0.05, 0])


def test_under_a_cap_the_same_fall_is_measured_in_time() -> None:
    """At a steady pace of 100 ms a step a cap of 100 steps falls like 100 iterations do."""
    assert [by_time(step, 100.0 * step) for step in range(101)] == pytest.approx([by_steps(s) for s in range(101)])


@given(step=st.integers(0, 10**6), elapsed=st.floats(0, 1e9), cap=st.floats(1, 1e8), warmdown=st.integers(0, 10**5))
def test_the_multiplier_is_a_fraction_and_never_grows_with_time(
    step: int, elapsed: float, cap: float, warmdown: int
) -> None:
    now = by_time(step, elapsed, cap, warmdown)
    assert 0 <= now <= 1
    assert by_time(step, elapsed * 1.5 + 1, cap, warmdown) <= now


def test_a_warmdown_fraction_is_of_steps_or_of_time() -> None:
    by_fraction = [
        lr_multiplier(step, 0.0, iterations=100, warmdown_iters=1, cap_ms=None, warmdown_fraction=0.4)
        for step in (0, 60, 80, 100)
    ]
    timed = [
        lr_multiplier(7, ms, iterations=10**6, warmdown_iters=1, cap_ms=1000.0, warmdown_fraction=0.4)
        for ms in (0.0, 600.0, 800.0, 1000.0)
    ]
    assert by_fraction == pytest.approx([1, 1, 0.5, 0])
    assert timed == pytest.approx(by_fraction)


def test_no_warmdown_keeps_the_rate() -> None:
    assert by_steps(100, warmdown=0) == by_time(5, 1e9, warmdown=0) == 1


def test_momentum_rises_linearly_and_stays() -> None:
    values = [muon_momentum(step, start=0.85, final=0.95, warmup_steps=500) for step in (0, 250, 500, 9999)]
    assert values == pytest.approx([0.85, 0.90, 0.95, 0.95])
    assert muon_momentum(0, start=0.85, final=0.95, warmup_steps=0) == 0.95


FALLS: list[dict[str, Any]] = [
    {"warmdown_iters": 40, "cap_ms": None},
    {"warmdown_iters": 40, "cap_ms": 10_000.0},
    {"warmdown_iters": 1, "cap_ms": None, "warmdown_fraction": 0.4},
    {"warmdown_iters": 1, "cap_ms": 10_000.0, "warmdown_fraction": 0.4},
]


@pytest.mark.parametrize("fall", FALLS)
def test_the_floor_holds_where_any_fall_would_go_below_it(fall: dict[str, Any]) -> None:
    """At 100 ms a step all four fall over the last 40 of 100 steps; the floor does not change their slope."""

    def at(step: int, min_lr: float) -> float:
        return lr_multiplier(step, 100.0 * step, iterations=100, min_lr=min_lr, **fall)

    for step in range(101):
        assert at(step, 0.1) == max(0.1, at(step, 0.0))
    assert [at(step, 0.1) for step in (0, 60, 80, 96, 97, 100)] == pytest.approx([1, 1, 0.5, 0.1, 0.1, 0.1])


@given(fraction=st.floats(0, 2), full=st.floats(0, 1), final=st.floats(0, 1))
def test_weight_decay_tapers_from_full_to_final(fraction: float, full: float, final: float) -> None:
    now = decay_multiplier(fraction, full=full, final=final)
    assert final <= now <= 1 or now == pytest.approx(final)
    assert decay_multiplier(fraction + 0.1, full=full, final=final) <= now + 1e-12
    assert fraction > full or now == 1


def test_the_taper_of_the_record() -> None:
    values = [decay_multiplier(fraction) for fraction in (0, 0.7, 0.85, 1, 1.001)]
    assert values == pytest.approx([1, 1, 0.75, 0.5, 0.5])
    assert decay_multiplier(1.0, full=1.0) == 1


def run_of(**changes: Any) -> Training:
    settings = tiny_settings(accumulation=1, train_batch_tokens=CHUNK_TOKENS, **changes)
    return tiny_training(tiny_model(), TinyBatches(), settings)


def test_the_last_steps_train_at_the_floor() -> None:
    steps = list(run_of(iterations=10, warmdown_iters=5, min_lr=0.5))
    assert [step.lr_multiplier for step in steps] == pytest.approx([1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.5, 0.5])
    plain = list(run_of(iterations=10, warmdown_iters=5))
    assert [step.loss for step in steps[:9]] == [step.loss for step in plain[:9]]  # a loss is that before the update
    assert steps[9].loss != plain[9].loss


def test_a_forced_last_step_ends_run_and_schedule_whatever_the_clock() -> None:
    """The same as a run of as many iterations without a cap, although the first step passes the cap."""
    forced = run_of(iterations=1000, force_stop_step=8, warmdown_iters=4, max_wallclock_seconds=1e-6)
    steps, plain = list(forced), list(run_of(iterations=8, warmdown_iters=4))
    assert [step.loss for step in steps] == [step.loss for step in plain]
    assert [step.lr_multiplier for step in steps] == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert [step.stopping for step in steps] == [False] * 7 + [True]
    (line,) = forced.finish()
    assert line.startswith("forced last step: 8, reached after ")
    assert line.endswith(", beyond the cap of 1e-06 s that a submission must keep")
    assert not forced.interrupted
    within = run_of(iterations=1000, force_stop_step=2, max_wallclock_seconds=1000.0)
    assert len(list(within)) == 2
    assert "beyond" not in within.finish()[0]


def test_a_warmdown_fraction_ends_with_the_run_by_steps_or_by_time() -> None:
    """Steps may end long before the cap."""
    factors = [
        lr_multiplier(step, 200.0 * step, iterations=300, warmdown_iters=1, cap_ms=600_000.0, warmdown_fraction=0.4)
        for step in (0, 150, 240, 300)
    ]
    assert factors == pytest.approx([1, 1, 0.5, 0])


def test_the_fraction_done_is_of_steps_or_time_whichever_is_larger() -> None:
    settings = tiny_settings(iterations=100, max_wallclock_seconds=10.0)
    assert fraction_done(settings, 50, 1000.0) == 0.5
    assert fraction_done(settings, 50, 8000.0) == 0.8
    assert fraction_done(tiny_settings(iterations=100), 50, 8000.0) == 0.5
    fractions = [fraction_done(settings, step, 150.0 * step) for step in range(60)]
    assert all(a < b for a, b in pairwise(fractions))


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"min_lr": 1.5}, "min_lr is 1.5"),
        ({"min_lr": -0.1}, "min_lr is -0.1"),
        ({"force_stop_step": -1}, "force_stop_step is -1"),
        ({"force_stop_step": 13}, "force_stop_step 13 .* 12 iterations"),
    ],
)
def test_impossible_schedules_are_refused(change: dict[str, Any], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        tiny_settings(**change)


ON = BanditSettings(every=2)


def start(bandit: BanditSettings | None, seed: int = 0, **changes: Any) -> Training:
    return tiny_training(tiny_model(seed), TinyBatches(), tiny_settings(**changes), bandit=bandit)


def play(bandit: Bandit, gains: dict[float, float], steps: int, noise: float = 0.0) -> list[float]:
    """Let `bandit` act on losses that each step at a factor lowers by its gain; return the chosen factors."""
    generator, loss, factors = random.Random(1), 10.0, []
    for _ in range(steps):
        factor = bandit.factor()
        factors.append(factor)
        bandit.observe(loss + noise * generator.gauss(0, 1))
        loss -= gains[factor]
    return factors


def test_it_finds_the_best_factor() -> None:
    factors = play(Bandit(BanditSettings(every=1), 0), {0.7: 0.01, 1.0: 0.02, 1.4: 0.03}, 400, noise=0.005)
    assert factors[200:].count(1.4) > 150


def test_a_choice_holds_for_its_window_and_multiplies_the_schedule() -> None:
    steps = list(start(BanditSettings(every=3, factors=(0.5, 2.0)), iterations=12, warmdown_iters=0))
    factors = [step.lr_multiplier for step in steps]
    assert set(factors) == {0.5, 2.0}
    assert all(len(set(factors[at : at + 3])) == 1 for at in range(0, 12, 3))


def test_it_is_decided_by_seed_and_losses_alone() -> None:
    state = torch.get_rng_state()
    gains = {0.7: 0.01, 1.0: 0.02, 1.4: 0.03}
    one, same, other = (play(Bandit(ON, seed), gains, 60, noise=0.02) for seed in (0, 0, 1))
    assert one == same != other
    assert torch.equal(torch.get_rng_state(), state)


def test_a_state_of_other_factors_is_ignored_and_a_broken_one_refused() -> None:
    bandit = Bandit(ON, 0)
    play(bandit, {0.7: 0.01, 1.0: 0.02, 1.4: 0.03}, 11)
    state = json.loads(json.dumps(bandit.state()))
    assert sum(state["chosen"]) == 6
    other = Bandit(BanditSettings(every=2, factors=(0.5, 1.0)), 0)
    other.load_state(state)
    assert other.counts == [0, 0]
    del state["sum"]
    with pytest.raises(WeightsError, match="bandit"):
        bandit.load_state(state)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"every": -1}, "bandit every is -1"),
        ({"factors": (1.0,)}, r"\(1\.0"),
        ({"factors": (1.0, 1.0)}, r"\(1\.0"),
        ({"factors": (0.0, 1.0)}, r"\(0\.0, 1\.0\)"),
        ({"discount": 0.0}, "bandit discount is 0.0"),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(change: dict[str, Any], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        BanditSettings(**change)
