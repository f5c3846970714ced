"""A trellis as a shift register: the form in which its paths are searched, many states at a time.

    states 2j, 2j + 1 ──► states j, j + states / 2

The states of `trellis_states.machine` decode fast, but the two states before a state lie anywhere. A change of
basis makes the same machine a shift register, the controller form of Ungerboeck's encoder: states 2j and 2j + 1 lead to
j and to j + states / 2, the four ways have the same oddness, and one parity says all four. So neighboring states are
searched by the same instructions.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.trellis_states import machine


class Register(NamedTuple):
    """A machine as a shift register."""

    odd: NDArray[np.uint8]  # (half,) 1 if states 2j and 2j + 1 shift the grid
    # (half,) of the number on the way from 2j to j; that to j + half, or from 2j + 1, is the other one
    parity: NDArray[np.uint8]
    swapped: NDArray[np.uint8]  # (half,) 1 if 2j + 1 comes before 2j in the order of the machine's states
    original: NDArray[np.int64]  # (states,) the machine's state


@cache
def register(states: int) -> Register:
    """Return the machine of `states` states as a shift register; half of one state, a plain grid, counts as one."""
    following = machine(states).next_state.astype(np.int64)
    count = len(following)
    feedback = int(following[-1, 0]) ^ (count - 1) >> 1
    original, image, bit = np.zeros(count, np.int64), following[0, 1], count >> 1
    while bit:  # where a lone 1 stands that came in at the top
        original[np.arange(count) & bit > 0] ^= image
        image, feedback, bit = following[image, feedback & 1], feedback >> 1, bit >> 1
    first, second = original[::2], original[1::2] if count > 1 else original
    half = max(count >> 1, 1)
    parity = following[first, 0] != original[:half]
    odd, swapped = first & 1, second < first
    return Register(odd.astype(np.uint8), parity.astype(np.uint8), swapped.astype(np.uint8), original)
