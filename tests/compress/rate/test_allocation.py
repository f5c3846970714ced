"""One exponent for all matrices: the last bit is worth the same everywhere, and sizes follow it steadily."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from birdie.compress.schemes.decode_trellis import MOST
from birdie.compress.schemes.decoders import DECODERS, decode
from torch import Tensor

from birdie.compress.rate.allocation import COARSEST, COARSEST_BY_LOSS, EMBEDDING_FACTOR, FINEST, Allocation
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.trellis import Trellis
from birdie.entropy import coder


def size(encoded: Encoded) -> int:
    """Bytes of all streams as a file has them."""
    layout = DECODERS[encoded.scheme].layout(encoded.shape, encoded.dtype, encoded.params)
    return sum(
        len(coder.encode(stream, each.hints).payload) for stream, each in zip(encoded.streams, layout, strict=True)
    )


def covariance(columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns**0.5
    mixed = mixed * torch.exp(0.5 * torch.randn(columns, generator=generator))
    return mixed.T @ mixed


def matrices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"one": (160, 96), "two": (96, 160), "three": (128, 128)}
    return {name: 0.1 * 2**place * torch.randn(shapes[name], generator=generator) for place, name in enumerate(shapes)}


def sensitivities() -> dict[str, Sensitivity]:
    """Of matrices whose weights count very differently."""
    found = {}
    for place, (name, weight) in enumerate(matrices().items()):
        rows, columns = weight.shape
        fisher = 30.0 ** (1 - place) * torch.exp(torch.randn(rows, generator=torch.Generator().manual_seed(place)))
        found[name] = Sensitivity(covariance(columns, place), fisher)
    return found


def loss(known: Sensitivity, weight: Tensor, encoded: Encoded | None) -> float:
    """½ tr(G E H Eᵀ), G being diagonal, of what was decoded; of zeros without."""
    error = weight.double() if encoded is None else decode(encoded).double() - weight.double()
    assert known.hessian is not None
    assert known.row_fisher is not None
    return 0.5 * float(known.row_fisher.double() @ ((error @ known.hessian.double()) * error).sum(1))


def test_the_last_bit_is_worth_the_same_in_every_matrix() -> None:
    """Reverse water-filling: nats of KL per bit between two exponents, matrix by matrix."""
    weights, known = matrices(), sensitivities()
    allocation = Allocation(weights, known, Trellis(4))
    fine, coarse = allocation.encode(-3.5), allocation.encode(-2.5)
    worth = [
        (loss(known[name], weights[name], coarse[name]) - loss(known[name], weights[name], fine[name]))
        / (8 * (size(fine[name]) - size(coarse[name])))
        for name in weights
    ]
    assert max(worth) < 1.25 * min(worth)
    bits = [8 * size(fine[name]) / weights[name].numel() for name in weights]
    assert max(bits) > min(bits) + 0.5, "bits go to where they count"


def test_one_more_is_a_bit_less_and_sizes_fall_all_the_way() -> None:
    allocation = Allocation(matrices(), sensitivities(), Trellis(4))
    weights = sum(weight.numel() for weight in matrices().values())
    totals = [sum(map(size, allocation.encode(exponent).values())) for exponent in (-5.0, -4.0, -3.0)]
    assert all(more - fewer == pytest.approx(weights / 8, rel=0.1) for more, fewer in pairwise(totals))
    close = [sum(map(size, allocation.encode(exponent).values())) for exponent in (-2.96, -2.92, -2.9)]
    assert all(more > fewer for more, fewer in pairwise(close)), "steady in small steps as well"


def test_a_draft_tells_the_size_about() -> None:
    allocation = Allocation(matrices(), sensitivities(), Trellis(8))
    full, draft = (sum(map(size, allocation.encode(-3.5, draft=each).values())) for each in (False, True))
    assert draft == pytest.approx(full, rel=0.12)


def test_the_exponent_is_relative_to_the_weights_and_to_the_loss() -> None:
    """Other units of weights or of loss change steps, not numbers."""
    weights, known = matrices(), sensitivities()
    one = Allocation(weights, known, Trellis(4)).encode(-3.0)
    scaled = {name: 4 * weight for name, weight in weights.items()}
    louder = {name: Sensitivity(each.hessian, 16 * each.row_fisher) for name, each in known.items()}  # type: ignore[operator]
    other = Allocation(scaled, louder, Trellis(4)).encode(-3.0)
    for name in weights:
        assert (one[name].streams[0] == other[name].streams[0]).all()
        assert torch.equal(4 * decode(one[name]), decode(other[name]))


def test_the_finest_and_the_coarsest_are_within_reach() -> None:
    weights, known = matrices(), sensitivities()
    weights["one"][3, 4] = 1e4
    allocation = Allocation(weights, known, Trellis(4))
    assert Allocation(matrices(), known).coarsest == COARSEST_BY_LOSS <= allocation.coarsest
    assert Allocation(weights).coarsest == COARSEST
    finest, coarsest = allocation.encode(FINEST), allocation.encode(allocation.coarsest)
    for name, weight in weights.items():
        assert max(np.abs(stream).max() for stream in finest[name].streams) <= MOST
        off = (decode(finest[name]) - weight).abs().amax(1)
        assert bool((off < 2e-3 * weight.abs().amax(1).clamp_min(1)).all())
        assert 8 * size(coarsest[name]) < 0.6 * weight.numel()
        assert loss(known[name], weight, coarsest[name]) <= 1.001 * loss(known[name], weight, None), "worse than zeros"


@pytest.mark.parametrize("plain", [True, False])
def test_what_was_not_calibrated_takes_steps_in_deviations_embeddings_finer_ones(plain: bool) -> None:
    weights = {"w": matrices()["one"], "tok_emb.weight": matrices()["two"], "three": matrices()["three"]}
    allocation = Allocation(weights, {"three": sensitivities()["three"], "other": Sensitivity()}, plain=plain)
    found = allocation.encode(-2.0)
    assert {name: each.scheme for name, each in found.items()} == {
        "w": "grid" if plain else "trellis",
        "tok_emb.weight": "grid" if plain else "trellis",
        "three": "trellis",
    }
    for name, sigma in (("w", 0.25), ("tok_emb.weight", 0.25 * EMBEDDING_FACTOR)):
        scheme = Grid(sigma=sigma) if plain else Trellis(sigma=sigma, per_tensor=True)
        expected = scheme.encode(name, weights[name])
        assert torch.equal(decode(found[name]), decode(expected))
        assert found[name].params == expected.params


def test_a_sample_is_weights_in_steps() -> None:
    """Whose spread is that of the numbers of an encoding, and about as many as were asked for."""
    allocation = Allocation(matrices(), sensitivities(), Trellis(1))
    for count in (2000, 10_000):
        assert 0.5 * count < allocation.sample(count).size < 2 * count + 1000
    numbers = np.concatenate([each.streams[0].ravel() for each in allocation.encode(-4.0).values()])
    assert float((allocation.sample(50_000) * 2.0**4).std()) == pytest.approx(float(numbers.std()), rel=0.1)


def test_workers_change_nothing() -> None:
    one, two = (Allocation(matrices(), sensitivities(), Trellis(4), workers=workers).encode(-3) for workers in (1, 2))
    for name, each in one.items():
        assert each.params == two[name].params
        assert all((a == b).all() for a, b in zip(each.streams, two[name].streams, strict=True))


def test_a_matrix_that_hardly_counts_does_not_keep_the_others_from_the_coarsest() -> None:
    """The exponent is of the mean matrix; where one pulls that down by dozens of octaves, the range must follow."""
    known = sensitivities()
    known["three"] = Sensitivity(1e-40 * torch.eye(128), known["three"].row_fisher)
    allocation = Allocation(matrices(), known)
    coarsest = sum(size(item) for item in allocation.encode(allocation.coarsest).values())
    assert coarsest < 0.1 * sum(weight.numel() for weight in matrices().values()) / 8
