"""Keys and values in few bits: distortion is that of the best quantizer, whatever the vectors, and sizes are true."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError
from birdie.model.cache_quantizer import BITS, Packed, Quantizer, levels, rotation

GAUSSIAN = {2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Mean square of the best quantizer of a Gaussian of variance 1 (Max 1960); at 8 bits √3·π/2 / 4^8 is the limit."""
DIMS = (4, 12, 48, 64, 80, 128)


def vectors(kind: str, dims: int, count: int = 2000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, dims, generator=generator)
    if kind == "one coordinate rules":
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
    found, best = relative(x, quantizer.dequantize(quantizer.quantize(x))), GAUSSIAN.get(bits, 4.15e-5)
    assert 0.87 * best < found < 1.03 * best  # coordinates of a sphere have a little less to lose than a Gaussian's


@pytest.mark.parametrize("kind", ["one coordinate rules", "alike", "one coordinate"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_distortion_hardly_depends_on_what_the_vectors_are(bits: int, kind: str) -> None:
    x, quantizer = vectors(kind, 64), Quantizer(64, bits)
    assert relative(x, quantizer.dequantize(quantizer.quantize(x))) < 1.8 * GAUSSIAN[bits]


@pytest.mark.parametrize("bits", BITS)
def test_lengths_stay_and_products_nearly(bits: int) -> None:
    x, y = vectors("gaussian", 48), vectors("gaussian", 48).roll(1, 0)
    quantizer = Quantizer(48, bits)
    decoded = quantizer.dequantize(quantizer.quantize(x))
    torch.testing.assert_close(decoded.norm(dim=-1), x.norm(dim=-1), rtol=2**-10, atol=0)
    y = y + x  # or products would be small beside their errors
    slope = float((decoded * y).sum(-1) @ (x * y).sum(-1) / (x * y).sum(-1).square().sum())
    assert 1 - GAUSSIAN.get(bits, 0.001) < slope < 1.001  # an angle, halved: no more is lost of a product


@pytest.mark.parametrize("dims", DIMS)
def test_the_rotation_is_one_and_spreads_evenly(dims: int) -> None:
    turned = rotation(dims, 1)
    np.testing.assert_allclose(turned @ turned.T, np.eye(dims), atol=1e-12)
    assert np.abs(turned).max() <= math.sqrt(2 / dims) + 1e-12
    assert (turned != rotation(dims, 2)).any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dims", [4, 48, 128])
def test_levels_are_the_means_of_what_is_nearest_to_them(dims: int, bits: int) -> None:
    found = levels(dims, bits)
    assert len(found) == 1 << bits
    assert (np.diff(found) > 0).all()
    np.testing.assert_allclose(found, -found[::-1], atol=1e-12)
    x = np.linspace(-1, 1, 2_000_001)
    density = np.maximum(0, 1 - x * x) ** ((dims - 3) / 2)
    nearest = np.searchsorted((found[1:] + found[:-1]) / 2, x)
    mass, moment = (np.bincount(nearest, weights=each, minlength=len(found)) for each in (density, density * x))
    held = mass > 1e-4 * mass.max()  # of 256 levels the outermost stand for next to nothing
    assert np.abs(moment / mass - found)[held].max() < 0.02 * (found[-1] - found[0]) / len(found)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(BITS), st.integers(4, 70), st.integers(0, 2**32 - 1))
def test_codes_come_back_and_take_what_they_say(bits: int, dims: int, seed: int) -> None:
    quantizer = Quantizer(dims, bits)
    codes = torch.randint(0, 1 << bits, (3, 2, dims), generator=torch.Generator().manual_seed(seed))
    packed = quantizer._pack(codes)
    assert torch.equal(quantizer._unpack(packed), codes)
    found = quantizer.quantize(torch.randn(3, 2, dims))
    assert found.codes.nbytes + found.scales.nbytes == 6 * quantizer.vector_bytes
    assert quantizer.vector_bytes <= bits * (dims + 7) / 8 + 2
    assert [part.shape for part in quantizer.zeros((3, 2))] == [part.shape for part in found]
    assert [part.dtype for part in quantizer.zeros((3, 2))] == [part.dtype for part in found]


def test_a_vector_is_coded_by_itself() -> None:
    x, quantizer = vectors("gaussian", 48, 20), Quantizer(48, 3)
    together = quantizer.quantize(x)
    for place in range(20):
        alone = quantizer.quantize(x[place])
        assert torch.equal(alone.codes, together.codes[place])
        assert torch.equal(alone.scales, together.scales[place])


def test_nothing_stays_nothing_and_the_huge_finite() -> None:
    quantizer = Quantizer(16, 4)
    assert not quantizer.dequantize(quantizer.quantize(torch.zeros(2, 16))).any()
    assert not quantizer.dequantize(quantizer.zeros((2,))).any()
    assert quantizer.dequantize(quantizer.quantize(torch.full((2, 16), 1e30))).isfinite().all()
    assert quantizer.dequantize(quantizer.quantize(torch.full((2, 16), math.nan))).isnan().all()
    half = torch.randn(2, 16).bfloat16()
    assert quantizer.dequantize(Packed(*quantizer.quantize(half)), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(("dims", "bits", "why"), [(64, 5, "5 bits; choose 2, 3, 4, 8"), (3, 4, "at least 4")])
def test_what_cannot_be_is_refused(dims: int, bits: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Quantizer(dims, bits)
