"""Calibration without gradients: sensitivities from forward passes, for models that cannot be differentiated.

    module, batches ──► forward passes ──► Hessians of inputs ───┐
    one matrix rounded at a time ──► KL on the held-out batches ─┴─► Sensitivity

Input Hessians rank the errors within one matrix and allow error feedback; only the loss can compare matrices. One
matrix at a time is rounded to a plain grid, and its factor f follows from the KL that costs, ½ f tr(E H Eᵀ). All rows
of a matrix get the same weight, where a calibration with gradients measures one per row; it is faster, and files are
larger.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from birdie.compress.calibration.sensitivity import Batch, Loss, measure
from birdie.compress.registry import decode
from birdie.compress.scheme import Sensitivity
from birdie.compress.schemes.grid import Grid

SIGMA = 0.4  # scale of the grid in deviations of a row: coarse enough to measure, fine enough to be local
_LEAST = 1e-12  # smallest KL of a matrix, in nats


class Distance(Protocol):
    """Measure of the distance of a module with other weights from itself; lacking weights stay."""

    @property
    def module(self) -> nn.Module:
        """The module from which distances are measured."""
        ...

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        """Return the distance; 0 for the weights of the module."""
        ...


def probe(
    held_out: Distance, batches: Iterable[Batch], loss: Loss, *, progress: Callable[[int], None] | None = None
) -> dict[str, Sensitivity]:
    """Return sensitivities from forward passes: one for every batch, and one measurement of the KL for every matrix.

    Args:
        held_out: KL of the module to calibrate, or another measure of what a change of its weights costs.
        batches: calibration batches for the Hessians.
        loss: (module, batch) → anything.
        progress: called with the number of batches done.
    """
    sensitivities = measure(held_out.module, batches, loss, gradients=False, progress=progress)
    weights: Mapping[str, Tensor] = held_out.module.state_dict()
    scaled = {}
    for name in [name for name in sensitivities if name in weights]:
        weight = weights[name].detach().cpu()
        rounded = decode(Grid(sigma=SIGMA).encode(name, weight))
        nats = max(held_out({name: rounded}), _LEAST)
        held_out({name: weight})
        scaled[name] = _scaled(sensitivities[name], (rounded - weight).float().flatten(1), nats)
    return scaled


def _scaled(sensitivity: Sensitivity, errors: Tensor, nats: float) -> Sensitivity:
    """Return `sensitivity` with row weights for which `errors` (rows, columns) cost `nats`."""
    hessian = sensitivity.hessian
    rows = torch.ones(len(errors), device=errors.device) if sensitivity.row_fisher is None else sensitivity.row_fisher
    if hessian is not None:
        weighted = errors @ hessian
    else:
        weighted = errors if sensitivity.blocks is None else sensitivity.blocks.product(errors)
    costs = (weighted * errors).sum(1)
    total = float((rows * costs).double().sum())
    return replace(sensitivity, row_fisher=rows * (2 * nats / total if total > 0 else 0.0))
