"""Low-rank corrections never make the error larger, and find what is of low rank."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.codebook import Codebook
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lowrank import LowRank
from birdie.compress.schemes.ternary import Ternary
from birdie.errors import ConfigError
from tests.compress.matrices import DTYPES, random_weight
from tests.compress.matrices import squared_error as error


def weighted(weight: torch.Tensor, encoded: Encoded, sensitivity: Sensitivity) -> float:
    """Σ rows of fisher · e H eᵀ."""
    e = decode(encoded).double() - weight.double()
    hessian = torch.eye(e.shape[1]) if sensitivity.hessian is None else sensitivity.hessian
    rows = torch.ones(len(e)) if sensitivity.row_fisher is None else sensitivity.row_fisher
    return float(torch.einsum("r,ri,ij,rj->", rows.double(), e, hessian.double(), e))


@settings(max_examples=15)
@given(
    base=st.sampled_from([Grid(bits=3), Grid(sigma=1.0), Ternary(8), Codebook(3), Codebook(4, per_row=True)]),
    shape=st.sampled_from([(7, 5), (24, 33), (5, 40), (6, 4, 3, 3), (1, 9)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
    rank=st.integers(1, 5),
)
def test_a_correction_never_makes_the_error_larger(
    base: Grid, shape: tuple[int, ...], dtype: torch.dtype, seed: int, rank: int
) -> None:
    weight = random_weight(*shape, seed=seed).to(dtype)
    encoded = LowRank(rank, base).encode("w", weight)
    # Narrow dtypes round what is decoded once more.
    slack = float((torch.finfo(dtype).eps * weight.double()).square().sum())
    uncorrected, corrected = error(weight, base.encode("w", weight)), error(weight, encoded)
    assert corrected**0.5 <= uncorrected**0.5 + 2 * slack**0.5 + 1e-9
    if encoded.scheme == "lowrank":
        assert encoded.params[0] <= rank


@settings(max_examples=8)
@given(seed=st.integers(0, 1000), full=st.booleans(), rows=st.booleans())
def test_nor_the_error_that_a_sensitivity_weighs(seed: int, full: bool, rows: bool) -> None:
    """Singular Hessians and dead columns included."""
    weight, inputs = random_weight(20, 32, seed=seed), random_weight(16, 32, seed=seed + 1)
    inputs[:, 3] = 0
    hessian = inputs.T @ inputs
    fisher = random_weight(20, 1, seed=seed + 2)[:, 0].square() + 0.01 if rows else None
    sensitivity = Sensitivity(hessian=hessian if full else torch.diag(hessian.diagonal()), row_fisher=fisher)
    base = Grid(bits=3)
    uncorrected = weighted(weight, base.encode("w", weight), sensitivity)
    last = uncorrected
    for rank in (1, 2, 4, 8):
        corrected = weighted(weight, LowRank(rank, base).encode("w", weight, sensitivity=sensitivity), sensitivity)
        assert corrected <= last * (1 + 1e-5)
        last = corrected
    assert last < 0.9 * uncorrected


@pytest.mark.parametrize("base", [Grid(bits=3), Ternary(8)])
def test_factors_of_eight_bits_are_nearly_as_good_as_the_singular_vectors(base: Grid) -> None:
    """Eckart–Young: nothing of rank r leaves less than the singular values beyond r."""
    weight = random_weight(24, 33)
    beyond = torch.linalg.svdvals(decode(base.encode("w", weight)).double() - weight.double())[4:]
    least = float(beyond.square().sum())
    assert least <= error(weight, LowRank(4, base, left_bits=8, right_bits=8).encode("w", weight)) < 1.03 * least
    assert error(weight, LowRank(4, base, left_bits=4, right_bits=4).encode("w", weight)) < 1.2 * least


def test_bases_that_cannot_be_corrected_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot correct cast"):
        LowRank(base=Cast()).encode("w", random_weight(4, 8))


def test_the_decoded_sum_is_the_one_that_is_described() -> None:
    weight = random_weight(12, 20)
    encoded = LowRank(3, Grid(bits=3)).encode("w", weight)
    base = Encoded("grid", (12, 20), torch.float32, (), encoded.streams[:2])
    total = decode(base).numpy().astype(np.float64)
    left, right, indices = encoded.streams[2:]
    for k in range(3):
        scale = 2.0 ** (int(indices[k, 0]) // 16) * np.rint(2.0 ** (23 + int(indices[k, 0]) % 16 / 16)) * 2.0**-23
        total = total + np.outer(left[:, k], right[k]) * scale
    np.testing.assert_array_equal(decode(encoded).numpy(), total.astype(np.float32))
