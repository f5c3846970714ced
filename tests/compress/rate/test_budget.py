"""A budget is met: never over, and within a thousandth under it, by real coded bytes."""

import re
from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.rate.allocation import Allocation
from birdie.compress.rate.budget import FINEST, ROUNDS, TINY, TOLERANCE, fit_budget
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.errors import BudgetError, ConfigError


def entropy_bytes(encoded: Mapping[str, Encoded]) -> int:
    """A stand-in for real coding: the order-0 entropy of every stream, and forty bytes of header.

    Of wide numbers only the top bits have an entropy to speak of; the rest are stored as they are where there are any.
    """
    bits = 0.0
    for item in encoded.values():
        for stream in item.streams:
            low = max(0, int(np.abs(stream.astype(np.int64)).max()).bit_length() - 8)
            counts = np.unique(stream >> low, return_counts=True)[1]
            bits += low * np.count_nonzero(stream) - float((counts * np.log2(counts / stream.size)).sum())
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


STATES = {
    "small matrices": {f"{index}": torch.randn(60, 60) * 0.02 for index in range(6)},
    "one vector": {"v": torch.randn(30_000)},
    "embedding": {"tok_emb.weight": torch.randn(2000, 32), "w": torch.randn(64, 64)},
    "sparse": {"w": torch.randn(256, 512).masked_fill(torch.rand(256, 512) > 0.02, 0)},
    "crowded": {"w": torch.randn(64, 64), "v": torch.randn(30_000), "norm": torch.ones(64), "steps": torch.tensor(5)},
    "huge": {"w": torch.randn(64, 128) * 1e25},
    "tiny": {"w": torch.randn(64, 128) * 1e-42},
}


def slack(state: Mapping[str, torch.Tensor], budget: int) -> int:
    """What a fit may leave: the tolerance, and one step of the scale where a single row holds all."""
    steps = sum(weight.numel() for weight in state.values() if weight.ndim == 1) // 16 // 8
    return max(TINY, budget // TOLERANCE) + int(1.1 * steps)


@pytest.mark.parametrize("kind", STATES)
@settings(max_examples=6, deadline=None)
@given(bits=st.floats(1.0, 14.0), rough=st.sampled_from([None, 1.0, 1.3, 3.0]))
def test_any_model_is_kept_or_lands_just_below_or_is_told_its_smallest_size(
    kind: str, bits: float, rough: float | None
) -> None:
    """A rough size that is far too large changes nothing about it."""
    state = STATES[kind]
    budget = int(bits * sum(weight.numel() for weight in state.values()) / 8)
    quick = None if rough is None else (lambda encoded: int(rough * entropy_bytes(encoded)))
    try:
        fit = fit_budget(state, entropy_bytes, budget, rough=quick)
    except BudgetError as error:
        least = int(re.findall(r"takes ([\d,]+) bytes", str(error))[0].replace(",", ""))
        assert budget < least == fit_budget(state, entropy_bytes, least).bytes
    else:
        assert fit.bytes <= budget
        whole = {item.scheme for item in fit.encoded.values()} == {"lossless"}
        assert whole or fit.sigma == 2**FINEST or fit.bytes >= budget - slack(state, budget)


@pytest.mark.parametrize("kind", STATES)
def test_a_budget_that_lossless_fits_is_lossless_and_a_little_less_is_not_far_from_it(kind: str) -> None:
    state = STATES[kind]
    exact = entropy_bytes({name: Lossless().encode(name, weight) for name, weight in state.items()})
    for rough in (None, lambda encoded: 3 * entropy_bytes(encoded)):
        fit = fit_budget(state, entropy_bytes, exact, rough=rough)
        assert fit.bytes == exact
        assert {item.scheme for item in fit.encoded.values()} == {"lossless"}
    if kind not in ("sparse", "tiny"):
        count = sum(weight.numel() for weight in state.values())
        assert fit_budget(state, entropy_bytes, exact - 1).bytes >= 16 / 8 * count


def test_what_is_small_is_coarsened_only_when_it_crowds_the_rest() -> None:
    state = {"w": torch.randn(256, 256), "v": torch.randn(5000).abs() + 1}
    roomy, crowded = (fit_budget(state, entropy_bytes, budget).encoded["v"].scheme for budget in (70_000, 15_000))
    assert (roomy, crowded) == ("cast", "grid")


def test_small_matrices_are_coarsened_when_their_worth_is_known() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"conv": (16, 16, 3, 3), "tiny": (12, 12), "thin": (512, 4), "wide": (64, 1024), "norm": (300,)}
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    known = {
        name: Sensitivity(torch.eye(weight[0].numel()), torch.ones(len(weight)))
        for name, weight in state.items()
        if weight.ndim >= 2
    }
    allocate = partial(Allocation, sensitivities=known)
    plain, told = (
        fit_budget(state, entropy_bytes, 40_000, allocate=allocate, calibrated=names).encoded for names in ((), known)
    )
    assert [name for name, one in plain.items() if one.scheme == "trellis"] == ["wide"]
    assert [name for name, one in told.items() if one.scheme == "trellis"] == ["conv", "wide"]


def test_pinned_tensors_keep_their_scheme() -> None:
    state = model()
    fit = fit_budget(state, entropy_bytes, 40_000, pinned={"blocks.0.w": Lossless(), "blocks.1.w": Grid(bits=4)})
    assert fit.encoded["blocks.0.w"].scheme == "lossless"
    assert int(np.abs(fit.encoded["blocks.1.w"].streams[0]).max()) <= 7
    assert 40_000 - 64 <= fit.bytes <= 40_000


def test_the_same_budget_gives_the_same_choice_on_any_number_of_threads() -> None:
    one, other = (fit_budget(model(), entropy_bytes, 12_345, workers=workers) for workers in (1, 4))
    assert (one.sigma, one.bytes) == (other.sigma, other.bytes)
