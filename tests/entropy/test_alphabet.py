"""Values and symbols are one to one for any int32, and each kind of alphabet is chosen where it belongs."""

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy.alphabet import AFFINE, LISTED, SPLIT, Alphabet
from birdie.entropy.side_information import SideReader, SideWriter
from birdie.errors import ArtifactError

Integers = NDArray[np.integer]
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


@pytest.mark.parametrize("name", CASES)
def test_each_kind_is_chosen_where_it_belongs(name: str) -> None:
    values, kind = CASES[name]
    assert round_trip(values.reshape(1, -1)).kind == kind


def test_an_alphabet_beyond_int32_is_refused() -> None:
    writer = SideWriter()
    Alphabet(AFFINE, np.array([2**31 - 2, 2**31 - 1, 2**31])).put(writer)
    with pytest.raises(ArtifactError, match="32 bits"):
        Alphabet.take(SideReader(writer.finish()))
