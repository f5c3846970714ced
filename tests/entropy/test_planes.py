"""Planes are a bijection: any bits of any dtype, NaN payloads and -0.0 among them, come back from their planes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from birdie.entropy import coder, planes
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


def test_special_floats_come_back_through_the_coder() -> None:
    values = np.array([[0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1.5, 3.4e38]], np.float32)
    bits = values.view(np.uint32).copy()
    bits[0, 4] |= 0x1234  # a NaN with a payload
    kinds = planes.plane_dtypes("float32")
    coded = [coder.encode(plane) for plane in planes.split(bits, "float32")]
    parts = tuple(coder.decode(c.coder, c.payload, 1, 8, dtype=kind) for c, kind in zip(coded, kinds, strict=True))
    assert (planes.join(parts, "float32") == bits).all()


def test_the_exponent_plane_is_the_exponent() -> None:
    values = np.array([[1.0, -1.0, 2.0, 0.5]], np.float32)
    exponent = planes.split(values.view(np.uint32), "float32")[0]
    assert exponent.tolist() == [[127, 127, 128, 126]]


def test_the_first_plane_of_float16_is_the_exponent_and_three_bits() -> None:
    values = np.array([[1.0, -1.0, 1.125, -1.25, 2.0]], np.float16)
    first, second = planes.split(values.view(np.uint16), "float16")
    assert first.tolist() == [[15 << 3, 15 << 3, 15 << 3 | 1, 15 << 3 | 2, 16 << 3]]
    assert (second >> 7).tolist() == [[0, 1, 0, 1, 0]]  # the sign


def test_damaged_planes_are_an_artifact_error() -> None:
    with pytest.raises(ArtifactError, match="float32"):
        planes.join((np.zeros((1, 1), np.uint8),), "float32")
    with pytest.raises(ArtifactError, match="bool"):
        planes.join((np.full((1, 1), 2, np.uint8),), "bool")
    with pytest.raises(ConfigError, match="float3"):
        planes.split(np.zeros((1, 1), np.uint8), "float3")
