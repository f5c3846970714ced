"""Many paths at a time: they are as good as those of the other search, long ones hold together, and rows left out are
zero."""

import numpy as np
import pytest
from numpy.typing import NDArray

from birdie.compress.trellis import lanes, viterbi
from birdie.compress.trellis.feedback import feedback
from birdie.compress.trellis.lanes import LARGEST, WeightDensity
from birdie.entropy.trellis_states import chunk_rows, odd_states

Matrix = NDArray[np.float32]
PRICE = 0.09  # of a bit at high rate, in squared scales


def weights(rows: int, columns: int, seed: int = 0) -> Matrix:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(6, (rows, columns)) * np.exp(0.3 * rng.normal(size=(rows, 1)))).astype(np.float32)


def quantized(weight: Matrix, states: int, scale: float = 0.4, price: float = PRICE) -> NDArray[np.int16]:
    rows, columns = (np.full(size, value, np.float32) for size, value in zip(weight.shape, (scale, 1.0), strict=True))
    return lanes.quantize(weight, WeightDensity.of(weight), rows, columns, states, price)


def error(weight: Matrix, numbers: NDArray[np.integer], states: int, scale: float = 0.4) -> float:
    """Return the mean squared error in squared scales."""
    odd = odd_states(numbers, states)
    return float(np.mean((weight / scale - numbers - 0.5 * odd) ** 2))


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("states", lanes.SEARCHED)
def test_it_is_as_good_as_the_search_with_counted_bits(states: int, direction: int) -> None:
    weight = weights(300, 170)
    rows, columns = np.full(300, 0.4, np.float32), np.ones(170, np.float32)
    counted = viterbi.quantize(weight, feedback(None, *weight.shape), rows, columns, direction * states, PRICE)
    fast = quantized(weight, direction * states).astype(np.int32)
    costs = [viterbi.cost(weight, one, rows, columns, direction * states, PRICE) for one in (fast, counted)]
    assert costs[0] < 1.004 * costs[1]


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 5000])
def test_a_path_along_rows_crosses_segments_and_chunks(columns: int) -> None:
    """No seam shows: the error is that of the trellis everywhere, which a wrong state at a seam would double."""
    rows = 2 * chunk_rows(columns) + 3 if columns == 5000 else 3000
    weight = weights(rows, columns)
    numbers = quantized(weight, -8, price=0.0)
    assert error(weight, numbers, -8) < 0.0665
    seams = np.arange(lanes._LENGTH, weight.size, lanes._LENGTH)
    near = (seams[:, None] + np.arange(-4, 4)).ravel()
    off = (weight / 0.4 - numbers - 0.5 * odd_states(numbers, -8)).ravel()[near[near < weight.size]]
    assert float(np.mean(off**2)) < 0.08


def test_coarse_scales_and_huge_numbers_are_not_suited() -> None:
    weight = weights(64, 64)
    shape, most, ones = WeightDensity.of(weight), np.abs(weight).max(1).astype(np.float64), np.ones(64, np.float32)

    def suited(scale: float, states: int = 8) -> bool:
        return lanes.suits(shape, most, np.full(64, scale, np.float32), ones, states)

    spread = float(weight.std())
    assert suited(spread / 2)
    assert not suited(spread * 2)
    assert not suited(float(most.max()) / (2 * LARGEST))
    assert not suited(spread / 2, states=64)
