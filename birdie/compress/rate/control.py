"""Control of a calibration: files of the same bytes by what is assumed, measured on the same inputs kept apart.

    calibrated file ──────────────────────────► error ──┐
    assumed sensitivities, to the same bytes ─► error ──┼─► assumed far worse: the calibrated file
    mean of both, if these errors are close ──► error ──┘   else the best of three, each fitted to the budget
    (or if bits are few)

Few data tell less than the kinds of weights do, and data that do not resemble those of use can mislead. So a
calibration never counts by itself: it has to be better than none. Where it is clearly better, the control takes one
encoding, at an exponent that estimated sizes propose. Of a large model some matrices are compared, at their bytes in
the calibrated file, and all others are exact. Plain rounding in place of trellises is no judge: without error feedback
the scales of a calibration had 2.4 times the error of the assumed ones, and with it a tenth.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from birdie.compress.calibration.result import CalibrationResult, DecodedTensors
from birdie.compress.coding import Quantized
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.jobs import Jobs
from birdie.compress.rate.search import Fit, fit_budget, proposed_exponent
from birdie.compress.state import EncodedState
from birdie.errors import BudgetError

COMPLETE = 1 << 22  # searched weights up to which complete files are compared
_NEAR = 100  # a file within this fraction (1/100) of the budget is compared as it is, else fitted to it
_LOW = 1.5  # bits a weight below which a mixture is always compared: there it may be the best by far
_CLEARLY = 2.0  # times the error of the calibrated file: no chance, and no mixture is as good

_TOO_LARGE = "not compared: no file by {} sensitivities is as small"

Source = Literal["calibrated", "assumed", "mixture"]
_OTHERS: tuple[Source, ...] = ("assumed", "mixture")


@dataclass(frozen=True, slots=True)
class Control:
    """Comparison of the sensitivities that a file may follow, on inputs kept apart."""

    kept: Source  # those that the file follows: by calibration, assumed, or the mean of both
    # error of each that was measured, at equal bytes: KL in nats per target, or a relative error
    errors: dict[Source, float]
    note: str = ""  # why there is no comparison, or on what; empty for one on complete files

    def __str__(self) -> str:
        """Return one line for people."""
        errors = ", ".join(f"{source} {error:.3g}" for source, error in self.errors.items())
        note = f" ({self.note})" if self.note else ""
        return f"sensitivities: {self.kept}" + (f"; errors on inputs kept apart: {errors}" if errors else "") + note


def controlled(
    jobs: Jobs,
    fit: Fit,
    other_jobs: Callable[[Source], Jobs | None],
    encoder: Encoder,
    budget: int,
    calibration: CalibrationResult,
) -> tuple[Jobs, Fit]:
    """Return the jobs and the fit with the lowest error; the fit says which that is.

    Args:
        fit: of these; without an exponent nothing depends on sensitivities.
        other_jobs: returns the jobs by other sensitivities, or None if there are none.
        budget: bytes the file may have.
        calibration: with inputs kept apart.
    """
    if fit.sigma is None:
        return jobs, fit
    if calibration.held_out is None or not calibration.keeps_apart:
        return jobs, replace(fit, control=Control("calibrated", {}, "not compared: no batch is kept apart"))
    some = _compared(jobs)
    is_part = len(some) < len(jobs.searched)
    note = f"compared on {len(some)} of {len(jobs.searched)} matrices" if is_part else ""
    coded, measure = fit.encoded.tensors, calibration.held_out
    room = budget
    if is_part:
        coded = encoder.coded(EncodedState({name: coded[name] for name in some}, {})).tensors
        room = encoder.size(EncodedState(coded, {})) - encoder.size(EncodedState({}, {}))

    def error(tensors: Mapping[str, Quantized]) -> float:
        """Return the error of the compared matrices; others are exact, or as in the file."""
        if is_part:
            return measure({**calibration.state, **DecodedTensors(tensors)})
        return calibration.divergence(jobs.state({**fit.encoded.tensors, **tensors}))

    is_low = 8 * budget < _LOW * jobs.weights
    errors: dict[Source, float] = {"calibrated": error(coded) if is_part else calibration.divergence(fit.encoded)}
    others: dict[Source, tuple[Jobs, float]] = {}
    fits: dict[Source, tuple[Jobs, Fit]] = {"calibrated": (jobs, fit)}

    def fit_other(source: Source) -> None:
        """Fit other sensitivities to the budget, and measure the file that meets it, if there is one."""
        nonlocal note
        candidate, exponent = others[source]
        try:
            other = fit_budget(candidate, encoder, budget, start=None if is_part else exponent)
        except BudgetError:  # what is assumed allows for no scales as coarse
            errors.pop(source, None)
            note = _TOO_LARGE.format(source)
            return
        fits[source] = candidate, other
        if not is_part:
            errors[source] = calibration.divergence(other.encoded)

    for source in _OTHERS[: 1 if is_part else None]:  # a mean of large Hessians takes too long
        candidate = other_jobs(source)
        if candidate is None:
            continue
        searched = [candidate.by_name[name] for name in some]
        part = replace(candidate, by_name={job.name: job for job in searched}) if is_part else candidate
        try:
            exponent = proposed_exponent(part, encoder, room)
        except BudgetError:
            if is_part:
                note = _TOO_LARGE.format(source)
                continue
            exponent = candidate.coarsest  # sizes near it are estimated badly
        if exponent is None:
            continue
        others[source] = candidate, exponent
        encoded = encoder.encode(searched, exponent)
        if is_part or _is_near(budget, encoder.size(encoder.coded(jobs.state({**fit.encoded.tensors, **encoded})))):
            errors[source] = error(encoded)
        else:  # near the coarsest scales a few bytes cost much
            fit_other(source)
        if not is_low and errors.get(source, 0.0) >= _CLEARLY * errors["calibrated"]:
            break
    while (kept := min(errors, key=lambda source: errors[source])) not in fits:
        fit_other(kept)
    jobs, fit = fits[kept]
    control = Control(kept, errors, note)
    logging.getLogger("birdie").info("%s", control)
    return jobs, replace(fit, control=control)


def _is_near(budget: int, size: int) -> bool:
    return abs(budget - size) * _NEAR <= budget


def _compared(jobs: Jobs) -> list[str]:
    """Return the names of the matrices to compare: all of them, or some from all over a large model."""
    searched = jobs.searched
    step = max(1, math.ceil(jobs.weights / COMPLETE))
    if step == 1:
        return [job.name for job in searched]
    names, room = list[str](), COMPLETE
    for job in (job for start in range(step) for job in searched[start::step]):
        if job.weight.numel() <= room:
            names.append(job.name)
            room -= job.weight.numel()
    return names or [min(searched, key=lambda job: job.weight.numel()).name]
