"""rANS gives back any symbols under any tables, costs what the tables promise, and ends where it began."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.entropy import rans
from birdie.entropy import trellis_states as trellis
from birdie.errors import ArtifactError
from tests.reference import decoder as reference

Integers = NDArray[np.integer]
STATES = st.sampled_from([sign * states for states in trellis.STATES for sign in (1, -1)])


@dataclass
class Case:
    """Symbols with the class of each row, frequency tables, and the trellis whose paths the values lie on."""

    symbols: NDArray[np.uint16]
    classes: NDArray[np.uint8]
    frequencies: NDArray[np.int64]
    precision: int
    states: int

    @property
    def paired(self) -> bool:
        """True if every class has a second table, for odd states."""
        return abs(self.states) > 1

    @property
    def values(self) -> NDArray[np.int64]:
        """The value of each symbol; values of either parity drive the machine of the trellis."""
        return np.arange(self.frequencies.shape[1]) - 3

    @property
    def odd(self) -> NDArray[np.uint8]:
        """1 for a symbol in an odd state of the trellis."""
        return trellis.odd_states(self.values[self.symbols], self.states)

    @property
    def machine(self) -> trellis.Machine:
        """Machine whose states select the tables."""
        return trellis.machine(self.states if self.paired else 1)

    @property
    def table(self) -> NDArray[np.uint64]:
        """Table of the decoder."""
        return rans.decode_table(self.frequencies, self.values, self.precision, 1 + self.paired)

    def encode(self) -> bytes:
        """Return the bytes of the chunk."""
        odd = self.odd if self.paired else None
        words = rans.encode(self.symbols, self.classes, self.frequencies, self.precision, odd)
        return words.astype("<u2").tobytes()

    def decode(self, data: bytes) -> NDArray[np.int32]:
        """Return the values of the chunk."""
        out = self._unset()
        rans.decode(memoryview(data), self.classes, self.table, self.precision, self.machine, out)
        return out

    def _unset(self) -> NDArray[np.int32]:
        return np.full(self.symbols.shape, -1 << 31, np.int32)

    @property
    def bits(self) -> float:
        """Bits that the frequencies promise."""
        tables = self.classes[:, None] * np.int64(1 + self.paired) + (self.odd if self.paired else 0)
        return float(-np.log2(self.frequencies[tables, self.symbols] / (1 << self.precision)).sum())


def any_case(rows: int, columns: int, size: int, precision: int, states: int, seed: int, classes: int = 3) -> Case:
    """Return symbols drawn from random tables in which each of `size` symbols has a slot at least."""
    rng = np.random.default_rng(seed)
    count = classes * (1 + (abs(states) > 1))
    weights = rng.dirichlet(np.full(size, 0.3), count)
    frequencies = 1 + np.stack([rng.multinomial((1 << precision) - size, share) for share in weights])
    labels = rng.integers(0, classes, rows).astype(np.uint8)
    share = frequencies[labels * (count // classes)] / (1 << precision)
    symbols = np.stack([rng.choice(size, columns, p=row) for row in share]).astype(np.uint16)
    return Case(symbols, labels, frequencies.astype(np.int64), precision, states)


CASES = st.builds(
    any_case,
    rows=st.integers(1, 6),
    columns=st.integers(1, 23),
    size=st.integers(1, 200),
    precision=st.sampled_from([8, 12, rans.MAX_PRECISION]),
    states=STATES,
    seed=st.integers(0, 1 << 30),
)


def reference_side(case: Case) -> reference.Side:
    """Return the side information of the chunk as the reference decoder holds it."""
    rows, columns = case.symbols.shape
    return reference.Side(
        values=case.values.tolist(),
        center=0,
        size=case.values.size,
        transposed=0,
        precision=case.precision,
        predicted=("none",),
        zero=0,
        paired=int(case.paired),
        kinds=case.classes.tolist(),
        tables=case.frequencies.tolist(),
        parts=[(case.classes.tolist(), columns)],
        words=[],
        shape=(rows, columns),
    )


@settings(max_examples=25, deadline=None)
@given(CASES)
def test_any_symbols_come_back_from_both_decoders(case: Case) -> None:
    data = case.encode()
    assert (case.decode(data) == case.values[case.symbols]).all()
    words = np.frombuffer(data, "<u2").tolist()
    columns = case.symbols.shape[1]
    symbols = reference.decode_chunk(words, case.classes.tolist(), columns, reference_side(case), case.states)
    assert symbols == case.symbols.ravel().tolist()


@pytest.mark.parametrize("states", [1, 8])
@pytest.mark.parametrize("precision", [12, rans.MAX_PRECISION])
def test_symbols_cost_what_their_frequencies_promise(precision: int, states: int) -> None:
    """Four initial states, and at most half a percent for the rounding of states."""
    case = any_case(200, 200, 60, precision, states, 0)
    assert 8 * len(case.encode()) < 1.005 * case.bits + 4 * (48 if case.paired else 32)


@pytest.mark.parametrize("states", [1, 8, -8])
@pytest.mark.parametrize("extra", [b"\0\0", b"\5\0\1\0", bytes(64)])
def test_needless_words_are_refused(states: int, extra: bytes) -> None:
    case = any_case(4, 9, 30, 12, states, 1)
    with pytest.raises(ArtifactError):
        case.decode(case.encode() + extra)


@settings(max_examples=50, deadline=None)
@given(CASES, st.data())
def test_damaged_words_give_an_error_or_values_of_the_table(case: Case, data: st.DataObject) -> None:
    coded = case.encode()
    damaged = bytearray(coded[: 2 * data.draw(st.integers(0, len(coded) // 2))])
    if damaged:
        bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
        damaged[bit // 8] ^= 1 << bit % 8
    try:
        values = case.decode(bytes(damaged))
    except ArtifactError:
        return
    assert np.isin(values, case.values).all()
