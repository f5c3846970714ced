"""The state machine of trellis-coded quantization: which half of a fine grid the next number of a path lies on.

A number is step · (m + odd/2): in a state that is odd the grid is shifted by half a step, and the parity of m leads to
the next state. The machines are Ungerboeck's one-dimensional codes (IEEE Trans. IT 28, 1982) in systematic feedback
form. Paths run down the columns of a matrix, each column on its own, so that errors can be fed back between columns; or
one path runs along the rows, one after the other, which is told by a negative number of states: what is short then is
no loss. Paths start again from state 0 where a chunk of the coder begins, so that chunks decode alone.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.compiled import njit

CHUNK = 1 << 20  # symbols coded on their own, in whole rows

# Parity polynomials (h0, h1) by the number of states.
_POLYNOMIALS = {1: (0o1, 0o0), 4: (0o5, 0o2), 8: (0o13, 0o4), 16: (0o23, 0o4), 32: (0o45, 0o10), 64: (0o103, 0o24)}
STATES = tuple(_POLYNOMIALS)


class Machine(NamedTuple):
    """A machine and where its paths run.

    Attributes:
        odd: (states,) whether a state shifts the grid.
        following: (states, 2) the next state by the parity of m.
        mask: the path that column j lies on is j & mask.
    """

    odd: NDArray[np.uint8]
    following: NDArray[np.uint8]
    mask: int


def machine(states: int) -> Machine:
    """The machine with so many states, one of `STATES` or minus that for a path along rows; one is a plain grid."""
    mask, states = -(states > 0), abs(states)
    h0, h1 = _POLYNOMIALS[states]
    state = np.arange(states)
    shifted = state >> 1 ^ (state & 1) * (h0 >> 1)
    return Machine((state & 1).astype(np.uint8), np.stack([shifted, shifted ^ h1 >> 1], 1).astype(np.uint8), mask)


def chunk_rows(columns: int) -> int:
    """Rows of a chunk; paths start again at its multiples."""
    return max(1, CHUNK // max(columns, 1))


def odds(numbers: NDArray[np.integer], states: int) -> NDArray[np.uint8]:
    """Whether each of `numbers` (rows, columns) is met in an odd state."""
    paths, out = machine(states), np.empty(numbers.shape, np.uint8)
    parities = np.ascontiguousarray(numbers & 1).astype(np.uint8)
    _walk(parities, paths.odd, paths.following, paths.mask, chunk_rows(numbers.shape[1]), out)
    return out


@njit(nogil=True, cache=True)
def _walk(parities, odd, following, mask, height, out):  # type: ignore[no-untyped-def]
    rows, columns = parities.shape
    state = np.zeros(columns, np.uint8)
    for i in range(rows):
        if i % height == 0:
            state[:] = 0
        for j in range(columns):
            out[i, j] = odd[state[j & mask]]
            state[j & mask] = following[state[j & mask], parities[i, j]]
