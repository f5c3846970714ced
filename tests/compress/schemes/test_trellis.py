"""Trellis-coded quantization: more states and more feedback cost less loss, a larger λ fewer bits, and any tensor is
either quantized soundly or kept."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.trellis import Trellis, column_scales, is_pruned, row_scales
from birdie.compress.tensors import rows_columns
from birdie.compress.trellis import viterbi
from birdie.compress.trellis.feedback import feedback
from birdie.entropy.trellis_states import STATES, machine
from tests.compress.matrices import coded_bytes, covariance


def sensitivity(rows: int, columns: int, seed: int = 0) -> Sensitivity:
    output = covariance(rows, seed + 1)
    return Sensitivity(covariance(columns, seed), output.diagonal().clone(), output)


def at_price(scheme: Trellis, weight: Tensor, known: Sensitivity | None, price: float) -> Encoded:
    """Encode at the scales at which a bit costs `price` nats, s² c F = price / ln 2, unless the scheme has scales."""
    if known is None or scheme.sigma is not None or scheme.bits is not None:
        return scheme.encode("w", weight, sensitivity=known)
    factors = feedback(known, *rows_columns(tuple(weight.shape)), output=scheme.output)
    return scheme.encode_with("w", weight, factors, math.sqrt(price / (math.log(2) * scheme.distortion)))


def weights(rows: int, columns: int, seed: int = 0) -> Tensor:
    return 0.1 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def loss(known: Sensitivity, weight: Tensor, encoded: Encoded) -> float:
    """tr(G E H Eᵀ) of what was decoded."""
    assert known.hessian is not None
    assert known.output is not None
    error = decode(encoded).double() - weight.double()
    return float(torch.trace(known.output @ error @ known.hessian @ error.T))


@pytest.mark.parametrize("seed", range(2))
def test_more_states_lose_less_at_the_same_scales(seed: int) -> None:
    known, weight = sensitivity(96, 64, seed), weights(96, 64, seed)
    nearest = [loss(known, weight, at_price(Trellis(states, rate=0.0), weight, known, 1e-4))
               for states in (1, 4, 8, 32)]  # fmt: skip
    assert all(value == pytest.approx(nearest[0], rel=0.2) for value in nearest), "scales make up for the states"
    tall, fixed = weights(600, 64, seed), []
    for states in (1, 4, 8, 32):
        scheme = Trellis(states, sigma=0.4, rate=0.0)
        fixed.append(float(((decode(scheme.encode("w", tall)) - tall) ** 2).mean()))
    assert all(more < fewer for fewer, more in pairwise(fixed))
    assert fixed[-1] < 0.8 * fixed[0]


def test_feedback_loses_less_than_rounding_and_feedback_on_both_sides_less_than_on_one() -> None:
    """At the same scales, which the columns' weights set alike."""
    known, weight = sensitivity(160, 96), weights(160, 96)
    shell = at_price(Trellis(8, rate=0.0), weight, known, 1e-4)
    row, column = row_scales(shell), column_scales(shell)
    rounded = replace(
        shell,
        params=(1, *shell.params[1:]),
        streams=(np.rint(weight.numpy() / row[:, None] / column).astype(np.int32), *shell.streams[1:]),
    )
    plain = at_price(Trellis(1, rate=0.0), weight, replace(known, output=None), 1e-4)
    assert loss(known, weight, plain) < 0.9 * loss(known, weight, rounded)
    # Both minimize the same tr(G E H Eᵀ) at scales of their own, so they are compared at equal bytes.
    curve = [at_price(Trellis(8, output=False), weight, known, 1e-5 * 4**power) for power in (2, 1, 0)]
    sizes, losses = [coded_bytes(point) for point in curve], [loss(known, weight, point) for point in curve]
    both = at_price(Trellis(8, output=True), weight, known, 4e-5)
    interpolated = np.exp(np.interp(coded_bytes(both), sizes, np.log(losses)))
    assert loss(known, weight, both) < 0.97 * interpolated


@pytest.mark.parametrize("along", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (20, 128), (160, 40)])
def test_a_matrix_of_inputs_by_outputs_is_worth_about_what_its_transpose_is(
    outputs: int, inputs: int, along: bool
) -> None:
    """A long path runs along its rows; where that would load slowly, it is a plain grid."""
    scheme, plain = Trellis(8, along=along), sensitivity(outputs, inputs)
    assert plain.output is not None
    assert plain.hessian is not None
    turned = replace(plain, hessian=plain.output, output=plain.hessian, rows_are_inputs=True)
    weight = weights(outputs, inputs)
    upright, lying = (
        at_price(scheme, one, known, 1e-4) for one, known in ((weight, plain), (weight.T.contiguous(), turned))
    )
    assert lying.params[0] == (-8 if along else 1)
    error = decode(lying).double().T - weight.double()
    losses = loss(plain, weight, upright), float(torch.trace(plain.output @ error @ plain.hessian @ error.T))
    prices = [cost + 1e-4 * 8 * coded_bytes(one) for cost, one in zip(losses, (upright, lying), strict=True)]
    assert prices[1] < 1.2 * prices[0]


def test_a_larger_lambda_costs_fewer_bytes_and_more_loss() -> None:
    known, weight = sensitivity(80, 64), weights(80, 64)
    curve = [at_price(Trellis(8), weight, known, 1e-6 * 8**power) for power in range(5)]
    sizes, losses = [coded_bytes(encoded) for encoded in curve], [loss(known, weight, encoded) for encoded in curve]
    assert all(more < fewer for fewer, more in pairwise(sizes))
    assert all(more > fewer for fewer, more in pairwise(losses))


def test_a_scale_finer_by_lambda_pays_lambda_a_bit() -> None:
    """λ is the price of a bit: −d(½ loss)/d(bits) = λ, in nats; at high rate, a trellis of scales set by the loss."""
    known, weight = sensitivity(160, 128), weights(160, 128)
    lam = 1e-6
    fine, coarse = (
        at_price(Trellis(8, output=False), weight, replace(known, output=None), price) for price in (lam / 2, lam * 2)
    )
    only_rows = replace(known, output=torch.diag(known.output.diagonal()))  # type: ignore[union-attr]
    saved = loss(only_rows, weight, coarse) / 2 - loss(only_rows, weight, fine) / 2
    assert saved / (8 * (coded_bytes(fine) - coded_bytes(coarse))) == pytest.approx(lam, rel=0.15)


def test_a_path_along_the_rows_is_the_cheapest_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other numbers near a few weights are better, and overlapping stretches agree with a single search."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2, 3, generator=generator)
    encoded = Trellis(4, sigma=0.8, rate=0.0).encode("w", weight)
    least = float(((decode(encoded) - weight) ** 2).sum())
    nearest = np.rint(weight.numpy() / row_scales(encoded)[:, None]).astype(np.int32)
    for moves in np.ndindex(*(3,) * 6):
        numbers = nearest + np.array(moves, np.int32).reshape(2, 3) - 1
        other = decode(replace(encoded, streams=(numbers, *encoded.streams[1:])))
        assert float(((other - weight) ** 2).sum()) >= least * 0.9999
    source = torch.randn(40, 50, generator=generator)
    at_once = Trellis(8, sigma=0.3).encode("w", source)
    monkeypatch.setattr(viterbi, "STRETCH", 300)
    assert (Trellis(8, sigma=0.3).encode("w", source).streams[0] == at_once.streams[0]).all()


def test_a_gaussian_source_comes_nearer_to_the_bound_than_on_any_grid() -> None:
    """Bits above ½ log₂(variance / error) on 200,000 samples: by at least 0.12 less than on a plain grid."""
    source = torch.randn(500, 400, generator=torch.Generator().manual_seed(0))
    gaps = []
    for scheme in (Trellis(1, sigma=0.3), Trellis(4, sigma=0.35), Trellis(8, sigma=0.35)):
        encoded = scheme.encode("w", source)
        error = float(((decode(encoded) - source) ** 2).mean())
        gaps.append(8 * coded_bytes(encoded) / source.numel() - 0.5 * math.log2(1 / error))
    assert min(gaps) > 0
    assert max(gaps[1:]) < gaps[0] - 0.12


def test_zero_tensors_are_kept_and_zero_rows_stay_zero() -> None:
    assert decode(Trellis().encode("w", torch.zeros(4, 40))).tolist() == torch.zeros(4, 40).tolist()
    for columns in (5, 40):
        weight = weights(30, columns)
        weight[7:9] = weight[29] = 0
        for known in (None, Sensitivity(torch.eye(columns), torch.ones(30))):
            decoded = decode(at_price(Trellis(8), weight, known, 1e-4))
            assert float(decoded[[7, 8, 29]].abs().max()) < 1e-30
            if columns == 40:
                assert not decoded[[7, 8, 29]].any()


def test_rows_are_left_out_for_what_all_of_their_inputs_lose_together() -> None:
    """Inputs that share a mean: feedback leaves next to nothing of each, yet a row of zeros loses the mean itself."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 64, generator=generator)
    weight = torch.randn(32, 64, generator=generator).abs() * torch.logspace(-2, 0, 32)[:, None]

    def left_out(mean: float) -> int:
        seen = inputs + mean
        sensitivity = Sensitivity(seen.T @ seen / len(seen), torch.ones(32))
        return int((decode(at_price(Trellis(), weight, sensitivity, 0.02)) == 0).all(1).sum())

    assert 0 == left_out(10.0) < left_out(0.0) < 32


def test_the_distortion_of_each_trellis_is_what_it_says() -> None:
    """Nearest paths on a fine grid, in squared scales: the bound on what a trellis can do for errors alone."""
    source = torch.rand(4000, 16, generator=torch.Generator().manual_seed(1)) * 60
    for states in STATES:
        encoded = Trellis(states, sigma=0.06, rate=0.0).encode("w", source)
        scale = row_scales(encoded)[:, None].astype(np.float64)
        error = (decode(encoded).double().numpy() - source.double().numpy()) / scale
        assert float((error**2).mean()) == pytest.approx(Trellis(states).distortion, rel=0.06)
        assert machine(states).odd.size == states


PRUNED = {  # the weights that are zero
    "one in ten": lambda draw: draw < -0.128,
    "nine in ten": lambda draw: draw < 0.128,
    "rows": lambda draw: (torch.arange(len(draw)) % 5 == 0)[:, None].expand_as(draw),
}


@pytest.mark.parametrize("scheme", [Trellis(), Trellis(8, 0.5), Trellis(bits=4), Trellis(1, bits=3, rate=0.0)], ids=str)
@pytest.mark.parametrize("columns", [9, 80])
@pytest.mark.parametrize("kind", PRUNED)
def test_zeros_of_a_pruned_matrix_stay_zeros(kind: str, columns: int, scheme: Trellis) -> None:
    """Half of the states have no zero, and feedback would move a zero away from it."""
    weight = weights(40, columns).masked_fill(PRUNED[kind](weights(40, columns, 1)), 0)
    for known in (None, sensitivity(40, columns)):
        decoded = decode(at_price(scheme, weight, known, 1e-3))
        assert not decoded[weight == 0].any()
        assert decoded.any()


def test_weights_that_were_quantized_once_are_not_pruned() -> None:
    """They have as many zeros as other multiples of their scale, and the trellis serves them as any others."""
    dead = weights(32, 256)
    dead[4:20] = 0  # rows that decode to zeros in any case
    for weight in (weights(32, 256), (weights(32, 256) * 50).round() / 50, dead):
        assert not is_pruned(weight.numpy())
    assert is_pruned(weights(32, 256).masked_fill(weights(32, 256, 1) < -0.128, 0).numpy())


def test_bits_of_weights_below_their_scale_go_on_to_fall_and_outputs_do_not_shrink() -> None:
    """A sensitivity that holds for large errors leaves no matrix out at once, nor at a floor of its bytes."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(64, 128, generator=generator), torch.randn(512, 128, generator=generator)
    hessian = inputs.T @ inputs / len(inputs)
    outputs, sizes, shares = weight @ hessian, [], []
    factors = feedback(Sensitivity(hessian, torch.ones(64), at_large=True), 64, 128)
    for scale in (2.0, 2.5, 3.0, 3.5):
        encoded = Trellis().encode_with("w", weight, factors, scale)
        sizes.append(coded_bytes(encoded))
        shares.append(float((outputs * decode(encoded)).sum() / (outputs * weight).sum()))
    assert all(fine > 1.03 * coarse for fine, coarse in pairwise(sizes))
    assert sizes[-1] < 0.8 * sizes[0]
    assert min(shares) > 0.95
    assert max(shares) < 1.05
