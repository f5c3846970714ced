"""Refit part by part: matrices that are not quantized yet make up for the errors of those that are.

    part 1 quantized ─► all else tuned ─► part 2 quantized ─► all else tuned ─► … ─► last part, to the target

A quantizer with error feedback makes up for errors within a matrix. Across matrices a few steps of Adam do, on the KL
from the float model, after each part. The scales stay those of the first search; only the last part's are searched
again, so that the file meets its budget.

Sources: fine-tuning of the layers that are left in AQLM (arXiv 2401.06118) and QuIP# (arXiv 2402.04396), there within
a block or for layers in float16, here for the whole model and before the rest is coded.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.allocation import Allocation
from birdie.compress.registry import decode
from birdie.compress.schemes.cast import Cast
from birdie.compress.state import EncodedState

PARTS = 8
_MEASUREMENTS = 2  # of the held-out KL after each part
Finish = Callable[[Allocation], EncodedState]


def refit_by_parts(
    allocation: Allocation, exponent: float, calibration: CalibrationResult, steps: int, finish: Finish
) -> EncodedState:
    """Encode every tensor, part by part.

    Args:
        allocation: of the search.
        exponent: that the search found.
        calibration: with batches.
        steps: number of Adam steps after each part, one batch each.
        finish: encodes the last part, in an allocation in which all other matrices are fixed.
    """
    order = [] if calibration.held_out is None else list(calibration.held_out.module.state_dict())
    *parts, _ = parts_of(allocation, order)
    for part in parts:
        allocation = allocation.continued(allocation.encode_part(part, exponent), {})
        tuned = calibration.refitted(
            decoded(allocation), tunable(allocation), steps, measurements=min(steps, _MEASUREMENTS)
        )
        allocation = allocation.continued({}, tuned)
    return finish(allocation)


def parts_of(allocation: Allocation, order: Sequence[str]) -> list[list[str]]:
    """Return the quantized tensors in one to `PARTS` parts of about equal size.

    Args:
        allocation: of the model.
        order: names in the order of the model; others come last.
    """
    settled, tensors = allocation.assignment.settled, allocation.assignment.tensors
    names = [name for name in tensors if name in allocation.matrices or (name in settled and settled[name].quantizes)]
    ranks = {name: rank for rank, name in enumerate(order)}
    names.sort(key=lambda name: ranks.get(name, len(ranks)))
    total = sum(tensors[name].numel() for name in names)
    parts: list[list[str]] = [[]]
    done = 0
    for name in names:
        if parts[-1] and done * PARTS >= len(parts) * total:
            parts.append([])
        parts[-1].append(name)
        done += tensors[name].numel()
    return parts


def decoded(allocation: Allocation) -> dict[str, Tensor]:
    """Return all tensors, decoded as far as they are fixed, tied ones under each of their names."""
    assignment = allocation.assignment
    state = {**assignment.tensors, **{name: decode(encoded) for name, encoded in allocation.fixed.items()}}
    return state | {second: state[first] for second, first in assignment.ties.items()}


def tunable(allocation: Allocation) -> list[str]:
    """Return the names of float tensors that are not fixed yet and need not keep their bits."""
    assignment = allocation.assignment
    schemes = {**assignment.settled, **assignment.small}
    return [
        name
        for name, tensor in assignment.tensors.items()
        if name not in allocation.fixed
        and tensor.is_floating_point()
        and (name not in schemes or schemes[name].quantizes or isinstance(schemes[name], Cast))
    ]
