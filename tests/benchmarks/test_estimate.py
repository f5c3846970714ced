"""The benchmark of estimates: its least squares is non-negative, and a run's mean step weighs its two phases."""

import dataclasses

import numpy as np
import pytest

from benchmarks import estimate
from birdie.model.gpt import GPTConfig
from birdie.run.recipe import Recipe


def test_least_squares_has_no_negative_coefficient() -> None:
    matrix = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert estimate._nonnegative(matrix, matrix @ [2.0, 3.0]) == pytest.approx([2, 3])
    assert estimate._nonnegative(matrix, matrix @ [2.0, -1.0]) == pytest.approx([1.5, 0])


def test_a_runs_mean_step_is_the_harmonic_mean_of_its_phases() -> None:
    config = GPTConfig(num_loops=1, loop_start=1, loop_end=2, enable_looping_at=0.25)
    entries = [np.array([1.0, 0.0, 0.0, 1.0]), np.array([3.0, 0.0, 0.0, 1.0])]
    constants = np.array([1.0, 0.0, 0.0])
    mean = estimate.mean_ms(Recipe(model=config), entries, constants)
    assert mean == pytest.approx(1 / (0.25 / 2 + 0.75 / 4))
    assert estimate.mean_ms(Recipe(model=dataclasses.replace(config, num_loops=0)), entries[:1], constants) == 2


def test_the_constants_of_synthetic_runs_are_recovered() -> None:
    constants = np.array([2.0, 5.0, 10.0])
    runs = []
    for settings in (
        {"num_layers": 1},
        {"num_layers": 2},
        {"num_layers": 1, "model_dim": 768},
        {"num_layers": 1, "mlp_mult": 4},
    ):
        recipe = Recipe(model=GPTConfig(**settings))  # type: ignore[arg-type]
        entries = estimate.parts(recipe, 8)
        runs.append((recipe, entries, estimate.mean_ms(recipe, entries, constants)))
    assert estimate.fitted(runs) == pytest.approx(constants, rel=1e-3)


@pytest.mark.nightly  # trains and saves each shape, and in new processes once more
def test_estimates_are_compared_with_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "2 × 64, vocabulary 4,096"
    monkeypatch.setattr(estimate, "SHAPES", {name: estimate.SHAPES[name]})
    rows = estimate.on_cpu(2)
    assert [row["what"] for row in rows[:3]] == ["parameters", "step, ms", "memory, MB"]
    assert rows[0]["error_%"] == 0
    assert [row["what"] for row in rows[3:]] == [f"{scheme}, bytes" for scheme in estimate.SCHEMES]
    for row in rows:
        assert row["error_%"] == pytest.approx(100 * (row["estimate"] / row["measured"] - 1))
