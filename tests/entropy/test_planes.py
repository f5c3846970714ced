"""Planes are a bijection: any bits of any dtype, NaN payloads and -0.0 among them, come back from their planes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from birdie.entropy import planes
from birdie.errors import ArtifactError, ConfigError


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(sorted(planes.FORMATS)))
def test_any_bits_come_back(data: st.DataObject, fmt: str) -> None:
    most = 1 if fmt == "bool" else None
    dtype = planes.word_dtype(fmt)
    elements = st.integers(0, most) if most else None
    bits = data.draw(arrays.arrays(dtype, arrays.array_shapes(min_dims=2, max_dims=2, min_side=0), elements=elements))
    original = bits.copy()
    parts = planes.split(bits, fmt)
    assert tuple(part.dtype for part in parts) == planes.plane_dtypes(fmt)
    assert len(parts) == len(planes.plane_hints(fmt))
    assert planes.join(parts, fmt).tobytes() == bits.tobytes() == original.tobytes()


def test_damaged_planes_are_an_artifact_error() -> None:
    with pytest.raises(ArtifactError, match="float32"):
        planes.join((np.zeros((1, 1), np.uint8),), "float32")
    with pytest.raises(ArtifactError, match="bool"):
        planes.join((np.full((1, 1), 2, np.uint8),), "bool")
    with pytest.raises(ConfigError, match="float3"):
        planes.split(np.zeros((1, 1), np.uint8), "float3")
