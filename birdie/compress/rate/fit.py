"""All tensors of a file, coded, by the assigned schemes or so that the file meets its target.

assignment ─► jobs ─► search for the target ─► checked ─► compared with what is assumed ─► tuned ─► coded
"""

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.packed import packed_names
from birdie.compress.rate.assignment import Assignment
from birdie.compress.rate.control import Control, Source, controlled
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.jobs import Jobs, assignments, jobs_of
from birdie.compress.rate.search import Fit, fit_budget, fit_quality
from birdie.compress.rate.target import Target
from birdie.compress.state import EncodedState
from birdie.compress.tensors import REAL_DTYPES
from birdie.errors import BudgetError

_MENTIONED = 10  # what no budget makes smaller is named in an error if it takes this fraction (1/10) of the budget
_DATA = ", or calibrate on data, which reaches less (calibration=…, --calibrate, --model and --data)"
_COARSER = 1 / 32  # octaves between a file and the neighbor it is compared with: a thirtieth of a bit a weight


def fit(
    assignment: Assignment,
    target: Target,
    encoder: Encoder,
    calibration: CalibrationResult | None = None,
    *,
    tune: float = 0.0,
) -> Fit:
    """Code every tensor of `assignment` so that the file meets `target`.

    Args:
        assignment: settled schemes, and the matrices that the search may coarsen.
        target: byte budget, quality, or nothing to search for.
        encoder: of the file. With effort "fast" files must load fast: paths of trellises run down the columns only.
        calibration: of the model.
        tune: seconds that the result is trained for, with a calibration on batches.
    """
    budget = target.in_bytes(assignment.weights)
    try:
        jobs, result = _fitted(assignment, target, encoder, calibration, calibration)
    except BudgetError:
        if calibration is None or budget is None:
            raise
        jobs, result = _fitted(assignment, target, encoder, None, calibration)
        result = replace(result, control=Control("assumed", {}, "no calibrated file is as small"))
    if calibration is None:
        return result
    if budget is not None:
        result = prefer_lower_error(jobs, result, encoder, calibration)
    if budget is not None and result.control is None:

        def other_jobs(source: Source) -> Jobs | None:
            return _jobs(
                jobs.assignment, encoder, None if source == "assumed" else calibration.mixed(assignment.embeddings)
            )

        jobs, result = controlled(jobs, result, other_jobs, encoder, budget, calibration)
    if tune and (result.sigma is not None or not target.searched):
        from birdie.compress.rate.tuned import tuned

        result = tuned(jobs, result, target, encoder, calibration, tune)
    elif tune:
        result = replace(result, nothing_to_tune=True)  # every bit is kept
    return replace(result, encoded=encoder.coded(result.encoded))


def _fitted(
    assignment: Assignment,
    target: Target,
    encoder: Encoder,
    known: CalibrationResult | None,
    measure: CalibrationResult | None,
) -> tuple[Jobs, Fit]:
    """Return jobs by `known` sensitivities and the fit that meets the target."""
    budget = target.in_bytes(assignment.weights)
    *preferred, last = assignments(assignment, budget)
    for option in preferred:
        with suppress(BudgetError):
            jobs = _jobs(option, encoder, known)
            return jobs, _search(jobs, target, encoder, measure)
    jobs = _jobs(last, encoder, known)
    try:
        return jobs, _search(jobs, target, encoder, measure)
    except BudgetError as error:
        if budget is None:
            raise
        data = "" if known is not None or measure is not None else _DATA
        raise BudgetError(f"{error}{data}{_fixed_shares(jobs, encoder, budget)}") from error


def _jobs(assignment: Assignment, encoder: Encoder, known: CalibrationResult | None) -> Jobs:
    sensitivities, factors = (None, None) if known is None else (known.sensitivities, known.factors)
    down, workers, world = encoder.effort == "fast", encoder.workers, encoder.world
    return jobs_of(assignment, sensitivities, factors, down_columns=down, workers=workers, world=world)


def _search(jobs: Jobs, target: Target, encoder: Encoder, calibration: CalibrationResult | None) -> Fit:
    budget = target.in_bytes(jobs.assignment.weights)
    if budget is not None:
        return fit_budget(jobs, encoder, budget, bits=target.bits)
    if target.quality is not None and calibration is not None:
        return fit_quality(jobs, encoder, target.quality, calibration.divergence)
    return Fit(jobs.state(encoder.encode(jobs.settled, 0.0)), 0, None)


def _fixed_shares(jobs: Jobs, encoder: Encoder, budget: int) -> str:
    """Return the end of an error: bytes that no budget makes smaller, by what they are of, if they are many."""
    settled, empty = encoder.code(jobs.settled), encoder.size(EncodedState({}, {}))
    sizes = {name: encoder.size(EncodedState({name: coded}, {})) - empty for name, coded in settled.items()}
    exact = {name: size for name, size in sizes.items() if name in jobs.assignment.exact}
    integers = {name: size for name, size in sizes.items() if not _is_real(jobs.assignment.tensors[name])}
    shares = {
        f"kept files and metadata {empty:,}": empty,
        f"integers and 8-bit floats, which stay exact, {sum(integers.values()):,}": sum(integers.values()),
        f"other tensors that stay exact {sum(exact.values()):,}{_largest(jobs, exact)}": sum(exact.values()),
    }
    if sum(shares.values()) * _MENTIONED < budget:
        return ""
    parts = [text for text, size in shares.items() if size * _MENTIONED >= sum(shares.values())]
    quantized = " (the model is quantized already)" if packed_names(jobs.assignment.tensors) else ""
    return f"; bytes that no budget makes fewer: {', '.join(parts)}{quantized}"


def _is_real(weight: Tensor) -> bool:
    return weight.dtype in REAL_DTYPES or weight.is_complex()


def _largest(jobs: Jobs, sizes: Mapping[str, int]) -> str:
    """Return which exact tensor is the largest, and what to do about it."""
    if not sizes:
        return ""
    largest = max(sizes, key=lambda name: sizes[name])
    groups = jobs.assignment.groups
    first = groups[largest].names[0] if largest in groups else largest
    others = f" and {len(groups[largest].names) - 1} others like it" if largest in groups else ""
    return f", the largest {first!r}{others} with {sizes[largest]:,} bytes (a rule of its full name may round it)"


def prefer_lower_error(jobs: Jobs, result: Fit, encoder: Encoder, calibration: CalibrationResult) -> Fit:
    """Return a fit, or slightly coarser scales if these are closer to the float model.

    Rounding errors add up by chance. In small networks they can make a file worse than a smaller one, which nobody
    would notice; with calibration it is measured on the held-out batches, and logged. A coarser file that is larger
    may be over the budget.
    """
    if calibration.held_out is None or result.sigma is None:
        return result
    exponent = math.log2(result.sigma) + _COARSER
    if exponent > jobs.coarsest:
        return result
    coarser = jobs.state({**result.encoded.tensors, **encoder.encode(jobs.searched, exponent)})
    errors = calibration.divergence(result.encoded), calibration.divergence(coarser)
    if errors[0] <= errors[1]:
        return result
    coded = encoder.coded(coarser)
    size = encoder.size(coded)
    if size > result.bytes:
        return result
    logging.getLogger("birdie").info(
        "error %.3g on held-out inputs is out of line: a slightly smaller file has %.3g and is kept", *errors
    )
    return Fit(coded, size, result.sigma, divergence=errors[1], fuller=errors[0])
