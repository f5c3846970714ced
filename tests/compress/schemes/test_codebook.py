"""Codebooks: k-means is the exact optimum, more levels never leave more error, prices buy fewer bits."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.registry import decode
from birdie.compress.scheme import Sensitivity
from birdie.compress.schemes.codebook import Codebook, kmeans
from birdie.entropy import coder
from tests.compress.matrices import DTYPES, random_weight
from tests.compress.matrices import squared_error as error

NUMBERS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9, unique=True)


def cost(values: np.ndarray, weights: np.ndarray, centres: np.ndarray) -> float:
    return float((weights * ((values[:, None] - centres) ** 2).min(axis=1)).sum())


@settings(max_examples=25)
@given(numbers=NUMBERS, k=st.integers(1, 5), seed=st.integers(0, 100))
def test_no_other_split_of_the_line_is_better(numbers: list[float], k: int, seed: int) -> None:
    values = np.sort(np.array(numbers))
    weights = np.random.default_rng(seed).exponential(size=len(values)) + 0.01
    best = np.inf
    for cuts in itertools.combinations(range(1, len(values)), min(k, len(values)) - 1):
        parts = np.split(np.arange(len(values)), cuts)
        centres = np.array([np.average(values[part], weights=weights[part]) for part in parts])
        best = min(best, cost(values, weights, centres))
    levels = kmeans(values, weights, k)
    assert (np.diff(levels) > 0).all()
    assert cost(values, weights, levels) <= best + 1e-9 * float((weights * values**2).sum() + 1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [2, 16, 256])
def test_every_weight_gets_its_nearest_level(k: int, dtype: torch.dtype) -> None:
    weight = random_weight(40, 33).to(dtype)
    encoded = Codebook(k).encode("w", weight)
    decoded = decode(encoded).double()
    assert int(encoded.streams[0].max()) < encoded.params[0] <= k
    nearest = (weight.double().reshape(-1, 1) - decoded.unique()).abs().amin(dim=1)
    largest = torch.maximum(weight.double().abs(), decoded.abs()).reshape(-1)
    error_of = (weight.double() - decoded).abs().reshape(-1)
    assert bool((error_of <= nearest + torch.finfo(dtype).eps * largest).all()), "but for the rounding of levels"


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_error_falls_as_levels_are_added(rows: bool, weighted: bool) -> None:
    weight = random_weight(24, 64)
    mass = torch.linspace(0.1, 4, 64).double()
    sensitivity = Sensitivity(hessian=torch.diag(mass)) if weighted else None
    errors = [
        error(weight, Codebook(k, rows).encode("w", weight, sensitivity=sensitivity), mass if weighted else None)
        for k in (2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
    ]
    assert all(more < fewer for fewer, more in itertools.pairwise(errors))
    assert errors[-1] < 0.001 * errors[0]


def test_few_values_are_kept_exactly_to_the_fineness_of_levels() -> None:
    values = torch.tensor([-0.5, -0.1, 0.0, 0.25, 3.0])
    weight = values[torch.randint(5, (50, 40), generator=torch.Generator().manual_seed(0))]
    encoded = Codebook(16).encode("w", weight)
    assert encoded.params[0] == 5
    gap = 0.1
    assert float((decode(encoded) - weight).abs().max()) <= gap / 32


def test_weights_of_the_error_move_levels_to_where_they_count() -> None:
    weight = torch.cat([torch.full((1, 50), 1.0), torch.full((1, 50), 1.4), torch.full((1, 50), 3.0)], dim=1)
    weight += 0.01 * torch.randn(1, 150, generator=torch.Generator().manual_seed(0))
    mass = torch.ones(150)
    mass[:100] = 1000
    decoded = decode(Codebook(2).encode("w", weight, sensitivity=Sensitivity(hessian=torch.diag(mass))))
    assert float((decoded[0, :50] - 1).abs().max()) < 0.05
    plain = decode(Codebook(2).encode("w", weight))
    assert float((plain[0, 100:] - 3).abs().max()) < 0.05


def test_a_price_on_bits_buys_them() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    sizes, errors = [], []
    for rate in (0.0, 0.01, 0.05, 0.3):
        encoded = Codebook(32, rate=rate).encode("w", weight)
        sizes.append(len(coder.encode(encoded.streams[0], effort="fast").payload))
        errors.append(error(weight, encoded))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.2 * sizes[2]
    assert errors == sorted(errors)


def test_priced_levels_leave_less_error_than_free_ones_at_the_same_size() -> None:
    """Sixteen levels as they come against more levels that pay for their bits."""
    weight = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    plain, paid = Codebook(16).encode("w", weight), Codebook(64, rate=0.0095).encode("w", weight)
    sizes = [len(coder.encode(encoded.streams[0], effort="fast").payload) for encoded in (plain, paid)]
    distance = np.log2(error(weight, paid) / error(weight, plain)) / 2 + (sizes[1] - sizes[0]) * 8 / weight.numel()
    assert distance < -0.05  # bits a weight


def test_one_outlier_does_not_eat_the_levels_of_the_rest() -> None:
    weight = torch.randn(100, 3000, generator=torch.Generator().manual_seed(0))
    weight[3, 3] = 1e4
    decoded = decode(Codebook(16).encode("w", weight))
    assert abs(float(decoded[3, 3]) - 1e4) < 10
    weight[3, 3] = decoded[3, 3]
    assert float((decoded - weight).square().mean()) < 0.013
