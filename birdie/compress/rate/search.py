"""Search for a byte budget or a quality: one exponent for all tensors, by real coded bytes or by measured KL.

The search never sees a tensor: it proposes an exponent, which stands for the Lagrange multiplier of all matrices
(`birdie.compress.rate.jobs`), and measures the coded size of the model at it. The size is monotone in the
exponent, about one bit per weight less an octave, so a bracket always contains the solution and bisection must end. A
model of the entropy on a sample of the weights makes the search faster: it proposes an exponent, the real encoder
measures the size, and the difference corrects the next proposal; between two measured sizes around the budget it
interpolates. The KL is monotone as well, and grows by about a factor of four an octave.

    sample ─► predicted bytes(exponent) ──► propose ──► encode, code, count ──► within 0.1 % under the budget?
                                                ▲                   │
                                                └── offset, bracket ┘

Large models are coded completely about once. The same search on some rows of every matrix comes first and yields a
proposal that is right within a few per mille. What is missing then is made up for by a few matrices, whose exponent
moves by about an eighth of an octave at most: the optimum is flat, so what is lost that way cannot be measured.

If a lossless file fits the budget, the result is lossless. On plain grids the scale of a row has a resolution of a
sixteenth of an octave, so a model of one row lands within a sixteenth of a bit per weight; over a few dozen rows these
errors average out, and in a trellis rows take the next sixteenth one by one.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from birdie.compress.coding import Coded, Quantized
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.jobs import FINEST, Jobs
from birdie.compress.state import EncodedState
from birdie.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from birdie.compress.rate.control import Control

TOLERANCE = 1000  # the file may be smaller than the budget by a thousandth of it …
_DRAFT_TOLERANCE = 250  # the same where sizes are estimated, which is no more exact
TINY = 64  # … or by this many bytes
NEAR = 2  # lossless is tried first if its rough size is at most this many budgets
ROUNDS = 12  # codings of the model, at most
SAMPLE = 1 << 18  # weights of the size model
_FEW, _FEW_SHARE = 1 << 19, 32  # weights that are searched first: so many, or 1/32 of all if that is more
_FEWEST, _FEWEST_ROWS = 1 << 16, 16  # weights that tell whether a lossless file may fit, and rows of a matrix
_ROWS = 64  # rows of a matrix that are searched first; fewer tell little about classes of rows
_NOTHING = EncodedState({}, {})
_CLOSE_BY = 50  # sizes within this fraction (1/50) of the budget are corrected by a part of the matrices
_MOST_SHIFT = 1 / 8  # octaves by which these are shifted
_MOST_PART = 0.7  # share of the weights: a larger part is no less work than all
_TRIMS = 4  # corrections by a part, at most
_MOST_SLOPE = 4  # bits of a weight an octave, at most; the mean is about 1
_SLOPES = 4  # most change of the slope from one correction to the next
_MARGIN = 0.05  # share of a bracket at either end in which no exponent is tried
FIRST = -2.0  # exponent at which a search for quality begins
_AIM, _CLOSE = 0.99, 0.97  # shares of the quality: the KL to aim for, and the KL at which the search stops
_NARROW = 1 / 512  # octaves of the bracket at which a search for quality stops


@dataclass(frozen=True, slots=True)
class Fit:
    """All tensors of a file that meets its target."""

    encoded: EncodedState  # every tensor; coded, but for a quality
    bytes: int  # size of the complete file, if that is the target; else 0
    sigma: float | None  # typical scale in standard deviations; None if nothing was searched, or everything is lossless
    rounds: int = 0  # how many times the complete model was coded or measured
    divergence: float | None = None  # KL in nats per target, if it was measured
    untuned: float | None = None  # the same without tuning, if there was one
    nothing_to_tune: bool = False  # tuning was asked for, and there was nothing to train
    fuller: float | None = None  # error of the file that fills the budget, if this smaller one has a lower error
    control: "Control | None" = None  # comparison with what is assumed, after a calibration


def fit_budget(
    jobs: Jobs, encoder: Encoder, budget: int, *, start: float | None = None, bits: float | None = None
) -> Fit:
    """Choose the exponent so that the file lands just under `budget` bytes; lossless if that fits.

    A search by estimated sizes on some of the weights yields the first proposal, so that the model is coded about
    twice. It decides nothing.

    Args:
        encoder: of the file; codes the model about four times, at most `ROUNDS` + 2.
        budget: bytes the file may have.
        start: exponent to begin with, if the model is known not to fit losslessly.
        bits: bits per weight that the budget stands for, for the error message.
    """
    if budget <= 0:
        raise ConfigError(f"budget {budget} is not a positive number of bytes")
    search = _Search(jobs, encoder, budget, encoder.code(jobs.settled), bits)
    if start is not None:
        return search.run(start)
    near = search.draft(_FEWEST, _FEWEST_ROWS).lossless().bytes <= NEAR * budget
    lossless = search.lossless() if near else None
    if lossless is not None and lossless.bytes <= budget:
        return lossless
    with suppress(BudgetError):
        start = search.proposal()
    fit = search.run(start)
    if lossless is None and budget - fit.bytes > search.tolerance:
        lossless = search.lossless()
        return lossless if lossless.bytes <= budget else fit
    return fit


def proposed_exponent(jobs: Jobs, encoder: Encoder, budget: int) -> float | None:
    """Return about the exponent that `fit_budget` chooses, by estimated sizes; None if nothing is searched.

    Raises:
        BudgetError: nothing fits the budget.
    """
    return _Search(jobs, encoder, budget, encoder.code(jobs.settled)).proposal()


def fit_rest(jobs: Jobs, encoder: Encoder, budget: int, encoded: Mapping[str, Quantized], start: float) -> Fit:
    """Choose the exponent of some tensors so that the file lands just under `budget` bytes.

    Args:
        budget: bytes the file may have.
        start: exponent to begin with.
    """
    coded = encoder.coded(EncodedState(dict(encoded), {})).tensors
    rest = {name: job for name, job in jobs.by_name.items() if name not in coded}
    return _Search(replace(jobs, by_name=rest), encoder, budget, coded).run(start)  # type: ignore[arg-type]


def fit_quality(
    jobs: Jobs,
    encoder: Encoder,
    quality: float,
    difference: Callable[[EncodedState], float],
) -> Fit:
    """Choose the coarsest exponent that costs at most `quality`, in nats of KL or whatever `difference` measures.

    Args:
        encoder: encodes them once a round.
        quality: largest mean KL in nats per target.
        difference: mean KL of these tensors from the float model, or a relative error (calibration/kl.py).
    """
    settled, weights = encoder.encode(jobs.settled, 0.0), jobs.weights
    finest, coarsest = FINEST, jobs.coarsest
    best: tuple[float, float, EncodedState] | None = None
    exponent, rounds = FIRST, 0
    while rounds < ROUNDS:
        rounds += 1
        encoded = jobs.state({**settled, **encoder.encode(jobs.searched, exponent)})
        nats = difference(encoded)
        if nats <= quality:
            best = (exponent, nats, encoded) if best is None or exponent > best[0] else best
            finest = exponent
            if nats >= _CLOSE * quality or exponent >= jobs.coarsest or not weights:
                break
        else:
            coarsest = exponent
            if exponent <= FINEST or not weights:
                break
        # To second order the KL grows with the square of the scale: extrapolate, or bisect outside of the bracket, and
        # where it is infinite.
        ratio = _AIM * quality / max(nats, 1e-12)
        proposal = exponent + math.log2(ratio) / 2 if ratio else -math.inf
        exponent = proposal if finest < proposal < coarsest else (finest + coarsest) / 2
        if coarsest - finest < _NARROW:
            break
    if best is None:
        raise BudgetError(
            f"a quality of {quality} cannot be met: with the finest scales the difference is still {nats:.6g}; "
            "allow more, or pin fewer tensors to coarse schemes"
        )
    exponent, nats, encoded = best
    return Fit(encoded, 0, 2.0**exponent, rounds, nats)


class _Search:
    """One search for a budget: the bracket, the best fit so far, and the correction of the size model."""

    def __init__(
        self, jobs: Jobs, encoder: Encoder, budget: int, settled: Mapping[str, Coded], bits: float | None = None
    ) -> None:
        self.jobs, self.encoder, self.budget, self.bits = jobs, encoder, budget, bits
        self.settled, self.searched, self.weights = settled, jobs.searched, jobs.weights
        self.tolerance = max(TINY, budget // TOLERANCE)
        self.is_draft = False
        self.rounds = 0

    def draft(self, count: int, rows: int) -> "_Draft":
        """Return a search by estimated sizes, on about `count` of the weights and so many rows of each matrix."""
        return _Draft(self, count, rows)

    def proposal(self) -> float | None:
        """Return the exponent that estimated sizes of some of the weights propose."""
        draft = self.draft(max(_FEW, self.weights // _FEW_SHARE), _ROWS).run(None)
        return None if draft.sigma is None else math.log2(draft.sigma)

    def lossless(self) -> Fit:
        """Return the fit in which all tensors without a rule are lossless, even if it is larger than the budget."""
        return self._fit({**self.settled, **self.encoder.code(self.jobs.lossless())}, None)

    def run(self, start: float | None) -> Fit:
        """Bracket the finest scale that fits and close in on it, beginning at `start` unless that is None."""
        if not self.weights:
            return self._settled_only()
        model = _SizeModel(self.jobs, self.weights)
        target = self.budget - self.tolerance / 2
        over, under = FINEST, self.jobs.coarsest
        above = below = 0  # bytes at these exponents, as far as they were coded
        best: Fit | None = None
        proposal = model.solve(target - self.settled_bytes()) if start is None else start
        for _ in range(ROUNDS):
            fit = self.at(proposal)
            coded = fit.bytes
            if self.weights >= _FEW and not self.is_draft and abs(fit.bytes - target) * _CLOSE_BY <= self.budget:
                fit = self._trimmed(fit, proposal, model, target)
            if fit.bytes <= self.budget:
                best = fit if best is None or fit.bytes > best.bytes else best
                if self.budget - fit.bytes <= self.tolerance or proposal <= FINEST:
                    return best
            if coded <= self.budget:
                under, below = proposal, coded
            else:
                over, above = proposal, coded
                if proposal >= self.jobs.coarsest:
                    break
            if above and below:
                if (under - over) * _MOST_SLOPE * self.weights / 8 < self.tolerance / 2:
                    break  # the size jumps here: a encoder's choice changes, so no exponent comes nearer
                # Two real sizes around the target give the slope, which at low rates is steeper than the model's.
                share = (above - target) / (above - below)
                proposal = over + (under - over) * min(max(share, _MARGIN), 1 - _MARGIN)
                continue
            # The model's error at this exponent is nearly the same at the next one: subtract it from the target.
            corrected = model.solve(target - (coded - model(proposal)))
            proposal = corrected if over < corrected < under else self._inside(over, under, corrected)
        if best is None:
            return self._coarsest()
        if self.is_draft or self.budget - best.bytes <= self.tolerance:
            return best
        return self._trimmed(best, under, model, target)  # other matrices may fill what a jump leaves

    def at(self, exponent: float) -> Fit:
        """Return the fit at an exponent, even if it is larger than the budget."""
        return self._fit({**self.settled, **self.encoder.code(self.searched, exponent)}, 2.0**exponent)

    def settled_bytes(self) -> int:
        """Return the size of a file of the tensors that the exponent does not change."""
        return self.encoder.size(EncodedState(self.settled, {}))

    def _fit(self, tensors: Mapping[str, Coded], sigma: float | None) -> Fit:
        self.rounds += 1
        encoded = self.jobs.state(tensors)
        return Fit(encoded, self.encoder.size(encoded), sigma, self.rounds)

    def _trimmed(self, fit: Fit, exponent: float, model: "_SizeModel", target: float) -> Fit:
        """Return the nearest fit below the budget that a shift of some matrices gives; `fit` if there is none."""
        slope = (model(exponent - 0.05) - model(exponent + 0.05)) / 0.1  # bytes an octave of all
        some, share = self.jobs.smallest(abs(fit.bytes - target) / max(slope, 1) / _MOST_SHIFT)
        if share > _MOST_PART:
            return fit
        tried, shift, slope = [fit], 0.0, slope * share
        for _ in range(_TRIMS):
            last = tried[-1]
            if 0 <= self.budget - last.bytes <= self.tolerance:
                break
            step = (last.bytes - target) / slope
            shift += step
            changed = {**fit.encoded.tensors, **self.encoder.code(some, exponent + shift)}
            tried.append(self._fit(changed, fit.sigma))  # type: ignore[arg-type]
            # Matrices that a calibration finds insensitive have few bits, and lose less than the model's slope.
            slope = min(max((last.bytes - tried[-1].bytes) / step, slope / _SLOPES), slope * _SLOPES)
        fits = [one for one in tried if one.bytes <= self.budget]
        return max(fits, key=lambda one: one.bytes, default=fit)

    def _inside(self, over: float, under: float, proposal: float) -> float:
        """Return an untried end of the range if the proposal lies beyond it, else the middle of the bracket."""
        if proposal <= FINEST and over == FINEST:
            return FINEST
        if proposal >= self.jobs.coarsest and under == self.jobs.coarsest:
            return self.jobs.coarsest
        return (over + under) / 2

    def _unmet(self) -> str:
        if self.bits is None:
            return f"budget {self.budget:,} bytes cannot be met"
        return f"{self.bits:g} bits per weight ({self.budget:,} bytes) cannot be met"

    def _size(self, size: int) -> str:
        per_weight = "" if self.bits is None else f" ({8 * size / self.jobs.assignment.weights:.3g} bits per weight)"
        return f"{size:,} bytes{per_weight}"

    def _coarsest(self) -> Fit:
        fit = self.at(self.jobs.coarsest)
        if fit.bytes > self.budget:
            raise BudgetError(
                f"{self._unmet()}: the smallest file takes {self._size(fit.bytes)}, with the coarsest scales possible; "
                "allow a few more than that"
            )
        return fit

    def _settled_only(self) -> Fit:
        fit = replace(self.at(0.0), sigma=None)
        if fit.bytes > self.budget:
            raise BudgetError(
                f"{self._unmet()}: no tensor is left to coarsen and they take {self._size(fit.bytes)}; allow more, or "
                "remove rules"
            )
        return fit


class _Draft(_Search):
    """A search by estimated sizes, on some rows of the matrices; its fits hold no tensors."""

    def __init__(self, search: _Search, count: int, rows: int) -> None:
        jobs, self.ratios = search.jobs.sampled(count, rows)
        # The wider tolerance is centered on the narrow one.
        budget = search.budget + (search.budget // _DRAFT_TOLERANCE - search.budget // TOLERANCE) // 2
        super().__init__(jobs, search.encoder, budget, search.settled)
        self.tolerance = max(TINY, budget // _DRAFT_TOLERANCE)
        self.is_draft, self.weights = True, search.weights  # sizes are those of the complete file
        self.known = self.encoder.estimated(search.settled)

    def lossless(self) -> Fit:
        """Return the size of the fit in which all tensors without a rule are lossless."""
        return Fit(_NOTHING, self._total({**self.known, **self.encoder.estimate(self.jobs.lossless())}), None)

    def at(self, exponent: float) -> Fit:
        """Return the size at an exponent."""
        sizes = {**self.known, **self.encoder.estimate(self.searched, exponent)}
        return Fit(_NOTHING, self._total(sizes), 2.0**exponent)

    def settled_bytes(self) -> int:
        """Return the size of the tensors that the exponent does not change."""
        return self._total(self.known)

    def _total(self, sizes: Mapping[str, tuple[float, float]]) -> int:
        return round(sum(weights * self.ratios.get(name, 1.0) + rest for name, (weights, rest) in sizes.items()))


class _SizeModel:
    """Model of the size: bytes of the matrices at an exponent, their elements times the entropy of a sample."""

    def __init__(self, jobs: Jobs, count: int) -> None:
        self.count = count
        self.coarsest = jobs.coarsest
        self.sample = jobs.normalized(SAMPLE)
        self.dense = np.count_nonzero(self.sample) / len(self.sample)

    def __call__(self, exponent: float) -> float:
        # Below 2^-5 there would be too few samples per histogram bin, and there each octave costs one bit for every
        # weight that is not zero.
        coarse = max(exponent, -5.0)
        symbols = np.rint(np.clip(self.sample * np.float32(2.0**-coarse), -32767, 32767)).astype(np.int64)
        counts = np.bincount(symbols + 32767)
        p = counts[counts > 0] / len(symbols)
        return self.count * (-float((p * np.log2(p)).sum()) + self.dense * (coarse - exponent)) / 8

    def solve(self, target: float) -> float:
        """Return the exponent at which the model predicts `target` bytes, within the range of the jobs."""
        low, high = FINEST, self.coarsest
        if self(low) <= target:
            return low
        if self(high) >= target:
            return high
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self(middle) > target else (low, middle)
        return high
