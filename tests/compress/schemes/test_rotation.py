"""Rotations: undone to the last digits, the same bits every time, Gaussian levels where they belong."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.rotation import Rotation, lloyd_max, rotate, rotate_rows, signs
from birdie.errors import ConfigError
from tests.compress.matrices import DTYPES, random_weight
from tests.compress.matrices import squared_error as error


@settings(max_examples=25)
@given(columns=st.integers(1, 300), seed=st.integers(0, 65_535))
def test_a_rotation_keeps_lengths_and_angles_and_is_undone(columns: int, seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((columns, 3))
    turned = weight.copy()
    rotate(turned, seed, back=False)
    np.testing.assert_allclose(turned.T @ turned, weight.T @ weight, atol=1e-9 * columns)
    rotate(turned, seed)
    np.testing.assert_allclose(turned, weight, atol=1e-12)


def test_every_seed_is_another_rotation_and_the_same_twice() -> None:
    rows = random_weight(4, 48).numpy()
    rotated = [rotate_rows(rows, seed) for seed in (0, 1, 2, 65_535)]
    assert all(np.abs(one - other).max() > 0.01 for i, one in enumerate(rotated) for other in rotated[:i])
    np.testing.assert_array_equal(rotated[0], rotate_rows(rows, 0))
    balance = [abs(signs(4096, seed).sum()) / 64 for seed in range(40)]  # in standard deviations
    assert max(balance) < 4
    assert abs(float(np.mean([signs(4096, seed) @ signs(4096, seed + 1) for seed in range(40)])) / 64) < 1


def test_the_first_signs_are_pinned() -> None:
    """Files are decoded with these signs: 1 for minus, the first columns of two seeds."""
    bits = ["".join("01"[int(sign < 0)] for sign in signs(24, seed)) for seed in (0, 131_071)]
    assert bits == ["101101010011010001101100", "111110110110001010000111"]


def test_lloyd_max_levels_are_those_of_the_tables() -> None:
    """Max 1960, as every textbook has them; errors 0.1175, 0.03454, 0.009497."""
    np.testing.assert_allclose(lloyd_max(1), [-0.7979, 0.7979], atol=2e-3)
    np.testing.assert_allclose(lloyd_max(2)[2:], [0.4528, 1.510], atol=2e-3)
    np.testing.assert_allclose(lloyd_max(3)[4:], [0.2451, 0.7560, 1.344, 2.152], atol=2e-3)
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    for bits, wanted in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        distortion = error(weight, Rotation(bits).encode("w", weight)) / weight.numel()
        assert abs(distortion / wanted - 1) < 0.03


@settings(max_examples=25)
@given(
    scheme=st.sampled_from([Rotation(4), Rotation(base=Grid(sigma=0.2)), Rotation(1)]),
    shape=st.sampled_from([(1, 1), (9,), (7, 5), (40, 33), (6, 4, 3, 3)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_no_row_is_farther_from_the_weight_than_zeros(
    scheme: Rotation, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    weight = random_weight(*shape, seed=seed).to(dtype)
    encoded = scheme.encode("w", weight)
    rows = weight.double().reshape(encoded.streams[0].shape)
    errors = (decode(encoded).double().reshape(rows.shape) - rows).square().sum(dim=1)
    assert bool((errors <= rows.square().sum(dim=1) + 1e-9).all())


def test_outliers_are_spread() -> None:
    """One column of outliers costs a grid with as many levels far more than its rotation."""
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    weight[:, 7] *= 100
    assert error(weight, Rotation(base=Grid(bits=4)).encode("w", weight)) < 0.5 * error(
        weight, Grid(bits=4).encode("w", weight)
    )


def test_the_hessian_is_rotated_with_the_rows() -> None:
    """A base scheme gets the sensitivity of what it encodes: weighted errors do not change."""

    class Recording(Scheme):
        decoder = Grid.decoder

        def encode(self, name: str, weight: torch.Tensor, *, sensitivity: Sensitivity | None = None) -> Encoded:
            assert sensitivity is not None
            assert sensitivity.hessian is not None
            self.weighted_error = torch.einsum("ri,ij,rj->", weight, sensitivity.hessian, weight)
            return Grid().encode(name, weight, sensitivity=sensitivity)

    weight, inputs = random_weight(8, 24), random_weight(100, 24, seed=1)
    recording, hessian = Recording(), inputs.T @ inputs
    Rotation(base=recording, seed=5).encode("w", weight, sensitivity=Sensitivity(hessian=hessian))
    torch.testing.assert_close(
        recording.weighted_error, torch.einsum("ri,ij,rj->", weight, hessian, weight), rtol=1e-4, atol=0
    )


def test_bases_that_cannot_be_rotated_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold cast"):
        Rotation(base=Cast()).encode("w", random_weight(4, 8))
    with pytest.raises(ConfigError, match="cannot hold rotation"):
        Rotation(base=Rotation()).encode("w", random_weight(4, 8))
