"""Codebooks: k-means is the exact optimum, more levels never leave more error, prices buy fewer bits."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.registry import decode
from birdie.compress.schemes.codebook import Codebook, kmeans
from birdie.entropy import coder
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


def test_few_values_are_kept_exactly_to_the_fineness_of_levels() -> None:
    values = torch.tensor([-0.5, -0.1, 0.0, 0.25, 3.0])
    weight = values[torch.randint(5, (50, 40), generator=torch.Generator().manual_seed(0))]
    encoded = Codebook(16).encode("w", weight)
    assert encoded.params[0] == 5
    gap = 0.1
    assert float((decode(encoded) - weight).abs().max()) <= gap / 32


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
