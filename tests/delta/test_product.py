"""Differences that are not exact: the sum is that of the format, and the cheaper of two forms is stored."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.compress.coding import estimate
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.trellis.feedback import feedback
from birdie.delta import product as products
from birdie.delta.delta_coding import decode, layout, near
from birdie.delta.product import Components, Weights, cheaper
from birdie.errors import ArtifactError
from tests.compress.matrices import covariance

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def product(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)
    return 0.01 * left @ right


@given(st.sampled_from(DTYPES), st.sampled_from([(7,), (6, 9), (5, 2, 3, 3)]), st.integers(0, 2**31))
def test_a_sum_is_rounded_once(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    base = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    added = Grid(bits=5).encode("w", torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)))
    encoded = near(base, base, added)
    expected = (base.double() + decode_inner(added).double()).float().to(dtype)
    assert torch.equal(decode(encoded), expected)
    assert encoded.shape == shape


@given(st.sampled_from(DTYPES), st.integers(1, 6), st.integers(0, 2**31))
def test_a_product_is_summed_in_order(dtype: torch.dtype, rank: int, seed: int) -> None:
    rows, columns = 6, 11
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, columns, generator=generator).to(dtype)
    left, right = (
        Trellis(8).encode(name, torch.randn(rank, size, generator=generator))
        for name, size in (("left", rows), ("right", columns))
    )
    encoded = near(base, base, left, right)
    factors = [decode_inner(part).double().numpy() for part in (left, right)]
    total = base.double().numpy()
    for row, column in zip(*factors, strict=True):
        total = total + np.outer(row, column)
    assert torch.equal(decode(encoded), torch.from_numpy(total).float().to(dtype))
    assert len(layout(encoded.shape, dtype, encoded.params)) == len(encoded.streams)


def decode_inner(encoded: Encoded) -> Tensor:
    from birdie.compress import registry

    return registry.decode(encoded)


@pytest.mark.parametrize("with_inputs", [False, True])
def test_all_components_make_up_the_difference_and_fall_in_size(with_inputs: bool) -> None:
    difference = product(24, 40, 5)
    known = Sensitivity(covariance(40, 0).float() if with_inputs else None, torch.rand(24) + 0.1)
    components = Components.of(difference.numpy(), Weights.of(known, np.ones(24)))
    assert np.allclose(components.left.T @ components.right, difference, atol=1e-6)
    assert (np.diff(components.sizes) <= 0).all()
    assert (components.sizes[5:] < 1e-5 * components.sizes[0]).all()
    assert components.weights.loss(difference.double().numpy()) == pytest.approx((components.sizes**2).sum() / 2)


def test_ranks_fall_as_bits_count_for_more() -> None:
    components = Components.of(torch.randn(60, 50).numpy(), Weights.of(None, np.ones(60)))
    ranks = [components.rank(10.0**exponent) for exponent in range(-9, 4)]
    assert ranks == sorted(ranks, reverse=True)
    assert (ranks[0], ranks[-1]) == (50, 0)


def test_components_of_a_large_matrix_are_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_EXACT", 100)
    monkeypatch.setattr(products, "MOST_RANK", 12)
    difference = product(210, 180, 3) + 1e-4 * torch.randn(210, 180)
    components = Components.of(difference.numpy(), Weights.of(None, np.ones(210)))
    exact = torch.linalg.svdvals(difference.double())
    assert len(components.sizes) == 12
    assert np.allclose(components.sizes[:3], exact[:3], rtol=1e-9)


def chosen(difference: Tensor, scale: float) -> tuple[Encoded, Encoded, Tensor]:
    """Return (the form that costs less, the difference as it is, the weight)."""
    base = torch.randn(difference.shape, generator=torch.Generator().manual_seed(7))
    weight, rows = base + difference, np.ones(len(difference))
    factors, trellis = feedback(None, *difference.shape), Trellis()
    direct = trellis.encode_with("w", weight - base, factors, scale)
    components = Components.of((weight - base).numpy(), Weights.of(None, rows))
    form = cheaper("w", weight, base, weight - base, lambda: direct, components, trellis, scale)
    return form, near(weight, base, direct), weight


def test_a_merged_adapter_is_a_product_and_noise_is_not() -> None:
    thin, plain, weight = chosen(product(128, 160, 4), 0.01)
    assert thin.params[2] == 4
    assert sum(estimate(thin)) < sum(estimate(plain)) / 5
    errors = [float((decode(form) - weight).square().mean()) for form in (thin, plain)]
    assert errors[0] < errors[1]
    noise = torch.randn(128, 160, generator=torch.Generator().manual_seed(1))
    assert chosen(noise, 0.1)[0].params[2] == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda params: params[:2],
        lambda params: (*params[:2], -1, *params[3:]),
        lambda params: (*params[:2], 99, *params[3:]),
        lambda params: (*params[:2], 0, *params[3:]),
        lambda params: params[:-1],
        lambda params: (*params, 1),
        lambda params: (*params[:3], 14, *params[4:]),
    ],
)
def test_parameters_that_lie_are_refused(change: object) -> None:
    encoded, _, _ = chosen(product(32, 48, 2), 0.01)
    assert encoded.params[2] == 2
    with pytest.raises(ArtifactError):
        layout(encoded.shape, encoded.dtype, change(encoded.params))  # type: ignore[operator]
    with pytest.raises(ArtifactError):
        layout(encoded.shape, torch.int32, encoded.params)
