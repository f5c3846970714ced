"""Every tensor of a file, encoded: by the schemes as they are, or as a search for the target has it.

assignment ─► allocation ─► search for the target ─► Encoded ──► the better of both ─► Encoded
     ▲                                                  │                 ▲
     ├── sensitivities of the quantized model too ◄── recalibrate ────────┤
     └── small tensors tuned to the quantized rest ◄── refit ─────────────┘
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.allocation import Allocation
from birdie.compress.rate.assignment import Assignment, encode_all
from birdie.compress.rate.budget import Size, fit_budget, fit_quality
from birdie.compress.rate.target import Target
from birdie.compress.scheme import Encoded
from birdie.errors import BudgetError, ConfigError

RESERVE_SHARE = 6  # small matrices stay in 16 bits where that is at most this part of the budget


@dataclass(frozen=True, slots=True)
class Refinement:
    """Further passes after the first search; each needs calibration, and its result is kept only where it is better.

    Attributes:
        recalibrate: calibrate once more, on the quantized model, and search with the means of both calibrations.
        refit: steps that tune what is kept in 16 bits to the quantized rest.
    """

    recalibrate: bool = False
    refit: int = 0

    def require(self, calibration: Any) -> None:
        """Refuse a refinement without calibration.

        Raises:
            ConfigError: there is none, or `refit` is no number of steps.
        """
        if self.recalibrate and calibration is None:
            raise ConfigError("recalibrate needs calibration data; give calibration=(module, batches, loss) as well")
        if not isinstance(self.refit, int) or self.refit < 0 or (self.refit and calibration is None):
            raise ConfigError(f"refit={self.refit!r} is not a number of steps with calibration to take them on")


def encode_tensors(
    assignment: Assignment,
    target: Target,
    size: Size,
    *,
    rough: Size | None = None,
    calibration: CalibrationResult | None = None,
    refinement: Refinement | None = None,
    plain: bool = False,
    workers: int | None = None,
) -> dict[str, Encoded]:
    """Encode every tensor of `assignment` so that the file meets `target`.

    Args:
        assignment: settled schemes, and the matrices that the search may coarsen.
        target: bytes, quality, or nothing to search for.
        size: bytes of the file that holds these.
        rough: about the same, sooner, for the beginning of a search.
        calibration: of the model.
        refinement: further passes; none by default.
        plain: whether files are to be quick to code and load: grids where calibration says nothing.
        workers: threads; None takes every core.

    Raises:
        BudgetError: nothing fits the budget or the quality.
        WeightsError: a tensor cannot be stored so.
    """

    def search(assignment: Assignment, calibration: CalibrationResult | None) -> dict[str, Encoded]:
        sensitivities = {} if calibration is None else assignment.by_stored_name(calibration.sensitivities)
        if not target.searched:
            return encode_all(assignment.tensors, assignment.settled, sensitivities=sensitivities, workers=workers)

        def allocate(assignment: Assignment) -> Allocation:
            return Allocation(assignment, sensitivities, plain=plain, workers=workers)

        if target.quality is not None and calibration is not None:
            return fit_quality(allocate(assignment), size, target.quality, calibration.divergence).encoded
        budget = target.in_bytes(sum(tensor.numel() for tensor in assignment.tensors.values()))
        assert budget is not None
        # What is kept in 16 bits must not starve the rest: with more of the budget it is coarsened as well.
        if 0 < RESERVE_SHARE * assignment.reserve_bytes() <= budget:
            with suppress(BudgetError):
                return fit_budget(allocate(assignment), size, budget, rough).encoded
        return fit_budget(allocate(assignment.with_reserve_freed()), size, budget, rough).encoded

    encoded = search(assignment, calibration)
    if calibration is None or refinement is None:
        return encoded
    # Smaller is better where a quality is met either way; else nearer to the float model.
    better = calibration.divergence if target.quality is None else size
    if refinement.recalibrate:
        recalibrated = calibration.recalibrated(encoded, assignment.ties, workers)
        other = search(assignment, recalibrated)
        if better(other) < better(encoded):
            encoded, calibration = other, recalibrated
    if refinement.refit:
        tuned = calibration.refitted(encoded, assignment.ties, refinement.refit, workers)
        tensors: Mapping[str, Any] = {**assignment.tensors, **tuned}
        encoded = min((encoded, search(replace(assignment, tensors=tensors), calibration)), key=better)
    return encoded
