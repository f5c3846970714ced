"""A recipe's way of scoring, twice: batched, as `birdie evaluate` scores, and as a scorer that predicts, then is told.

    recipe ─┬─ scorer_of ──► Scorer: predict(), reveal(token), …          for probes
            └─ batched ────► nats of every target, each entered once      what the score is made of

That both say the same is a finding; the scorer keeps its own keys and values, so that the probes do not take hours.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.data.byte_accounting import Tokens
from birdie.model.cache import Cache
from birdie.model.gpt import GPT
from birdie.run.recipe import Recipe
from birdie.runtime.callbacks import Progress
from birdie.score.accumulator import Accumulator
from birdie.score.evaluator import prepare, record
from birdie.score.ngram import NgramScorer
from birdie.score.reference import Scorer, StreamScorer, WindowScorer
from birdie.score.streaming import StreamingMode
from birdie.score.windows import WindowMode


class SteppedWindows:
    """What `WindowScorer` says, with the keys and values of the window under way kept from one token to the next.

    Args:
        model: in evaluation mode, of softmax attention.
        length, stride: as `birdie.score.windows.sliding` has them.
        bos_id: what windows begin anew with; None: nothing does.
        temperature: divides the logits.
    """

    def __init__(self, model: GPT, length: int, stride: int, *, bos_id: int | None, temperature: float) -> None:
        self._model, self._length, self._stride = model, length, stride
        self._bos_id, self._temperature = bos_id, temperature
        self._seen: list[int] = []
        self._window: tuple[int, Cache] | None = None  # where it begins, and what it has passed through the model
        self._said: Tensor | None = None

    def predict(self) -> Tensor:
        """Log-probabilities of the next token, (V,) float32."""
        if self._said is None:
            over = len(self._seen) - self._length
            begin = max(0, -(-over // self._stride)) * self._stride
            if self._window is None or self._window[0] != begin:
                self._window = begin, Cache(self._model, 1, self._length, chunk=self._length)
            cache = self._window[1]
            fresh = torch.tensor([self._seen[begin + cache.position :]], device=self._model.tok_emb.weight.device)
            self._said = (cache(fresh)[0, -1] / self._temperature).log_softmax(0).cpu()
        return self._said

    def reveal(self, token: int) -> None:
        """The next token is this."""
        if token == self._bos_id:
            self._seen.clear()
            self._window = None
        self._seen.append(token)
        self._said = None


def length_of(recipe: Recipe) -> int:
    """Inputs of a window, or the context of a stream."""
    return recipe.evaluation.seq_len or recipe.train.train_seq_len


def scorer_of(model: GPT, recipe: Recipe) -> Callable[[], Scorer]:
    """What makes a new scorer that says, a token at a time, what the recipe's way of scoring charges targets by.

    A stream in several segments is scored as one.
    """
    settings, length = recipe.evaluation, length_of(recipe)
    mode = settings.scoring_mode
    streaming = mode if isinstance(mode, StreamingMode) else None
    anew = settings.documents or (streaming and streaming.exact and recipe.model.isolate_documents)
    bos_id = recipe.model.bos_id if anew else None
    temperature = settings.temperature

    def make() -> Scorer:
        if streaming and not streaming.exact:
            chunk = min(streaming.chunk, length)
            scorer: Scorer = StreamScorer(
                model,
                length,
                chunk,
                sinks=streaming.sinks,
                kv_bits=streaming.kv_bits,
                bos_id=bos_id,
                temperature=temperature,
            )
        else:
            softmax = model.config.attention == "softmax"
            windows = SteppedWindows if softmax else WindowScorer
            stride = length if streaming else settings.stride or length
            scorer = windows(model, length, stride, bos_id=bos_id, temperature=temperature)
        return NgramScorer(scorer, settings.ngram) if settings.ngram.enabled else scorer

    return make


def batched(model: GPT, recipe: Recipe, tokens: Tokens, progress: Progress | None = None) -> tuple[str, Accumulator]:
    """The recipe's way in words, and the losses of `tokens` (N + 1,) by it, on the CPU, in an accumulator that keeps
    them.

    Without adaptation, which `learning` looks at.

    Raises:
        RuleError: a target was scored twice, or never.
    """
    settings, length = recipe.evaluation, recipe.train.train_seq_len
    mode = settings.scoring_mode
    if isinstance(mode, StreamingMode):
        settings = replace(settings, streaming=replace(mode, segments=1))
    else:
        settings = replace(settings, mode=WindowMode.name)
        if not (settings.stride or settings.documents):  # non-overlapping windows must have room for one
            settings = replace(settings, seq_len=min(length_of(recipe), len(tokens) - 1))
    mode = settings.scoring_mode
    counts = np.ones(len(tokens), np.uint16)  # bytes do not matter here
    scoring = prepare(
        model,
        tokens,
        counts,
        settings,
        mode,
        train_seq_len=length,
        bos_id=recipe.model.bos_id,
        device=torch.device("cpu"),
        batch_tokens=recipe.validation.batch_tokens,
        keep_losses=True,
        progress=progress,
    )
    record(mode, scoring)
    scoring.accumulator.ledger.close()
    return mode.describe(scoring), scoring.accumulator


def one_by_one(scorer: Scorer, tokens: Tokens, places: NDArray[np.integer[Any]]) -> Iterator[tuple[int, float]]:
    """(place, nats) of the targets at `places`, ascending, by what the scorer predicts before it is told."""
    wanted = set(places.tolist())
    for place, token in enumerate(tokens[: int(places[-1]) + 1].tolist()):
        scorer.reveal(token)
        predicted = scorer.predict()  # at every place: a scorer may learn from what it said
        if place in wanted:
            yield place, -float(predicted[int(tokens[place + 1])])
