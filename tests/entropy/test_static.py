"""Descriptions of the coder static come back: alphabets, classes of rows, tables of frequencies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy import frequency_tables, row_classes, static
from birdie.entropy import trellis_states as trellis
from birdie.entropy.alphabet import AFFINE, LISTED, SPLIT, Alphabet
from birdie.entropy.frequency_tables import Description
from birdie.entropy.side_information import SideReader, SideWriter
from birdie.entropy.trellis_states import STATES
from birdie.errors import ArtifactError
from tests.reference.streams import on_paths

Integers = NDArray[np.integer]
PATHS = [sign * states for states in STATES[1:] for sign in (1, -1)]  # down columns, along rows


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


INT32 = st.integers(-(2**31), 2**31 - 1)
CASES = {
    "affine": (np.arange(-40, 40, 4), AFFINE),
    "one value": (np.full(9, 7), AFFINE),
    "listed": (np.repeat([-900_000, 3, 5, 1 << 30], 1000), LISTED),
    "split": (np.arange(-5000, 5000) ** 3 // 977, SPLIT),
}


def round_trip(values: Integers) -> Alphabet:
    """Check that values come back from symbols, low bits and the alphabet of the side information."""
    alphabet, symbols = alphabets.choose(values)
    assert int(symbols.max()) < alphabet.size
    writer = SideWriter()
    alphabet.put(writer)
    reader = SideReader(writer.finish())
    taken = Alphabet.take(reader)
    reader.finish()
    low = alphabets.low_bits(values, alphabet) if alphabet.kind == SPLIT else b""
    out = np.empty(values.shape, np.int32)
    alphabets.values_of(symbols, taken, low, out)
    assert (out == values).all()
    return alphabet


@settings(max_examples=25, deadline=None)
@given(arrays.arrays(np.int64, arrays.array_shapes(min_dims=2, max_dims=2), elements=INT32))
def test_any_int32_comes_back(values: Integers) -> None:
    round_trip(values)


@pytest.mark.parametrize("name", CASES)
def test_each_kind_is_chosen_where_it_belongs(name: str) -> None:
    values, kind = CASES[name]
    assert round_trip(values.reshape(1, -1)).kind == kind


def test_an_alphabet_beyond_int32_is_refused() -> None:
    writer = SideWriter()
    Alphabet(AFFINE, np.array([2**31 - 2, 2**31 - 1, 2**31])).put(writer)
    with pytest.raises(ArtifactError, match="32 bits"):
        Alphabet.take(SideReader(writer.finish()))


def test_rows_of_two_scales_become_two_classes_narrow_first() -> None:
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 2, 64).astype(bool)
    symbols = np.rint(rng.normal(100, np.where(wide, 20, 2)[:, None], (64, 200))).clip(0, 199).astype(np.uint16)
    counts = row_classes.histograms(symbols, 200)
    assert (counts.sum(1) == 200).all()
    assert row_classes.cluster(counts, 2).tolist() == wide.astype(int).tolist()


def test_classes_come_back_unless_there_are_too_many() -> None:
    classes = np.array([0, 0, 3, 1, 3], np.uint8)
    writer = SideWriter()
    row_classes.put(writer, classes)
    words = writer.finish()
    assert row_classes.take(SideReader(words), 5, 4).tolist() == classes.tolist()
    with pytest.raises(ArtifactError, match="class 3 of 3"):
        row_classes.take(SideReader(words), 5, 3)


PRECISION = 12


@st.composite
def histograms(draw: st.DrawFn) -> NDArray[np.int64]:
    """Histograms that are smooth, ragged or nearly empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 400))
    middle, width = draw(st.integers(0, size - 1)), draw(st.sampled_from([0.1, 3.0, 40.0]))
    expected = 1e4 * np.exp(-np.abs(np.arange(size) - middle) / width)
    counts = rng.poisson(expected) if draw(st.booleans()) else rng.integers(0, 3, size) * rng.integers(0, 50, size)
    counts[middle] += 1
    return counts.astype(np.int64)


@settings(max_examples=25, deadline=None)
@given(histograms(), st.booleans())
def test_tables_give_every_symbol_a_frequency_and_come_back(counts: NDArray[np.int64], newton: bool) -> None:
    description, bits = frequency_tables.fit(counts, PRECISION, newton=newton)
    frequencies = description.frequencies(counts.size, PRECISION)
    assert int(frequencies.sum()) == 1 << PRECISION
    assert (frequencies[counts > 0] > 0).all()
    assert np.isfinite(bits)
    assert bits >= frequency_tables.least_bits(counts[None])[0]
    writer = SideWriter()
    description.put(writer, counts.size)
    description.put(writer, counts.size)
    reader = SideReader(writer.finish())
    taken = frequency_tables.take(reader, 2, counts.size, PRECISION)
    reader.finish()
    assert taken.tolist() == [frequencies.tolist()] * 2


def test_a_smooth_histogram_costs_its_entropy_and_few_bytes() -> None:
    counts = np.rint(20_000 * np.exp(-((np.arange(255) - 127) ** 2) / 2000)).astype(np.int64)
    present = counts[counts > 0]
    entropy = float((present * np.log2(counts.sum() / present)).sum())
    description, bits = frequency_tables.fit(counts, PRECISION, newton=True)
    assert bits < 1.005 * entropy
    writer = SideWriter()
    description.put(writer, counts.size)
    assert writer.finish().nbytes < 25


@pytest.mark.parametrize(
    "description",
    [Description(0, 1, 0, 0, (0, 0)), Description(0, 1, 0, 4, (384, 384)), Description(0, 5000, 0, 0, (1,) * 5001)],
    ids=["no symbol", "too large a log", "more symbols than slots"],
)
def test_impossible_tables_are_refused(description: Description) -> None:
    with pytest.raises(ArtifactError):
        description.frequencies(description.high + 1, PRECISION)
