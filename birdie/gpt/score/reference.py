"""Reference evaluator, token by token: `predict` returns the whole distribution, only then `reveal` gives the token.

    scorer ── predict() ──► log-probabilities (V,), fixed ──► reference_losses reads one entry, marks it in the ledger
       ▲                                                            │
       └────────────────────── reveal(token) ◄──────────────────────┘

A scorer of this form cannot break the four conditions of parameter-golf#1017
(github.com/openai/parameter-golf/issues/1017): it predicts a whole distribution (C2) before its token is known (C1),
the loss is final before anything can be learned from the token (C3), and there is no way back (C4). The batched
implementations of the scoring modes are tested against scorers of this form, and an audit probes one. Those of windows
and of streaming evaluation are in this module, the others beside their modes.
"""

import math
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import ConfigError, RuleError
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.gpt import GPT
from birdie.gpt.score.ledger import Ledger
from birdie.system.callbacks import Progress

TOLERANCE = 1e-3
"""Largest absolute logarithm of a distribution's sum."""


class Scorer(Protocol):
    """Predictor of a stream, token by token. A new one has seen nothing: the first token is revealed, not predicted."""

    def predict(self) -> Tensor:
        """Return the log-probabilities of the next token in nats, (vocabulary,) float32; repeated calls agree."""
        ...

    def reveal(self, token: int) -> None:
        """Take the next token of the stream; from now on the scorer may learn from it."""
        ...


def reference_losses(
    scorer: Scorer,
    tokens: NDArray[np.integer],
    *,
    ledger: Ledger | None = None,
    progress: Progress | None = None,
) -> NDArray[np.float64]:
    """Return the losses in nats of `tokens` (N + 1,) from the second on, (N,), as `scorer` predicts them.

    Args:
        scorer: a new one; the first token is revealed to it.
        ledger: of N targets, in which each is marked when its loss is final; None: a private one.
        progress: called with (targets done, total).

    Raises:
        RuleError: a prediction is not a distribution over a vocabulary that holds the token, or the scorer has declared
            to the ledger that it learns from a target before its loss is final.
    """
    targets = len(tokens) - 1
    ledger = Ledger(targets) if ledger is None else ledger
    nats = np.empty(targets)
    scorer.reveal(int(tokens[0]))
    for position in range(targets):
        token = int(tokens[position + 1])
        logp = check_distribution(scorer.predict(), position)
        if not 0 <= token < len(logp):
            raise RuleError(f"target {position:,} is token {token}, outside the {len(logp)} that were predicted (C2)")
        nats[position] = -float(logp[token])
        ledger.score(position, position + 1)
        scorer.reveal(token)
        if progress is not None:
            progress(position + 1, targets)
    ledger.close()
    return nats


def check_distribution(logp: Tensor, position: int) -> Tensor:
    """Return `logp` if it holds the logarithms of a distribution."""
    if logp.ndim != 1 or not logp.is_floating_point():
        raise RuleError(
            f"the prediction of target {position:,} is {logp.dtype} of shape {tuple(logp.shape)}; "
            "predict() must return the log-probability of every token of the vocabulary (C2)"
        )
    total = float(torch.logsumexp(logp.double(), 0))
    if not abs(total) <= TOLERANCE:  # NaN fails as well
        raise RuleError(
            f"the probabilities of target {position:,} sum to {math.exp(min(total, 700)):.6g}, not to 1; "
            "normalize them (C2)"
        )
    return logp


class WindowScorer:
    """Reference of sliding windows; with stride = length, of non-overlapping windows. It recomputes every window.

    Args:
        model: in evaluation mode.
        length, stride: as in `windows.sliding`.
        bos_id: token at which windows start anew; None: never.
        temperature: divides the logits.
    """

    def __init__(
        self, model: GPT, length: int, stride: int, *, bos_id: int | None = None, temperature: float = 1.0
    ) -> None:
        if not 1 <= stride <= length:
            raise ConfigError(f"stride {stride} does not fit windows of {length} tokens; give 1 to {length}")
        self._model, self._length, self._stride = model, length, stride
        self._bos_id, self._temperature = bos_id, temperature
        self._history: list[int] = []

    def predict(self) -> Tensor:
        beyond = len(self._history) - self._length
        window = self._history[max(0, -(-beyond // self._stride)) * self._stride :]
        ids = torch.tensor([window], device=self._model.tok_emb.weight.device)
        with torch.inference_mode(), self._model.rotary.base_for_length(self._length):
            logits: Tensor = self._model(ids, last_n=1)[0, -1] / self._temperature
            return logits.log_softmax(0).cpu()

    def reveal(self, token: int) -> None:
        if token == self._bos_id:
            self._history.clear()
        self._history.append(token)


class StreamScorer:
    """Reference of streaming evaluation: one token a call through a rolling KV cache.

    Args:
        model: in evaluation mode.
        context, chunk, sinks, kv_bits: as `birdie.gpt.model.cache.Cache` has them.
        bos_id: token at which the cache starts anew; None: never.
        temperature: divides the logits.
    """

    def __init__(
        self,
        model: GPT,
        context: int,
        chunk: int,
        *,
        sinks: int = 0,
        kv_bits: int = 0,
        bos_id: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        self._new_cache = partial(Cache, model, 1, context, chunk=chunk, sinks=sinks, kv_bits=kv_bits)
        self._cache, self._bos_id = self._new_cache(), bos_id
        self._device, self._temperature = model.tok_emb.weight.device, temperature
        self._logp: Tensor | None = None

    def predict(self) -> Tensor:
        assert self._logp is not None  # the first token of a stream is revealed, not predicted
        return self._logp

    def reveal(self, token: int) -> None:
        if token == self._bos_id and self._cache.position:
            self._cache = self._new_cache()
        logits = self._cache(torch.tensor([[token]], device=self._device))[0, -1]
        self._logp = (logits / self._temperature).log_softmax(0).cpu()
