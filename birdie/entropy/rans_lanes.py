"""rANS in lanes, which older files have: independent states with words of their own.

A lane takes every so-many-th column. Nothing in it depends on another one, so a processor decodes four without waiting
for the others' refills. Its encoder started at x = 0 and did not keep the state above a least value until it was there
by itself; a decoder takes words while x < 2**24 and there are any. Tables are those of `birdie.entropy.rans`; paths of
a trellis run down the columns.
"""

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.rans import advance
from birdie.entropy.trellis import Machine
from birdie.errors import ArtifactError
from birdie.system.kernels import njit

LEAST, MOST = 4, 256  # lanes
_ZERO, _ONE, _TWO, _THREE, _FOUR = np.arange(5, dtype=np.uint64)  # numba checks only indices that may be negative
_HALF, _FULL = np.uint64(16), np.uint64(1 << 24)  # bits of a word; state from which on no word is taken


def decode(
    data: memoryview,
    lengths: NDArray[np.int64],
    classes: NDArray[np.uint8],
    table: NDArray[np.uint64],
    precision: int,
    paths: Machine,
    out: NDArray[np.integer],
) -> None:
    """Fill `out` (rows, columns), C-contiguous, with the values of the table, cut to its dtype.

    Args:
        data: the bytes of the words, low byte first, as many as `lengths` say.
        lengths: (lanes,) words of each lane; a multiple of four lanes.
        classes: (rows,) class of each row.
        table: of `rans.decode_table`, in pairs for a machine of several states.
        precision: log2 of the number of slots.
        paths: machine whose states select the tables.
        out: the values.
    """
    words = np.frombuffer(bytes(data) + bytes(2), "<u2").astype(np.uint16)
    unsigned, state = out.view(f"u{out.itemsize}"), np.zeros(out.shape[1], np.uint8)  # fewer kernels to compile
    ends, next_state = np.cumsum(lengths).astype(np.uint64), paths.next_state.reshape(-1)
    if not _decode(words, ends, classes, table.reshape(-1), precision, next_state, state, unsigned):
        raise ArtifactError("a coded chunk does not end where it should; the file is damaged")


@njit(nogil=True, cache=True, inline="always")
def _refill(x, words, position):  # type: ignore[no-untyped-def]
    """Return the state and the position after taking a word, if the state is below its least value."""
    need, word = x < _FULL, np.uint64(words[position])  # loaded in any case: a branch would be a coin toss
    return (x << _HALF | word) if need else x, position + np.uint64(need)


@njit(nogil=True, cache=True)
def _decode(words, ends, classes, table, precision, next_state, state, out):  # type: ignore[no-untyped-def]
    """Fill `out`; return whether all lanes end as they should. One word of padding follows the words.

    Args:
        ends: (lanes,) of the words of each lane.
        table: entries class by class and slot by slot, of even and odd states in turn if there are several.
        next_state: (2 · states,); column c is in state[c].
    """
    paired, columns, lanes = np.uint64(next_state.size > 2), np.uint64(out.shape[1]), np.uint64(ends.size)
    shift, mask, size = np.uint64(precision), np.uint64((1 << precision) - 1), _ONE << np.uint64(precision) + paired
    full_columns, needed = columns // lanes * lanes, columns // lanes
    x, position, begin, sound = np.zeros(lanes, np.uint64), np.zeros(lanes, np.uint64), _ZERO, True
    for lane in range(lanes):
        sound &= begin == ends[lane] or words[begin] != 0
        for _ in range(3):
            if x[lane] < _FULL and begin < ends[lane]:
                x[lane] = x[lane] << _HALF | np.uint64(words[begin])
                begin += _ONE
        position[lane], begin = begin, ends[lane]
    for row in range(out.shape[0]):
        first = np.uint64(classes[row]) * size
        slots, values = table[first : first + size], out[row]
        for lane in range(_ZERO, lanes, _FOUR):
            l1, l2, l3 = lane + _ONE, lane + _TWO, lane + _THREE
            column, p0, p1, p2, p3 = np.uint64(lane), position[lane], position[l1], position[l2], position[l3]
            # Four columns take turns, without a check, where no words can run out in this row.
            if (
                p0 + needed <= ends[lane]
                and p1 + needed <= ends[l1]
                and p2 + needed <= ends[l2]
                and p3 + needed <= ends[l3]
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
                    x0, p0 = _refill(advance(x0, e0, shift), words, p0)
                    x1, p1 = _refill(advance(x1, e1, shift), words, p1)
                    x2, p2 = _refill(advance(x2, e2, shift), words, p2)
                    x3, p3 = _refill(advance(x3, e3, shift), words, p3)
                    column += lanes
                x[lane], x[l1], x[l2], x[l3] = x0, x1, x2, x3
                position[lane], position[l1], position[l2], position[l3] = p0, p1, p2, p3
            while column < columns:  # what is left of the row, one column at a time
                k, s = column & lanes - _ONE, np.uint64(state[column])
                entry = slots[((x[k] & mask) << paired) + (s & paired)]
                values[column], state[column] = entry, next_state[s << _ONE | entry & _ONE]
                x[k] = advance(x[k], entry, shift)
                if x[k] < _FULL and position[k] < ends[k]:
                    x[k] = x[k] << _HALF | np.uint64(words[position[k]])
                    position[k] += _ONE
                column += _ONE if k & _THREE < _THREE else lanes - _THREE
    for lane in range(lanes):
        sound &= x[lane] == _ZERO and position[lane] == ends[lane]
    return sound
