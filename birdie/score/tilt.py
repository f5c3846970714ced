"""Tilt: predictions lean towards a hint, and stay distributions.

    p'(x) = p(x) · e^(β · [x = hint]) / Z        Z = 1 + p(hint) · (e^β − 1)

Every entry of p' is known before the token is: the hint comes from revealed tokens (`ngram`), p from the model, and β
from both. That makes it a legal cache under openai/parameter-golf #1017 (#1514). In terms of the hint alone β is what
is added to its log-odds:

    log-odds p'(hint) = log-odds p(hint) + β

so the β that would have been best so far is a logistic regression of "the hint was right" on p(hint), which is what is
learned where β is not given: β = a + b · (log-odds p(hint) + 2) / 4, an a and a b for each bucket of hints, each token
moving those of its hint's bucket by one Newton step after it was scored. A hint that a model knows well needs no help,
and one that was seldom right gets none.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from birdie.runtime.kernels import njit
from birdie.score.ledger import Ledger
from birdie.score.ngram import MAX_STRENGTH, Hints, Memory, TiltSettings
from birdie.score.scorer import Scorer

_PRIOR_A, _PRIOR_B = 0.5, 2.0  # observations that a = 0 and b = 0 are worth at first
_LEAST = 1e-3  # of an observation's weight, so that steps stay small where all is clear
_SURE = -1e-6  # log p(hint) above which its odds are not trusted

Nats = NDArray[np.float64]


def tilted(
    nats: NDArray[np.floating],
    logp_hint: NDArray[np.floating],
    hint: NDArray[np.integer],
    target: NDArray[np.integer],
    beta: NDArray[np.floating] | float,
) -> Nats:
    """The loss of targets under p', from that under p; all (N,).

    Args:
        nats: −log p(target).
        logp_hint: log p(hint); of any value where there is none.
        hint: tokens; −1: none, p' = p.
        target: tokens.
        beta: of each, or of all.
    """
    lean = np.where(hint >= 0, beta, 0.0)
    log_z = np.log1p(np.exp(np.asarray(logp_hint, np.float64)) * np.expm1(lean))
    answer: Nats = nats + log_z - lean * (hint == target)
    return answer


def tilt(
    nats: NDArray[np.floating],
    logp_hint: NDArray[np.floating],
    hints: Hints,
    targets: NDArray[np.integer],
    settings: TiltSettings,
) -> Nats:
    """The losses of a whole stream of N targets under p', β fixed or learned as the stream goes.

    Args:
        nats: −log p(target), (N,).
        logp_hint: log p(hint), (N,), of any value where there is none.
        hints: those after the N inputs.
        targets: the tokens after the inputs, (N,).
        settings: those the hints were made with.
    """
    if settings.beta is not None:
        return tilted(nats, logp_hint, hints.tokens, targets, settings.beta)
    beta = np.zeros(len(targets))
    right = hints.tokens == targets
    _learn_along(np.asarray(logp_hint, np.float64), hints.tokens, hints.buckets, right, *_ignorant(settings), beta)
    return tilted(nats, logp_hint, hints.tokens, targets, beta)


class Tilted:
    """A scorer that leans on hints: `tilt`, a token at a time, of any other scorer."""

    def __init__(self, scorer: Scorer, settings: TiltSettings, ledger: Ledger | None = None) -> None:
        """Wrap `scorer`, a new one.

        Args:
            scorer: that predicts.
            settings: of hints and strength; `enabled` is the caller's to look at.
            ledger: is told of each target that hints and strengths learn from.
        """
        self.scorer, self.settings, self.ledger = scorer, settings, ledger
        self._memory, self._strengths = Memory(settings), _ignorant(settings)
        self._hint, self._bucket = -1, 0
        self._revealed = 0

    def predict(self) -> Tensor:
        """As `Scorer`."""
        predicted = self.scorer.predict()
        if self._hint < 0:
            return predicted
        logp = float(predicted[self._hint])
        beta = self._beta(logp)
        answer = predicted - math.log1p(math.exp(logp) * math.expm1(beta))
        answer[self._hint] += beta
        return answer

    def reveal(self, token: int) -> None:
        """As `Scorer`."""
        if self.ledger is not None and self._revealed:
            self.ledger.learn((self._revealed - 1, self._revealed))
        if self._hint >= 0 and self.settings.beta is None:
            logp = float(self.scorer.predict()[self._hint])
            _learn(*self._strengths, self._bucket, _odds(logp), token == self._hint)
        self.scorer.reveal(token)
        self._hint, self._bucket = self._memory.reveal(token)
        self._revealed += 1

    def _beta(self, logp: float) -> float:
        fixed = self.settings.beta
        return float(_beta(self._strengths.lines, self._bucket, _odds(logp))) if fixed is None else fixed


class _Strengths(NamedTuple):
    """A logistic regression for each bucket; both arrays are changed in place.

    Attributes:
        lines: (buckets, 2) a and b.
        weights: (buckets, 3) the Hessian: of a, of both, of b.
    """

    lines: NDArray[np.float64]
    weights: NDArray[np.float64]


def _ignorant(settings: TiltSettings) -> _Strengths:
    weights = np.tile(np.array([_PRIOR_A, 0.0, _PRIOR_B]), (settings.buckets, 1))
    return _Strengths(np.zeros((settings.buckets, 2)), weights)


@njit(nogil=True, cache=True)
def _odds(logp):  # type: ignore[no-untyped-def]
    # Log-odds of a log-probability
    logp = min(max(logp, -30.0), _SURE)
    return logp - math.log(-math.expm1(logp))


@njit(nogil=True, cache=True)
def _beta(lines, bucket, odds):  # type: ignore[no-untyped-def]
    beta = lines[bucket, 0] + lines[bucket, 1] * (odds + 2) / 4
    return min(max(beta, -MAX_STRENGTH), MAX_STRENGTH)


@njit(nogil=True, cache=True)
def _learn(lines, weights, bucket, odds, right):  # type: ignore[no-untyped-def]
    # One Newton step on the log-loss of whether the hint was right
    p = 1 / (1 + math.exp(-odds - _beta(lines, bucket, odds)))
    x, gradient, weight = (odds + 2) / 4, right - p, max(p * (1 - p), _LEAST)
    line, hessian = lines[bucket], weights[bucket]
    hessian[0] += weight
    hessian[1] += weight * x
    hessian[2] += weight * x * x
    step = gradient / (hessian[0] * hessian[2] - hessian[1] * hessian[1])
    line[0] += step * (hessian[2] - hessian[1] * x)
    line[1] += step * (hessian[0] * x - hessian[1])


@njit(nogil=True, cache=True)
def _learn_along(logp_hint, hint, buckets, right, lines, weights, beta):  # type: ignore[no-untyped-def]
    # β of each place, from the places before it
    for i in range(hint.size):
        if hint[i] >= 0:
            odds = _odds(logp_hint[i])
            beta[i] = _beta(lines, buckets[i], odds)
            _learn(lines, weights, buckets[i], odds, right[i])
