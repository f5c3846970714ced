"""A budget is met: never over, and within a thousandth under it, by real coded bytes."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.budget import ROUNDS, fit_budget
from birdie.compress.grid import Grid
from birdie.compress.lossless import Lossless
from birdie.compress.scheme import Encoded
from birdie.errors import BudgetError, ConfigError


def entropy_bytes(encoded: Mapping[str, Encoded]) -> int:
    """A stand-in for real coding: the order-0 entropy of every stream, and forty bytes of header."""
    bits = 0.0
    for item in encoded.values():
        for stream in item.streams:
            counts = np.unique(stream, return_counts=True)[1]
            bits -= float((counts * np.log2(counts / stream.size)).sum())
    return 40 + int(bits / 8)


def model(seed: int = 0, matrices: int = 4) -> dict[str, torch.Tensor]:
    """Matrices of different scales and shapes, an embedding, norms, a counter."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        f"blocks.{index}.w": torch.randn(64 + 32 * index, 96, generator=generator) * 0.1 * (index + 1)
        for index in range(matrices)
    }
    state["tok_emb.weight"] = torch.randn(256, 32, generator=generator)
    state["norm"] = torch.ones(96)
    state["steps"] = torch.tensor(5)
    return state


@settings(max_examples=25, deadline=None)
@given(bits=st.floats(0.6, 10.0), seed=st.integers(0, 100))
def test_any_budget_is_met_from_just_below(bits: float, seed: int) -> None:
    state = model(seed)
    budget = int(bits * sum(weight.numel() for weight in state.values()) / 8) + 300
    fit = fit_budget(state, entropy_bytes, budget)
    assert fit.bytes == entropy_bytes(fit.encoded)
    assert list(fit.encoded) == list(state)
    assert budget - max(64, budget // 1000) <= fit.bytes <= budget
    assert fit.rounds <= ROUNDS + 1


def test_few_codings_suffice() -> None:
    rounds = [fit_budget(model(seed), entropy_bytes, 20_000).rounds for seed in range(5)]
    assert max(rounds) <= 6


def test_embeddings_get_finer_steps() -> None:
    fit = fit_budget(model(), entropy_bytes, 15_000)
    assert fit.sigma is not None
    expected = Grid(sigma=0.35 * fit.sigma).encode("tok_emb.weight", model()["tok_emb.weight"])
    np.testing.assert_array_equal(fit.encoded["tok_emb.weight"].streams[0], expected.streams[0])


def test_a_generous_budget_is_lossless() -> None:
    fit = fit_budget(model(), entropy_bytes, 10**7)
    assert fit.sigma is None
    assert {item.scheme for item in fit.encoded.values()} == {"lossless"}


def test_an_impossible_budget_says_what_is_possible() -> None:
    with pytest.raises(BudgetError, match=r"budget 50 bytes cannot be met: the smallest file takes [\d,]+ bytes"):
        fit_budget(model(), entropy_bytes, 50)
    with pytest.raises(BudgetError, match="no tensor is left to coarsen"):
        fit_budget({"norm": torch.randn(1000)}, entropy_bytes, 50)
    with pytest.raises(ConfigError, match="-1"):
        fit_budget(model(), entropy_bytes, -1)


def test_pinned_tensors_keep_their_scheme() -> None:
    state = model()
    fit = fit_budget(state, entropy_bytes, 40_000, pinned={"blocks.0.w": Lossless(), "blocks.1.w": Grid(bits=4)})
    assert fit.encoded["blocks.0.w"].scheme == "lossless"
    assert int(np.abs(fit.encoded["blocks.1.w"].streams[0]).max()) <= 7
    assert 40_000 - 64 <= fit.bytes <= 40_000


def test_the_same_budget_gives_the_same_choice_on_any_number_of_threads() -> None:
    one, other = (fit_budget(model(), entropy_bytes, 12_345, workers=workers) for workers in (1, 4))
    assert (one.sigma, one.bytes) == (other.sigma, other.bytes)
