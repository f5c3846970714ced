"""Interleaved range asymmetric numeral systems (rANS) with static tables: the fastest decoder.

rANS (Duda, arXiv 1311.2540) keeps the message in one integer x, the state. Decoding a symbol of frequency f out of
2**precision is one table lookup, one multiplication and sometimes one 16-bit refill. Several states take turns, column
by column, so that a processor works on as many symbols at once (Giesen, arXiv 1402.3392). Every row of the array has a
class, and every class a frequency table; which tables these are is not this module's business. On the paths of a
trellis a class has two tables, for even and for odd states of the trellis. There are two forms of chunks:

    interleaved   four states that share their words            `encode`, `decode`
    lanes         up to 256 states, each with its own words     `encode_lanes`, `decode_lanes`

**Interleaved.** A state lives in [2**16, 2**32), with tables in pairs in [2**24, 2**40): these may be of high
precision, and the larger a state is beside 2**precision, the fewer bits its rounding loses. A chunk of words holds the
four initial states (two words each or three, low ones first), then the refills in the order in which the decoder reads
them. The encoder starts each state at its least value, so a decoder that does not end there with all words read knows
that the chunk is damaged.

**Lanes.** Nothing in a lane depends on another one, so a GPU decodes all of them at the same time, and a processor four
without waiting for the others' refills. A lane takes every so-many-th column. Its encoder starts at x = 0 and does not
keep the state above a least value until it is there by itself; a decoder takes words while x < 2**24 and there are
any. So a lane costs three bytes more than the entropy, its length included, where a state that starts at 2**24 would
cost six. Integers only.
"""

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.trellis import Machine
from birdie.errors import ArtifactError
from birdie.runtime.kernels import njit

Words = NDArray[np.uint16]
LANES = 4  # interleaved states
MAX_PRECISION = 15
MAX_LANES = 256
_ZERO, _ONE, _TWO, _THREE, _FOUR = np.arange(5, dtype=np.uint64)  # numba checks only indices that may be negative
_HALF = np.uint64(16)  # bits of a word


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


def encode_lanes(
    symbols: NDArray[np.uint16],
    classes: NDArray[np.uint8],
    frequencies: NDArray[np.int64],
    precision: int,
    odd: NDArray[np.uint8] | None,
    lanes: int,
) -> tuple[Words, NDArray[np.int64]]:
    """Code as `encode`, column j in lane j mod `lanes`: return the words, lane after lane, and how many each has."""
    rows, columns = symbols.shape
    parities, odd = (1, np.zeros((1, columns), np.uint8)) if odd is None else (2, odd)
    table, odd = encode_table(frequencies), np.ascontiguousarray(odd)
    buffer, first = np.empty((lanes, rows * -(-columns // lanes) + 3), np.uint16), np.empty(lanes, np.int64)
    _encode_lanes(symbols, classes, parities, odd, table, precision, first, buffer.reshape(-1))
    lengths = buffer.shape[1] * np.arange(1, lanes + 1) - first
    return np.concatenate([lane[lane.size - length :] for lane, length in zip(buffer, lengths, strict=True)]), lengths


def decode(
    data: memoryview,
    lengths: NDArray[np.int64],
    classes: NDArray[np.uint8],
    table: NDArray[np.uint64],
    precision: int,
    paths: Machine,
    out: NDArray[np.integer],
) -> None:
    """Undo `encode`, or `encode_lanes`, into `out` (rows, columns), C-contiguous: the table's values, cut to its dtype.

    Args:
        data: the bytes of the words, low byte first, as many as `lengths` say.
        lengths: (1,) words of the chunk; or (lanes,) words of each lane, a multiple of four, with paths down columns.
        classes: (rows,) class of each row.
        table: of `decode_table`, in pairs for a machine of several states.
        precision: log2 of the number of slots.
        paths: machine whose states select the tables.
        out: the values.

    Raises:
        ArtifactError: the words are not those of this many symbols.
    """
    words = np.frombuffer(bytes(data) + bytes(2), "<u2").astype(np.uint16)
    unsigned, state = out.view(f"u{out.itemsize}"), np.zeros(out.shape[1], np.uint8)  # fewer kernels to compile
    ends = np.cumsum(lengths).astype(np.uint64) if lengths.size > 1 else None
    next_state = paths.next_state.reshape(-1)
    if not _decode(words, ends, classes, table.reshape(-1), precision, next_state, paths.mask, state, unsigned):
        raise ArtifactError("a coded chunk does not end where it should; the file is damaged")


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True, inline="always")
def _push(x, entry, shift, limit, position, buffer):  # type: ignore[no-untyped-def]
    """Return the state after a symbol of this entry, and where the words begin."""
    frequency = entry & np.uint64(0xFFFF_FFFF)
    need = x >= frequency << limit
    buffer[position - 1] = np.uint16(x & np.uint64(0xFFFF))
    position -= np.int64(need)
    x = x >> np.uint64(16) if need else x
    # Below 2**40 the quotient of floats is rounded down to that of integers, in half the time.
    quotient = np.uint64(np.int64(np.float64(np.int64(x)) / np.float64(np.int64(frequency))))
    return (quotient << shift) + (x - quotient * frequency) + (entry >> np.uint64(32)), position


@njit(nogil=True, cache=True)
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
            x, position = _push(x0 if lane == 0 else x1 if lane == 1 else x2, entry, shift, limit, position, buffer)
            x0, x1, x2 = x if lane == 0 else x0, x if lane == 1 else x1, x if lane == 2 else x2
        while column:
            column -= 4
            e0, e1 = table[first + half[column], values[column]], table[first + half[column + 1], values[column + 1]]
            e2 = table[first + half[column + 2], values[column + 2]]
            x3, position = _push(
                x3, table[first + half[column + 3], values[column + 3]], shift, limit, position, buffer
            )
            x2, position = _push(x2, e2, shift, limit, position, buffer)
            x1, position = _push(x1, e1, shift, limit, position, buffer)
            x0, position = _push(x0, e0, shift, limit, position, buffer)
    for x in (x3, x2, x1, x0):
        for word in range(parities, -1, -1):
            position -= 1
            buffer[position] = np.uint16(x >> np.uint64(16 * word) & np.uint64(0xFFFF))
    return position


@njit(nogil=True, cache=True, inline="always")
def _advance(x, entry, shift):  # type: ignore[no-untyped-def]
    """Return the state before this symbol was encoded: frequency · (x >> precision) + offset."""
    return ((entry >> np.uint64(32)) & np.uint64(0xFFFF)) * (x >> shift) + (entry >> np.uint64(48))


@njit(nogil=True, cache=True, inline="always")
def _refill(x, least, words, position):  # type: ignore[no-untyped-def]
    """Return the state and the position after taking a word, if the state is below its least value."""
    need, word = x < least, np.uint64(words[position])  # loaded in any case: a branch would be a coin toss
    return (x << _HALF | word) if need else x, position + np.uint64(need)


@njit(nogil=True, cache=True)
def _decode(words, ends, classes, table, precision, next_state, path_mask, state, out):  # type: ignore[no-untyped-def]
    """Fill `out`; return whether all states end as they should, with all words used. One word of padding follows.

    Args:
        ends: (lanes,) of the words of each lane; None: four states share all words. A kernel is compiled for each.
        table: entries class by class and slot by slot, of even and odd states in turn if there are several.
        next_state: (2 · states,); column c is on path c & `path_mask`, in state[c & path_mask].
    """
    shared, paired, path_mask = ends is None, np.uint64(next_state.size > 2), np.uint64(path_mask)
    last = np.full(1, np.uint64(words.size - 1)) if ends is None else ends
    columns, lanes = np.uint64(out.shape[1]), _FOUR if shared else np.uint64(last.size)
    shift, mask, size = np.uint64(precision), np.uint64((1 << precision) - 1), _ONE << np.uint64(precision) + paired
    least = _ONE << np.uint64(16 if shared and not paired else 24)
    full_columns = columns // lanes * lanes
    needed, owner = (full_columns, _ZERO) if shared else (columns // lanes, lanes - _ONE)
    x, position, begin, sound = np.zeros(lanes, np.uint64), np.zeros(last.size, np.uint64), _ZERO, True
    if shared:
        position[0] = _FOUR * (_TWO + paired)
        if position[0] > last[0]:
            return False
        for word in range(position[0]):
            x[word // (_TWO + paired)] |= np.uint64(words[word]) << word % (_TWO + paired) * _HALF
    else:
        for lane in range(lanes):
            sound &= begin == last[lane] or words[begin] != 0
            for _ in range(3):
                if x[lane] < least and begin < last[lane]:
                    x[lane] = x[lane] << _HALF | np.uint64(words[begin])
                    begin += _ONE
            position[lane], begin = begin, last[lane]
    for row in range(out.shape[0]):
        first = np.uint64(classes[row]) * size
        slots, values = table[first : first + size], out[row]
        for lane in range(_ZERO, lanes, _FOUR):
            l1, l2, l3 = lane + _ONE, lane + _TWO, lane + _THREE
            q0, q1, q2, q3 = lane & owner, l1 & owner, l2 & owner, l3 & owner
            column, p0, p1, p2, p3 = np.uint64(lane), position[q0], position[q1], position[q2], position[q3]
            # Four columns take turns, without a check, where no words can run out in this row. Not on a path along the
            # row: there the value in a column decides the table of the next one.
            if (
                (path_mask or not paired)
                and p0 + needed <= last[q0]
                and p1 + needed <= last[q1]
                and p2 + needed <= last[q2]
                and p3 + needed <= last[q3]
            ):
                x0, x1, x2, x3 = x[lane], x[l1], x[l2], x[l3]
                while column < full_columns:
                    c1, c2, c3 = column + _ONE, column + _TWO, column + _THREE
                    if paired:
                        s0, s1 = np.uint64(state[column]), np.uint64(state[c1])
                        s2, s3 = np.uint64(state[c2]), np.uint64(state[c3])
                        e0, e1 = slots[((x0 & mask) << _ONE) + (s0 & _ONE)], slots[((x1 & mask) << _ONE) + (s1 & _ONE)]
                        e2, e3 = slots[((x2 & mask) << _ONE) + (s2 & _ONE)], slots[((x3 & mask) << _ONE) + (s3 & _ONE)]
                        state[column] = next_state[s0 << _ONE | e0 & _ONE]
                        state[c1] = next_state[s1 << _ONE | e1 & _ONE]
                        state[c2] = next_state[s2 << _ONE | e2 & _ONE]
                        state[c3] = next_state[s3 << _ONE | e3 & _ONE]
                    else:
                        e0, e1, e2, e3 = slots[x0 & mask], slots[x1 & mask], slots[x2 & mask], slots[x3 & mask]
                    values[column], values[c1], values[c2], values[c3] = e0, e1, e2, e3
                    x0, p0 = _refill(_advance(x0, e0, shift), least, words, p3 if shared else p0)
                    x1, p1 = _refill(_advance(x1, e1, shift), least, words, p0 if shared else p1)
                    x2, p2 = _refill(_advance(x2, e2, shift), least, words, p1 if shared else p2)
                    x3, p3 = _refill(_advance(x3, e3, shift), least, words, p2 if shared else p3)
                    column += lanes
                x[lane], x[l1], x[l2], x[l3] = x0, x1, x2, x3
                position[q0], position[q1], position[q2], position[q3] = p0, p1, p2, p3
            while column < columns:  # what is left of the row, one column at a time
                k, path = column & lanes - _ONE, column & path_mask
                q, s = k & owner, np.uint64(state[path])
                entry = slots[((x[k] & mask) << paired) + (s & paired)]
                values[column], state[path] = entry, next_state[s << _ONE | entry & _ONE]
                x[k] = _advance(x[k], entry, shift)
                if x[k] < least and position[q] < last[q]:
                    x[k] = x[k] << _HALF | np.uint64(words[position[q]])
                    position[q] += _ONE
                column += _ONE if k & _THREE < _THREE else lanes - _THREE
    for lane in range(lanes):
        sound &= x[lane] == (least if shared else _ZERO) and position[lane & owner] == last[lane & owner]
    return sound


@njit(nogil=True, cache=True)
def _encode_lanes(symbols, classes, parities, odd, table, precision, position, buffer):  # type: ignore[no-untyped-def]
    """Fill the end of each lane's part of `buffer`, and `position` (lanes,) with where its words begin."""
    rows, columns = symbols.shape
    lanes = position.size
    shift = np.uint64(precision)
    x = np.zeros(lanes, np.uint64)
    for lane in range(lanes):
        position[lane] = buffer.size // lanes * (lane + 1)
    for row in range(rows - 1, -1, -1):
        first, values, half = np.int64(classes[row]) * parities, symbols[row], odd[row * (parities - 1)]
        for column in range(columns - 1, -1, -1):
            lane, entry = column & (lanes - 1), table[first + half[column], values[column]]
            x[lane], position[lane] = _push(x[lane], entry, shift, np.uint64(40) - shift, position[lane], buffer)
    for lane in range(lanes):
        while x[lane]:
            position[lane] -= 1
            buffer[position[lane]] = np.uint16(x[lane] & np.uint64(0xFFFF))
            x[lane] >>= np.uint64(16)
