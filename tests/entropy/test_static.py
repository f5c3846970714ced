"""The coder "static" takes any int32, and has tables for even and for odd states of a trellis."""

import numpy as np
import pytest
from numpy.typing import NDArray

from birdie.entropy import static
from birdie.entropy import trellis_states as trellis
from birdie.entropy.trellis_states import STATES
from birdie.errors import ArtifactError
from tests.reference.streams import on_paths

Integers = NDArray[np.integer]
PATHS = [sign * states for states in STATES[1:] for sign in (1, -1)]  # down columns, along rows


@pytest.mark.parametrize("states", PATHS)
def test_tables_for_odd_states_reach_the_entropy_given_the_state(states: int) -> None:
    """Within 2 % and a little for the tables."""
    values = on_paths(300, 80, states, 0.7)
    odd = trellis.odd_states(values, states)
    bits = 0.0
    for band in np.array_split(np.arange(300), 12):  # rows differ in scale
        for side in (0, 1):
            counts = np.unique(values[band][odd[band] == side], return_counts=True)[1]
            bits += float((counts * np.log2(counts.sum() / counts)).sum())
    paired, plain = (len(static.encode(values, (1, 1), count)) for count in (states, 1))
    assert paired < 0.97 * plain
    assert 8 * paired < 1.02 * bits + 1200


def test_tables_for_odd_states_are_refused_without_a_trellis() -> None:
    values = on_paths(64, 60, 8, 0.6)
    payload = static.encode(values, (1, 1), 8)
    with pytest.raises(ArtifactError, match="number of classes"):
        static.decode(payload, 64, 60, np.dtype(np.int32), 1)
