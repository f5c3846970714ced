"""Scale tells nothing: networks that are the same function have files of one size and about one error."""

import io
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import birdie
from birdie.compress.registry import decode
from birdie.compress.scheme import Sensitivity
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.trellis.feedback import feedback

State = dict[str, Tensor]
SIZES = (48, 128, 128, 16)
UNITS = torch.tensor([3, 40, 77])
SEEDS = 3


def network(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(SIZES)):
        state[f"{layer}.weight"] = torch.randn(outputs, inputs, generator=generator) * (2 / inputs) ** 0.5
        state[f"{layer}.bias"] = 0.1 * torch.randn(outputs, generator=generator)
    return state


def outputs(state: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    x = inputs.double()
    for layer in range(3):
        x = F.linear(x, state[f"{layer}.weight"].double(), state[f"{layer}.bias"].double())
        x = x if layer == 2 else F.relu(x)
    return x


def units(factor: float, some: Any = UNITS, layer: int = 0) -> Callable[[State, Tensor], None]:
    """Return what multiplies hidden units, and divides the next layer's columns."""

    def rescale(state: State, inputs: Tensor) -> None:  # noqa: ARG001
        for name in ("weight", "bias"):
            state[f"{layer}.{name}"][some] *= factor
        state[f"{layer + 1}.weight"][:, some] /= factor

    return rescale


def column(factor: float) -> Callable[[State, Tensor], None]:
    """Return what multiplies a column of the first layer, and divides its input."""

    def rescale(state: State, inputs: Tensor) -> None:
        state["0.weight"][:, 5] *= factor
        inputs[:, 5] /= factor

    return rescale


RESCALED = {
    **{f"units times {factor:g}": units(factor) for factor in (1e3, 1e-20)},
    "a layer times 1e20": units(1e20, slice(None)),
    "a column times 1e5": column(1e5),
}


def saved(state: State, inputs: Tensor, path: Path, settings: dict[str, Any]) -> tuple[int, float]:
    """Return the bytes of the file, and the squared error of the outputs."""
    size = birdie.save(state, path, effort="fast", **settings).bytes
    return size, float((outputs(birdie.load(path), inputs) - outputs(state, inputs)).square().mean())


@pytest.mark.parametrize("settings", [{}, {"bits": 5}], ids=["default", "budget"])
def test_rescaled_networks_have_files_alike(settings: dict[str, Any], tmp_path: Path) -> None:
    errors: dict[str, list[float]] = {name: [] for name in RESCALED}
    sizes: dict[str, list[float]] = {name: [] for name in RESCALED}
    for seed in range(SEEDS):
        inputs = torch.randn(500, SIZES[0], generator=torch.Generator().manual_seed(seed)).double()
        size, error = saved(network(seed), inputs, tmp_path / "m.birdie", settings)
        for name, rescale in RESCALED.items():
            state, changed = network(seed), inputs.clone()
            rescale(state, changed)
            other, other_error = saved(state, changed, tmp_path / "m.birdie", settings)
            errors[name].append(math.log(other_error / error))
            sizes[name].append(other / size)
    for name in RESCALED:
        # scales of columns take 300 of 24,000 bytes
        assert abs(float(np.mean(sizes[name])) - 1) < 0.015, name
        assert math.exp(float(np.mean(errors[name]))) < 1.3, name


@pytest.mark.parametrize("heavy", [1, 40])
def test_small_weights_beside_large_ones_keep_no_larger_errors_than_themselves(heavy: int) -> None:
    """Few weights of a row are large, the others are 1/10,000 of them, and some rows or all of them are such."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 256, generator=generator)
    weight[:heavy, 8:] *= 1e-4
    for known in (Sensitivity(), Sensitivity(row_fisher=1 / weight.double().square().mean(1))):
        factors = feedback(known, *weight.shape)
        scale = None if known.row_fisher is None else 2.0**-4
        decoded = decode(Trellis(8, bits=6).encode_with("x", weight, factors, scale))
        error = (decoded - weight)[:heavy, 8:].square().mean().sqrt()
        assert error < 2 * weight[:heavy, 8:].square().mean().sqrt()


@pytest.mark.parametrize("bits", [2.5, 3])
def test_narrow_rows_cost_no_more_than_wide_ones(bits: float) -> None:
    """Chance makes some of 16 weights small, which is no reason to give up the trellis; and the budget is met."""
    weights = torch.randn(32_000, generator=torch.Generator().manual_seed(0))
    errors = []
    for width in (16, 320):
        weight = weights.reshape(-1, width)
        file = io.BytesIO()
        summary = birdie.save({"w": weight}, file, bits=bits, effort="fast")
        assert bits - 0.05 < summary.bits_per_weight <= bits
        errors.append(float((birdie.load(file)["w"] - weight).square().mean()))
    assert errors[0] < 1.2 * errors[1]
