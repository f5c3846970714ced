"""State machines of trellis-coded quantization, and streams of numbers on their paths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.entropy import coder, mixed, static
from birdie.entropy import trellis_states as trellis
from birdie.entropy.hints import Effort, Hints
from birdie.entropy.trellis_states import STATES
from tests.reference import decoder as reference
from tests.reference import mixed as reference_mixed
from tests.reference.streams import on_paths
from tests.reference.trellis import after

Integers = NDArray[np.integer]
PATHS = [sign * states for states in STATES for sign in (1, -1)]  # down columns, along rows


@pytest.mark.parametrize("states", PATHS)
def test_odd_states_are_those_of_the_reference_machine(states: int) -> None:
    numbers = np.random.default_rng(1).integers(-5, 6, (7, 3))
    state, odd = [0, 0, 0], np.empty(numbers.shape, int)
    for (row, column), number in np.ndenumerate(numbers):
        path = column if states > 0 else 0
        odd[row, column] = state[path] % 2
        state[path] = after(states, state[path], int(number))
    assert trellis.odd_states(numbers, states).tolist() == odd.tolist()


@st.composite
def walks(draw: st.DrawFn) -> tuple[Integers, int]:
    """Random walks, which follow no trellis, and numbers that do; some with far values, or with few different ones."""
    rows, columns, states = draw(st.integers(1, 14)), draw(st.integers(1, 18)), draw(st.sampled_from(PATHS))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    spread = draw(st.sampled_from([0.4, 3, 60, 900]))
    form = draw(st.sampled_from(["walk", "paths", "even", "few", "far"]))
    values = np.rint(np.cumsum(rng.normal(0, spread, (rows, columns)), 0)).astype(np.int64)
    if form == "paths":
        values = on_paths(rows, columns, states, spread).astype(np.int64)
    elif form == "even":
        values *= 2
    elif form == "few":
        values = np.array([-70_000, -3, 0, 2**20 - 1])[values % 4]
    elif form == "far":
        values[0, 0] = 2**31 - 1
    return values, states


@settings(max_examples=25, deadline=None)
@given(walks(), st.sampled_from([1 << 20, 40]), st.sampled_from(["max", "fast"]))
def test_any_numbers_come_back_under_any_states(case: tuple[Integers, int], chunk: int, effort: Effort) -> None:
    values, states = case
    rows, columns = values.shape
    hints = Hints(states=states)
    with pytest.MonkeyPatch.context() as patch:
        for module in (trellis, reference, reference_mixed):
            patch.setattr(module, "CHUNK", chunk)
        coded = coder.encode(values, hints, effort)
        assert coder.encode(values, hints, effort) == coded
        for threads in (1, 2):
            decoded = coder.decode(coded.coder, coded.payload, rows, columns, hints, threads=threads)
            assert (decoded == values).all()
        if values.min() == values.max():
            return
        payload = static.encode(values, (1, 1), states)
        assert reference.decode(coder.STATIC, payload, rows, columns, states) == values.tolist()
        assert (static.decode(payload, rows, columns, np.dtype(np.int32), 2, states) == values).all()
        mixed_payload = mixed.encode(values, (1, 1), states)
        if mixed_payload is not None:
            assert reference.decode(coder.MIXED, mixed_payload, rows, columns, states) == values.tolist()
            assert (mixed.decode(mixed_payload, rows, columns, np.dtype(np.int32), 2, states) == values).all()


@pytest.mark.parametrize("effort", ["max", "fast"])
def test_one_state_is_the_same_as_no_hint(effort: Effort) -> None:
    values = on_paths(60, 50, 8, 3)
    assert coder.encode(values, Hints(states=1), effort) == coder.encode(values, None, effort)
    assert coder.encode(values, Hints(states=1), effort) == coder.encode(values, Hints(), effort)


def test_numbers_on_paths_cost_their_entropy_given_the_state() -> None:
    """A normal source, rounded to the grid of the state, comes within 2 % of its entropy in bands of rows."""
    states, values = 8, on_paths(1200, 100, 8, 0.7)
    odd = trellis.odd_states(values, states)
    band = np.arange(1200) // 60  # rows differ in scale: the entropy of bands of them
    bits = 0.0
    for label in np.unique(band):
        for side in (0, 1):
            counts = np.unique(values[band == label][odd[band == label] == side], return_counts=True)[1]
            bits += float((counts * np.log2(counts.sum() / counts)).sum())
    assert 8 * len(coder.encode(values, Hints(states=states)).payload) < 1.02 * bits
