"""The coder "mixed" costs little more than the entropy, learns scales, and finds predictions and low bits."""

from math import erf

import numpy as np
import pytest
from numpy.typing import NDArray

from birdie.entropy import mixed, prediction, static
from tests.reference.streams import near_copies, smooth_kernels

Integers = NDArray[np.integer]


def cost(values: Integers, kernel: tuple[int, int] = (1, 1)) -> int:
    """Bytes of `values` as a mixed stream."""
    payload = mixed.encode(values, kernel)
    assert payload is not None
    return len(payload)


def rounded(scales: float | NDArray[np.float64], rows: int, columns: int, seed: int = 0) -> tuple[Integers, float]:
    """Return rounded Gaussians with these deviations, and their entropy in bytes given the deviations."""
    values = np.rint(np.random.default_rng(seed).normal(size=(rows, columns)) * scales)
    upper, lower = (np.vectorize(erf)((values + side) / (np.sqrt(2) * scales)) for side in (0.5, -0.5))
    return values.astype(np.int32), float(-np.log2((upper - lower) / 2).sum()) / 8


def test_a_tall_array_may_begin_with_many_equal_values() -> None:
    """As networks do whose first filters are pruned; some rows decide whether columns are coded first."""
    values = np.zeros((2048, 16), np.int32)
    values[-64:] = rounded(3.0, 64, 16)[0]
    assert cost(values) < 1.2 * cost(values[-64:]) + 64


@pytest.mark.parametrize("scale", [1.5, 40.0])
def test_a_gaussian_costs_its_entropy(scale: float) -> None:
    values, entropy = rounded(scale, 384, 256)
    assert cost(values) < 1.01 * entropy


def test_scales_of_rows_and_columns_are_learned() -> None:
    """Static tables know classes of rows; learning both scales beats them and comes near the entropy."""
    rng = np.random.default_rng(5)
    scales = 6 * np.exp(0.5 * rng.normal(size=(256, 1)) + 0.5 * rng.normal(size=256))
    values, entropy = rounded(scales, 256, 256)
    coded = cost(values)
    assert coded < 0.97 * len(static.encode(values, (1, 1)))
    assert coded < 1.03 * entropy


@pytest.mark.parametrize(("values", "kernel"), [(near_copies(), (1, 1)), (smooth_kernels(), (3, 3))])
def test_predictions_are_used_where_they_save_bytes(
    values: Integers, kernel: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = cost(values, kernel)
    monkeypatch.setattr(prediction, "candidates", lambda *_: [])
    assert predicted < 0.9 * cost(values, kernel)


@pytest.mark.parametrize("size", [600, 1500, 3000])
def test_more_symbols_than_the_tree_holds_leave_low_bits(size: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, size, (64, 160)).astype(np.int32)
    payload = mixed.encode(values, (1, 1))
    assert payload is not None
    assert (mixed.decode(payload, 64, 160, np.dtype(np.int32), 1) == values).all()
    assert len(payload) < 1.03 * values.size * np.log2(size) / 8
