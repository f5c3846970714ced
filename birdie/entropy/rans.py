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
from numpy.typing import NDArray

from birdie.entropy.compiled import njit
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
    data: memoryview, classes: NDArray[np.uint8], table: NDArray[np.uint64], precision: int, out: NDArray[np.integer]
) -> None:
    """Undo `encode` into `out` (rows, columns), C-contiguous: the values of the table, cut to its dtype.

    `data` are the bytes of the words, low byte first.

    Raises:
        ArtifactError: the words are not those of this many symbols.
    """
    if len(data) < 4 * LANES:
        raise ArtifactError(f"a coded chunk has {len(data)} bytes, {4 * LANES} at the least; the file is damaged")
    head, tail = bytes(data[: 4 * LANES]), bytes(data[max(0, len(data) - 8 * LANES) :])
    # One step of all lanes may take a word each, so near the end it reads from a copy with zeros behind.
    end = len(tail) // 2
    padded = _readonly(tail + bytes(2 * LANES))
    progress = np.zeros(3 + LANES, np.uint64)  # row, column, word, states
    progress[2] = 2 * LANES
    progress[3:] = np.frombuffer(head, "<u4")
    cells = out.view(f"u{out.itemsize}")  # signed or not: fewer kernels to compile
    done = False
    if len(data) > len(tail):
        done = _decode(_readonly(data), len(data) // 2 - LANES, classes, table, precision, progress, cells)
    skipped = (len(data) - len(tail)) // 2
    if not done:
        progress[2] -= np.uint64(skipped)
        done = _decode(padded, end, classes, table, precision, progress, cells)
        progress[2] += np.uint64(skipped)
    if not done or int(progress[2]) != len(data) // 2 or (progress[3:] != LOWEST).any():
        raise ArtifactError("a coded chunk does not end where it should; the file is damaged")


def _readonly(data: bytes | memoryview) -> NDArray[np.uint8]:
    """`data` as an array that cannot be written, whatever it was: again one kernel less."""
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False
    return array


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
def _word(data, at):  # type: ignore[no-untyped-def]
    """Two bytes, which compile to one load."""
    place = at + at
    return np.uint64(data[place]) | np.uint64(data[place + np.uint64(1)]) << np.uint64(8)


@njit(nogil=True, cache=True, inline="always")
def _advance(x, entry, shift):  # type: ignore[no-untyped-def]
    return ((entry >> np.uint64(32)) & np.uint64(0xFFFF)) * (x >> shift) + (entry >> np.uint64(48))


@njit(nogil=True, cache=True)
def _decode(data, limit, classes, table, precision, progress, out):  # type: ignore[no-untyped-def]
    """Go on from `progress` until a step could read past word `limit` + LANES or all is decoded, which is told."""
    rows, columns = out.shape
    shift, mask = np.uint64(precision), np.uint64((1 << precision) - 1)
    low, half = np.uint64(65536), np.uint64(16)
    first: int = np.int64(progress[1])  # type: ignore[assignment]
    at, last = progress[2], np.uint64(limit)
    x0, x1, x2, x3 = progress[3], progress[4], progress[5], progress[6]
    whole = columns & ~3
    for row in range(np.int64(progress[0]), rows):
        slots, cells = table[classes[row]], out[row]
        column = first
        while column < whole and at <= last:
            e0, e1, e2, e3 = slots[x0 & mask], slots[x1 & mask], slots[x2 & mask], slots[x3 & mask]
            cells[column] = e0
            cells[column + 1] = e1
            cells[column + 2] = e2
            cells[column + 3] = e3
            x0, x1 = _advance(x0, e0, shift), _advance(x1, e1, shift)
            x2, x3 = _advance(x2, e2, shift), _advance(x3, e3, shift)
            # Selecting instead of branching: whether a state needs a word is a coin toss to a branch predictor.
            need, word = x0 < low, _word(data, at)
            x0 = (x0 << half | word) if need else x0
            at += np.uint64(need)
            need, word = x1 < low, _word(data, at)
            x1 = (x1 << half | word) if need else x1
            at += np.uint64(need)
            need, word = x2 < low, _word(data, at)
            x2 = (x2 << half | word) if need else x2
            at += np.uint64(need)
            need, word = x3 < low, _word(data, at)
            x3 = (x3 << half | word) if need else x3
            at += np.uint64(need)
            column += 4
        if at > last and column < columns:
            progress[0], progress[1], progress[2] = row, column, at
            progress[3], progress[4], progress[5], progress[6] = x0, x1, x2, x3
            return False
        for column in range(whole, columns):  # at most three, which take lanes 0, 1, 2
            entry = slots[x0 & mask]
            cells[column] = entry
            x = _advance(x0, entry, shift)
            if x < low:
                x = x << half | _word(data, at)
                at += np.uint64(1)
            # Rotate so that the next column finds its own state in x0; after the last all are back in place.
            x0, x1, x2 = (x1, x2, x) if columns - whole == 3 else ((x1, x, x2) if columns - whole == 2 else (x, x1, x2))
        first = 0
    progress[2] = at
    progress[3], progress[4], progress[5], progress[6] = x0, x1, x2, x3
    return True
