"""Tuning of a file that a search found, so that it meets the same target and is closer to the float model.

    fit ─► coarser by what gains take ─► gains, norms, biases tuned ─► coded ──► the better of both

For a budget the numbers are coded anew for a few bytes less, which gains of rows take (`birdie.compress.tuning`). For a
quality scales are larger by what tuning is likely to win, and the result counts if it meets the quality after all.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.coding import Coded, Quantized, recode, with_integers
from birdie.compress.rate.encoding import Coder, Meter
from birdie.compress.rate.jobs import Job, Jobs
from birdie.compress.rate.search import Fit
from birdie.compress.rate.target import Target
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.trellis import GAINS
from birdie.compress.small_tensors import small_scheme
from birdie.compress.state import EncodedState
from birdie.compress.tuning import Tuned, Tuner, has_gains, rows_of, with_gains_of_rows

Search = Callable[[int, float], Fit]
"""Search for a size in bytes, from an exponent on."""

_BITS, _HEADER = 3.0, 12  # that a gain takes, and bytes of a stream
_SURE = 2.0  # standard errors by which the error must fall
_COARSER = 2**0.1  # scales of a quality: tuning lowers the difference by an eighth, which grows with their square


def tuned(
    jobs: Jobs, fit: Fit, target: Target, coder: Coder, calibration: CalibrationResult, search: Search, seconds: float
) -> Fit:
    """Return the better of a fit and of what tuning makes of it; its `untuned` is the error without.

    Args:
        jobs: of the file.
        fit: that meets the target.
        target: of the file.
        coder: of the file.
        calibration: with batches.
        search: for a smaller budget.
        seconds: that training may take.
    """
    end, tuner = time.monotonic() + seconds, Tuner(calibration.measured(), calibration.batches)
    untuned = calibration.divergence(fit.encoded)
    if target.quality is not None:
        return _to_quality(jobs, fit, target.quality, coder, calibration, tuner, end)
    start, budget = fit, target.in_bytes(jobs.assignment.weights)
    if budget is not None:
        exponent, reserve = math.log2(fit.sigma or 1.0), _reserve(fit.encoded)
        start = search(budget - reserve, exponent)
    result, coded = _train(jobs, start.encoded, tuner, end - time.monotonic(), coder.meter), coder.coded(start.encoded)
    fits = [replace(fit, divergence=untuned)]
    for resolution in GAINS:
        encoded = _file(jobs, coded, result, coder, resolution)
        if budget is None or coder.size(encoded) <= budget:
            divergence = calibration.divergence(encoded)
            fits.append(replace(start, encoded=encoded, bytes=coder.size(encoded), divergence=divergence))
    best = min(fits, key=lambda one: one.divergence or 0.0)
    if best is not fits[0] and not _is_sure(calibration.measured(), fit.encoded, best.encoded):
        best = fits[0]
    return replace(best, untuned=untuned)


def _is_sure(held_out: HeldOut, untuned: EncodedState, encoded: EncodedState) -> bool:
    """Return whether a lower error on held-out targets is more than chance: the best of many states is lucky there."""
    first, second = (held_out.nats(state.decode()) for state in (untuned, encoded))
    if first is None or second is None:
        return True
    gain = first - second
    return float(gain.mean()) > _SURE * float(gain.std()) / math.sqrt(max(len(gain), 1))


def _to_quality(
    jobs: Jobs, fit: Fit, quality: float, coder: Coder, calibration: CalibrationResult, tuner: Tuner, end: float
) -> Fit:
    """Return the smaller of a fit and of a coarser one that meets the quality after tuning."""
    untuned = calibration.divergence(fit.encoded)
    fallback = replace(fit, encoded=coder.coded(fit.encoded), untuned=untuned)
    exponent = math.log2(fit.sigma or 1.0)
    coarser = exponent + math.log2(_COARSER)
    for share in (0.6, 1.0):
        if coarser - exponent < math.log2(_COARSER) / 8:
            break
        encoded = jobs.state({**fit.encoded.tensors, **coder.encode(jobs.searched, coarser)})
        result = _train(jobs, encoded, tuner, share * (end - time.monotonic()), coder.meter)
        state = _file(jobs, coder.coded(encoded), result, coder, GAINS[1])
        divergence = calibration.divergence(state)
        if divergence <= quality:
            better = Fit(state, 0, 2.0**coarser, fit.rounds, divergence, untuned)
            return min(better, fallback, key=lambda one: coder.size(one.encoded))
        coarser += math.log2(0.98 * quality / divergence) / 2
    return fallback


def _train(jobs: Jobs, state: EncodedState, tuner: Tuner, seconds: float, meter: Meter) -> Tuned:
    encoded = {name: with_integers(tensor) for name, tensor in state.tensors.items()}
    rows = {name: one for name, one in encoded.items() if has_gains(one)}
    names = [name for name, job in jobs.by_name.items() if name not in jobs.assignment.exact and _may_change(job)]
    meter.begin(len(rows))
    result = tuner.run(
        state.decode(), rows, names, seconds, progress=lambda done, total: meter.show(len(rows) * done / (total or 1))
    )
    for _ in rows:
        meter.count()
    return result


def _may_change(job: Job) -> bool:
    """Return whether a tensor is stored in 16 bits, or small; a rule that keeps every bit is kept."""
    return job.role in ("small", "reserve") or isinstance(job.scheme, Cast)


def _reserve(state: EncodedState) -> int:
    """Return about the bytes that gains of rows take."""
    encoded = [with_integers(tensor) for tensor in state.tensors.values()]
    return round(sum(_HEADER + rows_of(one) * _BITS / 8 for one in encoded if has_gains(one)))


def _file(jobs: Jobs, state: EncodedState, result: Tuned, coder: Coder, resolution: int) -> EncodedState:
    """Return a coded state with what was tuned; gains have so many steps per octave."""
    small = [_stored(jobs.by_name[name], tensor) for name, tensor in result.tensors.items()]
    changed: dict[str, Quantized] = {**coder.code(small)}
    for name, gains in result.gains.items():
        tensor = state.tensors[name]
        assert isinstance(tensor, Coded)
        changed[name] = recode(tensor, with_gains_of_rows(with_integers(tensor), gains, resolution), coder.effort)
    return EncodedState({**state.tensors, **changed}, state.ties)


def _stored(job: Job, tensor: Tensor) -> Job:
    """Return the job of a tuned tensor: by its rule, or as small tensors are stored."""
    job = job.with_tensor(tensor)
    return job if job.role == "rule" else replace(job, scheme=small_scheme(tensor))
