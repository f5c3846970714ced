"""Interleaved range asymmetric numeral systems (rANS) with static tables: a fast decoder.

rANS (Duda, arXiv 1311.2540) keeps the message in one integer x, the state. Decoding a symbol of frequency f out of
2**precision is one table lookup, one multiplication and sometimes one 16-bit refill. Four independent states take
turns, column by column, so that a processor works on four symbols at once (Giesen, arXiv 1402.3392). Every row of the
array has a class, and every class a frequency table; which tables these are is not this module's business.

A state lives in [2**16, 2**32). On the paths of a trellis a class has two tables, for even and for odd states of the
trellis. They may be of high precision, so there a state lives in [2**24, 2**40): the larger a state is beside
2**precision, the fewer bits its rounding loses.

A chunk of words holds the four initial states (two words each or three, low ones first), then the refills in the order
in which the decoder reads them. The encoder starts each state at its least value, so a decoder that does not end there
with all words read knows that the chunk is damaged. Integers only.
"""

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.trellis_states import Machine
from birdie.errors import ArtifactError
from birdie.system.kernels import inlined, njit

Words = NDArray[np.uint16]
LANES = 4  # interleaved states
_PADDING = 3 * LANES  # words after a chunk: initial states and one step of all lanes may read so far
MAX_PRECISION = 15


def decode_table(
    frequencies: NDArray[np.int64], values: NDArray[np.int64], precision: int, parities: int = 1
) -> NDArray[np.uint64]:
    """Return the lookup table of the decoder, (classes, 2**precision, parities).

    A slot holds its value in bits 0–31, the frequency in bits 32–47 and the offset within the symbol in bits 48–63.

    Args:
        frequencies: (classes · parities, symbols), which sum to 2**precision in each row.
        values: (symbols,) the int32 that the decoder writes for each symbol.
        precision: log2 of the number of slots.
        parities: 2 for tables in pairs, for even and for odd states of a trellis.
    """
    table = np.empty((frequencies.shape[0] // parities, 1 << precision, parities), np.uint64)
    _fill(frequencies, values.astype(np.int32).view(np.uint32), table)
    return table


def encode_table(frequencies: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the entries of the encoder, (tables, symbols): the frequency, and from bit 32 on where its slots start."""
    starts = np.cumsum(frequencies, axis=1) - frequencies
    return frequencies.astype(np.uint64) | starts.astype(np.uint64) << np.uint64(32)


def encode(
    symbols: NDArray[np.uint16],
    classes: NDArray[np.uint8],
    frequencies: NDArray[np.int64],
    precision: int,
    odd: NDArray[np.uint8] | None = None,
) -> Words:
    """Code `symbols` (rows, columns), row r with the table `frequencies[classes[r]]`: one chunk of words.

    With `odd` (rows, columns), 1 for symbols in odd states of a trellis, tables come in pairs, the second for those.
    """
    parities, odd = (1, np.zeros((1, symbols.shape[1]), np.uint8)) if odd is None else (2, odd)
    buffer = np.empty(symbols.size + 4 * LANES, np.uint16)
    first = _encode(symbols, classes, parities, np.ascontiguousarray(odd), encode_table(frequencies), precision, buffer)
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

    `data` are the bytes of the words, low byte first. A machine of several states has two tables per class.
    """
    words = np.frombuffer(bytes(data) + bytes(2 * _PADDING), "<u2").astype(np.uint16)
    unsigned = out.view(f"u{out.itemsize}")  # signed or not: fewer kernels to compile
    if not _decode(words, classes, table, precision, *paths, np.zeros(out.shape[1], np.uint8), unsigned):
        raise ArtifactError("a coded chunk does not end where it should; the file is damaged")


@njit(nogil=True, cache=True, _nrt=False)
def _fill(frequencies, values, table):  # type: ignore[no-untyped-def]
    parities = table.shape[2]
    for row in range(frequencies.shape[0]):
        slot = 0
        for symbol in range(frequencies.shape[1]):
            frequency = frequencies[row, symbol]
            fixed = np.uint64(values[symbol]) | np.uint64(frequency) << np.uint64(32)
            for offset in range(frequency):
                table[row // parities, slot, row % parities] = fixed | np.uint64(offset) << np.uint64(48)
                slot += 1


@inlined
def push(x, entry, shift, limit, position, buffer):  # type: ignore[no-untyped-def]
    """Return the state after a symbol of this entry, and where the words begin."""
    frequency = entry & np.uint64(0xFFFF_FFFF)
    need = x >= frequency << limit
    buffer[position - 1] = np.uint16(x & np.uint64(0xFFFF))
    position -= np.int64(need)
    x = x >> np.uint64(16) if need else x
    # Below 2**40 the quotient of floats is rounded down to that of integers, in half the time.
    quotient = np.uint64(np.int64(np.float64(np.int64(x)) / np.float64(np.int64(frequency))))
    return (quotient << shift) + (x - quotient * frequency) + (entry >> np.uint64(32)), position


@njit(nogil=True, cache=True, _nrt=False)
def _encode(symbols, classes, parities, odd, table, precision, buffer):  # type: ignore[no-untyped-def]
    """Fill the end of `buffer`; return where the words begin. Symbols are coded backwards: the decoder undoes it."""
    rows, columns = symbols.shape
    shift = np.uint64(precision)
    limit = np.uint64(24 + 8 * parities) - shift
    x0 = x1 = x2 = x3 = np.uint64(256) << np.uint64(8 * parities)
    position = buffer.size
    for row in range(rows - 1, -1, -1):
        first, values, half = np.int64(classes[row]) * parities, symbols[row], odd[row * (parities - 1)]
        column = columns
        while column & 3:
            column -= 1
            entry, lane = table[first + half[column], values[column]], column & 3
            x, position = push(x0 if lane == 0 else x1 if lane == 1 else x2, entry, shift, limit, position, buffer)
            x0, x1, x2 = x if lane == 0 else x0, x if lane == 1 else x1, x if lane == 2 else x2
        while column:
            column -= 4
            e0, e1 = table[first + half[column], values[column]], table[first + half[column + 1], values[column + 1]]
            e2 = table[first + half[column + 2], values[column + 2]]
            x3, position = push(x3, table[first + half[column + 3], values[column + 3]], shift, limit, position, buffer)
            x2, position = push(x2, e2, shift, limit, position, buffer)
            x1, position = push(x1, e1, shift, limit, position, buffer)
            x0, position = push(x0, e0, shift, limit, position, buffer)
    for x in (x3, x2, x1, x0):
        for word in range(parities, -1, -1):
            position -= 1
            buffer[position] = np.uint16(x >> np.uint64(16 * word) & np.uint64(0xFFFF))
    return position


@inlined
def advance(x, entry, shift):  # type: ignore[no-untyped-def]
    """Return the state before this symbol was encoded: frequency · (x >> precision) + offset."""
    return ((entry >> np.uint64(32)) & np.uint64(0xFFFF)) * (x >> shift) + (entry >> np.uint64(48))


@inlined
def _next(state, entry, feedback, flip):  # type: ignore[no-untyped-def]
    """Return the state of a trellis after the value of an entry: s >> 1 ^ odd · feedback ^ parity · flip."""
    return np.uint8(state >> 1 ^ (state & 1) * feedback ^ np.uint8(entry & np.uint64(1)) * flip)


@njit(nogil=True, cache=True, _nrt=False)
def _decode(words, classes, table, precision, odd, next_state, path_mask, state, out):  # type: ignore[no-untyped-def]
    """Fill `out`; return whether the words, which have padding after them, end where they should."""
    rows, columns = out.shape
    shift, mask = np.uint64(precision), np.uint64((1 << precision) - 1)
    # On a path along the row the value in a column decides the table of the next one, so columns go one by one.
    parities, interleaved = min(odd.size, 2), columns & ~3 if odd.size < 2 or path_mask else 0
    feedback, flip = next_state[-1, 0] ^ (odd.size - 1) >> 1, next_state[0, 1]
    low, half = np.uint64(256) << np.uint64(8 * parities), np.uint64(16)
    position, last = np.uint64(4 * parities + 4), np.uint64(words.size - _PADDING)
    x0 = x1 = x2 = x3 = np.uint64(0)
    for word in range(4 * parities + 3, -1, -1):
        lane, part = word // (parities + 1), np.uint64(words[word])
        x0 = x0 << half | part if lane == 0 else x0
        x1 = x1 << half | part if lane == 1 else x1
        x2 = x2 << half | part if lane == 2 else x2
        x3 = x3 << half | part if lane == 3 else x3
    for row in range(rows):
        slots, values = table[classes[row]], out[row]
        column = 0
        while column < interleaved and position <= last:
            if parities == 1:
                e0, e1, e2, e3 = slots[x0 & mask, 0], slots[x1 & mask, 0], slots[x2 & mask, 0], slots[x3 & mask, 0]
            else:
                s0, s1, s2, s3 = state[column], state[column + 1], state[column + 2], state[column + 3]
                e0, e1 = slots[x0 & mask, s0 & 1], slots[x1 & mask, s1 & 1]
                e2, e3 = slots[x2 & mask, s2 & 1], slots[x3 & mask, s3 & 1]
                state[column], state[column + 1] = _next(s0, e0, feedback, flip), _next(s1, e1, feedback, flip)
                state[column + 2], state[column + 3] = _next(s2, e2, feedback, flip), _next(s3, e3, feedback, flip)
            values[column] = e0
            values[column + 1] = e1
            values[column + 2] = e2
            values[column + 3] = e3
            x0, x1 = advance(x0, e0, shift), advance(x1, e1, shift)
            x2, x3 = advance(x2, e2, shift), advance(x3, e3, shift)
            # Selecting instead of branching: whether a state needs a word is a coin toss to a branch predictor.
            need, refill = x0 < low, np.uint64(words[position])
            x0 = (x0 << half | refill) if need else x0
            position += np.uint64(need)
            need, refill = x1 < low, np.uint64(words[position])
            x1 = (x1 << half | refill) if need else x1
            position += np.uint64(need)
            need, refill = x2 < low, np.uint64(words[position])
            x2 = (x2 << half | refill) if need else x2
            position += np.uint64(need)
            need, refill = x3 < low, np.uint64(words[position])
            x3 = (x3 << half | refill) if need else x3
            position += np.uint64(need)
            column += 4
        while interleaved <= column < columns and position <= last:
            path = column & path_mask
            entry = slots[x0 & mask, state[path] & 1]
            values[column] = entry
            state[path] = _next(state[path], entry, feedback, flip)
            advanced = advance(x0, entry, shift)
            need, refill = advanced < low, np.uint64(words[position])
            # Rotate so that the next column finds its own state in x0; after the last all return to where they were.
            x0, x1, x2, x3 = x1, x2, x3, (advanced << half | refill) if need else advanced
            position += np.uint64(need)
            column += 1
        for _ in range(-columns & 3):
            x0, x1, x2, x3 = x1, x2, x3, x0
    return position == last and x0 == x1 == x2 == x3 == low  # past the last word nothing more is decoded
