"""The byte budget and the quality: one number for all tensors, found by search on real coded bytes or real KL.

Every matrix has a step that one exponent scales (`allocate`). The size falls steadily with it, about one bit per weight
an octave, so a model of the entropy on a sample of the weights proposes an exponent, the real coder answers, and the
difference corrects the next proposal. The KL rises as steadily, by about four an octave.

    sample ─► predicted bytes(exponent) ──► propose ──► encode, code, count ──► within 0.1 % under the budget?
                                                ▲                   │
                                                └── offset, bracket ┘

A budget that lossless fits gives lossless. One that leaves too little beside what is small and kept in 16 bits
coarsens that too, but for vectors under a few thousand elements. Small matrices are among what is kept, unless
calibration tells their worth or they would take more than a sixth of the budget. On plain grids the step of a
row is found in sixteenths of an octave, so a model of a single row lands within a sixteenth of a bit per weight; a few
dozen rows even that out, and in a trellis rows take the next sixteenth one by one.
"""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from birdie.compress.rate.allocation import FINEST, Allocation
from birdie.compress.rate.assignment import encode_all, is_matrix, small_scheme, suit, takes_grid
from birdie.compress.scheme import Encoded, Scheme
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import rows_columns
from birdie.errors import BudgetError, ConfigError

Size = Callable[[Mapping[str, Encoded]], int]
Allocate = Callable[[Mapping[str, Tensor]], Allocation]
Divergence = Callable[[Mapping[str, Encoded]], float]

TOLERANCE = 1000  # land within a thousandth of the budget …
TINY = 64  # … or this many bytes
NEAR = 2  # lossless is tried at once when its rough size is within this many budgets
COLUMNS = 8  # a row shorter than this is no smaller with a step of its own than in 16 bits
LEAST = 256  # elements of a matrix below which 16 bits cost less than the names of its steps, about
KEPT = 6  # small matrices stay in 16 bits where that is at most this part of the budget
ROUNDS = 12
SAMPLE = 1 << 18
_FIRST = -2.0  # the exponent a search for quality begins at
_AIM, _CLOSE = 0.99, 0.97  # of the quality: what is proposed, and what is near enough
_NARROW = 1 / 512  # octaves


@dataclass(frozen=True, slots=True)
class Fit:
    """What the budget search settled on.

    Attributes:
        encoded: every tensor, encoded.
        bytes: the size of the whole file, by the caller's measure; never over the budget.
        sigma: the typical step in standard deviations; None when everything is lossless.
        rounds: how many times the whole model was coded.
        divergence: nats of KL it costs, where that was asked for.
    """

    encoded: dict[str, Encoded]
    bytes: int
    sigma: float | None
    rounds: int
    divergence: float | None = None


def fit_budget(
    state: Mapping[str, Tensor],
    size: Size,
    budget: int,
    *,
    pinned: Mapping[str, Scheme] | None = None,
    rough: Size | None = None,
    allocate: Allocate = Allocation,
    calibrated: Collection[str] = (),
    workers: int | None = None,
) -> Fit:
    """Choose the precision of each tensor so that the file lands just under `budget` bytes.

    Args:
        state: name → tensor, ties already removed.
        size: encoded tensors → bytes of the whole file; called about four times, at most `ROUNDS` + 2.
        budget: bytes the file may have.
        pinned: schemes chosen by hand, which the search leaves alone.
        rough: a quick stand-in for `size`, never smaller by much: it finds the neighbourhood, so that `size` is called
            about twice. What does not fit by it may still fit by `size`, which is then asked from the start.
        allocate: the matrices to coarsen → how fine each is at an exponent.
        calibrated: names of tensors that `allocate` knows the worth of; matrices among them are coarsened though small.
        workers: threads; None takes every core.

    Raises:
        BudgetError: even the coarsest setting does not fit.
        ConfigError: the budget is not positive.
        WeightsError: a tensor is not finite.
    """
    if budget <= 0:
        raise ConfigError(f"budget {budget} is not a positive number of bytes")
    pinned = {name: suit(scheme, state[name]) for name, scheme in (pinned or {}).items()}
    free = {name: weight for name, weight in state.items() if name not in pinned}
    matrices = {name: weight for name, weight in free.items() if _pays(weight, name in calibrated)}
    more = {name: weight for name, weight in free.items() if name in matrices or _coarsens(weight)}
    kept_bytes = sum(weight.numel() * min(weight.itemsize, 2) for name, weight in more.items() if name not in matrices)
    # What is kept in 16 bits must not starve the rest: with more of the budget it is coarsened as well.
    if 0 < KEPT * kept_bytes <= budget:
        with suppress(BudgetError):
            return _fit(_Request(state, allocate(matrices), pinned, budget, workers), size, rough)
    return _fit(_Request(state, allocate(more), pinned, budget, workers), size, rough)


def fit_quality(
    state: Mapping[str, Tensor],
    size: Size,
    quality: float,
    divergence: Divergence,
    *,
    pinned: Mapping[str, Scheme] | None = None,
    allocate: Allocate = Allocation,
    calibrated: Collection[str] = (),
    workers: int | None = None,
) -> Fit:
    """The coarsest steps that cost at most `quality` nats of KL.

    Args:
        state: name → tensor, ties already removed.
        size: encoded tensors → bytes of the whole file; called once.
        divergence: encoded tensors → mean KL from the float model to theirs.
        pinned, allocate, calibrated, workers: as for `fit_budget`.

    Raises:
        BudgetError: what is pinned or small costs more than that already.
        ConfigError: the quality is not positive.
    """
    if not 0 < quality < math.inf:
        raise ConfigError(f"quality {quality} is not a positive number of nats")
    pinned = {name: suit(scheme, state[name]) for name, scheme in (pinned or {}).items()}
    free = {name: weight for name, weight in state.items() if name not in pinned}
    matrices = {name: weight for name, weight in free.items() if _pays(weight, name in calibrated)}
    search = _Search(_Request(state, allocate(matrices), pinned, 0, workers), size)
    finest, coarsest = FINEST, search.allocation.coarsest
    best: tuple[float, float, dict[str, Encoded]] | None = None
    exponent, tried = _FIRST, 0
    while tried < ROUNDS:
        tried += 1
        encoded = search.encoded(exponent)
        found = divergence(encoded)
        if found <= quality:
            best = (exponent, found, encoded) if best is None or exponent > best[0] else best
            finest = exponent
            if found >= _CLOSE * quality or exponent >= search.allocation.coarsest or not matrices:
                break
        else:
            coarsest = exponent
            if exponent <= FINEST or not matrices:
                break
        # The KL goes with the square of the step, while it is small.
        wanted = exponent + math.log2(_AIM * quality / max(found, 1e-12)) / 2
        exponent = wanted if finest < wanted < coarsest else (finest + coarsest) / 2
        if coarsest - finest < _NARROW:
            break
    if best is None:
        raise BudgetError(
            f"a quality of {quality} nats cannot be met: with the finest steps the model still costs {found:.6g}; "
            "allow more, or pin fewer tensors to coarse schemes"
        )
    exponent, found, encoded = best
    return Fit(encoded, size(encoded), 2.0**exponent, tried, found)


def _pays(weight: Tensor, calibrated: bool) -> bool:
    """Whether coarser steps are worth it: of large matrices always, of small ones when their worth is known."""
    known = calibrated and weight.ndim >= 2 and weight.numel() >= LEAST and _coarsens(weight)
    return known or is_matrix(weight)


def _coarsens(weight: Tensor) -> bool:
    """Whether a grid makes it smaller than 16 bits: not where rows are so short that their steps weigh more."""
    return takes_grid(weight) and rows_columns(tuple(weight.shape))[1] >= COLUMNS


@dataclass(frozen=True, slots=True)
class _Request:
    """What is to fit: all tensors, those to coarsen among them, the schemes of those pinned, bytes, threads."""

    state: Mapping[str, Tensor]
    allocation: Allocation
    pinned: Mapping[str, Scheme]
    budget: int
    workers: int | None


def _fit(request: _Request, size: Size, rough: Size | None) -> Fit:
    """Lossless if that fits, else the finest step that does; `rough` saves calls of `size`, and decides nothing."""
    near, start = True, None
    search = _Search(request, size)
    if rough is not None:
        probe = _Search(request, rough, search.fixed, draft=True)
        near = probe.lossless().bytes <= NEAR * request.budget
    kept = search.lossless() if near else None
    if kept is not None and kept.bytes <= request.budget:
        return kept
    if rough is not None:
        with suppress(BudgetError):
            start = probe.run(None).sigma
    fit = search.run(start)
    if kept is None and request.budget - fit.bytes > search.tolerance:
        kept = search.lossless()
        return kept if kept.bytes <= request.budget else fit
    return fit


class _Search:
    """One search: the bracket, the best fit so far, and the correction of the size model."""

    def __init__(
        self, request: _Request, size: Size, fixed: dict[str, Encoded] | None = None, *, draft: bool = False
    ) -> None:
        self.state, self.allocation, self.pinned = request.state, request.allocation, request.pinned
        self.matrices = request.allocation.matrices
        self.budget, self.workers, self.size, self.draft = request.budget, request.workers, size, draft
        self.tolerance = max(TINY, self.budget // TOLERANCE)
        self.rounds = 0
        self.fixed = self._fixed() if fixed is None else fixed

    def _fixed(self) -> dict[str, Encoded]:
        """What no step changes: the pinned tensors, and those too small for a grid."""
        names = [name for name in self.state if name not in self.matrices]
        schemes = {name: self.pinned.get(name) or small_scheme(self.state[name]) for name in names}
        state = {name: self.state[name] for name in names}
        return encode_all(state, schemes, sensitivities=self.allocation.sensitivities, workers=self.workers)

    def lossless(self) -> Fit:
        """Everything that is not pinned kept losslessly, whether or not it fits."""
        free = {name: weight for name, weight in self.state.items() if name not in self.pinned}
        kept = encode_all(free, dict.fromkeys(free, Lossless()), workers=self.workers)
        encoded = self._ordered(self.fixed | kept)
        return Fit(encoded, self._measure(encoded), None, self.rounds)

    def run(self, start: float | None) -> Fit:
        """Bracket and close in on the finest step that fits."""
        if not self.matrices:
            return self._fixed_only()
        model = _SizeModel(self.allocation)
        offset = float(sum(stream.nbytes for encoded in self.fixed.values() for stream in encoded.streams))
        target = self.budget - self.tolerance / 2
        over, under = FINEST, self.allocation.coarsest
        best: Fit | None = None
        proposal = model.solve(target - offset) if start is None else math.log2(start)
        for _ in range(ROUNDS):
            fit = self._code(proposal)
            if fit.bytes <= self.budget:
                under = proposal
                best = fit if best is None or fit.bytes > best.bytes else best
                if self.budget - fit.bytes <= self.tolerance or proposal <= FINEST:
                    return best
            else:
                over = proposal
                if proposal >= self.allocation.coarsest:
                    break
            wanted = model.solve(target - (fit.bytes - model(proposal)))
            proposal = wanted if over < wanted < under else self._inside(over, under, wanted)
        return best or self._coarsest()

    def _inside(self, over: float, under: float, wanted: float) -> float:
        """An end of the range that was proposed and never tried, else the middle of the bracket."""
        if wanted <= FINEST and over == FINEST:
            return FINEST
        coarsest = self.allocation.coarsest
        if wanted >= coarsest and under == coarsest:
            return coarsest
        return (over + under) / 2

    def _coarsest(self) -> Fit:
        fit = self._code(self.allocation.coarsest)
        if fit.bytes > self.budget:
            raise BudgetError(
                f"budget {self.budget:,} bytes cannot be met: the smallest file takes {fit.bytes:,} bytes, with "
                "the coarsest steps there are; allow a few more than that, or pin fewer tensors to fine schemes"
            )
        return fit

    def _fixed_only(self) -> Fit:
        size = self._measure(self._ordered(self.fixed))
        if size > self.budget:
            raise BudgetError(
                f"budget {self.budget:,} bytes cannot be met: no tensor is left to coarsen and they take {size:,} bytes"
            )
        return Fit(self._ordered(self.fixed), size, None, self.rounds)

    def encoded(self, exponent: float) -> dict[str, Encoded]:
        """Every tensor, the matrices at `exponent`."""
        return self._ordered(self.fixed | self.allocation.encode(exponent, draft=self.draft))

    def _code(self, exponent: float) -> Fit:
        encoded = self.encoded(exponent)
        return Fit(encoded, self._measure(encoded), 2.0**exponent, self.rounds)

    def _measure(self, encoded: Mapping[str, Encoded]) -> int:
        self.rounds += 1
        return self.size(encoded)

    def _ordered(self, encoded: Mapping[str, Encoded]) -> dict[str, Encoded]:
        return {name: encoded[name] for name in self.state}


class _SizeModel:
    """Predicted bytes of the matrices at an exponent: their number times the entropy of a normalised sample."""

    def __init__(self, allocation: Allocation) -> None:
        self.count = sum(weight.numel() for weight in allocation.matrices.values())
        self.coarsest = allocation.coarsest
        self.sample = allocation.sample(SAMPLE)
        self.dense = np.count_nonzero(self.sample) / len(self.sample)

    def __call__(self, exponent: float) -> float:
        # Below 2^-5 the histogram would be too thin for its sample, and each octave costs one bit for what is not zero.
        coarse = max(exponent, -5.0)
        symbols = np.rint(np.clip(self.sample * np.float32(2.0**-coarse), -32767, 32767)).astype(np.int64)
        counts = np.bincount(symbols + 32767)
        p = counts[counts > 0] / len(symbols)
        return self.count * (-float((p * np.log2(p)).sum()) + self.dense * (coarse - exponent)) / 8

    def solve(self, target: float) -> float:
        """The exponent at which the model predicts `target` bytes, within what the allocation has."""
        low, high = FINEST, self.coarsest
        if self(low) <= target:
            return low
        if self(high) >= target:
            return high
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self(middle) > target else (low, middle)
        return high
