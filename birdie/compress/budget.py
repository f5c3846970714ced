"""The byte budget: one number for all tensors, found by bisection on real coded bytes.

Every matrix gets a grid whose step is c · f · (standard deviation of the row), with one c for the whole model and
f = 1, except for embeddings, which are read or written by every token and mind errors more (`EMBEDDING_FACTOR`). The
size falls steadily as c grows, about one bit per weight an octave, so the search runs over log2 c: a model of the
entropy on a sample of the weights proposes c, the real coder answers, and the difference corrects the next proposal.

    sample ─► predicted bytes(log2 c) ──► propose ──► encode, code, count ──► within 0.1 % under the budget?
                                             ▲                   │
                                             └── offset, bracket ┘

A budget that lossless fits gives lossless. One that leaves too little beside what is small and kept in 16 bits
coarsens that too, but for vectors under a few thousand elements. The step of a row is found in sixteenths of an
octave, so a model of a single row lands within a sixteenth of a bit per weight; a few dozen rows even that out.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.choose import encode_all, is_matrix, small_scheme, suit, takes_grid
from birdie.compress.grid import Grid
from birdie.compress.lossless import Lossless
from birdie.compress.scheme import Encoded, Scheme
from birdie.compress.tensors import finite_rows, rows_columns
from birdie.errors import BudgetError, ConfigError

Size = Callable[[Mapping[str, Encoded]], int]

# Embedding rows take steps this much finer. Tuned on a 3.8 M-weight GPT with GPTQ, the best pairs of steps were
# 0.3 σ with 0.05 σ for the embedding, and 0.2 σ with 0.108 σ: factors of 0.17 and 0.54. This is between the two.
EMBEDDING_FACTOR = 0.35
EMBEDDING_NAMES = ("tok_emb", "embed", "wte", "lm_head")

# log2 c. The finest is about eighteen bits per weight, the most that symbols exact in float32 leave to a row with
# outliers; at the coarsest every row, embeddings included, has the widest step.
FINEST, COARSEST = -16.0, 3.6
# Standard deviations no step exceeds: beyond, a matrix is all but zero, and to call that a fit would be a lie.
WIDEST = 4.0
TOLERANCE = 1000  # land within a thousandth of the budget …
TINY = 64  # … or this many bytes
NEAR = 2  # lossless is tried at once when its rough size is within this many budgets
COLUMNS = 8  # a row shorter than this is no smaller with a step of its own than in 16 bits
ROUNDS = 12
SAMPLE = 1 << 18


@dataclass(frozen=True, slots=True)
class Fit:
    """What the budget search settled on.

    Attributes:
        encoded: every tensor, encoded.
        bytes: the size of the whole file, by the caller's measure; never over the budget.
        sigma: the step c in standard deviations; None when everything is lossless.
        rounds: how many times the whole model was coded.
    """

    encoded: dict[str, Encoded]
    bytes: int
    sigma: float | None
    rounds: int


def fit_budget(
    state: Mapping[str, Tensor],
    size: Size,
    budget: int,
    *,
    pinned: Mapping[str, Scheme] | None = None,
    rough: Size | None = None,
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
    matrices = {name: weight for name, weight in free.items() if is_matrix(weight)}
    more = {name: weight for name, weight in free.items() if name in matrices or _coarsens(weight)}
    kept_bytes = sum(weight.numel() * min(weight.itemsize, 2) for name, weight in more.items() if name not in matrices)
    # What is kept in 16 bits must not starve the rest: over half of the budget, it is coarsened as well.
    if 0 < 2 * kept_bytes <= budget:
        with suppress(BudgetError):
            return _fit(_Request(state, matrices, pinned, budget, workers), size, rough)
    return _fit(_Request(state, more, pinned, budget, workers), size, rough)


def _coarsens(weight: Tensor) -> bool:
    """Whether a grid makes it smaller than 16 bits: not where rows are so short that their steps weigh more."""
    return takes_grid(weight) and rows_columns(tuple(weight.shape))[1] >= COLUMNS


@dataclass(frozen=True, slots=True)
class _Request:
    """What is to fit: all tensors, those to coarsen among them, the schemes of those pinned, bytes, threads."""

    state: Mapping[str, Tensor]
    matrices: Mapping[str, Tensor]
    pinned: Mapping[str, Scheme]
    budget: int
    workers: int | None


def _fit(request: _Request, size: Size, rough: Size | None) -> Fit:
    """Lossless if that fits, else the finest step that does; `rough` saves calls of `size`, and decides nothing."""
    near, start = True, None
    search = _Search(request, size)
    if rough is not None:
        probe = _Search(request, rough, search.fixed)
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

    def __init__(self, request: _Request, size: Size, fixed: dict[str, Encoded] | None = None) -> None:
        self.state, self.matrices, self.pinned = request.state, request.matrices, request.pinned
        self.budget, self.workers, self.size = request.budget, request.workers, size
        self.tolerance = max(TINY, self.budget // TOLERANCE)
        self.rounds = 0
        self.fixed = self._fixed() if fixed is None else fixed

    def _fixed(self) -> dict[str, Encoded]:
        """What no step changes: the pinned tensors, and those too small for a grid."""
        names = [name for name in self.state if name not in self.matrices]
        schemes = {name: self.pinned.get(name) or small_scheme(self.state[name]) for name in names}
        return encode_all({name: self.state[name] for name in names}, schemes, workers=self.workers)

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
        model = _SizeModel(self.matrices)
        offset = float(sum(stream.nbytes for encoded in self.fixed.values() for stream in encoded.streams))
        target = self.budget - self.tolerance / 2
        over, under = FINEST, COARSEST
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
                if proposal >= COARSEST:
                    break
            wanted = model.solve(target - (fit.bytes - model(proposal)))
            proposal = wanted if over < wanted < under else self._inside(over, under, wanted)
        return best or self._coarsest()

    def _inside(self, over: float, under: float, wanted: float) -> float:
        """An end of the range that was proposed and never tried, else the middle of the bracket."""
        if wanted <= FINEST and over == FINEST:
            return FINEST
        if wanted >= COARSEST and under == COARSEST:
            return COARSEST
        return (over + under) / 2

    def _coarsest(self) -> Fit:
        fit = self._code(COARSEST)
        if fit.bytes > self.budget:
            raise BudgetError(
                f"budget {self.budget:,} bytes cannot be met: the smallest file takes {fit.bytes:,} bytes, with "
                "steps of 4 standard deviations; allow a few more than that, or pin fewer tensors to fine schemes"
            )
        return fit

    def _fixed_only(self) -> Fit:
        size = self._measure(self._ordered(self.fixed))
        if size > self.budget:
            raise BudgetError(
                f"budget {self.budget:,} bytes cannot be met: no tensor is left to coarsen and they take {size:,} bytes"
            )
        return Fit(self._ordered(self.fixed), size, None, self.rounds)

    def _code(self, exponent: float) -> Fit:
        sigma = 2.0**exponent
        schemes = {name: Grid(sigma=min(sigma * _factor(name), WIDEST)) for name in self.matrices}
        encoded = self._ordered(self.fixed | encode_all(self.matrices, schemes, workers=self.workers))
        return Fit(encoded, self._measure(encoded), sigma, self.rounds)

    def _measure(self, encoded: Mapping[str, Encoded]) -> int:
        self.rounds += 1
        return self.size(encoded)

    def _ordered(self, encoded: Mapping[str, Encoded]) -> dict[str, Encoded]:
        return {name: encoded[name] for name in self.state}


def _factor(name: str) -> float:
    return EMBEDDING_FACTOR if any(part in name for part in EMBEDDING_NAMES) else 1.0


class _SizeModel:
    """Predicted bytes of the matrices at log2 c: their number times the entropy of a normalised sample on that grid."""

    def __init__(self, matrices: Mapping[str, Tensor]) -> None:
        self.count = sum(weight.numel() for weight in matrices.values())
        share = min(1.0, SAMPLE / self.count)
        self.sample = np.concatenate([_normalised(name, weight, share) for name, weight in matrices.items()])
        self.dense = np.count_nonzero(self.sample) / len(self.sample)

    def __call__(self, exponent: float) -> float:
        # Below 2^-5 the histogram would be too thin for its sample, and each octave costs one bit for what is not zero.
        coarse = max(exponent, -5.0)
        symbols = np.rint(np.clip(self.sample * np.float32(2.0**-coarse), -32767, 32767)).astype(np.int64)
        counts = np.bincount(symbols + 32767)
        p = counts[counts > 0] / len(symbols)
        return self.count * (-float((p * np.log2(p)).sum()) + self.dense * (coarse - exponent)) / 8

    def solve(self, target: float) -> float:
        """The log2 c at which the model predicts `target` bytes, within [FINEST, COARSEST]."""
        low, high = FINEST, COARSEST
        if self(low) <= target:
            return low
        if self(high) >= target:
            return high
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self(middle) > target else (low, middle)
        return high


def _normalised(name: str, weight: Tensor, share: float) -> NDArray[np.float32]:
    """About `share` of the rows of `weight`, in units of the step at c = 1, flat."""
    flat = weight.detach().reshape(rows_columns(tuple(weight.shape)))
    picked = torch.arange(0, flat.shape[0], max(1, round(1 / share)))
    rows = finite_rows(name, flat[picked])
    deviation = rows.std(axis=1, keepdims=True, dtype=np.float64)
    unit = np.where(deviation > 0, deviation, 1) * _factor(name)
    return np.asarray(rows / unit, dtype=np.float32).reshape(-1)
