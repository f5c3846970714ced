"""Frequency tables sum to a power of two, come back from their descriptions, and cost little more than the entropy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.entropy import frequency_tables
from birdie.entropy.frequency_tables import Description
from birdie.entropy.side_information import SideReader, SideWriter
from birdie.errors import ArtifactError

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
