"""Forecast of a .birdie file, by some rows of every matrix: `birdie compress --dry-run`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from threadpoolctl import threadpool_limits
from torch import Tensor

from birdie.artifact.content import Content
from birdie.checkpoints import pytree
from birdie.checkpoints.checkpoint import Checkpoint
from birdie.compress.rate.assignment import Schemes, assign, parse_rules
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.forecast import Forecast, Forecaster
from birdie.compress.rate.groups import group_tiny_tensors, merge_copies
from birdie.compress.rate.target import Target
from birdie.entropy.hints import EffortOption, effort_for

BITS = (8.0, 6.0, 5.0, 4.0, 3.0)
LOSSLESS = Target(lossless=True)


def forecast(
    checkpoint: Checkpoint,
    target: Target,
    *,
    scheme: Schemes | None = None,
    effort: EffortOption = "auto",
    bits: Sequence[float] = BITS,
    workers: int | None = None,
) -> tuple[Forecast, dict[Target, Forecast]]:
    """Forecast the files of a checkpoint in seconds, without calibration.

    Args:
        checkpoint: that was read.
        target: of the file that is meant.
        scheme, effort, workers: as for `birdie.save`.
        bits: budgets to compare it with, bits per weight, beside a lossless file.

    Returns:
        The forecast for `target`, and those by other targets; of a complete object only the first.

    Raises:
        ConfigError: settings contradict one another, or a spec or pattern is wrong.
        WeightsError: a tensor holds NaN or infinite values and is not kept losslessly, or cannot be stored at all.
    """
    model: Mapping[str, Tensor] = checkpoint.content
    tree: Any = None
    if checkpoint.is_object:
        model, tree = pytree.flatten(checkpoint.content)
    content = Content.of(
        model,
        checkpoint.metadata or None,
        checkpoint.files,
        tree,
        onnx=checkpoint.onnx,
        roles=checkpoint.roles,
    )
    fixed = parse_rules(scheme)[0]
    searchable = None if fixed is not None and fixed.at_scale(1.0) is None else scheme
    forecasters: dict[tuple[bool, bool], Forecaster] = {}

    def of(wanted: Target, schemes: Schemes | None) -> Forecast:
        key = wanted.searched, wanted.lossless
        if key not in forecasters:
            assignment = group_tiny_tensors(merge_copies(assign(content.state, schemes, wanted)))
            chosen = effort_for(effort, assignment.weights)
            budget = wanted.in_bytes(assignment.weights)
            size = content.beside(assignment, chosen, budget).size
            forecasters[key] = Forecaster(assignment, Encoder(chosen, size, workers))
        forecaster = forecasters[key]
        budget = wanted.in_bytes(forecaster.assignment.weights)
        return (
            replace(forecaster.settled(), lossless=wanted.lossless) if budget is None else forecaster.for_budget(budget)
        )

    with threadpool_limits(1, user_api="blas"):
        meant = of(target, None if target.lossless else scheme)
        others = {} if checkpoint.is_object else {Target(bits=one): of(Target(bits=one), searchable) for one in bits}
        return meant, others if checkpoint.is_object or target.lossless else {LOSSLESS: of(LOSSLESS, None), **others}
