"""Interleaved range asymmetric numeral systems (rANS) with static tables: the fast path of the decoder.

rANS (Duda, arXiv 1311.2540) keeps the message in one integer x: decoding a symbol of frequency f out of 2**precision
is one table look-up, one multiplication and sometimes one 16-bit refill. Four independent states take turns, column by
column, so that a processor can work on four symbols at once (Giesen, arXiv 1402.3392). Every row of the array has a
class, and each class its table; what the tables are is not this module's business.

A state lives in [2**16, 2**32). A chunk of words holds the four first states (low half, then high half), then the
refills in the order the decoder takes them. Encoding starts each state at 2**16, so a decoder that does not end there,
with all words used, knows that the chunk is damaged. Integers only.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from birdie.errors import ArtifactError

Words = NDArray[np.uint16]
LANES = 4
LOWEST = 1 << 16
MAX_PRECISION = 15


def decode_table(frequencies: NDArray[np.int64], values: NDArray[np.int64], precision: int) -> NDArray[np.uint64]:
    """What each slot decodes to, (classes, 2**precision): value in bits 0–31, frequency in 32–47, offset in 48–63.

    `frequencies` (classes, symbols) sum to 2**precision in each class; `values` (symbols,) are the int32 written out.
    """
    table = np.empty((frequencies.shape[0], 1 << precision), np.uint64)
    _fill(frequencies, values.astype(np.int32).view(np.uint32), table)
    return table


def encode(
    symbols: NDArray[np.uint16], classes: NDArray[np.uint8], frequencies: NDArray[np.int64], precision: int
) -> Words:
    """Code `symbols` (rows, columns), row r with the table `frequencies[classes[r]]`: one chunk of words."""
    starts = np.cumsum(frequencies, axis=1) - frequencies
    buffer = np.empty(symbols.size + 2 * LANES, np.uint16)
    first = _encode(symbols, classes, frequencies.astype(np.uint32), starts.astype(np.uint32), precision, buffer)
    return buffer[first:]


def decode(
    words: Words, classes: NDArray[np.uint8], table: NDArray[np.uint64], precision: int, out: NDArray[np.integer]
) -> None:
    """Undo `encode` into `out` (rows, columns), which holds the values of the table, cut to its dtype.

    Raises:
        ArtifactError: the words are not those of this many symbols.
    """
    if words.size < 2 * LANES:
        raise ArtifactError(
            f"a coded chunk has {words.size} words, at least {2 * LANES} are needed; the file is damaged"
        )
    padded = np.concatenate([words, np.zeros(LANES, np.uint16)])
    if not _decode(padded, words.size, classes, table, precision, out):
        raise ArtifactError("a coded chunk does not end where it should; the file is damaged")


@njit(nogil=True, cache=True)
def _fill(frequencies, values, table):  # type: ignore[no-untyped-def]
    for kind in range(frequencies.shape[0]):
        slot = 0
        for symbol in range(frequencies.shape[1]):
            frequency = frequencies[kind, symbol]
            fixed = np.uint64(values[symbol]) | np.uint64(frequency) << np.uint64(32)
            for offset in range(frequency):
                table[kind, slot] = fixed | np.uint64(offset) << np.uint64(48)
                slot += 1


@njit(nogil=True, cache=True)
def _encode(symbols, classes, frequencies, starts, precision, buffer):  # type: ignore[no-untyped-def]
    rows, columns = symbols.shape
    shift = np.uint64(precision)
    states = np.full(4, 65536, np.uint64)
    at = buffer.size
    for row in range(rows - 1, -1, -1):
        kind = classes[row]
        for column in range(columns - 1, -1, -1):
            symbol = symbols[row, column]
            frequency = np.uint64(frequencies[kind, symbol])
            x = states[column & 3]
            if x >= frequency << (np.uint64(32) - shift):
                at -= 1
                buffer[at] = np.uint16(x & np.uint64(0xFFFF))
                x >>= np.uint64(16)
            whole = x // frequency
            states[column & 3] = (whole << shift) + (x - whole * frequency) + np.uint64(starts[kind, symbol])
    for lane in range(3, -1, -1):
        at -= 2
        buffer[at] = np.uint16(states[lane] & np.uint64(0xFFFF))
        buffer[at + 1] = np.uint16(states[lane] >> np.uint64(16))
    return at


@njit(nogil=True, cache=True, inline="always")
def _advance(x, entry, shift):  # type: ignore[no-untyped-def]
    return ((entry >> np.uint64(32)) & np.uint64(0xFFFF)) * (x >> shift) + (entry >> np.uint64(48))


@njit(nogil=True, cache=True)
def _decode(words, count, classes, table, precision, out):  # type: ignore[no-untyped-def]
    rows, columns = out.shape
    shift, mask = np.uint64(precision), np.uint64((1 << precision) - 1)
    low, half = np.uint64(65536), np.uint64(16)
    x0 = np.uint64(words[0]) | np.uint64(words[1]) << half
    x1 = np.uint64(words[2]) | np.uint64(words[3]) << half
    x2 = np.uint64(words[4]) | np.uint64(words[5]) << half
    x3 = np.uint64(words[6]) | np.uint64(words[7]) << half
    at = 8
    whole = columns & ~3
    for row in range(rows):
        slots = table[classes[row]]
        for column in range(0, whole, 4):
            if at > count:
                return False
            e0, e1, e2, e3 = slots[x0 & mask], slots[x1 & mask], slots[x2 & mask], slots[x3 & mask]
            out[row, column] = np.int32(e0 & np.uint64(0xFFFFFFFF))
            out[row, column + 1] = np.int32(e1 & np.uint64(0xFFFFFFFF))
            out[row, column + 2] = np.int32(e2 & np.uint64(0xFFFFFFFF))
            out[row, column + 3] = np.int32(e3 & np.uint64(0xFFFFFFFF))
            x0, x1, x2, x3 = (
                _advance(x0, e0, shift),
                _advance(x1, e1, shift),
                _advance(x2, e2, shift),
                _advance(x3, e3, shift),
            )
            # Selecting instead of branching: whether a state needs a word is a coin toss to a branch predictor.
            word = np.uint64(words[at])
            need = x0 < low
            x0 = (x0 << half | word) if need else x0
            at += need
            word = np.uint64(words[at])
            need = x1 < low
            x1 = (x1 << half | word) if need else x1
            at += need
            word = np.uint64(words[at])
            need = x2 < low
            x2 = (x2 << half | word) if need else x2
            at += need
            word = np.uint64(words[at])
            need = x3 < low
            x3 = (x3 << half | word) if need else x3
            at += need
        for column in range(whole, columns):
            if at > count:
                return False
            entry = slots[x0 & mask]
            out[row, column] = np.int32(entry & np.uint64(0xFFFFFFFF))
            x = _advance(x0, entry, shift)
            if x < low:
                x = x << half | np.uint64(words[at])
                at += 1
            # The tail of a row takes lanes 0, 1, 2: rotate so that the next column finds its own in x0.
            x0, x1, x2 = (x1, x2, x) if columns - whole == 3 else ((x1, x, x2) if columns - whole == 2 else (x, x1, x2))
        # After a tail of n steps lanes 0 … n-1 are back in place.
    return at == count and x0 == low and x1 == low and x2 == low and x3 == low
