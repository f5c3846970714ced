"""Encoding of all tensors of a file: by the assigned schemes, or by a search for the target.

assignment ─► allocation ─► search for the target ─► Encoded ──► the better of both ─► Encoded
     ▲                                                  │                 ▲
     ├── sensitivities of the quantized model too ◄── recalibrate ────────┤
     └── small tensors tuned to the quantized rest ◄── refit ─────────────┘
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.allocation import allocations
from birdie.compress.rate.assignment import Assignment
from birdie.compress.rate.budget import Size, fit_budget, fit_quality
from birdie.compress.rate.target import Target
from birdie.compress.state import EncodedState
from birdie.errors import BudgetError, ConfigError


@dataclass(frozen=True, slots=True)
class Refinement:
    """Further passes after the first search; each needs calibration, and its result is kept only if it is better.

    Attributes:
        recalibrate: calibrate once more, on the quantized model, and search with the means of both calibrations.
        refit: number of Adam steps that tune the tensors in 16 bits to the quantized matrices.
    """

    recalibrate: bool = False
    refit: int = 0

    def require(self, calibration: Any) -> None:
        """Raise ConfigError for a refinement without calibration, or if `refit` is no number of steps."""
        if self.recalibrate and calibration is None:
            raise ConfigError("recalibrate needs calibration data; give calibration=(module, batches, loss) as well")
        if not isinstance(self.refit, int) or self.refit < 0 or (self.refit and calibration is None):
            raise ConfigError(f"refit={self.refit!r} is not a number of steps with calibration to take them on")


def encode_state(
    assignment: Assignment,
    target: Target,
    size: Size,
    *,
    rough: Size | None = None,
    calibration: CalibrationResult | None = None,
    refinement: Refinement | None = None,
    plain: bool = False,
    workers: int | None = None,
) -> EncodedState:
    """Encode every tensor of `assignment` so that the file meets `target`.

    Args:
        assignment: settled schemes, and the matrices that the search may coarsen.
        target: byte budget, quality, or nothing to search for.
        size: bytes of the file that holds an encoded state.
        rough: fast estimate of `size`, for the beginning of a search.
        calibration: of the model.
        refinement: further passes; none by default.
        plain: whether matrices without calibration take grids, so that files code and load fast.
        workers: threads; None uses every core.

    Raises:
        BudgetError: nothing fits the budget or the quality.
        WeightsError: a tensor cannot be stored by its scheme.
    """
    budget = target.in_bytes(assignment.weights)

    def search(assignment: Assignment, calibration: CalibrationResult | None) -> EncodedState:
        sensitivities = {} if calibration is None else calibration.sensitivities
        *preferred, last = allocations(assignment, sensitivities, budget, plain=plain, workers=workers)
        if target.quality is not None and calibration is not None:
            return fit_quality(last, size, target.quality, calibration.divergence).encoded
        if budget is None:
            return last.encode_settled()
        for allocation in preferred:
            with suppress(BudgetError):
                return fit_budget(allocation, size, budget, rough).encoded
        return fit_budget(last, size, budget, rough).encoded

    encoded = search(assignment, calibration)
    if calibration is None or refinement is None:
        return encoded
    # With a quality as the target both results meet it, so the smaller file wins; else the lower KL.
    loss = calibration.divergence if target.quality is None else size
    if refinement.recalibrate:
        recalibrated = calibration.recalibrated(encoded, workers)
        other = search(assignment, recalibrated)
        if loss(other) < loss(encoded):
            encoded, calibration = other, recalibrated
    if refinement.refit:
        tuned = calibration.refitted(encoded, refinement.refit, workers)
        tensors = {**assignment.tensors, **tuned}
        encoded = min((encoded, search(replace(assignment, tensors=tensors), calibration)), key=loss)
    return encoded
