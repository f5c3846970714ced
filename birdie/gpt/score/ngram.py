"""n-gram logit bias: predictions move toward the token that followed the same context earlier in the stream.

    token i ─► each order k: what followed the last k tokens when they last occurred? ─► candidate, hit rate
                    │                                                                        │
                    └── a table of 2^bits slots; tokens are compared, so a collision         ▼
                        is no match                                  hint i: the candidate of the best hit rate

    p'(x) = p(x) · e^(β · [x = hint]) / Z        Z = 1 + p(hint) · (e^β − 1)

Hints. A slot stores where its context ended last, the token that has followed it most of late, and how often that
token did and did not follow. Candidates of one order and one such count (a bucket) share their hits over the whole
stream, and the hint is the candidate of the bucket with the best hit rate: long contexts win where they are worth it.
Hint i is a function of tokens 0 … i: the token after a context is stored only after it was revealed.

Strength. Every entry of p' is known before the token is: the hint comes from revealed tokens, p from the model, β from
both. In terms of the hint alone β is added to its log-odds:

    log-odds p'(hint) = log-odds p(hint) + β

so the β that would have been best so far is a logistic regression of "the hint was right" on p(hint). That is what is
learned where β is not given: β = a + b · (log-odds p(hint) + 2) / 4, with an a and a b for each bucket, moved by one
Newton step after each token is scored. A hint that the model knows well needs no bias, and one that was seldom right
gets none.

The n-gram tables are those of parameter-golf#1514 (github.com/openai/parameter-golf/pull/1514) and its followers, a
cache that is rule-compliant under parameter-golf#1017 (github.com/openai/parameter-golf/issues/1017). Choosing by past
hits, instead of the longest match or a fixed threshold, is ours. Their word-level experts are left out: with contexts
from one token on they gained 0.001 bits per byte, and they are where hints came to depend on the token to be predicted.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import DataError, RuleError
from birdie.gpt.score.accumulator import reduce_device
from birdie.gpt.score.ledger import Ledger
from birdie.gpt.score.mode import COUNTS, MAX_BETA, Losses, NgramSettings, Scoring
from birdie.gpt.score.reference import Scorer
from birdie.system.kernels import inner, njit

_PRIOR_HIT_RATE, _PRIOR_HINTS = 0.3, 2.0  # of a bucket without any, and how many hints that is worth
_PRIOR_A, _PRIOR_B = 0.5, 2.0  # observations that a = 0 and b = 0 are worth at the start
_MIN_WEIGHT = 1e-3  # of an observation, so that steps stay small where the outcome is certain
_MAX_LOGP = -1e-6  # of a hint; above it the odds lose their precision
_EMPTY = -1
_VOCABULARY = 1 << 16

Nats = NDArray[np.float64]


class NgramHints(NamedTuple):
    """Hints of a stream of N tokens.

    Attributes:
        tokens: (N,) int32, the likeliest token after each; −1: no hint.
        buckets: (N,) int32, bucket of each; bucket b is of contexts of sorted(orders)[b // COUNTS] tokens.
    """

    tokens: NDArray[np.int32]
    buckets: NDArray[np.int32]


def hints(tokens: NDArray[np.integer], settings: NgramSettings) -> NgramHints:
    """Return the hints of a whole stream (N,), in one pass.

    Raises:
        DataError: a token is not from 0 to 65,535.
    """
    stream = _checked(tokens)
    result = NgramHints(np.empty(len(stream), np.int32), np.empty(len(stream), np.int32))
    _advance(stream, 0, *_empty_tables(settings), settings.threshold, *result)
    return result


class HintTables:
    """The same hints, one token at a time."""

    def __init__(self, settings: NgramSettings) -> None:
        self._tables, self._threshold = _empty_tables(settings), settings.threshold
        self._stream, self._length = np.empty(1 << 10, np.uint16), 0
        self._hint = NgramHints(np.empty(1, np.int32), np.empty(1, np.int32))

    def reveal(self, token: int) -> tuple[int, int]:
        """Take the next token; return the hint for the one after it (−1: none) and its bucket."""
        position = self._length
        if position == len(self._stream):
            self._stream = np.concatenate((self._stream, np.empty_like(self._stream)))
        self._stream[position] = _checked(np.array([token]))[0]
        self._length += 1
        _advance(self._stream[: self._length], position, *self._tables, self._threshold, *self._hint)
        return int(self._hint.tokens[0]), int(self._hint.buckets[0])


class _NgramTables(NamedTuple):
    """State of the hints beside the tokens; each array is changed in place.

    Attributes:
        orders: (K,) ascending.
        tables: (K, 2^bits): end of the context's last occurrence · 2^32 + candidate · 2^16 + times it followed · 2^8
            + times it did not; or _EMPTY.
        slots: (K,) slots of the contexts that end with the last token; −1: there are too few tokens.
        candidates: (K,) tokens the tables predict next; −1: none.
        buckets: (K,) of these.
        hits: (buckets, 2) hits of each bucket, and hints.
    """

    orders: NDArray[np.int64]
    tables: NDArray[np.int64]
    slots: NDArray[np.int64]
    candidates: NDArray[np.int64]
    buckets: NDArray[np.int64]
    hits: NDArray[np.float64]


def _empty_tables(settings: NgramSettings) -> _NgramTables:
    orders = np.array(sorted(settings.orders), dtype=np.int64)
    tables = np.full((len(orders), 1 << settings.table_bits), _EMPTY, dtype=np.int64)
    none = np.full(len(orders), -1, dtype=np.int64)
    hits = np.tile(np.array([_PRIOR_HIT_RATE * _PRIOR_HINTS, _PRIOR_HINTS]), (settings.buckets, 1))
    return _NgramTables(orders, tables, none.copy(), none.copy(), none.copy(), hits)


def _checked(tokens: NDArray[np.integer]) -> NDArray[np.uint16]:
    """Return the tokens in the dtype of the tables."""
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < _VOCABULARY:
        raise DataError(
            f"tokens run from {int(tokens.min())} to {int(tokens.max())}; n-gram tables hold ids below {_VOCABULARY:,}"
        )
    return np.array(tokens, dtype=np.uint16)  # a copy: numba would compile the kernels again for a read-only array


@njit(nogil=True, cache=True, _nrt=False)
def _advance(  # type: ignore[no-untyped-def]
    tokens, first, orders, tables, slots, candidates, buckets, hits, threshold, hint_tokens, hint_buckets
):
    # Reveal tokens `first` and on, one by one; hints go to the front of `hint_tokens` and `hint_buckets`.
    for i in range(first, tokens.size):
        token = np.int64(tokens[i])
        best, hint, bucket = -1.0, -1, 0
        for k in range(orders.size):
            if slots[k] >= 0:
                _store(tables[k], slots[k], candidates[k], token, i - 1)
            if candidates[k] >= 0:
                hits[buckets[k], 0] += candidates[k] == token
                hits[buckets[k], 1] += 1
        hashed = np.uint64(0x9E3779B97F4A7C15)
        length = 0
        for k in range(orders.size):
            slots[k] = candidates[k] = -1
            if orders[k] > i + 1:
                continue
            while length < orders[k]:  # orders ascend, so each hash extends the one before
                hashed = (hashed ^ np.uint64(tokens[i - length] + 1)) * np.uint64(0xD1342543DE82EF95)
                hashed ^= hashed >> np.uint64(29)
                length += 1
            slots[k] = np.int64(hashed & np.uint64(tables.shape[1] - 1))
            entry = tables[k, slots[k]]
            if entry != _EMPTY and _same_context(tokens, entry >> 32, i, length):
                candidates[k] = entry >> 16 & 0xFFFF
                buckets[k] = COUNTS * k + _count_class(entry >> 8 & 0xFF, entry & 0xFF)
        for k in range(orders.size):
            if candidates[k] >= 0:
                rate = hits[buckets[k], 0] / hits[buckets[k], 1]
                if rate >= best:  # among equals, the longest context
                    best, hint, bucket = rate, candidates[k], buckets[k]
        hint_tokens[i - first] = hint if best >= threshold else -1
        hint_buckets[i - first] = bucket


@inner
def _same_context(tokens, one, other, length):  # type: ignore[no-untyped-def]
    # Compare the last `length` tokens up to two positions.
    back = 0
    while back < length and tokens[one - back] == tokens[other - back]:
        back += 1
    return back == length


@inner
def _count_class(followed, not_followed):  # type: ignore[no-untyped-def]
    often = 0 if followed < 2 else 1 if followed < 4 else 2
    return 2 * often + (1 if not_followed > 0 else 0)


@inner
def _store(table, slot, candidate, token, position):  # type: ignore[no-untyped-def]
    # Store that `token` followed the context that ends at `position`; `candidate` was the table's prediction, -1: none,
    # or of another context. The count that contradicts `token` is halved, so that old statistics fade.
    followed, not_followed = 1, 0
    if candidate >= 0:
        followed, not_followed = table[slot] >> 8 & 0xFF, table[slot] & 0xFF
        if candidate == token:
            followed = min(followed + 1, 255)
            if not_followed > 2:
                not_followed = not_followed // 2 + 1
        else:
            not_followed = min(not_followed + 1, 255)
            followed = followed // 2 + 1 if followed > 2 else followed - 1
            if followed == 0:
                candidate, followed = token, 1
    else:
        candidate = token
    table[slot] = np.int64(position) << 32 | candidate << 16 | followed << 8 | not_followed


def biased_losses(
    nats: NDArray[np.floating],
    hint_logp: NDArray[np.floating],
    hint: NDArray[np.integer],
    target: NDArray[np.integer],
    beta: NDArray[np.floating] | float,
) -> Nats:
    """Return the losses of targets under p' from those under p; all (N,).

    Args:
        nats: −log p(target).
        hint_logp: log p(hint); any value where there is no hint.
        hint: tokens; −1: none, p' = p.
        beta: one for each target, or one for all.
    """
    strength = np.where(hint >= 0, beta, 0.0)
    log_z = np.log1p(np.exp(np.asarray(hint_logp, np.float64)) * np.expm1(strength))
    losses: Nats = nats + log_z - strength * (hint == target)
    return losses


def apply_bias(
    nats: NDArray[np.floating],
    hint_logp: NDArray[np.floating],
    hints: NgramHints,
    targets: NDArray[np.integer],
    settings: NgramSettings,
) -> Nats:
    """Return the losses of a whole stream of N targets under p', with β fixed, or learned from target to target.

    Args:
        nats: −log p(target), (N,).
        hint_logp: log p(hint), (N,); any value where there is no hint.
        hints: those after the N inputs.
        targets: the tokens after the inputs, (N,).
        settings: those the hints were computed with.
    """
    if settings.beta is not None:
        return biased_losses(nats, hint_logp, hints.tokens, targets, settings.beta)
    beta = np.zeros(len(targets))
    right = hints.tokens == targets
    regressions = _new_regressions(settings)
    _learn_stream(np.asarray(hint_logp, np.float64), hints.tokens, hints.buckets, right, *regressions, beta)
    return biased_losses(nats, hint_logp, hints.tokens, targets, beta)


def biased(losses: Iterable[Losses], scoring: Scoring, hints: NgramHints) -> Iterator[Losses]:
    """Yield the losses of a stream under p', once those under p are all there, in one causal pass on rank 0.

    The hints, of the tokens alone, are those of `scoring.hint_tokens`; the strength is learned from target to target,
    so it comes last, with the losses of all ranks. `NgramScorer` is the reference.
    """
    ledger, world = scoring.ledger, scoring.world
    kept = np.zeros((2, len(ledger)), dtype=np.float32)  # nats, log p(hint)
    for firsts, nats, hint_logp in losses:
        assert hint_logp is not None
        for row, first in enumerate(firsts.tolist()):
            stop = first + nats.shape[1]
            ledger.score(first, stop)
            kept[0, first:stop], kept[1, first:stop] = nats[row], hint_logp[row]
    counts = ledger.local_mask.astype(np.int32)
    if world.size > 1:
        device = reduce_device(scoring.device)
        kept = world.sum_(torch.from_numpy(kept).to(device)).cpu().numpy()
        counts = world.sum_(torch.from_numpy(counts).to(device)).cpu().numpy()
    wrong = np.flatnonzero(counts != 1)
    if len(wrong):
        raise RuleError(f"target {int(wrong[0]):,} was scored {counts[wrong[0]]} times; each is scored once (C4)")
    if world.is_main:
        targets = np.asarray(scoring.tokens[1:]).astype(np.int64)
        nats, hint_logp = kept.astype(np.float64)
        yield Losses(np.array([0]), apply_bias(nats, hint_logp, hints, targets, scoring.settings.ngram)[None])


class NgramScorer:
    """Reference: the predictions of any other scorer with the bias applied, one token at a time.

    Args:
        scorer: a new one.
        settings: of hints and strength; `enabled` is ignored.
        ledger: each target that hints and strengths learn from is declared to it.
    """

    def __init__(self, scorer: Scorer, settings: NgramSettings, ledger: Ledger | None = None) -> None:
        self.scorer, self.settings, self.ledger = scorer, settings, ledger
        self._tables, self._regressions = HintTables(settings), _new_regressions(settings)
        self._hint, self._bucket = -1, 0
        self._revealed = 0

    def predict(self) -> Tensor:
        logp = self.scorer.predict()
        if self._hint < 0:
            return logp
        hint_logp = float(logp[self._hint])
        beta = self._beta(hint_logp)
        biased = logp - math.log1p(math.exp(hint_logp) * math.expm1(beta))
        biased[self._hint] += beta
        return biased

    def reveal(self, token: int) -> None:
        if self.ledger is not None and self._revealed:
            self.ledger.learn((self._revealed - 1, self._revealed))
        if self._hint >= 0 and self.settings.beta is None:
            hint_logp = float(self.scorer.predict()[self._hint])
            _learn(*self._regressions, self._bucket, _log_odds(hint_logp), token == self._hint)
        self.scorer.reveal(token)
        self._hint, self._bucket = self._tables.reveal(token)
        self._revealed += 1

    def _beta(self, hint_logp: float) -> float:
        fixed = self.settings.beta
        return float(_beta(self._regressions.lines, self._bucket, _log_odds(hint_logp))) if fixed is None else fixed


class _Regressions(NamedTuple):
    """Logistic regression of each bucket; both arrays are changed in place.

    Attributes:
        lines: (buckets, 2) a and b.
        hessians: (buckets, 3) second derivatives: by a, by both, by b.
    """

    lines: NDArray[np.float64]
    hessians: NDArray[np.float64]


def _new_regressions(settings: NgramSettings) -> _Regressions:
    hessians = np.tile(np.array([_PRIOR_A, 0.0, _PRIOR_B]), (settings.buckets, 1))
    return _Regressions(np.zeros((settings.buckets, 2)), hessians)


@njit(nogil=True, cache=True, _nrt=False)
def _log_odds(logp):  # type: ignore[no-untyped-def]
    logp = min(max(logp, -30.0), _MAX_LOGP)
    return logp - math.log(-math.expm1(logp))


@njit(nogil=True, cache=True, _nrt=False)
def _beta(lines, bucket, odds):  # type: ignore[no-untyped-def]
    beta = lines[bucket, 0] + lines[bucket, 1] * (odds + 2) / 4
    return min(max(beta, -MAX_BETA), MAX_BETA)


@njit(nogil=True, cache=True, _nrt=False)
def _learn(lines, hessians, bucket, odds, right):  # type: ignore[no-untyped-def]
    # One Newton step on the log-loss of "the hint was right".
    p = 1 / (1 + math.exp(-odds - _beta(lines, bucket, odds)))
    x, gradient, weight = (odds + 2) / 4, right - p, max(p * (1 - p), _MIN_WEIGHT)
    line, hessian = lines[bucket], hessians[bucket]
    hessian[0] += weight
    hessian[1] += weight * x
    hessian[2] += weight * x * x
    step = gradient / (hessian[0] * hessian[2] - hessian[1] * hessian[1])
    line[0] += step * (hessian[2] - hessian[1] * x)
    line[1] += step * (hessian[0] * x - hessian[1])


@njit(nogil=True, cache=True, _nrt=False)
def _learn_stream(hint_logp, hint, buckets, right, lines, hessians, beta):  # type: ignore[no-untyped-def]
    # β of each target, from the targets before it.
    for i in range(hint.size):
        if hint[i] >= 0:
            odds = _log_odds(hint_logp[i])
            beta[i] = _beta(lines, buckets[i], odds)
            _learn(lines, hessians, buckets[i], odds, right[i])
