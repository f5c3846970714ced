"""The prior tells kinds of weights and rows apart, in no unit, and its assumed inputs lower the error of outputs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birdie.compress.prior import KINDS, covariance, kinds_of, prior, prior_in_units_of
from birdie.compress.scheme import Sensitivity
from birdie.errors import WeightsError

SHAPES = {
    "conv.weight": (32, 16, 3, 3),
    "frames.weight": (24, 16, 5),
    "rnn.weight_ih_l0": (64, 10),
    "rnn.weight_hh_l0": (64, 16),
    "fc.weight": (40, 30),
}


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rows(sensitivity: Sensitivity) -> Tensor:
    assert sensitivity.row_fisher is not None
    return sensitivity.row_fisher


MODELS: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    # name → shapes of a model, and the letters of kinds: image, sound, recurrent, embedding, matrix
    "GPT": ({"a": (500, 64), **{f"{i}{j}": (64, 64) for i in range(4) for j in range(4)}}, "e" + 16 * "m"),
    "two tables": ({"a": (500, 64), "z": (500, 64), "q": (64, 64), "up": (256, 64), "down": (64, 256)}, "eemmm"),
    "fused": (
        {"t": (500, 64), "a": (192, 64), "b": (192, 64), "c": (192, 64), "o": (64, 64), "p": (64, 64), "q": (64, 64)},
        "emmmmmm",
    ),
    "factorized": ({"t": (500, 64), "p": (128, 64), "q": (128, 128), "k": (128, 128)}, "mmmm"),
    "as tall as a layer": ({"t": (256, 64), "up": (256, 64), "down": (64, 256), "q": (64, 64)}, "mmmm"),
    "LSTM": ({"i": (256, 40), "h": (256, 64), "out": (10, 64)}, "rrm"),
    "LSTM of its own width": ({"conv": (64, 32, 3), "i": (256, 64), "h": (256, 64)}, "srr"),
    "GRU, both directions": ({"i": (192, 40), "h": (192, 64), "j": (192, 40), "k": (192, 64)}, "rrrr"),
    "Mamba": ({f"{i}{j}": shape for i in range(3) for j, shape in enumerate([(256, 64), (64, 128)])}, 6 * "m"),
    "feed forward": ({"a": (256, 64), "b": (256, 64), "c": (64, 256), "d": (64, 256)}, "mmmm"),
    "as many heights as layers": ({str(rows): (rows, 64) for rows in (80, 96, 112, 128, 160)}, "mmmmm"),
    "perceptron": ({"a": (256, 784), "b": (256, 256), "c": (10, 256)}, "mmm"),
    "convolutions": ({"a": (16, 3, 3, 3), "b": (16, 8, 5), "c": (10, 16), "d": (8, 4, 2, 3, 3)}, "ismi"),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_kind_is_told_by_shapes(model: str) -> None:
    shapes, letters = MODELS[model]
    kinds = kinds_of({name: torch.empty(shape) for name, shape in shapes.items()})
    assert "".join(kind[0] for kind in kinds.values()) == letters


@given(factor=st.floats(1e-6, 1e6), seed=st.integers(0, 100))
@settings(max_examples=20)
def test_the_unit_of_a_layer_does_not_count(factor: float, seed: int) -> None:
    """A relative error costs the same, so a row that is larger by a factor weighs less by its square."""
    plain = prior(weights(seed))
    scaled = prior({name: weight.double() * factor for name, weight in weights(seed).items()})
    for name, sensitivity in plain.items():
        np.testing.assert_allclose(rows(scaled[name]) * factor**2, rows(sensitivity), rtol=1e-4)


@pytest.mark.parametrize("decades", [5, -5, 20, -20])
def test_units_of_another_scale_count_like_the_others(decades: int) -> None:
    """Rows times a factor, and columns of the next layer divided by it: the same function."""
    torch.manual_seed(0)  # three units, so a bound of their ratios holds for most draws, not for all
    state = {"below.weight": torch.randn(96, 40), "above.weight": torch.randn(24, 96), **weights()}
    units, factor = torch.tensor([3, 41, 77]), 10.0**decades
    scaled = {name: weight.double().clone() for name, weight in state.items()}
    scaled["below.weight"][units] *= factor
    scaled["above.weight"][:, units] /= factor
    plain, other = prior(state), prior(scaled)
    inverse = torch.ones(96, dtype=torch.float64)
    inverse[units] /= factor**2
    ratios = rows(other["below.weight"]) / rows(plain["below.weight"]) / inverse
    energies = state["below.weight"].double().square().sum(1)
    ratios[units] *= energies[units] / energies.median()  # at its own energy, which is not that of the typical row
    np.testing.assert_allclose(ratios, 1, rtol=0.2)
    taps = other["above.weight"].taps
    assert plain["above.weight"].taps is None
    assert taps is not None
    assert taps.power is not None
    # a column of 24 rows has the median energy that chance says
    assert (np.abs(np.log(taps.power[units] / factor**2)) < np.log(4)).all()
    assert (np.delete(taps.power, units) == 1).all()


@pytest.mark.parametrize(
    "shape", [(8, 4, 3, 3), (8, 4, 7), (8, 4, 2, 3, 3), (8, 1, 5, 5), (8, 4, 1, 1), (8, 3, 40, 40)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_assumed_inputs_have_variance_one_and_a_covariance(shape: tuple[int, ...], kind: str) -> None:
    taps = covariance(shape, KINDS[kind])
    if not KINDS[kind].tap_correlation:
        assert (taps is None) == (not KINDS[kind].shared or shape[1] == 1)
        return
    if taps is None:
        assert np.prod(shape[2:]) == 1 or shape[1] == 1
        return
    assert np.prod(shape[2:]) % len(taps.taps) == 0
    np.testing.assert_allclose(taps.taps, taps.taps.T)
    assert (taps.taps.diagonal() == 1).all()
    assert np.linalg.eigvalsh(taps.taps).min() > 0
    assert (taps.shared > 0) == (shape[1] > 1), "a first or depthwise layer may have inputs of any mean"


def test_calibrated_weights_keep_what_was_measured_and_set_the_unit_of_the_others() -> None:
    state = weights()
    known = {"fc.weight": Sensitivity(torch.eye(30), 7 * rows(prior(state)["fc.weight"])), "elsewhere": Sensitivity()}
    every = prior_in_units_of(known, state)
    assert every.keys() == state.keys() - {"fc.weight"}
    for name in every:
        np.testing.assert_allclose(rows(every[name]), 7 * rows(prior(state)[name]), rtol=1e-6)
    for name, sensitivity in prior_in_units_of({}, state).items():
        assert torch.equal(rows(sensitivity), rows(prior(state)[name]))


def test_zeros_have_a_finite_weight_and_what_is_not_finite_is_refused() -> None:
    zero_row = weights()["conv.weight"]
    zero_row[3] = 0
    for weight in (torch.zeros(4, 4, 3, 3), zero_row, torch.zeros(5)):
        values = rows(prior({"x": weight})["x"])
        assert bool((values > 0).all() and values.isfinite().all())
    zero_row[0, 0, 0, 0] = torch.nan
    with pytest.raises(WeightsError, match="'x'"):
        prior({"x": zero_row})
