"""Tuning of a file that a search found, so that it meets the same target and is closer to the float model.

    float weights ─► encode some matrices ─► train the others ─► encode some more ─► … ─► the last meet the target
                            ▲                                            │
                            └────────────────────────────────────────────┘

Matrices that are not encoded yet, norms and biases make up for the errors of those that are
(`birdie.compress.tuning`). Small matrices come first, so that most weights are still free. The last ones, for which
nothing makes up, take the bytes that are left. The result counts if it is better than the file without tuning by more
than chance.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.coding import Quantized
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.job import Fixed, Free, Job
from birdie.compress.rate.jobs import Jobs
from birdie.compress.rate.search import Fit, fit_rest
from birdie.compress.rate.target import Target
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.small_tensors import small_scheme
from birdie.compress.state import EncodedState
from birdie.compress.tuning import Done, Tuner
from birdie.errors import BudgetError
from birdie.system.settings import kept_settings

PARTS = 6  # of the weights, encoded one after the other
_SURE = 2.0  # standard errors by which the error must fall
_COARSER = 0.2  # octaves, for a quality: tuning lowers the difference by about a quarter, which grows with their square
_SHARES = (0.5, 1.0)  # of the time that is left, for two attempts at a quality


def tuned(
    jobs: Jobs, fit: Fit, target: Target, encoder: Encoder, calibration: CalibrationResult, seconds: float
) -> Fit:
    """Return the better of a fit and of what tuning makes of it; its `untuned` is the error without."""
    untuned = calibration.divergence(fit.encoded)
    work = _ByParts(jobs, Tuner(calibration.measured(), calibration.batches), encoder)
    fit = replace(fit, divergence=untuned, untuned=untuned)
    with kept_settings():
        result = _tuned(work, fit, target, calibration, seconds)
    return replace(result, nothing_to_tune=len(work.parts) < 2)


def _tuned(work: "_ByParts", fit: Fit, target: Target, calibration: CalibrationResult, seconds: float) -> Fit:
    exponent, untuned, encoder = math.log2(fit.sigma or 1.0), fit.untuned, work.encoder
    if target.quality is not None:
        return _to_quality(work, fit, target.quality, calibration, seconds)
    budget = target.in_bytes(work.jobs.assignment.weights)
    try:
        better = work.run(exponent, budget, seconds)
    except BudgetError:  # the last part cannot make up for what the others take
        return fit
    if budget is not None and encoder.size(encoder.coded(better.encoded)) > budget:
        return fit
    better = replace(better, sigma=fit.sigma, divergence=calibration.divergence(better.encoded), untuned=untuned)
    return better if _is_sure(work.tuner.measure, fit.encoded, better.encoded) else fit


def _is_sure(held_out: HeldOut, untuned: EncodedState, encoded: EncodedState) -> bool:
    """Return whether a lower error on held-out targets is more than chance: the best of many states is lucky there."""
    first, second = (held_out.nats(state.decode()) for state in (untuned, encoded))
    if first is None or second is None:
        return held_out(encoded.decode()) < held_out(untuned.decode())
    gain = first - second
    return float(gain.mean()) > _SURE * float(gain.std()) / math.sqrt(max(len(gain), 1))


def _to_quality(work: "_ByParts", fit: Fit, quality: float, calibration: CalibrationResult, seconds: float) -> Fit:
    """Return the smaller of a fit and of a coarser one that meets the quality after tuning."""
    exponent = math.log2(fit.sigma or 1.0)
    coarser = exponent + _COARSER
    for share in _SHARES:
        if coarser - exponent < _COARSER / 8:
            break
        better = work.run(coarser, None, share * seconds)
        seconds *= 1 - share
        divergence = calibration.divergence(better.encoded)
        if divergence <= quality:
            size = work.encoder.size
            smaller = size(work.encoder.coded(better.encoded)) < size(work.encoder.coded(fit.encoded))
            return replace(better, divergence=divergence, untuned=fit.untuned) if smaller else fit
        if not math.isfinite(divergence):
            break
        coarser += math.log2(0.98 * quality / divergence) / 2
    return fit


def _keeps_its_value(job: Job) -> bool:
    """Return whether a tensor is lossless because 16 bits are not precise enough, not because they save little."""
    return isinstance(job.alone.scheme, Lossless) and not isinstance(small_scheme(job.tensor), Cast)


class _ByParts:
    """The matrices of a file, encoded one part after the other, while a tuner trains the rest.

    Args:
        jobs: of the file.
        tuner: of the module.
        encoder: of the file.
    """

    def __init__(self, jobs: Jobs, tuner: Tuner, encoder: Encoder) -> None:
        self.jobs, self.tuner, self.encoder = jobs, tuner, encoder
        changing = [
            jobs.by_name[name]
            for name in tuner.tunable(jobs.by_name)
            if name not in jobs.assignment.exact and not _keeps_its_value(jobs.by_name[name])
        ]
        self.small = [job for job in changing if self._is_small(job)]
        self._small = {job.name for job in self.small}
        matrices = [job for job in changing if job.name not in self._small]
        searched, pinned = ([job for job in matrices if isinstance(job.alone, Free) is free] for free in (True, False))
        # what a rule names comes first: the last part has to meet the target
        self.parts = [*([pinned] if searched and pinned else []), *in_parts(searched or pinned, PARTS)]

    def run(self, exponent: float, budget: int | None, seconds: float) -> Fit:
        """Return the file at an exponent; the last part has another to meet a budget. It is ready after `seconds`."""
        jobs, encoder, tuner = self.jobs, self.encoder, self.tuner
        changing = {job.name for part in (self.small, *self.parts) for job in part}
        encoded = {**encoder.encode([job for job in jobs.by_name.values() if job.name not in changing], exponent)}
        tuner.load({**jobs.assignment.tensors, **_decoded(encoded)})
        *first, last = self.parts or [[]]
        weights = _weights(self.parts)
        end = time.monotonic() + seconds
        encoder.meter.begin(len(jobs.by_name))
        for index, part in enumerate(first):
            some = encoder.encode([self._now(job) for job in part], exponent)
            encoded |= some
            tuner.load(_decoded(some))
            rest = [job.name for later in (*self.parts[index + 1 :], self.small) for job in later]
            shown = len(jobs.by_name) / max(len(first), 1)
            untrained, trained = tuner.train(rest, self._share(end, len(first) - index, index * shown, shown))
            logging.getLogger("birdie").info(
                "tuning: %.0f %% of the weights encoded, error %.4g, %.4g after training the rest",
                *(100 * _weights(self.parts[: index + 1]) / weights, untrained, trained),
            )
        small = [self._now(job) for job in self.small]
        encoded |= encoder.encode(small, exponent)
        current = jobs.continued({job.name: self._now(job).tensor for job in last})
        rest_of = [current.by_name[job.name] for job in last]
        if budget is None or not any(isinstance(job.alone, Free) for job in rest_of):
            return Fit(jobs.state({**encoded, **encoder.encode(rest_of, exponent)}), 0, 2.0**exponent)
        return fit_rest(current, encoder, budget, encoded, exponent)

    def _now(self, job: Job) -> Job:
        """Return the job of the trained tensor: by its rule, or as small tensors are stored."""
        tensor = self.tuner.value(job.name).reshape(job.tensor.shape).to(job.tensor.dtype)
        is_ruled = job.name in self.jobs.assignment.settled or job.numbers.is_delta
        if job.name not in self._small or is_ruled or not isinstance(job, Fixed):
            return job.with_tensor(tensor)
        return replace(job, by_size=True).with_tensor(without_subnormals(tensor, job.tensor))

    def _is_small(self, job: Job) -> bool:
        """Return whether a tensor is too small for a search, or has 16 bits by a rule."""
        settled = self.jobs.assignment.settled
        return isinstance(job.alone, Fixed) and (job.name not in settled or isinstance(job.alone.scheme, Cast))

    def _share(self, end: float, parts: int, shown: float, more: float) -> Done:
        """Return the clock of a part's training, which gets an equal share of the time that is left, and shows it."""
        begin = time.monotonic()
        seconds = (end - begin) / parts

        def done() -> float:
            share = min((time.monotonic() - begin) / seconds, 1.0) if seconds > 0 else 1.0
            self.encoder.meter.show(shown + share * more)
            return share

        return done


def _decoded(encoded: Mapping[str, Quantized]) -> dict[str, Tensor]:
    return EncodedState(dict(encoded), {}).decode()


def _weights(parts: Sequence[Sequence[Job]]) -> int:
    return sum(job.tensor.numel() for part in parts for job in part)


def in_parts(jobs: Sequence[Job], parts: int) -> list[list[Job]]:
    """Return jobs in about so many parts of as many weights each, small ones first; none is empty."""
    ordered = sorted(jobs, key=lambda job: job.tensor.numel())
    split: list[list[Job]] = [[] for _ in range(parts)]
    total, count = _weights([ordered]), 0
    for job in ordered:
        middle = count + job.tensor.numel() / 2
        split[min(parts - 1, int(parts * middle / total))].append(job)
        count += job.tensor.numel()
    return [part for part in split if part]


def without_subnormals(tensor: Tensor, original: Tensor) -> Tensor:
    """Return a tensor that 16 bits can store if they could store `original`.

    A bias that passes through zero would otherwise be stored losslessly in 32 bits.
    """
    if small_scheme(original) != Cast() or original.dtype not in (torch.float32, torch.float64):
        return tensor
    return torch.where(tensor.to(torch.float16).abs() < torch.finfo(torch.float16).tiny, 0, tensor)
