"""Lossless means every bit of every dtype; a cast rounds once and is lossless from there."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birdie.compress.registry import decode, decoder
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import FORMATS, from_bits, to_bits
from birdie.errors import ArtifactError, ConfigError, WeightsError


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern is as likely as any other: NaN payloads, infinities, subnormals, -0.0."""
    count = int(np.prod(shape, dtype=int))
    generator = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, shape).astype(bool))
    data = generator.integers(0, 256, (count + 1) * dtype.itemsize).astype(np.uint8)
    return torch.from_numpy(data).view(dtype)[:count].reshape(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality that tells NaN payloads and signed zeros apart."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.numel() == 0 or bool((to_bits(one) == to_bits(other)).all())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (4, 0), (0, 3, 2)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = random_bits(dtype, shape)
    encoded = Lossless().encode("w", weight)
    layout = decoder("lossless").layout(encoded.shape, encoded.dtype, encoded.params)
    assert [(stream_layout.rows, stream_layout.columns) for stream_layout in layout] == [
        stream.shape for stream in encoded.streams
    ]
    assert same_bits(decode(encoded), weight)


@given(dtype=st.sampled_from(list(FORMATS)), seed=st.integers(0, 10**6))
def test_any_bit_pattern_comes_back(dtype: torch.dtype, seed: int) -> None:
    weight = random_bits(dtype, (5, 7), seed)
    assert same_bits(decode(Lossless().encode("w", weight)), weight)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negated_views_are_resolved(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 6, dtype=dtype)
    assert same_bits(decode(Lossless().encode("w", weight.conj())), weight.conj().resolve_conj())
    assert same_bits(decode(Lossless().encode("w", weight.conj().imag)), weight.conj().imag.resolve_neg())


def test_a_boolean_is_zero_or_one() -> None:
    with pytest.raises(ArtifactError, match="neither 0 nor 1"):
        from_bits(np.array([[2]], dtype=np.uint8), (1,), torch.bool)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)], ids=str)
def test_booleans_of_other_bytes_are_refused_by_name(shape: tuple[int, ...]) -> None:
    """torch takes them for True, but a file would have 1 instead."""
    for byte in (2, 3, 128, 255):
        weight = torch.ones(shape, dtype=torch.uint8)
        weight.view(-1)[-1] = byte
        with pytest.raises(WeightsError, match="'mask'"):
            Lossless().encode("mask", weight.view(torch.bool))


def test_an_empty_tensor_may_have_any_strides() -> None:
    weight = torch.empty(0).as_strided((0, 1), (1, 0))
    assert decode(Lossless().encode("w", weight)).shape == (0, 1)


@pytest.mark.parametrize("dtype", [dtype for dtype in FORMATS if dtype.itemsize == 1], ids=str)
def test_transposed_bytes_come_back(dtype: torch.dtype) -> None:
    data = torch.arange(24, dtype=torch.uint8).remainder(2 if dtype is torch.bool else 24).view(4, 6)
    decoded = decode(Lossless().encode("w", data.view(dtype).t()))
    assert decoded.dtype is dtype
    assert torch.equal(decoded.view(torch.uint8), data.t())


@pytest.mark.parametrize(("to", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("source", [torch.float32, torch.float64])
def test_a_cast_rounds_once(to: str, dtype: torch.dtype, source: torch.dtype) -> None:
    weight = torch.randn(9, 11, dtype=source)
    decoded = decode(Cast(to).encode("w", weight))  # type: ignore[arg-type]
    assert decoded.dtype == source
    assert torch.equal(decoded, weight.to(dtype).to(source))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.float8_e5m2, torch.bool], ids=str)
def test_a_cast_leaves_narrow_and_integer_tensors_alone(dtype: torch.dtype) -> None:
    weight = random_bits(dtype, (6, 5))
    assert same_bits(decode(Cast().encode("w", weight)), weight)


def test_a_cast_refuses_what_would_not_survive() -> None:
    with pytest.raises(WeightsError, match="beyond fp16"):
        Cast("fp16").encode("w", torch.tensor([1e6]))
    with pytest.raises(ConfigError, match="'fp8'"):
        Cast("fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "params"), [(torch.float32, (2,)), (torch.int8, (0,))])
def test_a_cast_to_another_dtype_or_of_integers_is_a_corrupt_file(dtype: torch.dtype, params: tuple[int, ...]) -> None:
    with pytest.raises(ArtifactError, match="scheme cast"):
        decoder("cast").layout((2, 2), dtype, params)


def test_a_plane_with_values_too_wide_is_a_corrupt_file() -> None:
    encoded = Lossless().encode("w", torch.zeros(2, 3))
    streams = (encoded.streams[0].astype(np.int32) + 300, *encoded.streams[1:])
    with pytest.raises(ArtifactError):
        decode(Encoded("lossless", encoded.shape, encoded.dtype, (), streams))
