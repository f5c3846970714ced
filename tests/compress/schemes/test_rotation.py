"""Rotations: undone to the last digits, the same bits every time, Gaussian levels where they belong."""

import numpy as np
import pytest
import torch

from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.rotation import Rotation, lloyd_max, signs
from birdie.errors import ConfigError
from tests.compress.matrices import random_weight
from tests.compress.matrices import squared_error as error


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
