"""Tucker: exact at full rank, orthonormal factors, the error is the energy that was cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.spectral.tucker import tucker
from birdie.errors import ConfigError

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=50)
@given(shape=SHAPES, seed=st.integers(0, 99), energy=st.floats(0.05, 1))
def test_what_is_kept_is_what_was_asked_for(shape: tuple[int, ...], seed: int, energy: float) -> None:
    weight = noise(*shape, seed=seed)
    parts = tucker(weight, energy=energy)
    total, lost = float(weight.square().sum()), float((parts.inverse() - weight).square().sum())
    assert lost <= (1 - energy) * total + 1e-9 * total
    assert lost == pytest.approx(total - float(parts.core.square().sum()), abs=1e-9 * total + 1e-12)
    assert parts.numel <= weight.numel()
    for factor in parts.factors:
        if factor is not None:
            torch.testing.assert_close(factor.mT @ factor, torch.eye(factor.shape[1], dtype=factor.dtype))


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 4, 3, 3), (7,)])
def test_full_ranks_keep_everything(shape: tuple[int, ...]) -> None:
    weight = noise(*shape)
    parts = tucker(weight, ranks=shape)
    assert parts.factors == (None,) * len(shape)
    assert torch.equal(parts.inverse(), weight)


def test_a_matrix_is_cut_as_eckart_and_young_say() -> None:
    weight = noise(12, 20)
    parts = tucker(weight, ranks=(4, 20))
    beyond = torch.linalg.svdvals(weight)[4:].square().sum()
    torch.testing.assert_close((parts.inverse() - weight).square().sum(), beyond)
    both = tucker(weight, ranks=(4, 4))
    torch.testing.assert_close((both.inverse() - weight).square().sum(), beyond)
    diagonal = torch.diag(both.core.abs().diagonal())
    torch.testing.assert_close(both.core.abs(), diagonal, rtol=0, atol=1e-9)


def test_what_has_few_components_becomes_small() -> None:
    left, right, core = noise(32, 3), noise(24, 2), noise(3, 2, 3, 3)
    weight = torch.einsum("ai,bj,ijkl->abkl", left, right, core)
    parts = tucker(weight, energy=1 - 1e-12)
    assert tuple(parts.core.shape) == (3, 2, 3, 3)
    assert parts.numel < 0.05 * weight.numel()
    torch.testing.assert_close(parts.inverse(), weight)


def test_zeros_constants_and_sixteen_bits() -> None:
    assert not tucker(torch.zeros(4, 5)).inverse().any()
    torch.testing.assert_close(tucker(torch.ones(6, 7), energy=0.999).inverse(), torch.ones(6, 7))
    half = noise(8, 8).bfloat16()
    assert tucker(half, ranks=(4, 4)).inverse().dtype is torch.bfloat16
    assert tucker(torch.zeros(0, 3)).inverse().shape == (0, 3)


def test_gradients_reach_core_and_factors() -> None:
    decomposition = tucker(noise(6, 5, 3), ranks=(3, 2, 3))
    parts = [decomposition.core, *(factor for factor in decomposition.factors if factor is not None)]
    for part in parts:
        part.requires_grad_()
    torch.autograd.backward(decomposition.inverse().square().sum())
    assert all(part.grad is not None and bool(part.grad.any()) for part in parts)


@pytest.mark.parametrize(
    ("settings", "match"), [({"energy": 0.0}, "energy"), ({"ranks": (2,)}, "ranks"), ({"ranks": (5, 1)}, "ranks")]
)
def test_wrong_settings_are_refused_in_words(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        tucker(noise(4, 6), **settings)  # type: ignore[arg-type]
