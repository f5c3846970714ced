"""A recipe's evaluation as probes need it: token by token, batched, and with the end of the text replaced.

    recipe ─┬─ scorer_of ─────────► Scorer: predict(), reveal(token), …     for probes
            ├─ batched_losses ────► nats of every target, as `birdie evaluate` scores
            └─ check_adaptation ──► test-time training, run on two texts that end differently

That the first two agree is a finding; the scorer keeps keys and values, so that probes do not take hours.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import BirdieError, RuleError
from birdie.golf.audit import rules
from birdie.golf.audit.rules import Finding
from birdie.gpt.data.byte_accounting import Tokens
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.score.accumulator import Text
from birdie.gpt.score.evaluator import Scored, score
from birdie.gpt.score.mode import TrainingReport
from birdie.gpt.score.modes.streaming import StreamingMode
from birdie.gpt.score.modes.windows import WindowMode
from birdie.gpt.score.ngram import NgramScorer
from birdie.gpt.score.reference import Scorer, StreamScorer, WindowScorer
from birdie.system.callbacks import Progress, no_progress

CLOSE = 1e-4
"""Nats by which losses may differ that no learning should have changed."""

_CPU = torch.device("cpu")
_CHUNKS = 4  # that SGD learns from, over the text: enough for learning to come before scoring
_CHANGES = (0.3, 0.6, 0.9)  # parts of the text after which it is replaced


class CachedWindows:
    """The predictions of `WindowScorer`, with the keys and values of the current window kept between tokens.

    Args:
        model: in evaluation mode, of softmax attention.
        length, stride: of windows, as in `birdie.gpt.score.window_losses.sliding`.
        bos_id: the token that begins windows anew; None: no token does.
        temperature: divides the logits.
    """

    def __init__(self, model: GPT, length: int, stride: int, *, bos_id: int | None, temperature: float) -> None:
        self._model, self._length, self._stride = model, length, stride
        self._bos_id, self._temperature = bos_id, temperature
        self._tokens: list[int] = []
        self._window: tuple[int, Cache] | None = None  # its first token, and its keys and values so far
        self._prediction: Tensor | None = None

    def predict(self) -> Tensor:
        """Return the log-probabilities of the next token, (V,) float32."""
        if self._prediction is None:
            excess = len(self._tokens) - self._length
            begin = max(0, -(-excess // self._stride)) * self._stride
            if self._window is None or self._window[0] != begin:
                self._window = begin, Cache(self._model, 1, self._length, chunk=self._length)
            cache = self._window[1]
            inputs = torch.tensor([self._tokens[begin + cache.position :]], device=self._model.tok_emb.weight.device)
            self._prediction = (cache(inputs)[0, -1] / self._temperature).log_softmax(0).cpu()
        return self._prediction

    def reveal(self, token: int) -> None:
        """Append the next token."""
        if token == self._bos_id:
            self._tokens.clear()
            self._window = None
        self._tokens.append(token)
        self._prediction = None


def window_length(recipe: Recipe) -> int:
    """Return the inputs of a window, or the context of a stream."""
    return recipe.evaluation.seq_len or recipe.train.train_seq_len


def scorer_of(model: GPT, recipe: Recipe) -> Callable[[], Scorer]:
    """Return a function that returns new scorers, which predict token by token as the recipe's evaluation does.

    A stream in several segments is scored as one.
    """
    settings, length = recipe.evaluation, window_length(recipe)
    mode = settings.scoring_mode
    streaming = mode if isinstance(mode, StreamingMode) else None
    isolated = settings.documents or (streaming and streaming.exact and recipe.model.isolate_documents)
    shared: dict[str, Any] = {"bos_id": recipe.model.bos_id if isolated else None, "temperature": settings.temperature}

    def new_scorer() -> Scorer:
        if streaming and not streaming.exact:
            memory: dict[str, Any] = {"sinks": streaming.sinks, "kv_bits": streaming.kv_bits}
            scorer: Scorer = StreamScorer(model, length, min(streaming.chunk, length), **memory, **shared)
        else:
            windows = CachedWindows if model.config.attention == "softmax" else WindowScorer
            scorer = windows(model, length, length if streaming else settings.stride or length, **shared)
        return NgramScorer(scorer, settings.ngram) if settings.ngram.enabled else scorer

    return new_scorer


def token_losses(scorer: Scorer, tokens: Tokens, targets: NDArray[np.integer[Any]]) -> Iterator[tuple[int, float]]:
    """Yield (target, nats) of `targets`, ascending, by predictions made before each token is revealed."""
    wanted = set(targets.tolist())
    for position, token in enumerate(tokens[: int(targets[-1]) + 1].tolist()):
        scorer.reveal(token)
        prediction = scorer.predict()  # for every target: a scorer may learn from what it predicted
        if position in wanted:
            yield position, -float(prediction[int(tokens[position + 1])])


def batched_losses(
    model: GPT, recipe: Recipe, tokens: Tokens, progress: Progress = no_progress
) -> tuple[str, NDArray[np.float64]]:
    """Return the evaluation mode in words, and the nats of the targets of `tokens` by it, on the CPU, unadapted."""
    settings = recipe.evaluation
    mode = settings.scoring_mode
    if isinstance(mode, StreamingMode):
        settings = replace(settings, streaming=replace(mode, segments=1))
    else:
        settings = replace(settings, mode=WindowMode.name)
        if not (settings.stride or settings.documents):  # non-overlapping windows need room for one
            settings = replace(settings, seq_len=min(window_length(recipe), len(tokens) - 1))
    scored = _scored(model, replace(recipe, evaluation=settings), tokens, recipe.train.train_seq_len, progress)
    return scored.method, _kept(scored)


def _scored(model: GPT, recipe: Recipe, tokens: Tokens, length: int, progress: Progress) -> Scored:
    """Score `tokens` on the CPU, and keep the losses."""
    return score(
        model,
        Text(tokens, np.ones(len(tokens), np.uint16), recipe.model.bos_id),  # bytes do not matter for losses
        recipe.evaluation,
        train_seq_len=length,
        device=_CPU,
        batch_tokens=recipe.validation.batch_tokens,
        keep_losses=True,
        progress=progress,
    )


def _kept(scored: Scored) -> NDArray[np.float64]:
    assert scored.losses is not None
    return scored.losses


def check_adaptation(
    model: GPT, recipe: Recipe, tokens: Tokens, shown: str, progress: Progress = no_progress
) -> list[Finding]:
    """Check the recipe's test-time training on the CPU, over `tokens` (N + 1,), in chunks that are small enough."""
    mode = recipe.evaluation.scoring_mode
    name = mode.name
    try:
        nats, adapted = _adapted_losses(model, recipe, tokens, progress)
    except RuleError as error:
        return [Finding(rules.SCORE_FIRST, "fail", f"{name}: {error}", "ledger", shown)]
    except BirdieError as error:
        evidence = f"{name} could not be tried on {len(tokens) - 1:,} targets: {error}"
        return [Finding(rules.SCORE_FIRST, "unknown", evidence, "ledger", shown)]
    evidence = f"{name}: {len(nats):,} targets were scored once, and {adapted.steps:,} steps learned from "
    evidence += f"{adapted.tokens:,} positions, each after it was scored"
    findings = [Finding(rules.SCORE_FIRST, "pass" if adapted.steps else "unknown", evidence, "ledger", shown)]
    if not mode.left_to_right:
        evidence = f"{name}: documents are scored by length, so one may learn from later text (never ruled upon)"
        return [*findings, Finding(rules.CAUSAL, "unknown", evidence, "perturbation", shown)]
    largest, position = 0.0, 0
    for part in _CHANGES:
        last = int(part * len(nats))
        changed = _with_other_end(tokens, last + 2, recipe)
        difference = np.abs(_adapted_losses(model, recipe, changed, progress)[0][: last + 1] - nats[: last + 1])
        if difference.max() > largest:
            largest, position = float(difference.max()), int(difference.argmax())
    evidence = f"{name}: replacing all tokens after {len(_CHANGES)} positions changes no loss before by more than "
    evidence += f"{largest:.1e} nats"
    if largest > CLOSE:
        evidence = (
            f"{name}: the loss of target {position:,} changes by {largest:.3g} nats with tokens that come after it"
        )
    return [*findings, Finding(rules.CAUSAL, "fail" if largest > CLOSE else "pass", evidence, "perturbation", shown)]


def _with_other_end(tokens: Tokens, first: int, recipe: Recipe) -> Tokens:
    """Return `tokens` with other tokens from `first` on, where a document begins after a few of them."""
    changed = np.array(tokens)
    rest = len(changed) - first
    changed[first:] = np.random.default_rng(first).integers(0, recipe.model.vocab_size, rest)
    changed[first + min(3, rest - 1)] = recipe.model.bos_id
    return changed


def _adapted_losses(
    model: GPT, recipe: Recipe, tokens: Tokens, progress: Progress
) -> tuple[NDArray[np.float64], TrainingReport]:
    """Return the nats (N,) of the targets, with adaptation in small chunks; the model gets its weights back."""
    bos_id, settings = recipe.model.bos_id, recipe.evaluation
    length = min(window_length(recipe), max(1, (len(tokens) - 1) // _CHUNKS))
    prefix = max(1, int((np.asarray(tokens) == bos_id).sum()) // 2)
    sgd, lora, phases = settings.ttt_sgd, settings.ttt_lora, settings.ttt_multi_phase
    settings = replace(
        settings,
        seq_len=length,
        stride=min(settings.stride, length),
        ttt_sgd=replace(sgd, chunk_tokens=min(sgd.chunk_tokens, length)),
        ttt_lora=replace(lora, chunk=min(lora.chunk, max(1, length // 2)), context=min(lora.context, length)),
        ttt_multi_phase=replace(phases, prefix_docs=min(phases.prefix_docs, prefix)),
    )
    scored = _scored(model, replace(recipe, evaluation=settings), tokens, length, progress)
    assert scored.report is not None  # the recipe adapts
    return _kept(scored), scored.report
