"""The state machine of trellis-coded quantization: which half of a fine grid the next number of a path lies on.

A number is step · (m + odd/2): in a state that is odd the grid is shifted by half a step, and the parity of m leads to
the next state. The machines are Ungerboeck's one-dimensional codes (IEEE Trans. IT 28, 1982) in systematic feedback
form. Paths run down the columns of a matrix, each column on its own, and start again from state 0 where a chunk of the
coder begins, so that chunks decode alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20  # symbols coded on their own, in whole rows

# Parity polynomials (h0, h1) by the number of states.
_POLYNOMIALS = {1: (0o1, 0o0), 4: (0o5, 0o2), 8: (0o13, 0o4), 16: (0o23, 0o4), 32: (0o45, 0o10), 64: (0o103, 0o24)}
STATES = tuple(_POLYNOMIALS)


@dataclass(frozen=True, slots=True)
class Machine:
    """`odd` (states,): whether a state shifts the grid; `following` (states, 2): the next state by the parity of m."""

    odd: NDArray[np.uint8]
    following: NDArray[np.uint8]


def machine(states: int) -> Machine:
    """The machine with so many states, one of `STATES`; one state is a plain grid."""
    h0, h1 = _POLYNOMIALS[states]
    state = np.arange(states)
    shifted = state >> 1 ^ (state & 1) * (h0 >> 1)
    return Machine((state & 1).astype(np.uint8), np.stack([shifted, shifted ^ h1 >> 1], 1).astype(np.uint8))


def chunk_rows(columns: int) -> int:
    """Rows of a chunk; paths start again at its multiples."""
    return max(1, CHUNK // max(columns, 1))
