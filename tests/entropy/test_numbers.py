"""The coder "numbers" takes any int32 with nothing to describe first, and codes smooth values by their differences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from birdie.entropy import numbers
from birdie.errors import ArtifactError
from tests.reference import decoder as reference

Integers = NDArray[np.integer]
INT32 = np.dtype(np.int32)
SHAPES = arrays.array_shapes(min_dims=2, max_dims=2, max_side=12)
FAR = arrays.arrays(np.int64, SHAPES, elements=st.integers(-(2**31), 2**31 - 1))
NEAR = arrays.arrays(np.int64, SHAPES, elements=st.integers(-40, 40))


@settings(max_examples=25, deadline=None)
@given(st.one_of(NEAR, FAR))
def test_any_int32_comes_back_from_both_decoders(values: Integers) -> None:
    payload = numbers.encode(values)
    rows, columns = values.shape
    assert (numbers.decode(payload, rows, columns, INT32, 1) == values).all()
    assert reference.decode_numbers(payload, rows, columns) == values.tolist()


def test_smooth_values_cost_their_differences_and_a_hundred_of_them_little() -> None:
    """The order decides: the same values, shuffled, cost twice as much."""
    rng = np.random.default_rng(0)
    smooth = np.cumsum(rng.integers(-2, 3, (100, 1)), axis=0) - 700
    shuffled = rng.permutation(smooth)
    assert len(numbers.encode(smooth)) < 0.75 * len(numbers.encode(shuffled))
    entropy = 100 * np.log2(5) / 8
    assert len(numbers.encode(smooth)) < entropy + 16


def test_impossible_lengths_are_refused() -> None:
    payload = numbers.encode(np.arange(6).reshape(2, 3))
    for damaged, rows in ((payload[:-1], 2), (payload + b"\0\0", 2), (payload, numbers.MAX_VALUES)):
        with pytest.raises(ArtifactError):
            numbers.decode(damaged, rows, 3, INT32, 1)
