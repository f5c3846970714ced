"""Encoding of all tensors of a file: by the assigned schemes, or by a search for the target.

assignment ─► allocation ─► search for the target ─► checked ─► Encoded ──► the better of both ─► Encoded
     ▲                                                             │                 ▲
     ├── sensitivities of the quantized model too ◄── recalibrate ─┴─────────────────┤
     └── small tensors tuned to the quantized rest ◄── refit ────────────────────────┘
"""

import logging
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.allocation import allocations
from birdie.compress.rate.assignment import Assignment
from birdie.compress.rate.budget import Encoder, Fit, Size, fit_budget, fit_quality
from birdie.compress.rate.target import Target
from birdie.compress.state import EncodedState
from birdie.errors import BudgetError, ConfigError

_COARSER = 1 / 32  # octaves between a file and the neighbor it is compared with: a thirtieth of a bit a weight


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
                return checked(fit_budget(allocation, size, budget, rough), allocation, calibration)
        return checked(fit_budget(last, size, budget, rough), last, calibration)

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


def checked(fit: Fit, encoder: Encoder, calibration: CalibrationResult | None) -> EncodedState:
    """Return the encoding that the search found, or a slightly coarser one if that is closer to the float model.

    Rounding errors add up by chance. In small networks they can make a file worse than a smaller one, which nobody
    would notice; with calibration it is measured on the held-out batches, and logged.

    Args:
        fit: result of the search.
        encoder: which it was found with.
        calibration: of the model, if there is one.
    """
    if calibration is None or calibration.held_out is None or fit.sigma is None:
        return fit.encoded
    exponent = math.log2(fit.sigma) + _COARSER
    if exponent > encoder.coarsest:
        return fit.encoded
    coarser = encoder.encode(exponent)
    errors = calibration.divergence(fit.encoded), calibration.divergence(coarser)
    if errors[0] <= errors[1]:
        return fit.encoded
    logging.getLogger("birdie").info(
        "error %.3g on held-out inputs is out of line: a slightly smaller file has %.3g and is kept", *errors
    )
    return coarser
