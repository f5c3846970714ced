"""Bytes, packed values and planes of floats come back; what lies is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from birdie.entropy import coder, planes, raw
from birdie.errors import ArtifactError, ConfigError
from tests.reference import decoder as reference

Integers = NDArray[np.integer]


INT8: np.dtype[np.integer] = np.dtype(np.int8)
UINT8: np.dtype[np.integer] = np.dtype(np.uint8)
INT32: np.dtype[np.integer] = np.dtype(np.int32)
VALUES = st.integers(-(2**31), 2**31 - 1)
ANY = arrays.arrays(np.int64, arrays.array_shapes(min_dims=2, max_dims=2, max_side=20), elements=VALUES)


@given(VALUES)
def test_a_constant_takes_the_fewest_bytes_that_hold_it(value: int) -> None:
    payload = raw.encode_constant(value)
    assert (raw.decode_constant(payload, 3, 4, INT32, 1) == np.full((3, 4), value)).all()
    if payload:
        shorter = 8 * (len(payload) - 1)
        assert shorter == 0 or not -(1 << shorter - 1) <= value < 1 << shorter - 1
    else:
        assert value == 0
    sign = b"\xff" if value < 0 else b"\0"
    with pytest.raises(ArtifactError, match=str(len(payload) + 1)):
        raw.decode_constant(payload + sign, 3, 4, INT32, 1)


@given(ANY, st.sampled_from([1 << 20, 64]))
def test_packed_values_come_back_and_take_the_bits_of_their_range(values: Integers, block: int) -> None:
    low, high = int(values.min()), int(values.max())
    rows, columns = values.shape
    if low == high:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw, "_BLOCK", block)
        payload = raw.encode_packed(values, low, high)
        assert (raw.decode_packed(payload, rows, columns, INT32, 1) == values).all()
    assert reference.decode_plain(2, payload, rows, columns) == values.tolist()
    assert len(payload) == 5 + -(-values.size * (high - low).bit_length() // 8)
    for damaged in (payload[:-1], payload + b"\0", b"\0" + payload[1:], payload[:4]):
        with pytest.raises(ArtifactError, match=f"{len(damaged):,}"):
            raw.decode_packed(damaged, rows, columns, INT32, 1)


def test_values_beyond_the_dtype_are_refused() -> None:
    for decode, payload in (
        (raw.decode_bytes, bytes([1, 128])),
        (raw.decode_constant, raw.encode_constant(128)),
        (raw.decode_packed, raw.encode_packed(np.array([[1, 128]]), 1, 128)),
    ):
        with pytest.raises(ArtifactError, match=r"128\b.*int8"):
            decode(payload, 1, 2, INT8, 1)


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


def test_damaged_planes_are_an_artifact_error() -> None:
    with pytest.raises(ArtifactError, match="float32"):
        planes.join((np.zeros((1, 1), np.uint8),), "float32")
    with pytest.raises(ArtifactError, match="bool"):
        planes.join((np.full((1, 1), 2, np.uint8),), "bool")
    with pytest.raises(ConfigError, match="float3"):
        planes.split(np.zeros((1, 1), np.uint8), "float3")
