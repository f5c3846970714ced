"""Quantized keys and values: the distortion of the best scalar quantizer, whatever the vectors, at the stated size."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError
from birdie.gpt.model.cache_quantizer import BITS, PackedCache, Quantizer

GAUSSIAN = {2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Mean square of the best quantizer of a Gaussian of variance 1 (Max 1960); at 8 bits √3·π/2 / 4^8 is the limit."""


def vectors(kind: str, dims: int, count: int = 2000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, dims, generator=generator)
    if kind == "one large coordinate":
        x[:, 3] *= 100
    elif kind == "alike":
        x = 1 + 0.1 * x
    elif kind == "one coordinate":
        x = torch.eye(dims).repeat(-(-count // dims), 1)[:count]
    return x


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(((x - y).square().sum(-1) / x.square().sum(-1)).mean())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dims", [48, 64, 128])
def test_distortion_is_that_of_the_best_scalar_quantizer(dims: int, bits: int) -> None:
    x = vectors("gaussian", dims)
    quantizer = Quantizer(dims, bits)
    error, best = relative(x, quantizer.dequantize(quantizer.quantize(x))), GAUSSIAN.get(bits, 4.15e-5)
    assert 0.87 * best < error < 1.03 * best  # coordinates on a sphere have a little less distortion than Gaussian ones


@pytest.mark.parametrize("kind", ["one large coordinate", "alike", "one coordinate"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_distortion_hardly_depends_on_the_vectors(bits: int, kind: str) -> None:
    x, quantizer = vectors(kind, 64), Quantizer(64, bits)
    assert relative(x, quantizer.dequantize(quantizer.quantize(x))) < 1.8 * GAUSSIAN[bits]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(BITS), st.integers(4, 70), st.integers(0, 2**32 - 1))
def test_codes_round_trip_at_the_stated_size(bits: int, dims: int, seed: int) -> None:
    quantizer = Quantizer(dims, bits)
    x = torch.randn(3, 2, dims, generator=torch.Generator().manual_seed(seed))
    vectors = quantizer.quantize(x)
    assert vectors.codes.nbytes + vectors.scales.nbytes == 6 * quantizer.vector_bytes
    assert quantizer.vector_bytes <= bits * (dims + 7) / 8 + 2
    assert [part.shape for part in quantizer.zeros((3, 2))] == [part.shape for part in vectors]
    assert [part.dtype for part in quantizer.zeros((3, 2))] == [part.dtype for part in vectors]


def test_each_vector_is_coded_on_its_own() -> None:
    x, quantizer = vectors("gaussian", 48, 20), Quantizer(48, 3)
    together = quantizer.quantize(x)
    for index in range(20):
        alone = quantizer.quantize(x[index])
        assert torch.equal(alone.codes, together.codes[index])
        assert torch.equal(alone.scales, together.scales[index])


def test_zero_stays_zero_huge_values_finite_and_nan_visible() -> None:
    quantizer = Quantizer(16, 4)
    assert not quantizer.dequantize(quantizer.quantize(torch.zeros(2, 16))).any()
    assert not quantizer.dequantize(quantizer.zeros((2,))).any()
    assert quantizer.dequantize(quantizer.quantize(torch.full((2, 16), 1e30))).isfinite().all()
    assert quantizer.dequantize(quantizer.quantize(torch.full((2, 16), math.nan))).isnan().all()
    half = torch.randn(2, 16).bfloat16()
    assert quantizer.dequantize(PackedCache(*quantizer.quantize(half)), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(("dims", "bits", "values"), [(64, 5, "5 bits; .* 2, 3, 4, 8"), (3, 4, "3 .* at least 4")])
def test_unsupported_sizes_are_refused(dims: int, bits: int, values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        Quantizer(dims, bits)
