"""Alphabets: the mapping between integer values and symbols 0 … size - 1, which the probability models describe.

affine   low + step · symbol: adjacent values have adjacent symbols (int8 rounded to multiples of 4 has step 4)
listed   the values that occur, rising: codebooks, a few values that lie far apart
split    a token and raw low bits, for more than 4,096 values: a number near the center has a token of its own, numbers
         farther off share one with all that agree in magnitude and three more bits, so every int32 has a token
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.side_information import SideReader, SideWriter, zigzag
from birdie.errors import ArtifactError
from birdie.system.kernels import njit

Symbols = NDArray[np.uint16]

MAX_SIZE = 1 << 12
AFFINE, LISTED, SPLIT = 0, 1, 2
_DIRECT, _DETAIL = 8, 3  # tokens below 2**8 are the number itself; above, three bits follow the leading one
_LENGTHS = 33 - _DIRECT + 1
_TOKENS = (1 << _DIRECT) + (_LENGTHS << _DETAIL)
_MEDIAN_SAMPLE = 1 << 18  # symbols, in whole rows, from which a median is taken
_KIND, _LOW, _STEP, _SIZE, _GAP = 0, 1, 2, 3, 4  # contexts of the side information


@dataclass(frozen=True, slots=True)
class Alphabet:
    """A mapping between values and symbols."""

    kind: int  # AFFINE, LISTED or SPLIT
    values: NDArray[np.int64]  # value of each symbol (size,), rising; of a split alphabet the tokens themselves
    center: int = 0  # of a split alphabet, the value that is number 0: the median

    @property
    def size(self) -> int:
        """Number of symbols."""
        return self.values.size

    def put(self, writer: SideWriter) -> None:
        """Write the alphabet to the side information."""
        writer.put(_KIND, self.kind)
        if self.kind == SPLIT:
            writer.put_signed(_LOW, self.center)
            return
        writer.put_signed(_LOW, int(self.values[0]))
        writer.put(_SIZE, self.size - 1)
        gaps = np.diff(self.values)
        if self.kind == AFFINE:
            writer.put(_STEP, int(gaps[0]) - 1 if gaps.size else 0)
        else:
            writer.put_all(_GAP, gaps - 1)

    @classmethod
    def take(cls, reader: SideReader) -> "Alphabet":
        """Read an alphabet from the side information; one that `choose` cannot return is an ArtifactError."""
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
    """Return the alphabet of `values` (int32 range, any shape, not empty) and their symbols, same shape.

    The symbols of a split alphabet are tokens; `low_bits` of the same values completes them.
    """
    low, high = int(values.min()), int(values.max())
    if high - low < MAX_SIZE:
        offsets, counts = np.empty(values.shape, np.uint16), np.zeros(high - low + 1, np.int64)
        words = np.ascontiguousarray(values).view(f"u{values.itemsize}")  # signed or not: fewer kernels to compile
        mask = np.iinfo(words.dtype).max
        _subtract(words.ravel(), np.uint64(low & mask), np.uint64(mask), offsets.ravel(), counts)
        present = np.flatnonzero(counts) + low
        if present.size > 1 and counts[1] and high - low < 4 * present.size:
            return Alphabet(AFFINE, np.arange(low, high + 1, dtype=np.int64)), offsets
    else:
        present = np.unique(values)
    present = present.astype(np.int64)
    step = int(np.gcd.reduce(np.diff(present))) if present.size > 1 else 1
    if (high - low) // step < MAX_SIZE and (high - low) // step < 4 * present.size:
        grid = np.arange(low, high + 1, step, dtype=np.int64)
        return Alphabet(AFFINE, grid), ((values.astype(np.int64) - low) // step).astype(np.uint16)
    if present.size <= MAX_SIZE and 8 * present.size < max(values.size, 4096):
        return Alphabet(LISTED, present), np.searchsorted(present, values).astype(np.uint16)
    center = int(np.sort(values, axis=None)[values.size // 2])
    return Alphabet(SPLIT, np.arange(_TOKENS), center), _tokens(_numbers(values, center))[0]


def zero_symbol(alphabet: Alphabet, symbols: Symbols) -> int:
    """Return the symbol that magnitudes are counted from: that of the value 0, or the median if it lies elsewhere."""
    some = symbols[:: max(1, symbols.size // _MEDIAN_SAMPLE)].ravel()
    median = int(np.searchsorted(np.cumsum(np.bincount(some)), some.size // 2, side="right"))
    nearest = int(np.abs(alphabet.values).argmin())
    return nearest if abs(nearest - median) <= alphabet.size // 8 else median


def low_bits(values: NDArray[np.integer], alphabet: Alphabet) -> bytes:
    """Return the bits that the tokens of `values` leave open, value by value in scan order, low bit first."""
    numbers = _numbers(values, alphabet.center)
    widths = _tokens(numbers)[1].ravel()
    data = np.zeros((int(widths.sum(dtype=np.int64)) + 7) // 8 + 8, np.uint8)
    _pack(numbers.ravel(), widths, data)
    return data[:-8].tobytes()


def values_of(symbols: Symbols, alphabet: Alphabet, low: bytes | memoryview, out: NDArray[np.integer]) -> None:
    """Write the values of `symbols` (rows, columns) into `out`, same shape; `low` are the `low_bits` of tokens.

    The caller has checked that `out` holds all values of an alphabet that is not split.
    """
    if alphabet.kind == SPLIT:
        _join(symbols.ravel(), low, alphabet, out.ravel())
        return
    word = f"u{out.itemsize}"  # signed or not: one kernel less to compile
    _look_up(symbols, alphabet.values.astype(out.dtype).view(word), out.view(word))


def _join(tokens: Symbols, low: bytes | memoryview, alphabet: Alphabet, out: NDArray[np.integer]) -> None:
    token = np.arange(_TOKENS)
    widths = np.where(token >> _DIRECT > 0, (token - (1 << _DIRECT) >> _DETAIL) + _DIRECT - _DETAIL, 0)
    bounds = np.iinfo(out.dtype)
    data = np.frombuffer(low, np.uint8)
    bits = _unpack(tokens, widths, data, alphabet.center, bounds.min, bounds.max, out)
    if (bits + 7) // 8 != len(low):
        raise ArtifactError("a stream has the wrong number of low bits, or a number out of range; the file is damaged")


def _numbers(values: NDArray[np.integer], center: int) -> NDArray[np.int64]:
    """Return the zigzag differences from the center, which tokens and low bits stand for."""
    return zigzag(values.astype(np.int64) - center)


def _tokens(numbers: NDArray[np.int64]) -> tuple[Symbols, NDArray[np.uint8]]:
    """Return the token of each number and how many low bits it leaves open."""
    lengths = np.frexp(numbers.astype(np.float64))[1].astype(np.int64)
    widths = np.where(lengths > _DIRECT, lengths - 1 - _DETAIL, 0)
    far = (1 << _DIRECT) + (lengths - 1 - _DIRECT << _DETAIL) + (numbers >> widths) - (1 << _DETAIL)
    return np.where(lengths > _DIRECT, far, numbers).astype(np.uint16), widths.astype(np.uint8)


@njit(nogil=True, cache=True, _nrt=False)
def _subtract(words, low, mask, offsets, counts):  # type: ignore[no-untyped-def]
    """Fill `offsets` with words − low, modulo mask + 1, and count each."""
    for index in range(words.size):
        offset = np.uint16((np.uint64(words[index]) - low) & mask)
        offsets[index] = offset
        counts[offset] += 1


@njit(nogil=True, cache=True, _nrt=False)
def _look_up(symbols, values, out):  # type: ignore[no-untyped-def]
    for row in range(symbols.shape[0]):
        for column in range(symbols.shape[1]):
            out[row, column] = values[symbols[row, column]]


@njit(nogil=True, cache=True, _nrt=False)
def _pack(numbers, widths, data):  # type: ignore[no-untyped-def]
    position = 0  # in bits
    for index in range(numbers.size):
        for bit in range(widths[index]):
            data[position >> 3] |= np.uint8(((numbers[index] >> bit) & 1) << (position & 7))
            position += 1


@njit(nogil=True, cache=True, _nrt=False)
def _unpack(tokens, widths, data, center, least, most, out):  # type: ignore[no-untyped-def]
    """Fill `out`; return the number of bits used, -8 when there are too few or a value is out of range."""
    position = 0
    for index in range(tokens.size):
        number = np.int64(tokens[index])
        width = widths[number]
        if number >= 256:
            number = 8 + ((number - 256) & 7)
        if position + width > 8 * data.size:
            return -8
        low = np.int64(0)
        for bit in range(width):
            low |= np.int64((data[position >> 3] >> (position & 7)) & 1) << bit
            position += 1
        number = number << width | low
        number = ((number >> 1) ^ -(number & 1)) + center
        if number < least or number > most:
            return -8
        out[index] = number
    return position
