"""The coder "static" takes any int32, and has tables for even and for odd states of a trellis. The coder "lanes" codes
the same in independent lanes, where that costs next to nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from birdie.entropy import coder, frequency_tables, static, trellis
from birdie.entropy.hints import Hints
from birdie.entropy.trellis import STATES
from birdie.errors import ArtifactError
from tests.nightly import mostly_nightly
from tests.reference.streams import gaussian, near_copies, on_paths, smooth_kernels

Integers = NDArray[np.integer]
PATHS = [sign * states for states in STATES[1:] for sign in (1, -1)]  # down columns, along rows


@settings(max_examples=25, deadline=None)
@given(arrays.arrays(np.int64, (6, 50), elements=st.integers(-(2**31), 2**31 - 1)))
def test_any_int32_comes_back(values: Integers) -> None:
    if values.min() != values.max():
        payload = static.encode(values, (1, 1))
        assert (static.decode(payload, 6, 50, np.dtype(np.int32), 1) == values).all()


@pytest.mark.parametrize("states", PATHS)
def test_tables_for_odd_states_reach_the_entropy_given_the_state(states: int) -> None:
    """Within 2 % and a little for the tables."""
    values = on_paths(300, 80, states, 0.7)
    odd = trellis.odd_states(values, states)
    bits = 0.0
    for band in np.array_split(np.arange(300), 12):  # rows differ in scale
        for side in (0, 1):
            counts = np.unique(values[band][odd[band] == side], return_counts=True)[1]
            bits += float((counts * np.log2(counts.sum() / counts)).sum())
    paired, plain = (len(static.encode(values, (1, 1), count)) for count in (states, 1))
    assert paired < 0.97 * plain
    assert 8 * paired < 1.02 * bits + 1200


@pytest.mark.parametrize("states", [1, 8])
def test_ways_that_are_given_up_early_are_none_of_the_cheapest(monkeypatch: pytest.MonkeyPatch, states: int) -> None:
    rng = np.random.default_rng(0)
    values = np.rint(rng.normal(0, 3 + 9 * rng.random((48, 1)), (48, 64))).astype(np.int32)
    payload = static.encode(values, (1, 1), states)
    monkeypatch.setattr(frequency_tables, "least_bits", lambda counts: np.full(len(counts), -np.inf))
    assert static.encode(values, (1, 1), states) == payload


def test_tables_for_odd_states_are_refused_without_a_trellis() -> None:
    values = on_paths(64, 60, 8, 0.6)
    payload = static.encode(values, (1, 1), 8)
    with pytest.raises(ArtifactError, match="number of classes"):
        static.decode(payload, 64, 60, np.dtype(np.int32), 1)


@settings(max_examples=25, deadline=None)
@given(arrays.arrays(np.int64, (9, 50), elements=st.integers(-(2**31), 2**31 - 1)), st.sampled_from([4, 32]))
def test_any_int32_comes_back_from_lanes(values: Integers, lanes: int) -> None:
    if values.min() != values.max():
        payload = static.encode(values, (1, 1), lanes=lanes)
        assert (static.decode_lanes(payload, 9, 50, np.dtype(np.int32), 1) == values).all()


@pytest.mark.parametrize("states", [1, 4, 64])
def test_numbers_on_paths_come_back_from_lanes(states: int) -> None:
    values = on_paths(150, 75, states, 0.7)
    payload = static.encode(values, (1, 1), states, 16)
    assert (static.decode_lanes(payload, 150, 75, np.dtype(np.int32), 2, states) == values).all()


@pytest.mark.parametrize(("states", "deviation"), mostly_nightly([(1, 0.5), (8, 1.5), (1, 20)], [(8, 1.5)]))
def test_lanes_cost_a_thousandth_of_the_bytes(states: int, deviation: float) -> None:
    values = on_paths(256, 1024, states, deviation)
    fast = coder.encode(values, Hints(states=states), "fast")
    assert fast.coder == coder.LANES
    assert len(fast.payload) < 1.001 * len(static.encode(values, (1, 1), states))
    assert (coder.decode(fast.coder, fast.payload, 256, 1024, Hints(states=states)) == values).all()


@pytest.mark.parametrize(
    ("values", "states", "kernel"),
    [
        (gaussian(100, 600, 3, 3), 1, (1, 1)),
        (gaussian(9000, 8, 3, 3), 1, (1, 1)),
        (on_paths(100, 800, -8, 2), -8, (1, 1)),
        (near_copies(2000), 1, (1, 1)),
        (smooth_kernels(256, 64), 1, (3, 3)),
        (np.random.default_rng(0).integers(-(2**31), 2**31, (300, 300)), 1, (1, 1)),
    ],
    ids=["few values", "few columns", "along rows", "rows from rows", "kernels", "split"],
)
def test_the_coder_static_is_kept_where_lanes_gain_nothing(
    values: Integers, states: int, kernel: tuple[int, int]
) -> None:
    payload, in_lanes = static.encode_fastest(values, kernel, states)
    assert not in_lanes
    assert payload == static.encode(values, kernel, states)


def test_paths_along_rows_are_refused_in_lanes() -> None:
    """One path leads through all lanes, which then would not be independent."""
    payload = static.encode(on_paths(64, 60, 8, 0.6), (1, 1), 8, 4)
    with pytest.raises(ArtifactError, match="number of classes"):
        static.decode_lanes(payload, 64, 60, np.dtype(np.int32), 1, -8)


@pytest.mark.parametrize(("columns", "lanes", "sound"), [(3, 4, True), (7, 8, False), (8, 8, True), (4, 2, False)])
def test_lanes_are_four_or_at_most_one_a_column(columns: int, lanes: int, sound: bool) -> None:
    values = gaussian(90, columns, 3, 3)
    payload = static.encode(values, (1, 1), lanes=lanes)
    if sound:
        assert (static.decode_lanes(payload, 90, columns, np.dtype(np.int32), 1) == values).all()
        return
    with pytest.raises(ArtifactError, match=f"{lanes} lanes"):
        static.decode_lanes(payload, 90, columns, np.dtype(np.int32), 1)
