"""Searches of a trellis: no path is nearer; lanes and scales of columns lose nothing."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.trellis import Trellis, column_scales
from birdie.compress.trellis import lanes, vectors, viterbi
from birdie.compress.trellis.feedback import feedback
from birdie.compress.trellis.lanes import LARGEST, WeightDensity
from birdie.compress.trellis.register import register
from birdie.entropy.trellis_states import STATES, chunk_rows, machine, odd_states
from birdie.system.kernels import njit
from tests.compress.matrices import gaussian

Matrix = NDArray[np.float32]


def least_error(values: Matrix, states: int) -> float:
    """Return the least sum of squared errors of any path, from state 0, by its definition."""
    paths, cost = machine(states), np.where(np.arange(states) == 0, 0.0, np.inf)
    for value in values.astype(np.float64):
        best = np.full(states, np.inf)
        for parity in (0, 1):
            shifted = (value - 0.5 * paths.odd - parity) / 2
            total = cost + (2 * (shifted - np.rint(shifted))) ** 2
            np.minimum.at(best, paths.next_state[:, parity], total)
        cost = best
    return float(cost.min())


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("states", STATES)
def test_without_a_price_no_path_is_nearer(states: int, direction: int) -> None:
    weight = np.random.default_rng(states).normal(0, 5, (60, 3)).astype(np.float32)
    rows, columns = np.ones(60, np.float32), np.ones(3, np.float32)
    signed = direction * states
    numbers = {"one by one": viterbi.quantize(weight, feedback(None, 60, 3), rows, columns, signed, 0)}
    if states in lanes.SEARCHED:
        many = lanes.quantize(weight, WeightDensity.of(weight), rows, columns, signed, 0)
        numbers["many at a time"] = many.astype(np.int32)
    paths = weight.T if direction > 0 else weight.reshape(1, -1)
    least = sum(least_error(path, states) for path in paths)
    for search, chosen in numbers.items():
        error = float(((weight - chosen - 0.5 * odd_states(chosen, signed)) ** 2).sum())
        assert error == pytest.approx(least, rel=1e-4), search


@pytest.mark.parametrize("states", STATES[1:])
def test_a_register_is_the_machine_in_another_order(states: int) -> None:
    """From states 2j and 2j + 1 the ways to j and j + states / 2 are those of the machine."""
    odd, parity, swapped, original = register(states)
    paths, half = machine(states), states // 2
    assert sorted(original) == list(range(states))
    for j in range(half):
        assert swapped[j] == (original[2 * j + 1] < original[2 * j])
        for second in (0, 1):
            state = original[2 * j + second]
            assert paths.odd[state] == odd[j]
            for top in (0, 1):
                assert paths.next_state[state, parity[j] ^ second ^ top] == original[j + half * top]


def test_instructions_do_what_the_bodies_of_their_functions_do() -> None:
    def every(values, out, bits):  # type: ignore[no-untyped-def]
        a, b = vectors.load_even(values, 1), vectors.load_odd(values, 1)
        less, at_most = vectors.less(a, b), vectors.at_most(b, vectors.splat(values[0, 0]))
        vectors.store_bits(bits, 0, less)
        vectors.store_bits(bits, 2, vectors.choose(less, at_most, less))
        vectors.store(out, 3, vectors.choose(at_most, vectors.plus(a, b), vectors.load(values, 9)))

    values = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    results = []
    for function in (every, njit()(every)):
        out, bits = np.zeros(12, np.float32), np.zeros(3, np.uint8)
        function(values, out, bits)
        results.append((out.tolist(), bits.tolist()))
    assert results[0] == results[1]
    assert any(results[0][1])


def with_fisher(weight: Tensor, fisher: Tensor) -> Encoded:
    """Encode a weight of deviation 1 at about three bits, its columns with this Fisher information."""
    factors = feedback(Sensitivity(torch.diag(fisher)), *weight.shape)
    return Trellis().encode_with("w", weight, factors, 0.25 * math.exp(float(fisher.log().mean()) / 2))


def octaves(columns: int, most: float, seed: int = 1) -> Tensor:
    """Return a Fisher information for each column; their ideal scales differ by up to `most` octaves."""
    return torch.exp2(2 * most * torch.rand(columns, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(("rows", "most"), [(16, 0.0), (16, 1.0), (512, 0.1)])
def test_columns_that_are_nearly_alike_share_a_scale(rows: int, most: float) -> None:
    encoded = with_fisher(gaussian(rows, 96), octaves(96, most))
    assert encoded.params[2] == 0
    assert len(encoded.streams) == 2


@pytest.mark.parametrize(("rows", "most"), [(64, 3.0), (512, 1.0)])
def test_columns_that_differ_have_scales_by_their_fisher_information(rows: int, most: float) -> None:
    fisher = octaves(96, most)
    encoded = with_fisher(gaussian(rows, 96), fisher)
    exponents = np.log2(column_scales(encoded)) + 0.5 * np.log2(fisher.numpy())
    assert len(encoded.streams) == 3
    assert np.ptp(exponents) < 1, "indices that cost fewer bits are near the ideal scale"


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
