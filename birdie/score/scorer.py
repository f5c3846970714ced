"""The contract of scoring: `predict` the whole distribution, only then `reveal` the token.

    scorer ── predict() ──► log-probabilities (V,), fixed ──► referee reads off one entry, enters it in the ledger
       ▲                                                            │
       └────────────────────── reveal(token) ◄──────────────────────┘

Whoever keeps to it cannot break the four conditions of openai/parameter-golf #1017: what is predicted is a whole
distribution (C2) made before its token is known (C1), its loss is final before anything can be learned from it (C3),
and there is no way back (C4). The fast batched ways of scoring are tested equal to scorers of this kind.
"""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import RuleError
from birdie.score.ledger import Ledger

TOLERANCE = 1e-3
"""How far from 0 the logarithm of a distribution's sum may be."""


class Scorer(Protocol):
    """Predicts a stream token by token. A new one has seen nothing: its first prediction is of the stream's start."""

    def predict(self) -> Tensor:
        """Log-probabilities in nats of the next token, (vocabulary,) float32; the same however often it is asked."""
        ...

    def reveal(self, token: int) -> None:
        """The next token is this; from now on it may be learned from."""
        ...


def referee(
    scorer: Scorer,
    tokens: NDArray[np.integer],
    *,
    ledger: Ledger | None = None,
    progress: Callable[[float, float | None], None] | None = None,
) -> NDArray[np.float64]:
    """Have `scorer` predict `tokens` (N + 1,) from the second on; returns nats of the N targets.

    Args:
        scorer: a new one; the first token is revealed to it.
        tokens: of a stream.
        ledger: of N targets, where each is entered when its loss is final; None: one of its own.
        progress: called with (targets done, targets in all).

    Raises:
        RuleError: a distribution is not over a vocabulary that holds the token, does not sum to 1, or is NaN; or the
            scorer has learned, through the ledger, what it must not have.
    """
    targets = len(tokens) - 1
    ledger = Ledger(targets) if ledger is None else ledger
    nats = np.empty(targets)
    scorer.reveal(int(tokens[0]))
    for place in range(targets):
        token = int(tokens[place + 1])
        predicted = checked(scorer.predict(), place)
        if not 0 <= token < len(predicted):
            raise RuleError(f"target {place:,} is token {token}, outside the {len(predicted)} that were predicted (C2)")
        nats[place] = -float(predicted[token])
        ledger.score(place, place + 1)
        scorer.reveal(token)
        if progress is not None:
            progress(place + 1, targets)
    ledger.close()
    return nats


def checked(predicted: Tensor, place: int) -> Tensor:
    """`predicted` if it is a distribution.

    Raises:
        RuleError: it is not.
    """
    if predicted.ndim != 1 or not predicted.is_floating_point():
        raise RuleError(
            f"target {place:,} got {predicted.dtype} of shape {tuple(predicted.shape)}; "
            "predict() must give the log-probability of every token of the vocabulary (C2)"
        )
    total = float(torch.logsumexp(predicted.double(), 0))
    if not abs(total) <= TOLERANCE:
        raise RuleError(
            f"the probabilities of target {place:,} sum to {math.exp(min(total, 700)):.6g}, not to 1; normalise (C2)"
        )
    return predicted
