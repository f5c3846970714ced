"""Forecast of a file from some rows of its tensors: bytes, error and time, within seconds, and nothing is written.

    assignment ──► jobs ──some rows──► encoded, coded, decoded ──extrapolated──► bytes, error, seconds
                                        at whole exponents, for a budget between two of them

A few matrices of each scheme are coded, and correct the estimated sizes of the others. Some rows take more bytes a
weight than all of a matrix, since tables count and coders learn: so half of them are coded as well, and what the other
half adds is taken for all that are left.
"""

import math
import os
import re
import time
import zlib
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from birdie.compress import registry
from birdie.compress.coding import Coded, code, join_parts
from birdie.compress.coding import estimate as estimate_bytes
from birdie.compress.distortion import INTEGER_BITS, decibels, integer_bits, integer_errors
from birdie.compress.rate.assignment import Assignment
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.job import Job, Searched
from birdie.compress.rate.jobs import FINEST, Jobs, assignments, jobs_of
from birdie.compress.rate.search import TINY, TOLERANCE
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.state import EncodedState
from birdie.entropy.hints import Stream
from birdie.system.mapped import release

_WEIGHTS = 1 << 20  # that are coded, about, of each setting
_LEAST, _LEAST_ROWS = 1 << 14, 16  # weights and rows of a matrix, at least
_PARTS = 8  # parts of a matrix that rows are from
_MOST = 0.7  # share of the rows from which all of them are taken
_FIRST = -2  # exponent at which a search for a budget begins
_BLOCKS = 2  # blocks of a large tensor that are looked at
_ESTIMATED = 8  # matrices of one kind, each of another layer, that are looked at
_CODED, _CODED_WEIGHTS = 2, 1 << 18  # those of them that are coded, and weights of each
_ROUNDS = 2  # times that a search codes a model completely, about
_NO_ERRORS = torch.zeros(len(INTEGER_BITS), dtype=torch.float64)
_DEPENDENT = 1 << 20  # weights that are coded of tensors of one kind whose rows depend on one another


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Expected file of some settings."""

    bytes: int  # size of the file
    weights: int  # number of elements of all tensors, tied ones once
    error: float  # Σ ‖decoded − weights‖² / Σ ‖weights‖² of the tensors that do not keep every bit, without calibration
    integer_errors: tuple[float, ...]  # errors of the same tensors in integers by row (birdie.compress.distortion)
    seconds: float  # that compression takes, about
    fits: bool = True  # False if the budget cannot be met, and `bytes` is the smallest file
    lossless: bool = False  # whether every tensor without a rule keeps every bit

    @property
    def bits_per_weight(self) -> float:
        """Bits of the file per weight; 0 if there are no weights."""
        return 8 * self.bytes / self.weights if self.weights else 0.0

    @property
    def decibels(self) -> float | None:
        """Signal-to-quantization-noise ratio of those tensors; None without an error."""
        return decibels(1.0, self.error) if self.error else None

    @property
    def integer_bits(self) -> float | None:
        """Bits of the integers by row whose error is as large; None without an error."""
        return integer_bits(self.error, self.integer_errors) if self.error else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `--json` prints."""
        values = {name: value for name, value in asdict(self).items() if name != "integer_errors"}
        more = {"sqnr_db": self.decibels, "as_near_as_int_bits": self.integer_bits}
        return {**values, **more, "bits_per_weight": self.bits_per_weight}


@dataclass(slots=True)
class Forecaster:
    """Forecasts of files of one assignment."""

    assignment: Assignment  # settled schemes, and the matrices that a search may coarsen
    encoder: Encoder  # of the file
    _jobs: dict[tuple[str, ...], Jobs] = field(default_factory=dict)
    _settled: dict[tuple[str, ...], "_Measured"] = field(default_factory=dict)
    _points: dict[tuple[tuple[str, ...], float], "_Measured"] = field(default_factory=dict)
    _lossless: "_Measured | None" = None

    def settled(self) -> Forecast:
        """Return the forecast of a file without a target."""
        return self._forecast(self._settled_of(self.assignment))

    def for_budget(self, budget: int) -> Forecast:
        """Return the forecast of a file of at most so many bytes."""
        if self._lossless is None:
            jobs = self._jobs_of(self.assignment)
            self._lossless = self._measure([*jobs.rules, *jobs.lossless()])
        exact = replace(self._forecast(self._lossless), lossless=True)
        if exact.bytes <= budget:
            return exact
        options = assignments(self.assignment, budget)
        bracket = next(filter(None, (self._bracket(option, budget) for option in options)), None)
        if bracket is None:
            coarsest = self._at(options[-1], self._jobs_of(options[-1]).coarsest)
            return replace(self._forecast(coarsest), fits=False)
        fine, coarse = map(self._forecast, bracket)
        share = (fine.bytes - budget) / max(fine.bytes - coarse.bytes, 1)
        errors = [math.log(max(one.error, 1e-300)) for one in (fine, coarse)]
        return replace(
            coarse,
            bytes=min(fine.bytes, budget - max(TINY, budget // TOLERANCE) // 2),
            error=math.exp(errors[0] + min(max(share, 0.0), 1.0) * (errors[1] - errors[0])),
            seconds=_ROUNDS * coarse.seconds,
        )

    def _bracket(self, assignment: Assignment, budget: int) -> "tuple[_Measured, _Measured] | None":
        """Return the figures at two exponents, a file above the budget and one below it; None if none is below it."""
        jobs = self._jobs_of(assignment)
        if not jobs.weights:
            settled = self._settled_of(assignment)
            return (settled, settled) if self._size(settled) <= budget else None
        low, high = math.ceil(FINEST), math.ceil(jobs.coarsest)
        exponent = _FIRST
        while high - low > 1:
            size = self._size(self._at(assignment, exponent))
            low, high = (exponent, high) if size > budget else (low, exponent)
            step = round(8 * (size - budget) / jobs.weights)  # an octave of the scales is about a bit
            exponent = min(max(exponent + (step or (1 if size > budget else -1)), low + 1), high - 1)
        coarse = self._at(assignment, min(high, jobs.coarsest))
        return (self._at(assignment, low), coarse) if self._size(coarse) <= budget else None

    def _at(self, assignment: Assignment, exponent: float) -> "_Measured":
        key = assignment.free, exponent
        if key not in self._points:
            searched = self._measure(self._jobs_of(assignment).searched, exponent)
            self._points[key] = self._settled_of(assignment) + searched
        return self._points[key]

    def _forecast(self, measured: "_Measured") -> Forecast:
        seconds = measured.seconds / (self.encoder.workers or os.cpu_count() or 1)
        square = measured.square or 1.0
        return Forecast(
            bytes=self._size(measured),
            weights=self.assignment.weights,
            error=measured.error / square,
            integer_errors=tuple((measured.integers / square).tolist()),
            seconds=seconds,
        )

    def _size(self, measured: "_Measured") -> int:
        return self.encoder.size(EncodedState(measured.tensors, self.assignment.ties))

    def _jobs_of(self, assignment: Assignment) -> Jobs:
        if assignment.free not in self._jobs:
            down, workers = self.encoder.effort == "fast", self.encoder.workers
            self._jobs[assignment.free] = jobs_of(assignment, down_columns=down, workers=workers)
        return self._jobs[assignment.free]

    def _settled_of(self, assignment: Assignment) -> "_Measured":
        if assignment.free not in self._settled:
            self._settled[assignment.free] = self._measure(self._jobs_of(assignment).settled)
        return self._settled[assignment.free]

    def _measure(self, jobs: Sequence[Job], exponent: float = 0.0) -> "_Measured":
        """Return the figures of jobs by some of their rows."""
        look = _Look(self.encoder, exponent, min(1.0, _WEIGHTS / max(sum(job.weight.numel() for job in jobs), 1)))
        kinds: dict[Hashable, list[Job]] = {}
        for job in jobs:
            layers = re.sub("[0-9]+", "0", job.name)
            kinds.setdefault((job.alone.scheme, job.tensor.dtype, job.weight.shape, layers), []).append(job)
        figures: dict[str, _Figures] = {}
        with ThreadPoolExecutor(self.encoder.workers or os.cpu_count()) as pool:
            for alike in kinds.values():
                figures |= _figures_of(alike, look, pool)
        tensors = {name: replace(one.coded, crc=zlib.crc32(name.encode())) for name, one in figures.items()}
        error, square, seconds = (
            sum(getattr(one, name) for one in figures.values()) for name in ("error", "square", "seconds")
        )
        return _Measured(tensors, error, square, seconds, sum((one.integers for one in figures.values()), _NO_ERRORS))


@dataclass(frozen=True, slots=True)
class _Expected(Stream):
    """A stream of which the length alone is known."""

    bytes: int = 0

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return self.bytes


@dataclass(frozen=True, slots=True)
class _Measured:
    """Tensors as they are expected in the file, squares of their errors and of weights, seconds of one thread."""

    tensors: Mapping[str, Coded] = field(default_factory=dict)
    error: float = 0.0
    square: float = 0.0
    seconds: float = 0.0
    integers: Tensor = _NO_ERRORS  # as `error`, of integers by row

    def __add__(self, other: "_Measured") -> "_Measured":
        sums = self.error + other.error, self.square + other.square, self.seconds + other.seconds
        return _Measured({**self.tensors, **other.tensors}, *sums, self.integers + other.integers)


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures of a tensor, or of a block of it."""

    coded: Coded  # its form in the file
    # its bytes by estimation, which are those of `coded` if it was not coded; `weights` of those without tables
    estimate: float
    weights: float
    # error, square: squares of its errors and of its weights
    error: float
    square: float
    seconds: float = 0.0  # of one thread, if it was coded
    integers: Tensor = _NO_ERRORS  # as `error`, of integers by row


@dataclass(frozen=True, slots=True)
class _Look:
    """Extent to which tensors are looked at, as the encoder of the file codes them at an exponent."""

    encoder: Encoder
    exponent: float
    share: float  # of the rows that are taken
    most: int = _WEIGHTS  # weights of a matrix that are taken


def _figures_of(alike: Sequence[Job], look: _Look, pool: ThreadPoolExecutor) -> dict[str, _Figures]:
    """Return the figures of jobs that differ by the layer: of some of them, and of each other those of the nearest.

    They are estimated, and corrected by a few that are coded; or coded, if some of their rows do not tell about others.
    """
    weights, independent = max(alike[0].weight.numel(), 1), _has_rows(alike[0])
    some = _spread(alike, _ESTIMATED if independent else max(1, _DEPENDENT // weights))
    known = list(pool.map(lambda job: _figures(job, look, not independent), some))
    if independent:
        more = replace(look, share=1.0, most=_CODED_WEIGHTS)
        coded = list(pool.map(lambda job: _figures(job, more, True), _spread(alike, _CODED)))
        estimate = sum(one.estimate for one in coded)
        ratio = sum(one.coded.bytes for one in coded) / estimate if estimate else 1.0
        seconds = min(one.seconds for one in coded)  # the first call of a kernel takes longer
        known = [replace(one, coded=_scaled(one.coded, ratio), seconds=seconds) for one in known]
    return {job.name: known[index * len(known) // len(alike)] for index, job in enumerate(alike)}


def _spread(jobs: Sequence[Job], count: int) -> list[Job]:
    """Return at most so many jobs, at even distances."""
    count = min(count, len(jobs))
    return [jobs[(2 * index + 1) * len(jobs) // (2 * count)] for index in range(count)]


def _has_rows(job: Job) -> bool:
    """Return whether some rows of a job tell about the others."""
    return job.weight.ndim > 1 and (isinstance(job, Searched) or job.by_rows)


def _figures(job: Job, look: _Look, coded: bool) -> _Figures:
    """Return the figures of a tensor, by some of its blocks."""
    blocks = job.blocks
    some = [blocks[index * len(blocks) // _BLOCKS] for index in range(_BLOCKS)] if len(blocks) > _BLOCKS else blocks
    parts = [_figures_of_block(job, rows, look, coded) for rows in some]
    every = [parts[index * len(parts) // len(blocks)] for index in range(len(blocks))]
    return _Figures(
        join_parts(tuple(job.tensor.shape), job.tensor.dtype, [part.coded for part in every]),
        sum(part.estimate for part in every),
        sum(part.weights for part in every),
        sum(part.error for part in every),
        sum(part.square for part in every),
        sum(part.seconds for part in every),
        sum((part.integers for part in every), _NO_ERRORS),
    )


def _figures_of_block(job: Job, rows: slice, look: _Look, coded: bool) -> _Figures:
    """Return the figures of a block, by some of its rows."""
    block = job.rows(rows)
    count = len(block) if _has_rows(job) else 1
    share = min(max(look.share, _LEAST / max(block.numel(), 1)), look.most / max(block.numel(), 1))
    height = max(_LEAST_ROWS, math.ceil(count * share))
    if height >= _MOST * count:
        return _encode(job, rows, look, coded)
    step = height // _PARTS
    starts = [(rows.start or 0) + int((index + 0.5) * count / _PARTS - step / 2) for index in range(_PARTS)]
    parts = [slice(start, start + step) for start in starts]
    more = _encode(job.alone.cut(parts), slice(None), look, coded)
    halves = [slice(part.start, part.start + step // 2) for part in parts]
    less = _encode(job.alone.cut(halves), slice(None), look, True) if coded else None
    left = count / (_PARTS * step) - 1  # rows that are not looked at, in units of those that are
    lengths = [stream.length for stream in more.coded.streams]
    factor = step / (step - step // 2)
    added, added_s = [more.weights, *(0 for _ in lengths[1:])], more.seconds
    if less is not None and len(less.coded.streams) == len(lengths):
        added = [factor * (end - stream.length) for end, stream in zip(lengths, less.coded.streams, strict=True)]
        added_s = factor * max(more.seconds - less.seconds, more.seconds / 4)  # or it was the first call of a kernel
    streams = [
        _Expected(stream.coder, b"", max(0, round(length + left * add)))
        for stream, length, add in zip(more.coded.streams, lengths, added, strict=True)
    ]
    return _Figures(
        replace(more.coded, shape=tuple(block.shape), streams=tuple(streams)),
        more.estimate + left * more.weights,
        more.weights * (1 + left),
        more.error * (1 + left),
        more.square * (1 + left),
        more.seconds + left * added_s,
        more.integers * (1 + left),
    )


def _encode(job: Job, rows: slice, look: _Look, coded: bool) -> _Figures:
    """Return the figures of some rows, which are coded or estimated."""
    start = time.thread_time()
    encoded = job.encode(rows, look.exponent)
    result = code(encoded, look.encoder.effort) if coded else None
    seconds = time.thread_time() - start
    weights, tables = estimate_bytes(encoded)
    if result is None:
        lengths = [round(weights + tables), *(0 for _ in encoded.streams[1:])]
        streams = tuple(_Expected(0, b"", length) for length in lengths)
        result = Coded(encoded.scheme, encoded.shape, encoded.dtype, encoded.params, streams)
    error, square, integers = 0.0, 0.0, _NO_ERRORS
    if not isinstance(job.alone.scheme, Lossless):
        values = job.rows(rows).detach().double().reshape(-1)
        integers = integer_errors(job.rows(rows))
        error = float((registry.decode(encoded).double().reshape(-1) - values).square().sum())
        square = float(values.square().sum())
    release(job.rows(rows))
    return _Figures(result, weights + tables, weights, error, square, seconds, integers)


def _scaled(coded: Coded, ratio: float) -> Coded:
    """Return a tensor with streams that many times as long."""
    streams = tuple(_Expected(stream.coder, b"", round(stream.length * ratio)) for stream in coded.streams)
    return replace(coded, streams=streams, parts=tuple(_scaled(part, ratio) for part in coded.parts))
