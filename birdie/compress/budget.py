"""The byte budget: one number for all tensors, found by bisection on real coded bytes.

Every matrix gets a grid whose step is c · f · (standard deviation of the row), with one c for the whole model and
f = 1, except for embeddings, which are read or written by every token and mind errors more (`EMBEDDING_FACTOR`). The
size falls steadily as c grows, about one bit per weight an octave, so the search runs over log2 c: a model of the
entropy on a sample of the weights proposes c, the real coder answers, and the difference corrects the next proposal.

    sample ─► predicted bytes(log2 c) ──► propose ──► encode, code, count ──► within 0.1 % under the budget?
                                             ▲                   │
                                             └── offset, bracket ┘
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.choose import encode_all, is_matrix, small_scheme, suit
from birdie.compress.grid import Grid
from birdie.compress.lossless import Lossless
from birdie.compress.scheme import Encoded, Scheme
from birdie.compress.tensors import finite_rows
from birdie.errors import BudgetError, ConfigError

Size = Callable[[Mapping[str, Encoded]], int]

# Embedding rows take steps this much finer. Tuned on a 3.8 M-weight GPT with GPTQ, the best pairs of steps were
# 0.3 σ with 0.05 σ for the embedding, and 0.2 σ with 0.108 σ: factors of 0.17 and 0.54. This is between the two.
EMBEDDING_FACTOR = 0.35
EMBEDDING_NAMES = ("tok_emb", "embed", "wte", "lm_head")

FINEST, COARSEST = -9.0, 2.0  # log2 c: about eleven bits per weight; only what is beyond 2 σ is not zero
TOLERANCE = 1000  # land within a thousandth of the budget …
TINY = 64  # … or this many bytes
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
    pinned = dict(pinned or {})
    free = {name: weight for name, weight in state.items() if name not in pinned}
    matrices = {name: weight for name, weight in free.items() if is_matrix(weight)}
    fixed_schemes = {name: suit(pinned[name], state[name]) for name in pinned}
    fixed_schemes |= {name: small_scheme(weight) for name, weight in free.items() if name not in matrices}
    fixed = encode_all({name: state[name] for name in fixed_schemes}, fixed_schemes, workers=workers)
    search = _Search(state, matrices, fixed, size, budget, workers)
    start = None
    if rough is not None:
        with suppress(BudgetError):
            start = fit_budget(state, rough, budget, pinned=pinned, workers=workers).sigma
    kept = search.lossless(fixed_schemes, pinned) if start is None else None
    return kept or search.run(start)


class _Search:
    """One search: the bracket, the best fit so far, and the correction of the size model."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        matrices: Mapping[str, Tensor],
        fixed: dict[str, Encoded],
        size: Size,
        budget: int,
        workers: int | None,
    ) -> None:
        self.state, self.matrices, self.fixed = state, matrices, fixed
        self.size, self.budget, self.workers = size, budget, workers
        self.rounds = 0

    def lossless(self, schemes: Mapping[str, Scheme], pinned: Mapping[str, Scheme]) -> Fit | None:
        """Everything that is not pinned kept losslessly, if there is a chance that this fits and it does."""
        raw = sum(weight.nbytes for name, weight in self.state.items() if name not in pinned)
        if self.budget < raw // 4 and raw > 1 << 20:
            return None
        free = {name: weight for name, weight in self.state.items() if name not in pinned}
        kept = encode_all(free, dict.fromkeys(free, Lossless()), workers=self.workers)
        encoded = self._ordered({name: self.fixed[name] for name in schemes if name in pinned} | kept)
        size = self._measure(encoded)
        return Fit(encoded, size, None, self.rounds) if size <= self.budget else None

    def run(self, start: float | None) -> Fit:
        """Bracket and close in on the finest step that fits."""
        if not self.matrices:
            return self._fixed_only()
        model = _SizeModel(self.matrices)
        offset = float(sum(stream.nbytes for encoded in self.fixed.values() for stream in encoded.streams))
        tolerance = max(TINY, self.budget // TOLERANCE)
        over, under = FINEST, COARSEST
        best: Fit | None = None
        proposal = model.solve(self.budget - tolerance / 2 - offset) if start is None else math.log2(start)
        for _ in range(ROUNDS):
            fit = self._code(proposal)
            if fit.bytes <= self.budget:
                under = proposal
                best = fit if best is None or fit.bytes > best.bytes else best
                if self.budget - fit.bytes <= tolerance or proposal <= FINEST:
                    return best
            else:
                over = proposal
                if proposal >= COARSEST:
                    break
            wanted = model.solve(self.budget - tolerance / 2 - (fit.bytes - model(proposal)))
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
                f"budget {self.budget:,} bytes cannot be met: the smallest file takes {fit.bytes:,} bytes, with nearly "
                "every weight rounded to zero; allow more than that, or pin fewer tensors to fine schemes"
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
        schemes = {name: Grid(sigma=sigma * _factor(name)) for name in self.matrices}
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

    def __call__(self, exponent: float) -> float:
        # Below 2^-5 the histogram would be too thin for its sample, and each octave costs one bit exactly.
        coarse = max(exponent, -5.0)
        symbols = np.rint(np.clip(self.sample * np.float32(2.0**-coarse), -32767, 32767)).astype(np.int64)
        counts = np.bincount(symbols + 32767)
        p = counts[counts > 0] / len(symbols)
        return self.count * (-float((p * np.log2(p)).sum()) + coarse - exponent) / 8

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
    flat = weight.detach().reshape(weight.shape[0], -1)
    picked = torch.arange(0, flat.shape[0], max(1, round(1 / share)))
    rows = finite_rows(name, flat[picked])
    deviation = rows.std(axis=1, keepdims=True)
    unit = np.where(deviation > 0, deviation, 1) * _factor(name)
    return np.asarray(rows / unit, dtype=np.float32).reshape(-1)
