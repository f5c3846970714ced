"""What matrices are worth by a few evaluations of the loss: for models that cannot be differentiated, or in a hurry.

    module, batches ──► forward passes ──► Hessians of inputs ──┐
    each matrix rounded, alone ──► KL on the batches held back ─┴─► Sensitivity

Hessians say how errors of one matrix compare, and let them be fed back; how matrices compare, only the loss can say.
One matrix at a time is rounded to a plain grid and the KL it then costs, ½ f tr(E H Eᵀ), tells f. Rows weigh alike, for
which a full calibration knows better.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from birdie.compress.calibration.kl import HeldOutKL
from birdie.compress.calibration.sensitivity import Batch, Loss, calibrate
from birdie.compress.registry import decode
from birdie.compress.scheme import Sensitivity
from birdie.compress.schemes.grid import Grid

SIGMA = 0.4  # step of the grid in deviations of a row: coarse enough to be told from nothing, fine enough to be local
_LEAST = 1e-12  # nats that a matrix costs at least


def probe(
    held_out: HeldOutKL, batches: Iterable[Batch], loss: Loss, *, progress: Callable[[int], None] | None = None
) -> dict[str, Sensitivity]:
    """Sensitivities from forward passes alone: one for each of `batches`, and one of the held_out for each matrix.

    Args:
        held_out: of the module these are of.
        batches: what Hessians are taken from.
        loss: (module, batch) → anything.
        progress: called with the number of batches done.

    Raises:
        ConfigError: the module has no matrices, or its loss uses none or hands no logits to `F.cross_entropy`.
        DataError: there are no batches, or what they give is not finite.
        WeightsError: a weight is not finite.
    """
    found = calibrate(held_out.module, batches, loss, gradients=False, progress=progress)
    weights: Mapping[str, Tensor] = held_out.module.state_dict()
    priced = {}
    for name in [name for name in found if name in weights]:
        weight = weights[name].detach().cpu()
        rounded = decode(Grid(sigma=SIGMA).encode(name, weight))
        nats = max(held_out({name: rounded}), _LEAST)
        held_out({name: weight})
        priced[name] = _priced(found[name], (rounded - weight).float().flatten(1), nats)
    return priced


def _priced(sensitivity: Sensitivity, errors: Tensor, nats: float) -> Sensitivity:
    """Rows weigh what makes these errors (rows, columns) cost so many nats."""
    hessian = sensitivity.hessian
    rows = torch.ones(len(errors)) if sensitivity.row_fisher is None else sensitivity.row_fisher
    costs = (errors**2).sum(1) if hessian is None else ((errors @ hessian) * errors).sum(1)
    total = float((rows * costs).double().sum())
    return replace(sensitivity, row_fisher=rows * (2 * nats / total if total > 0 else 0.0))
