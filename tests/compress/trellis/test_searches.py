"""Both searches find the nearest paths through a trellis, whose states they number in another way."""

import numpy as np
import pytest
from numpy.typing import NDArray

from birdie.compress.trellis import lanes, vectors, viterbi
from birdie.compress.trellis.feedback import feedback
from birdie.compress.trellis.lanes import WeightDensity
from birdie.compress.trellis.register import register
from birdie.entropy.trellis_states import STATES, machine, odd_states
from birdie.system.kernels import njit

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
