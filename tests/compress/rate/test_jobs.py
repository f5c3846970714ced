"""Jobs: at one exponent the last bit is worth the same in every matrix, and sizes follow it steadily."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from birdie.compress.coding import Coded, decode, with_integers
from birdie.compress.prior import prior
from birdie.compress.rate.assignment import Assignment
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.jobs import COARSEST, FINEST, Jobs, assignments, jobs_of
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.grid import MAX_SYMBOL, Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.trellis import Trellis
from tests.compress.matrices import coded_bytes, covariance, gaussian


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


def test_a_draft_estimates_the_size() -> None:
    allocation = allocate(matrices(), sensitivities(), Trellis(8))
    full, draft = (total_bytes(encode(allocation, -3.5, draft=draft)) for draft in (False, True))
    assert draft == pytest.approx(full, rel=0.12)


def fisher(sensitivity: Sensitivity) -> Tensor:
    assert sensitivity.row_fisher is not None
    return sensitivity.row_fisher


def test_the_exponent_is_relative_to_the_weights_and_to_the_loss() -> None:
    """Other units of weights or of loss change scales, not symbols."""
    weights, known = matrices(), sensitivities()
    plain = encode(allocate(weights, known, Trellis(4)), -3.0)
    larger = {name: 4 * weight for name, weight in weights.items()}
    louder = {name: Sensitivity(item.hessian, 16 * fisher(item)) for name, item in known.items()}
    scaled = encode(allocate(larger, louder, Trellis(4)), -3.0)
    for name in weights:
        assert (plain[name].streams[0] == scaled[name].streams[0]).all()
        assert torch.equal(4 * decode(plain[name]), decode(scaled[name]))


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


def test_what_a_calibration_missed_takes_the_prior_in_its_units() -> None:
    """Whatever unit the loss has, the matrices it does not tell of keep their share of the bits."""
    weights = {"w": matrices()["one"], "tok_emb.weight": matrices()["two"]}
    known = {"w": sensitivities()["one"], "other": Sensitivity()}
    louder = {"w": Sensitivity(known["w"].hessian, 16 * fisher(known["w"]))}
    quiet, loud = (encode(allocate(weights, item), -2.0) for item in (known, louder))
    assert torch.equal(decode(quiet["tok_emb.weight"]), decode(loud["tok_emb.weight"]))
    assert not torch.equal(decode(quiet["w"]), decode(encode(allocate(weights), -2.0)["w"]))


def test_a_sample_is_weights_in_scales() -> None:
    """Its spread is that of the symbols, and its size about what was asked for."""
    allocation = allocate(matrices(), sensitivities(), Trellis(1))
    for count in (2000, 10_000):
        assert 0.5 * count < allocation.normalized(count).size < 2 * count + 1000
    symbols = np.concatenate([tensor.streams[0].ravel() for tensor in encode(allocation, -4.0).values()])
    assert float((allocation.normalized(50_000) * 2.0**4).std()) == pytest.approx(float(symbols.std()), rel=0.1)


def test_the_number_of_threads_changes_nothing() -> None:
    jobs = allocate(matrices(), sensitivities(), Trellis(4))
    one, two = (Encoder("fast", workers=workers).code(jobs.searched, -3.0) for workers in (1, 2))
    assert one == two


def test_a_matrix_that_hardly_counts_does_not_keep_the_others_from_the_coarsest() -> None:
    """The exponent is of the mean matrix; where one pulls that down by dozens of octaves, the range must follow."""
    known = sensitivities()
    known["three"] = Sensitivity(1e-40 * torch.eye(128), known["three"].row_fisher)
    allocation = allocate(matrices(), known)
    weights = sum(weight.numel() for weight in matrices().values())
    assert total_bytes(encode(allocation, allocation.coarsest)) < 0.1 * weights / 8


def test_small_matrices_stay_in_16_bits_where_that_is_a_small_part_of_the_budget() -> None:
    weights = {"small": torch.randn(10, 10), "w": torch.randn(100, 100)}
    assignment = Assignment(weights, {}, {}, {}, free=("w",), reserve=("small",))

    def free(budget: int | None) -> list[tuple[str, ...]]:
        return [option.free for option in assignments(assignment, budget)]

    assert free(None) == [("w",)]
    assert free(6 * 200) == [("w",), ("small", "w")]
    assert free(6 * 200 - 1) == [("small", "w")]


def test_settled_tensors_are_encoded_by_their_scheme_at_any_exponent() -> None:
    weights = {"a": gaussian(8, 8), "b": gaussian(64, 64), "c": torch.arange(5), "d": gaussian(9)}
    assignment = Assignment(weights, {"e": "a"}, {"a": Grid(bits=4)}, {"c": Lossless()}, free=("b",), reserve=("d",))
    jobs, encoder = jobs_of(assignment), Encoder("fast")
    assert [job.name for job in jobs.searched] == ["b"]
    assert [job.name for job in jobs.rules] == ["a"]
    fine, coarse = (jobs.state(encoder.code([*jobs.by_name.values()], exponent)) for exponent in (-3.0, 0.0))
    lossless = encoder.code(jobs.lossless())
    assert [tensor.scheme for tensor in fine.tensors.values()] == ["grid", "trellis", "lossless", "cast"]
    assert {name: tensor.scheme for name, tensor in lossless.items()} == dict.fromkeys("bcd", "lossless")
    assert all(fine.tensors[name] == coarse.tensors[name] for name in "acd")
    assert torch.equal(fine.decode()["e"], decode(Grid(bits=4).encode("a", weights["a"])))
    assert not torch.equal(fine.decode()["b"], coarse.decode()["b"])


def test_some_rows_tell_the_size_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (600, 300), "narrow": (2000, 40), "tok_emb.weight": (3000, 64)}
    spread = torch.exp(0.3 * torch.randn(3000, 1, generator=generator))
    weights = {name: torch.randn(shape, generator=generator) * spread[: shape[0]] for name, shape in shapes.items()}
    allocation = allocate(weights)
    some, factors = allocation.sampled(40_000, 64)
    for exponent in (-3.0, -1.0):
        every, sampled = encode(allocation, exponent), encode(some, exponent)
        for name, factor in factors.items():
            assert factor > 2
            expected = coded_bytes(every[name])
            assert factor * coded_bytes(sampled[name]) == pytest.approx(expected, rel=0.03)


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


@pytest.mark.parametrize("keep", [False, True])
def test_a_coded_tensor_opens_to_the_one_that_was_encoded(keep: bool) -> None:
    jobs = allocate(matrices())
    coded = Encoder("fast", keeps_integers=keep).code(jobs.searched, -2.0)
    for name, encoded in encode(jobs, -2.0).items():
        again = with_integers(coded[name])
        assert (coded[name].encoded is not None) == keep
        assert (again.scheme, again.params, again.shape) == (encoded.scheme, encoded.params, encoded.shape)
        assert all((one == two).all() for one, two in zip(again.streams, encoded.streams, strict=True))
