"""From integers to symbols 0 … size - 1 and back: what a table is a table of.

affine   low + step · symbol: neighbours stay neighbours (int8 rounded to multiples of 4 has step 4)
listed   the values that occur, rising: codebooks, a few far-flung numbers
split    a token and raw low bits, for more than 4,096 values: numbers near a centre have a token each, those
         further off share one among all that agree in magnitude and three more bits, so any int32 has its place
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.compiled import njit
from birdie.entropy.numbers import Reader, Writer, zigzag
from birdie.errors import ArtifactError

Symbols = NDArray[np.uint16]

MAX_SIZE = 1 << 12
AFFINE, LISTED, SPLIT = 0, 1, 2
_DIRECT, _DETAIL = 8, 3  # tokens below 2**8 are the number itself; above, three bits follow the leading one
_LENGTHS = 33 - _DIRECT + 1
_TOKENS = (1 << _DIRECT) + (_LENGTHS << _DETAIL)
_KIND, _LOW, _STEP, _SIZE, _GAP = 0, 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Alphabet:
    """How symbols stand for values.

    Attributes:
        kind: AFFINE, LISTED or SPLIT.
        values: value of each symbol (size,), rising; of a split alphabet the tokens themselves.
        centre: of a split alphabet, the number closest to most.
    """

    kind: int
    values: NDArray[np.int64]
    centre: int = 0

    @property
    def size(self) -> int:
        """Number of symbols."""
        return self.values.size

    def put(self, writer: Writer) -> None:
        """Describe the alphabet to `writer`."""
        writer.put(_KIND, self.kind)
        if self.kind == SPLIT:
            writer.put_signed(_LOW, self.centre)
            return
        writer.put_signed(_LOW, int(self.values[0]))
        writer.put(_SIZE, self.size - 1)
        gaps = np.diff(self.values)
        if self.kind == AFFINE:
            writer.put(_STEP, int(gaps[0]) - 1 if gaps.size else 0)
        else:
            writer.put_all(_GAP, gaps - 1)

    @classmethod
    def take(cls, reader: Reader) -> "Alphabet":
        """Undo `put`."""
        kind = reader.take(_KIND, SPLIT, "the kind of an alphabet")
        low = reader.take_signed(_LOW)
        if kind == SPLIT:
            return cls(SPLIT, np.arange(_TOKENS), low)
        size = reader.take(_SIZE, MAX_SIZE - 1, "the size of an alphabet") + 1
        if kind == AFFINE:
            gaps = np.full(size - 1, reader.take(_STEP, 1 << 32, "the step of an alphabet") + 1)
        else:
            gaps = reader.take_all(_GAP, size - 1) + 1
        values = low + np.concatenate([np.zeros(1, np.int64), np.cumsum(gaps)])
        if int(values[0]) < -(1 << 31) or int(values[-1]) >= 1 << 31:
            raise ArtifactError("an alphabet reaches beyond 32 bits; the file is damaged")
        return cls(kind, values)


def choose(values: NDArray[np.integer]) -> tuple[Alphabet, Symbols]:
    """The alphabet of `values` (int32 range, any shape, not empty) and its symbols, same shape.

    A split alphabet's symbols are tokens; their low bits are `low_bits` of the same values.
    """
    low, high = int(values.min()), int(values.max())
    if high - low < MAX_SIZE:
        present = np.flatnonzero(np.bincount((values.astype(np.int32) - low).ravel(), minlength=1)) + low
    else:
        present = np.unique(values)
    present = present.astype(np.int64)
    step = int(np.gcd.reduce(np.diff(present))) if present.size > 1 else 1
    if (high - low) // step < MAX_SIZE and (high - low) // step < 4 * present.size:
        whole = np.arange(low, high + 1, step, dtype=np.int64)
        return Alphabet(AFFINE, whole), ((values.astype(np.int64) - low) // step).astype(np.uint16)
    if present.size <= MAX_SIZE and 8 * present.size < max(values.size, 4096):
        return Alphabet(LISTED, present), np.searchsorted(present, values).astype(np.uint16)
    centre = int(np.sort(values, axis=None)[values.size // 2])
    return Alphabet(SPLIT, np.arange(_TOKENS), centre), _tokens(_offsets(values, centre))[0]


def zero(alphabet: Alphabet, symbols: Symbols) -> int:
    """The symbol magnitudes are counted from: that of the value 0, or the median where values lie around another."""
    middle = int(np.partition(symbols, symbols.size // 2, axis=None)[symbols.size // 2])
    nearest = int(np.abs(alphabet.values).argmin())
    return nearest if abs(nearest - middle) <= alphabet.size // 8 else middle


def narrowest(alphabet: Alphabet, dtype: np.dtype[np.integer]) -> np.dtype[np.integer]:
    """`dtype`, or instead of int32 the narrowest signed one that holds all values."""
    low, high = int(alphabet.values[0]), int(alphabet.values[-1])
    narrow = (kind for kind in (np.int8, np.int16) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return np.dtype(next(narrow, np.int32)) if dtype == np.int32 else dtype


def low_bits(values: NDArray[np.integer], alphabet: Alphabet) -> bytes:
    """The bits that tokens leave open, in scan order, low bit first."""
    offsets = _offsets(values, alphabet.centre)
    widths = _tokens(offsets)[1].ravel()
    data = np.zeros((int(widths.sum(dtype=np.int64)) + 7) // 8 + 8, np.uint8)
    _pack(offsets.ravel(), widths, data)
    return data[:-8].tobytes()


def look_up(symbols: Symbols, alphabet: Alphabet, out: NDArray[np.integer]) -> None:
    """Write the values of `symbols` (rows, columns) into `out`, whose dtype holds all of the alphabet."""
    word = f"u{out.itemsize}"  # signed or not: one kernel less to compile
    _look_up(symbols, alphabet.values.astype(out.dtype).view(word), out.view(word))


def join(tokens: Symbols, low: bytes | memoryview, alphabet: Alphabet, out: NDArray[np.integer]) -> None:
    """Write the values of `tokens` and their `low_bits` into `out`, both flat.

    Raises:
        ArtifactError: there are more or fewer low bits than the tokens ask for, or a value does not fit `out`.
    """
    token = np.arange(_TOKENS)
    widths = np.where(token >> _DIRECT > 0, (token - (1 << _DIRECT) >> _DETAIL) + _DIRECT - _DETAIL, 0)
    bounds = np.iinfo(out.dtype)
    data = np.frombuffer(low, np.uint8)
    bits = _unpack(tokens, widths, data, alphabet.centre, bounds.min, bounds.max, out)
    if (bits + 7) // 8 != len(low):
        raise ArtifactError("a stream has the wrong number of low bits, or a number out of range; the file is damaged")


def _offsets(values: NDArray[np.integer], centre: int) -> NDArray[np.int64]:
    return zigzag(values.astype(np.int64) - centre)


def _tokens(offsets: NDArray[np.int64]) -> tuple[Symbols, NDArray[np.uint8]]:
    """Token of each number and how many low bits it leaves open."""
    lengths = np.frexp(offsets.astype(np.float64))[1].astype(np.int64)
    widths = np.where(lengths > _DIRECT, lengths - 1 - _DETAIL, 0)
    far = (1 << _DIRECT) + (lengths - 1 - _DIRECT << _DETAIL) + (offsets >> widths) - (1 << _DETAIL)
    return np.where(lengths > _DIRECT, far, offsets).astype(np.uint16), widths.astype(np.uint8)


@njit(nogil=True, cache=True)
def _look_up(symbols, values, out):  # type: ignore[no-untyped-def]
    for row in range(symbols.shape[0]):
        for column in range(symbols.shape[1]):
            out[row, column] = values[symbols[row, column]]


@njit(nogil=True, cache=True)
def _pack(numbers, widths, data):  # type: ignore[no-untyped-def]
    at = 0
    for index in range(numbers.size):
        for place in range(widths[index]):
            data[at >> 3] |= np.uint8(((numbers[index] >> place) & 1) << (at & 7))
            at += 1


@njit(nogil=True, cache=True)
def _unpack(tokens, widths, data, centre, lowest, highest, out):  # type: ignore[no-untyped-def]
    """Bits used; -8 when there are too few or a value is out of range."""
    at = 0
    for index in range(tokens.size):
        number = np.int64(tokens[index])
        width = widths[number]
        if number >= 256:
            number = 8 + ((number - 256) & 7)
        if at + width > 8 * data.size:
            return -8
        low = np.int64(0)
        for place in range(width):
            low |= np.int64((data[at >> 3] >> (at & 7)) & 1) << place
            at += 1
        number = number << width | low
        number = ((number >> 1) ^ -(number & 1)) + centre
        if number < lowest or number > highest:
            return -8
        out[index] = number
    return at
