"""Interleaved range asymmetric numeral systems (rANS) with static tables: the fast path of the decoder.

rANS (Duda, arXiv 1311.2540) keeps the message in one integer x: decoding a symbol of frequency f out of 2**precision
is one table look-up, one multiplication and sometimes one 16-bit refill. Four independent states take turns, column by
column, so that a processor can work on four symbols at once (Giesen, arXiv 1402.3392). Every row of the array has a
class, and each class its table; what the tables are is not this module's business.

A state lives in [2**16, 2**32). On the paths of a trellis a class has one table for even states and one for odd ones,
which are fine: there a state lives in [2**24, 2**40). A chunk of words holds the four first states (two words each or
three, low ones first), then the refills in the order the decoder takes them. Encoding starts each state at its lowest,
so a decoder that does not end there, with all words used, knows that the chunk is damaged. Integers only.
"""

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.compiled import njit
from birdie.entropy.trellis import Machine
from birdie.errors import ArtifactError

Words = NDArray[np.uint16]
LANES = 4
_PADDING = 3 * LANES  # words behind a chunk: first states and one step of all lanes may read so far
MAX_PRECISION = 15


def decode_table(frequencies: NDArray[np.int64], values: NDArray[np.int64], precision: int) -> NDArray[np.uint64]:
    """What each slot decodes to, (classes, 2**precision): value in bits 0–31, frequency in 32–47, offset in 48–63.

    `frequencies` (classes, symbols) sum to 2**precision in each class; `values` (symbols,) are the int32 written out.
    """
    table = np.empty((frequencies.shape[0], 1 << precision), np.uint64)
    _fill(frequencies, values.astype(np.int32).view(np.uint32), table)
    return table


def encode(
    symbols: NDArray[np.uint16],
    classes: NDArray[np.uint8],
    frequencies: NDArray[np.int64],
    precision: int,
    odd: NDArray[np.uint8] | None = None,
) -> Words:
    """Code `symbols` (rows, columns), row r with the table `frequencies[classes[r]]`: one chunk of words.

    With `odd` (rows, columns), what is met in odd states of a trellis, tables come in pairs and that has the second.
    """
    kinds, odd = (1, np.zeros(symbols.shape, np.uint8)) if odd is None else (2, odd)
    starts = np.cumsum(frequencies, axis=1) - frequencies
    buffer = np.empty(symbols.size + 4 * LANES, np.uint16)
    tables = frequencies.astype(np.uint32), starts.astype(np.uint32)
    first = _encode(symbols, classes, kinds, np.ascontiguousarray(odd), *tables, precision, buffer)
    return buffer[first:]


def decode(
    data: memoryview,
    classes: NDArray[np.uint8],
    table: NDArray[np.uint64],
    precision: int,
    paths: Machine,
    out: NDArray[np.integer],
) -> None:
    """Undo `encode` into `out` (rows, columns), C-contiguous: the values of the table, cut to its dtype.

    `data` are the bytes of the words, low byte first. A machine of several states has two tables a class.

    Raises:
        ArtifactError: the words are not those of this many symbols.
    """
    words = np.frombuffer(bytes(data) + bytes(2 * _PADDING), "<u2").astype(np.uint16)
    cells = out.view(f"u{out.itemsize}")  # signed or not: fewer kernels to compile
    if not _decode(words, classes, table, precision, *paths, np.zeros(out.shape[1], np.uint8), cells):
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
def _encode(symbols, classes, kinds, odd, frequencies, starts, precision, buffer):  # type: ignore[no-untyped-def]
    rows, columns = symbols.shape
    shift = np.uint64(precision)
    states = np.full(4, 256 << 8 * kinds, np.uint64)
    limit = np.uint64(24 + 8 * kinds) - shift
    at = buffer.size
    for row in range(rows - 1, -1, -1):
        for column in range(columns - 1, -1, -1):
            kind = classes[row] * kinds + odd[row, column]
            symbol = symbols[row, column]
            frequency = np.uint64(frequencies[kind, symbol])
            x = states[column & 3]
            if x >= frequency << limit:
                at -= 1
                buffer[at] = np.uint16(x & np.uint64(0xFFFF))
                x >>= np.uint64(16)
            whole = x // frequency
            states[column & 3] = (whole << shift) + (x - whole * frequency) + np.uint64(starts[kind, symbol])
    for lane in range(3, -1, -1):
        for word in range(kinds, -1, -1):
            at -= 1
            buffer[at] = np.uint16(states[lane] >> np.uint64(16 * word) & np.uint64(0xFFFF))
    return at


@njit(nogil=True, cache=True, inline="always")
def _advance(x, entry, shift):  # type: ignore[no-untyped-def]
    return ((entry >> np.uint64(32)) & np.uint64(0xFFFF)) * (x >> shift) + (entry >> np.uint64(48))


@njit(nogil=True, cache=True)
def _decode(words, classes, table, precision, odd, following, path, state, out):  # type: ignore[no-untyped-def]
    """Whether the words, which have padding behind them, end where they should."""
    rows, columns = out.shape
    shift, mask = np.uint64(precision), np.uint64((1 << precision) - 1)
    # Of a trellis a column says from which table the one after it comes, so they go one by one.
    kinds, whole = (1, columns & ~3) if odd.size < 2 else (2, 0)
    low, half = np.uint64(256) << np.uint64(8 * kinds), np.uint64(16)
    at, last = np.uint64(4 * kinds + 4), np.uint64(words.size - _PADDING)
    x = np.zeros(4, np.uint64)
    for place in range(4 * kinds + 3, -1, -1):
        lane = place // (kinds + 1)
        x[lane] = x[lane] << half | np.uint64(words[place])
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    for row in range(rows):
        slots, cells = table[classes[row]], out[row]
        column = 0
        while column < whole and at <= last:
            e0, e1, e2, e3 = slots[x0 & mask], slots[x1 & mask], slots[x2 & mask], slots[x3 & mask]
            cells[column] = e0
            cells[column + 1] = e1
            cells[column + 2] = e2
            cells[column + 3] = e3
            x0, x1 = _advance(x0, e0, shift), _advance(x1, e1, shift)
            x2, x3 = _advance(x2, e2, shift), _advance(x3, e3, shift)
            # Selecting instead of branching: whether a state needs a word is a coin toss to a branch predictor.
            need, word = x0 < low, np.uint64(words[at])
            x0 = (x0 << half | word) if need else x0
            at += np.uint64(need)
            need, word = x1 < low, np.uint64(words[at])
            x1 = (x1 << half | word) if need else x1
            at += np.uint64(need)
            need, word = x2 < low, np.uint64(words[at])
            x2 = (x2 << half | word) if need else x2
            at += np.uint64(need)
            need, word = x3 < low, np.uint64(words[at])
            x3 = (x3 << half | word) if need else x3
            at += np.uint64(need)
            column += 4
        while whole <= column < columns and at <= last:
            place = column & path
            entry = table[np.int64(classes[row]) * kinds + odd[state[place]], x0 & mask]
            cells[column] = entry
            state[place] = following[state[place], entry & np.uint64(1)]
            after = _advance(x0, entry, shift)
            need, word = after < low, np.uint64(words[at])
            # Rotate so that the next column finds its own state in x0; after the last all go back to their places.
            x0, x1, x2, x3 = x1, x2, x3, (after << half | word) if need else after
            at += np.uint64(need)
            column += 1
        for _ in range(-columns & 3):
            x0, x1, x2, x3 = x1, x2, x3, x0
    return at == last and x0 == x1 == x2 == x3 == low  # once past the last word nothing is decoded any more
