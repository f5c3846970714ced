"""Refit part by part: matrices that are not quantized yet make up for the errors of those that are.

    part 1 quantized ─► all else tuned ─► part 2 quantized ─► all else tuned ─► … ─► last part, to the target

A quantizer with error feedback makes up for errors within a matrix. Across matrices a few steps of Adam do, on the KL
from the float model, after each part. The scales stay those of the first search; only the last part's are searched
again, so that the file meets its budget.

Sources: fine-tuning of the layers that are left in AQLM (arXiv 2401.06118) and QuIP# (arXiv 2402.04396), there within
a block or for layers in float16, here for the whole model and before the rest is coded.
"""

from collections.abc import Sequence

from torch import Tensor

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.coding import decode
from birdie.compress.rate.encoding import Coder
from birdie.compress.rate.jobs import Jobs
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.cast import Cast

PARTS = 8
_MEASUREMENTS = 2  # of the held-out KL after each part


def refit_by_parts(jobs: Jobs, exponent: float, coder: Coder, calibration: CalibrationResult) -> Jobs:
    """Code all parts but the last, and tune the rest after each; return the jobs of the rest, all others fixed.

    Args:
        jobs: of the file.
        exponent: that the search found.
        coder: of the file.
        calibration: with batches, and the number of steps of Adam after each part, one batch each.
    """
    held_out = calibration.held_out
    order = list(held_out.module.state_dict()) if isinstance(held_out, HeldOut) else []
    steps = calibration.refit
    *parts, _ = parts_of(jobs, order)
    for part in parts:
        jobs = jobs.continued(coder.code([jobs.by_name[name] for name in part], exponent), {})
        tuned = calibration.refitted(decode_jobs(jobs), tunable(jobs), steps, measurements=min(steps, _MEASUREMENTS))
        jobs = jobs.continued({}, tuned)
    return jobs


def parts_of(jobs: Jobs, order: Sequence[str]) -> list[list[str]]:
    """Return the quantized tensors in one to `PARTS` parts of about equal size.

    Args:
        jobs: of the model.
        order: names in the order of the model; others come last.
    """
    sizes = {
        name: job.tensor.numel()
        for name, job in jobs.by_name.items()
        if job.role == "searched" or (job.role == "rule" and _quantizes(job.scheme))
    }
    ranks = {name: rank for rank, name in enumerate(order)}
    parts: list[list[str]] = [[]]
    done = 0
    for name in sorted(sizes, key=lambda name: ranks.get(name, len(ranks))):
        if parts[-1] and done * PARTS >= len(parts) * sum(sizes.values()):
            parts.append([])
        parts[-1].append(name)
        done += sizes[name]
    return parts


def decode_jobs(jobs: Jobs) -> dict[str, Tensor]:
    """Return all tensors, decoded as far as they are fixed, tied ones under each of their names."""
    state = {**jobs.assignment.tensors, **{name: decode(tensor) for name, tensor in jobs.fixed.items()}}
    return state | {second: state[first] for second, first in jobs.assignment.ties.items()}


def tunable(jobs: Jobs) -> list[str]:
    """Return the names of float tensors that are not fixed yet and need not keep their bits."""
    return [
        name
        for name, job in jobs.by_name.items()
        if job.tensor.is_floating_point()
        and (job.role in ("searched", "reserve") or isinstance(job.scheme, Cast) or _quantizes(job.scheme))
    ]


def _quantizes(scheme: Scheme | None) -> bool:
    return scheme is not None and scheme.quantizes
