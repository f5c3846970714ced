"""Evaluator, the one door to a score: evaluation, validation in training and audit enter here.

    text ─► common targets ─► mode.score ─► losses ─► (n-gram bias) ─► accumulator, with its ledger ─► Score

All modes score the same targets, those of non-overlapping windows as the challenge counts them, so that their scores
are comparable; only windows longer than those of training leave out more.
"""

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.errors import DataError
from birdie.gpt.model.gpt import GPT
from birdie.gpt.score.accumulator import Accumulator, Score, Text
from birdie.gpt.score.ledger import Ledger
from birdie.gpt.score.mode import Losses, Scoring, ScoringMode, TrainingReport
from birdie.gpt.score.settings import EvaluationSettings
from birdie.gpt.score.window_losses import LanguageModel
from birdie.system.callbacks import Progress
from birdie.system.distributed import World


@dataclass(frozen=True, slots=True)
class Scored:
    """Result of a scoring mode on a text.

    Attributes:
        score: the same on all ranks.
        method: what the mode did, in a few words.
        losses: (N,) nats of this rank's targets, NaN for the others; None unless they were kept.
    """

    score: Score
    method: str
    report: TrainingReport | None
    losses: NDArray[np.float64] | None

    def warnings(self, mode: ScoringMode, seconds: float, budget: float) -> tuple[str, ...]:
        """Return warnings about an evaluation that took so many seconds; a budget of 0 is unlimited."""
        warnings = []
        if self.report is not None and not self.report.steps:
            warnings.append(f"{mode.name} trained on nothing: all of the text is in one chunk; use smaller chunks")
        if 0 < budget < seconds:
            warnings.append(f"the evaluation took {seconds:,.0f} s, more than its budget of {budget:,.0f} s")
        return tuple(warnings)


def score(
    model: LanguageModel,
    text: Text,
    settings: EvaluationSettings | None = None,
    mode: ScoringMode | None = None,
    *,
    train_seq_len: int,
    device: torch.device,
    batch_tokens: int = 65_536,
    world: World | None = None,
    progress: Progress | None = None,
    keep_losses: bool = False,
) -> Scored:
    """Score the common targets of a text; the model, in evaluation mode, gets its weights back.

    Args:
        model: a `GPT`, but for windows at temperature 1, which need its losses alone.
        settings: of the evaluation; None: non-overlapping windows.
        mode: None: the one that the settings name.
        train_seq_len: sequence length of training.
        batch_tokens: inputs in a batch over all ranks; at least one window a rank.
        world: ranks that share the work; all return the same score.
        progress: called with (targets done, total) of this rank.

    Raises:
        ConfigError: the settings do not fit each other.
        DataError: the text has no target or no bytes, or the loss is not finite.
        RuleError: a target was scored twice or never, or learned from too early.
    """
    settings, world = settings or EvaluationSettings(), world or World()
    mode, length = mode or settings.scoring_mode, settings.seq_len or train_seq_len
    count = len(text.tokens)
    if count < 2:
        raise DataError(f"the text has {count} token{'s' * (count != 1)}, and the first is not scored; give at least 2")
    settings.check(length, mode)
    text = common_targets(text, max(length, train_seq_len))
    accumulator, targets = Accumulator(text, keep_losses=keep_losses), len(text.tokens) - 1
    ledger, hints, hint_tokens = accumulator.ledger, None, None
    if settings.ngram.enabled:
        from birdie.gpt.score import ngram

        hints, ledger = ngram.hints(np.asarray(text.tokens[:-1]), settings.ngram), Ledger(targets)
        hint_tokens = np.maximum(hints.tokens, 0)  # any token where there is no hint
    gpt = cast(GPT, model)
    scoring = Scoring(gpt, text, ledger, length, device, settings, batch_tokens, world, hint_tokens)
    report: TrainingReport | None = None

    def all_losses() -> Generator[Losses]:
        nonlocal report
        report = yield from mode.score(scoring)

    began = time.perf_counter()
    with closing(all_losses()) as losses:  # however this ends, a mode that trains restores the weights
        parts = _watched(losses, progress, targets / world.size)
        for firsts, nats, _ in parts if hints is None else ngram.biased(parts, scoring, hints):
            accumulator.add(firsts, nats)
    result = accumulator.score(targets, time.perf_counter() - began, world, device)
    return Scored(result, mode.describe(scoring), report, accumulator.losses)


def common_targets(text: Text, length: int) -> Text:
    """Return the head of a text whose targets every mode scores; all of it if it is shorter than one window."""
    targets = len(text.tokens) - 1
    return text.head((targets // length * length or targets) + 1)


def _watched(losses: Iterable[Losses], progress: Progress | None, total: float) -> Iterator[Losses]:
    """Yield `losses`, and report each once it is recorded; ranks have about `total` targets each."""
    done = 0
    for part in losses:
        yield part
        done += part.nats.size
        if progress is not None:
            progress(min(done, total), total)
