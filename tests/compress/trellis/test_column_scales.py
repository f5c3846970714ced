"""Columns have scales of their own where these save more bits than they take, and share one elsewhere."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.trellis import Trellis, column_scales
from birdie.compress.trellis.feedback import feedback
from tests.compress.matrices import gaussian


def with_fisher(weight: Tensor, fisher: Tensor) -> Encoded:
    """Encode a weight of deviation 1 at about three bits, its columns with this Fisher information."""
    factors = feedback(Sensitivity(torch.diag(fisher)), *weight.shape)
    return Trellis().encode_with("w", weight, factors, 0.25 * math.exp(float(fisher.log().mean()) / 2))


def octaves(columns: int, most: float, seed: int = 1) -> Tensor:
    """Return a Fisher information for each column; their ideal scales differ by up to `most` octaves."""
    return torch.exp2(2 * most * torch.rand(columns, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(("rows", "most"), [(16, 0.0), (16, 1.0), (512, 0.1)])
def test_columns_that_are_nearly_alike_share_a_scale(rows: int, most: float) -> None:
    encoded = with_fisher(gaussian(rows, 96), octaves(96, most))
    assert encoded.params[2] == 0
    assert len(encoded.streams) == 2


@pytest.mark.parametrize(("rows", "most"), [(64, 3.0), (512, 1.0)])
def test_columns_that_differ_have_scales_by_their_fisher_information(rows: int, most: float) -> None:
    fisher = octaves(96, most)
    encoded = with_fisher(gaussian(rows, 96), fisher)
    exponents = np.log2(column_scales(encoded)) + 0.5 * np.log2(fisher.numpy())
    assert len(encoded.streams) == 3
    assert np.ptp(exponents) < 1, "indices that cost fewer bits are near the ideal scale"
