"""Control of a calibration: files of the same bytes by what is assumed, measured on the same inputs kept apart.

    calibrated file ──────────────────────────► error ──┐
    assumed sensitivities, to the same bytes ─► error ──┼─► assumed far worse: the calibrated file
    mean of both, if these errors are close ──► error ──┘   else the best of three, fitted to the budget

Few data tell less than the kinds of weights do, and data that do not resemble those of use can mislead. So a
calibration never counts by itself: it has to be better than none. Where it is clearly better, the control takes one
encoding, at an exponent that estimated sizes propose; of a large model it is rounded in place of trellises, and so is
what it is compared with.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.encoding import Coder
from birdie.compress.rate.jobs import Jobs
from birdie.compress.rate.search import Fit, fit_budget, proposed_exponent
from birdie.errors import BudgetError

COMPLETE = 1 << 22  # searched weights up to which the control is encoded as the file is
_CLEARLY = 2.0  # times the error of the calibrated file: no chance, and no mixture is as good
_FIRST = 0.0  # exponent of settled tensors, which does not count

Source = Literal["calibrated", "assumed", "mixture"]
_OTHERS: tuple[Source, ...] = ("assumed", "mixture")


@dataclass(frozen=True, slots=True)
class Control:
    """Comparison of the sensitivities that a file may follow, on inputs kept apart.

    Attributes:
        kept: those that the file follows: by calibration, assumed, or the mean of both.
        errors: error of each that was measured, at equal bytes: KL in nats per target, or a relative error.
        note: why there is no comparison, or on what; empty for one on complete files.
    """

    kept: Source
    errors: dict[Source, float]
    note: str = ""

    def __str__(self) -> str:
        """Return one line for people."""
        errors = ", ".join(f"{source} {error:.3g}" for source, error in self.errors.items())
        note = f" ({self.note})" if self.note else ""
        return f"sensitivities: {self.kept}" + (f"; errors on inputs kept apart: {errors}" if errors else "") + note


def controlled(
    jobs: Jobs,
    fit: Fit,
    other_jobs: Callable[[Source], Jobs | None],
    coder: Coder,
    budget: int,
    calibration: CalibrationResult,
) -> tuple[Jobs, Fit]:
    """Return the jobs and the fit with the lowest error; the fit says which that is.

    Args:
        jobs: of the calibrated file.
        fit: of these; without an exponent nothing depends on sensitivities.
        other_jobs: returns the jobs by other sensitivities, or None if there are none.
        coder: of the file.
        budget: bytes the file may have.
        calibration: with inputs kept apart.
    """
    if fit.sigma is None:
        return jobs, fit
    if calibration.held_out is None or not calibration.keeps_apart:
        return jobs, replace(fit, control=Control("calibrated", {}, "not compared: no batch is kept apart"))
    rounded = jobs.weights > COMPLETE
    note = "plain rounding compared" if rounded else ""

    def error(some: Jobs, exponent: float) -> float:
        settled = coder.encode(some.settled, _FIRST)
        return calibration.divergence(some.state({**settled, **coder.encode(some.searched, exponent, draft=rounded)}))

    errors: dict[Source, float] = {}
    errors["calibrated"] = error(jobs, math.log2(fit.sigma)) if rounded else calibration.divergence(fit.encoded)
    others: dict[Source, tuple[Jobs, float]] = {}
    for source in _OTHERS:
        candidate, exponent = other_jobs(source), None
        try:
            exponent = None if candidate is None else proposed_exponent(candidate, coder, budget)
        except BudgetError:  # what is assumed allows for no scales as coarse
            note = f"not compared: no file by {source} sensitivities is as small"
        if candidate is None or exponent is None:
            continue
        others[source] = candidate, exponent
        errors[source] = error(candidate, exponent)
        if errors[source] >= _CLEARLY * errors["calibrated"]:
            break
    kept = min(errors, key=lambda source: errors[source])
    if kept in others:
        try:
            other = fit_budget(others[kept][0], coder, budget, start=others[kept][1])
            errors[kept] = errors[kept] if rounded else calibration.divergence(other.encoded)
        except BudgetError:  # estimated sizes were too small
            errors[kept] = math.inf
        if errors[kept] < errors["calibrated"]:
            jobs, fit = others[kept][0], other
        else:
            kept = "calibrated"
    control = Control(kept, errors, note)
    logging.getLogger("birdie").info("%s", control)
    return jobs, replace(fit, control=control)
