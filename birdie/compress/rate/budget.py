"""Search for a byte budget or a quality: one exponent for all tensors, by real coded bytes or by measured KL.

The search never sees a tensor: it proposes an exponent, which stands for the Lagrange multiplier of all matrices
(`birdie.compress.rate.allocation`), and measures the coded size of the model at it. The size is monotone in the
exponent, about one bit per weight less an octave, so a bracket always contains the solution and bisection must end. A
model of the entropy on a sample of the weights makes the search faster: it proposes an exponent, the real coder
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from birdie.compress.scheme import Encoded
from birdie.compress.state import EncodedState
from birdie.errors import BudgetError, ConfigError

Size = Callable[[EncodedState], int]
"""Bytes of the file that holds these tensors."""
Estimate = Callable[[EncodedState], Mapping[str, tuple[float, float]]]
"""About the bytes of each tensor: of its weights, in proportion to them, and of what describes them."""
Divergence = Callable[[EncodedState], float]
"""Mean KL of these tensors from the float model, in nats per target, or a relative error (calibration/kl.py)."""


class Encoder(Protocol):
    """Encoder of a model at any exponent; `Allocation` is one.

    Attributes:
        finest, coarsest: the range of exponents.
        weights: how many weights the exponent changes.
    """

    finest: float
    coarsest: float
    weights: int

    def encode(self, exponent: float, draft: bool = False) -> EncodedState:
        """Encode every tensor at an exponent; a draft gives about the size in less time."""
        ...

    def encode_lossless(self) -> EncodedState:
        """Encode every tensor losslessly, except those that a rule names."""
        ...

    def encode_part(self, names: Sequence[str], exponent: float) -> dict[str, Encoded]:
        """Encode some tensors at an exponent."""
        ...

    def part(self, share: float) -> tuple[list[str], float]:
        """Return tensors that hold at least this share of the weights that the exponent changes, and their share."""
        ...

    def sampled(self, count: int, rows: int) -> "tuple[Encoder, Mapping[str, float]]":
        """Return an encoder of some rows of the tensors, about `count` weights, and how many times fewer of each.

        Of a matrix it has at least so many rows.
        """
        ...

    def settled(self) -> EncodedState:
        """Return the tensors that the exponent does not change, alone."""
        ...

    def sample(self, count: int) -> NDArray[np.float32]:
        """Return about `count` weights that the exponent changes, divided by their scales at exponent 0."""
        ...


TOLERANCE = 1000  # the file may be smaller than the budget by a thousandth of it …
_DRAFT_TOLERANCE = 250  # the same where sizes are estimated, which is no more exact
TINY = 64  # … or by this many bytes
NEAR = 2  # lossless is tried first if its rough size is at most this many budgets
ROUNDS = 12  # codings of the model, at most
SAMPLE = 1 << 18  # weights of the size model
_FEW, _FEW_SHARE = 1 << 19, 32  # weights that are searched first: so many, or 1/32 of all if that is more
_FEWEST, _FEWEST_ROWS = 1 << 16, 16  # weights that tell whether a lossless file may fit, and rows of a matrix
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
    """Result of a search for a budget or a quality.

    Attributes:
        encoded: every tensor, encoded.
        bytes: size of the complete file, by the caller's measure.
        sigma: typical scale in standard deviations; None if everything is lossless.
        rounds: how many times the complete model was coded.
        divergence: KL in nats per target, if a quality was the target.
    """

    encoded: EncodedState
    bytes: int
    sigma: float | None
    rounds: int
    divergence: float | None = None


def fit_budget(
    encoder: Encoder, size: Size, budget: int, rough: Estimate | None = None, *, start: float | None = None
) -> Fit:
    """Choose the exponent so that the file lands just under `budget` bytes; lossless if that fits.

    Args:
        encoder: of the model.
        size: bytes of the file; called about four times, at most `ROUNDS` + 2.
        budget: bytes the file may have.
        rough: fast estimate of `size`, never much smaller: a search by it on some of the weights yields the first
            proposal, so that `size` is called about twice. It decides nothing: a state that does not fit by `rough` may
            still fit by `size`.
        start: scale to begin with, in standard deviations, if the model is known not to fit losslessly.
    """
    if budget <= 0:
        raise ConfigError(f"budget {budget} is not a positive number of bytes")
    search = _Search(encoder, size, budget)
    if start is not None:
        return search.run(start)
    near = True
    if rough is not None:
        near = _scaled(encoder, rough, budget, _FEWEST, _FEWEST_ROWS).lossless().bytes <= NEAR * budget
    lossless = search.lossless() if near else None
    if lossless is not None and lossless.bytes <= budget:
        return lossless
    if rough is not None:
        with suppress(BudgetError):
            start = _scaled(encoder, rough, budget, max(_FEW, encoder.weights // _FEW_SHARE)).run(None).sigma
    fit = search.run(start)
    if lossless is None and budget - fit.bytes > search.tolerance:
        lossless = search.lossless()
        return lossless if lossless.bytes <= budget else fit
    return fit


def fit_quality(encoder: Encoder, size: Size, quality: float, divergence: Divergence, *, start: float = FIRST) -> Fit:
    """Choose the coarsest exponent that costs at most `quality`, in nats of KL or whatever `divergence` measures.

    Args:
        encoder: of the model.
        size: called once.
        quality: largest mean KL in nats per target.
        divergence: mean KL of an encoded state; called once a round.
        start: exponent to begin with.
    """
    if not 0 < quality < math.inf:
        raise ConfigError(f"quality {quality} is not a positive number")
    finest, coarsest = encoder.finest, encoder.coarsest
    best: tuple[float, float, EncodedState] | None = None
    exponent, rounds = start, 0
    while rounds < ROUNDS:
        rounds += 1
        encoded = encoder.encode(exponent)
        nats = divergence(encoded)
        if nats <= quality:
            best = (exponent, nats, encoded) if best is None or exponent > best[0] else best
            finest = exponent
            if nats >= _CLOSE * quality or exponent >= encoder.coarsest or not encoder.weights:
                break
        else:
            coarsest = exponent
            if exponent <= encoder.finest or not encoder.weights:
                break
        # To second order the KL grows with the square of the scale: extrapolate, or bisect outside of the bracket.
        proposal = exponent + math.log2(_AIM * quality / max(nats, 1e-12)) / 2
        exponent = proposal if finest < proposal < coarsest else (finest + coarsest) / 2
        if coarsest - finest < _NARROW:
            break
    if best is None:
        raise BudgetError(
            f"a quality of {quality} cannot be met: with the finest scales the difference is still {nats:.6g}; "
            "allow more, or pin fewer tensors to coarse schemes"
        )
    exponent, nats, encoded = best
    return Fit(encoded, size(encoded), 2.0**exponent, rounds, nats)


def _scaled(encoder: Encoder, estimate: Estimate, budget: int, count: int, rows: int = 64) -> "_Search":
    """Return a search by an estimate of the size, on about `count` of the weights, and so many rows of each matrix.

    Fewer rows tell little about classes of rows.
    """
    some, factors = encoder.sampled(count, rows)

    def size(encoded: EncodedState) -> int:
        parts = estimate(encoded).items()
        return round(sum(weights * factors.get(name, 1.0) + rest for name, (weights, rest) in parts))

    # The wider tolerance is centered on the narrow one.
    return _Search(some, size, budget + (budget // _DRAFT_TOLERANCE - budget // TOLERANCE) // 2, draft=True)


class _Search:
    """One search for a budget: the bracket, the best fit so far, and the correction of the size model."""

    def __init__(self, encoder: Encoder, size: Size, budget: int, *, draft: bool = False) -> None:
        self.encoder, self.size, self.budget, self.draft = encoder, size, budget, draft
        self.tolerance = max(TINY, self.budget // (_DRAFT_TOLERANCE if draft else TOLERANCE))
        self.rounds = 0

    def lossless(self) -> Fit:
        """Return the fit in which all tensors without a rule are lossless, even if it is larger than the budget."""
        encoded = self.encoder.encode_lossless()
        return Fit(encoded, self._measure(encoded), None, self.rounds)

    def run(self, start: float | None) -> Fit:
        """Bracket the finest scale that fits and close in on it, beginning at `start` unless that is None."""
        if not self.encoder.weights:
            return self._settled_only()
        model = _SizeModel(self.encoder)
        offset = float(self.size(self.encoder.settled()))
        target = self.budget - self.tolerance / 2
        over, under = self.encoder.finest, self.encoder.coarsest
        above = below = 0  # bytes at these exponents, as far as they were coded
        best: Fit | None = None
        proposal = model.solve(target - offset) if start is None else math.log2(start)
        for _ in range(ROUNDS):
            fit = self._code(proposal)
            coded = fit.bytes
            if self.encoder.weights >= _FEW and not self.draft and abs(fit.bytes - target) * _CLOSE_BY <= self.budget:
                fit = self._trimmed(fit, proposal, model, target)
            if fit.bytes <= self.budget:
                best = fit if best is None or fit.bytes > best.bytes else best
                if self.budget - fit.bytes <= self.tolerance or proposal <= self.encoder.finest:
                    return best
            if coded <= self.budget:
                under, below = proposal, coded
            else:
                over, above = proposal, coded
                if proposal >= self.encoder.coarsest:
                    break
            if above and below:
                if (under - over) * _MOST_SLOPE * self.encoder.weights / 8 < self.tolerance / 2:
                    break  # the size jumps here: a coder's choice changes, so no exponent comes nearer
                # Two real sizes around the target give the slope, which at low rates is steeper than the model's.
                share = (above - target) / (above - below)
                proposal = over + (under - over) * min(max(share, _MARGIN), 1 - _MARGIN)
                continue
            # The model's error at this exponent is nearly the same at the next one: subtract it from the target.
            corrected = model.solve(target - (coded - model(proposal)))
            proposal = corrected if over < corrected < under else self._inside(over, under, corrected)
        if best is None:
            return self._coarsest()
        if self.draft or self.budget - best.bytes <= self.tolerance:
            return best
        return self._trimmed(best, under, model, target)  # other matrices may fill what a jump leaves

    def _trimmed(self, fit: Fit, exponent: float, model: "_SizeModel", target: float) -> Fit:
        """Return the nearest fit below the budget that a shift of some matrices gives; `fit` if there is none."""
        slope = (model(exponent - 0.05) - model(exponent + 0.05)) / 0.1  # bytes an octave of all
        names, share = self.encoder.part(abs(fit.bytes - target) / max(slope, 1) / _MOST_SHIFT)
        if share > _MOST_PART:
            return fit
        tried, shift, slope = [fit], 0.0, slope * share
        for _ in range(_TRIMS):
            last = tried[-1]
            if 0 <= self.budget - last.bytes <= self.tolerance:
                break
            step = (last.bytes - target) / slope
            shift += step
            part = self.encoder.encode_part(names, exponent + shift)
            encoded = EncodedState({**fit.encoded.tensors, **part}, fit.encoded.ties)
            tried.append(Fit(encoded, self._measure(encoded), fit.sigma, self.rounds))
            # Matrices that a calibration finds insensitive have few bits, and lose less than the model's slope.
            slope = min(max((last.bytes - tried[-1].bytes) / step, slope / _SLOPES), slope * _SLOPES)
        fits = [one for one in tried if one.bytes <= self.budget]
        return max(fits, key=lambda one: one.bytes, default=fit)

    def _inside(self, over: float, under: float, proposal: float) -> float:
        """Return an untried end of the range if the proposal lies beyond it, else the middle of the bracket."""
        finest, coarsest = self.encoder.finest, self.encoder.coarsest
        if proposal <= finest and over == finest:
            return finest
        if proposal >= coarsest and under == coarsest:
            return coarsest
        return (over + under) / 2

    def _coarsest(self) -> Fit:
        fit = self._code(self.encoder.coarsest)
        if fit.bytes > self.budget:
            raise BudgetError(
                f"budget {self.budget:,} bytes cannot be met: the smallest file takes {fit.bytes:,} bytes, with "
                "the coarsest scales possible; allow a few more than that, or pin fewer tensors to fine schemes"
            )
        return fit

    def _settled_only(self) -> Fit:
        encoded = self.encoder.encode(0.0)
        size = self._measure(encoded)
        if size > self.budget:
            raise BudgetError(
                f"budget {self.budget:,} bytes cannot be met: no tensor is left to coarsen and they take {size:,} bytes"
                "; allow more, or remove rules"
            )
        return Fit(encoded, size, None, self.rounds)

    def _code(self, exponent: float) -> Fit:
        encoded = self.encoder.encode(exponent, self.draft)
        return Fit(encoded, self._measure(encoded), 2.0**exponent, self.rounds)

    def _measure(self, encoded: EncodedState) -> int:
        self.rounds += 1
        return self.size(encoded)


class _SizeModel:
    """Model of the size: bytes of the matrices at an exponent, their elements times the entropy of a sample."""

    def __init__(self, encoder: Encoder) -> None:
        self.count = encoder.weights
        self.finest, self.coarsest = encoder.finest, encoder.coarsest
        self.sample = encoder.sample(SAMPLE)
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
        """Return the exponent at which the model predicts `target` bytes, within the range of the allocation."""
        low, high = self.finest, self.coarsest
        if self(low) <= target:
            return low
        if self(high) >= target:
            return high
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self(middle) > target else (low, middle)
        return high
