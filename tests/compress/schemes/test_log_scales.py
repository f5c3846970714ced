"""Scales come in sixteenths of an octave: a pinned table, exact by their index, on any machine."""

import hashlib

import numpy as np
import pytest

from birdie.compress.log_scales import (
    HIGHEST,
    LOWEST,
    PER_OCTAVE,
    TABLE,
    covering_indices,
    nearest_indices,
    scales_of,
)
from birdie.errors import ArtifactError


def test_the_table_is_pinned() -> None:
    assert len(TABLE) == PER_OCTAVE
    assert hashlib.sha256(repr(TABLE).encode()).hexdigest()[:16] == "4f1e4b8d7c637c80"
    np.testing.assert_array_equal(TABLE, np.rint(2.0 ** (23 + np.arange(PER_OCTAVE) / PER_OCTAVE)))


def test_scales_rise_over_the_whole_range_double_by_octaves_and_find_their_index_again() -> None:
    indices = np.arange(LOWEST, HIGHEST + 1)
    values = scales_of(indices)
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    assert (np.diff(values.astype(np.float64)) > 0).all()
    np.testing.assert_array_equal(values[PER_OCTAVE:], 2 * values[:-PER_OCTAVE])
    np.testing.assert_array_equal(covering_indices(values), indices)
    np.testing.assert_array_equal(nearest_indices(values), indices)
    for index in (LOWEST - 1, HIGHEST + 1):
        with pytest.raises(ArtifactError, match="index"):
            scales_of(np.array([index]))
