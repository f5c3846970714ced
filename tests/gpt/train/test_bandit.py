"""The bandit finds the better factor, forgets, is equal on all ranks and after resuming, and off it does nothing."""

import json
import random
from typing import Any

import pytest
import torch

from birdie.errors import ConfigError, WeightsError
from birdie.gpt.train.bandit import Bandit
from birdie.gpt.train.settings import BanditSettings
from birdie.gpt.train.training import Training
from tests.tiny_run import TinyBatches, tiny_model, tiny_settings, tiny_training

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


def test_it_follows_a_change_of_the_best_factor() -> None:
    bandit = Bandit(BanditSettings(every=1, discount=0.95), 0)
    early = play(bandit, {0.7: 0.01, 1.0: 0.02, 1.4: 0.04}, 300, noise=0.005)
    late = play(bandit, {0.7: 0.04, 1.0: 0.02, 1.4: 0.01}, 300, noise=0.005)
    assert early[150:].count(1.4) > 100
    assert late[150:].count(0.7) > 100


def test_among_equal_factors_it_tries_all() -> None:
    factors = play(Bandit(BanditSettings(every=1), 0), dict.fromkeys((0.7, 1.0, 1.4), 0.01), 600, noise=0.1)
    assert min(factors.count(factor) for factor in (0.7, 1.0, 1.4)) > 100


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
