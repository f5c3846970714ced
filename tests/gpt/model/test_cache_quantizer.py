"""Quantized keys and values: the distortion of the best scalar quantizer, whatever the vectors, at the stated size."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError
from birdie.gpt.model.cache_quantizer import BITS, PackedCache, Quantizer, levels, rotation

GAUSSIAN = {2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Mean square of the best quantizer of a Gaussian of variance 1 (Max 1960); at 8 bits √3·π/2 / 4^8 is the limit."""
DIMS = (4, 12, 48, 64, 80, 128)


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


@pytest.mark.parametrize("bits", BITS)
def test_norms_are_kept_and_inner_products_nearly(bits: int) -> None:
    x, y = vectors("gaussian", 48), vectors("gaussian", 48).roll(1, 0)
    quantizer = Quantizer(48, bits)
    decoded = quantizer.dequantize(quantizer.quantize(x))
    torch.testing.assert_close(decoded.norm(dim=-1), x.norm(dim=-1), rtol=2**-10, atol=0)
    y = y + x  # otherwise the products would be small relative to their errors
    slope = float((decoded * y).sum(-1) @ (x * y).sum(-1) / (x * y).sum(-1).square().sum())
    assert 1 - GAUSSIAN.get(bits, 0.001) < slope < 1.001  # half of the angular error is lost from a product


@pytest.mark.parametrize("dims", DIMS)
def test_the_rotation_is_orthogonal_and_spreads_evenly(dims: int) -> None:
    matrix = rotation(dims, 1)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dims), atol=1e-12)
    assert np.abs(matrix).max() <= math.sqrt(2 / dims) + 1e-12
    assert (matrix != rotation(dims, 2)).any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dims", [4, 48, 128])
def test_levels_are_the_means_of_their_cells(dims: int, bits: int) -> None:
    centers = levels(dims, bits)
    assert len(centers) == 1 << bits
    assert (np.diff(centers) > 0).all()
    np.testing.assert_allclose(centers, -centers[::-1], atol=1e-12)
    x = np.linspace(-1, 1, 2_000_001)
    density = np.maximum(0, 1 - x * x) ** ((dims - 3) / 2)
    nearest = np.searchsorted((centers[1:] + centers[:-1]) / 2, x)
    mass, moment = (np.bincount(nearest, weights=w, minlength=len(centers)) for w in (density, density * x))
    filled = mass > 1e-4 * mass.max()  # the outermost of 256 levels have almost no mass
    assert np.abs(moment / mass - centers)[filled].max() < 0.02 * (centers[-1] - centers[0]) / len(centers)


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
