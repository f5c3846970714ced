"""Jobs: at one exponent the last bit is worth the same in every matrix, and sizes follow it steadily."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from birdie.compress.coding import Coded, decode
from birdie.compress.prior import prior
from birdie.compress.rate.assignment import Assignment
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.jobs import COARSEST, FINEST, Jobs, assignments, jobs_of
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.grid import MAX_SYMBOL
from birdie.compress.schemes.trellis import Trellis
from tests.compress.matrices import coded_bytes, covariance


def matrices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"one": (160, 96), "two": (96, 160), "three": (128, 128)}
    return {name: 0.1 * 2**index * torch.randn(shapes[name], generator=generator) for index, name in enumerate(shapes)}


def sensitivities() -> dict[str, Sensitivity]:
    """Return sensitivities of matrices whose weights count very differently."""
    by_name = {}
    for index, (name, weight) in enumerate(matrices().items()):
        rows, columns = weight.shape
        fisher = 30.0 ** (1 - index) * torch.exp(torch.randn(rows, generator=torch.Generator().manual_seed(index)))
        by_name[name] = Sensitivity(covariance(columns, index).float(), fisher)
    return by_name


def allocate(
    weights: Mapping[str, Tensor],
    known: Mapping[str, Sensitivity] | None = None,
    trellis: Trellis | None = None,
    *,
    down_columns: bool = True,
) -> Jobs:
    """Return the jobs of matrices that are all searched."""
    assignment = Assignment(weights, {}, {}, {}, free=tuple(weights), trellis=trellis or Trellis())
    return jobs_of(assignment, known, down_columns=down_columns)


def encode(jobs: Jobs, exponent: float, *, draft: bool = False) -> dict[str, Encoded]:
    """Return all tensors, encoded; none has blocks here."""
    return {job.name: job.encode(slice(None), exponent, draft=draft) for job in jobs.by_name.values()}


def total_bytes(encoded: Mapping[str, Encoded]) -> int:
    return sum(map(coded_bytes, encoded.values()))


def loss(sensitivity: Sensitivity, weight: Tensor, encoded: Encoded | None) -> float:
    """Return ½ tr(G E H Eᵀ), G being diagonal, of the decoded matrix; of zeros without one."""
    error = weight.double() if encoded is None else decode(encoded).double() - weight.double()
    assert sensitivity.hessian is not None
    assert sensitivity.row_fisher is not None
    return 0.5 * float(sensitivity.row_fisher.double() @ ((error @ sensitivity.hessian.double()) * error).sum(1))


def test_the_last_bit_is_worth_the_same_in_every_matrix() -> None:
    """Reverse water-filling: nats of KL per bit between two exponents, matrix by matrix."""
    weights, known = matrices(), sensitivities()
    allocation = allocate(weights, known, Trellis(4))
    fine, coarse = encode(allocation, -3.5), encode(allocation, -2.5)
    sizes = {name: (coded_bytes(fine[name]), coded_bytes(coarse[name])) for name in weights}
    worth = [
        (loss(known[name], weights[name], coarse[name]) - loss(known[name], weights[name], fine[name]))
        / (8 * (sizes[name][0] - sizes[name][1]))
        for name in weights
    ]
    assert max(worth) < 1.25 * min(worth)
    bits = [8 * sizes[name][0] / weights[name].numel() for name in weights]
    assert max(bits) > min(bits) + 0.5, "bits go to the matrices that count"


def test_an_octave_coarser_is_a_bit_less_and_sizes_fall_all_the_way() -> None:
    allocation = allocate(matrices(), sensitivities(), Trellis(4))
    weights = sum(weight.numel() for weight in matrices().values())
    totals = [total_bytes(encode(allocation, exponent)) for exponent in (-5.0, -4.0, -3.0)]
    assert all(more - fewer == pytest.approx(weights / 8, rel=0.1) for more, fewer in pairwise(totals))
    close = [total_bytes(encode(allocation, exponent)) for exponent in (-2.96, -2.92, -2.9)]
    assert all(more > fewer for more, fewer in pairwise(close)), "in small differences as well"


def fisher(sensitivity: Sensitivity) -> Tensor:
    assert sensitivity.row_fisher is not None
    return sensitivity.row_fisher


def test_the_finest_and_the_coarsest_are_within_reach() -> None:
    weights, known = matrices(), sensitivities()
    weights["one"][3, 4] = 1e4
    allocation = allocate(weights, known, Trellis(4))
    assert allocate(matrices()).coarsest < COARSEST <= allocation.coarsest
    finest, coarsest = encode(allocation, FINEST), encode(allocation, allocation.coarsest)
    for name, weight in weights.items():
        assert max(np.abs(stream).max() for stream in finest[name].streams) <= MAX_SYMBOL
        error = (decode(finest[name]) - weight).abs().amax(1)
        assert bool((error < 2e-3 * weight.abs().amax(1).clamp_min(1)).all())
        assert 8 * coded_bytes(coarsest[name]) < 0.6 * weight.numel()
        assert loss(known[name], weight, coarsest[name]) <= 1.001 * loss(known[name], weight, None), "worse than zeros"


@pytest.mark.parametrize("plain", [True, False])
def test_uncalibrated_matrices_take_the_prior_on_paths_down_the_columns_where_asked(plain: bool) -> None:
    weights = {"w": matrices()["one"], "tok_emb.weight": matrices()["two"]}
    by_default = encode(allocate(weights, down_columns=plain), -2.0)
    by_prior = encode(allocate(weights, prior(weights), Trellis(along=not plain)), -2.0)
    for name, encoded in by_default.items():
        assert encoded.scheme == "trellis"
        assert encoded.params == by_prior[name].params
        assert torch.equal(decode(encoded), decode(by_prior[name]))


def test_the_number_of_threads_changes_nothing() -> None:
    jobs = allocate(matrices(), sensitivities(), Trellis(4))
    one, two = (Encoder("fast", workers=workers).code(jobs.searched, -3.0) for workers in (1, 2))
    assert one == two


def test_small_matrices_stay_in_16_bits_where_that_is_a_small_part_of_the_budget() -> None:
    weights = {"small": torch.randn(10, 10), "w": torch.randn(100, 100)}
    assignment = Assignment(weights, {}, {}, {}, free=("w",), reserve=("small",))

    def free(budget: int | None) -> list[tuple[str, ...]]:
        return [option.free for option in assignments(assignment, budget)]

    assert free(None) == [("w",)]
    assert free(6 * 200) == [("w",), ("small", "w")]
    assert free(6 * 200 - 1) == [("small", "w")]


class Kept:
    """Records that are kept in memory."""

    def __init__(self) -> None:
        self.records: dict[str, Coded] = {}
        self.recalled = 0

    def recall(self, key: str) -> Coded | None:
        self.recalled += key in self.records
        return self.records.get(key)

    def keep(self, key: str, coded: Coded) -> Coded:
        self.records[key] = coded
        return coded


def test_what_is_kept_is_not_coded_again_at_the_same_exponent() -> None:
    jobs, kept = allocate(matrices()), Kept()
    encoder = Encoder("fast", records=kept, workers=1)
    first = encoder.code(jobs.searched, -2.0)
    assert encoder.code(jobs.searched, -2.0) == first
    assert kept.recalled == len(kept.records) == 3
    encoder.code(jobs.searched, -1.0)
    assert len(kept.records) == 6
