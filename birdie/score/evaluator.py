"""Evaluator: cut a stream to the common targets, run a scoring mode on it, apply the n-gram bias, return one score.

    tokens ─► common targets ─► Scoring ─► mode.score ─► (n-gram bias) ─► accumulator ─► Score

All modes score the same targets, those of non-overlapping windows as the challenge counts them, so that their scores
are comparable; only windows longer than those of training leave out more. Evaluation and audit share this code.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.model.gpt import GPT
from birdie.score.accumulator import Accumulator, BytesPerToken, Score
from birdie.score.mode import Scoring, ScoringMode, TrainingReport
from birdie.score.settings import EvaluationSettings
from birdie.score.windows import non_overlapping, require_target


def prepare(
    model: GPT,
    tokens: NDArray[np.uint16],
    table: BytesPerToken | NDArray[np.uint16],
    settings: EvaluationSettings,
    mode: ScoringMode,
    *,
    train_seq_len: int,
    bos_id: int,
    device: torch.device,
    keep_losses: bool = False,
    **more: Any,
) -> Scoring:
    """Return the scoring of the common targets of a stream.

    Args:
        model: in evaluation mode, on `device`.
        tokens: of the stream.
        table: bytes per token, or the bytes of every token of the stream.
        settings: of the evaluation.
        mode: that is going to score.
        train_seq_len: sequence length of training.
        bos_id, device, more: fields of `Scoring`.
        keep_losses: keep the loss of each target in the accumulator.
    """
    require_target(len(tokens))
    length = settings.seq_len or train_seq_len
    settings.check(length, mode)
    tokens = common_targets(tokens, length, train_seq_len)
    counts = table[: len(tokens)] if isinstance(table, np.ndarray) else table
    accumulator = Accumulator(tokens, counts, bos_id, keep_losses=keep_losses)
    return Scoring(model, tokens, accumulator, length, bos_id, device, settings, **more)


def common_targets(tokens: NDArray[np.uint16], length: int, train_seq_len: int) -> NDArray[np.uint16]:
    """Return the tokens (N + 1,) whose N targets every mode scores; a text shorter than one window is kept entirely."""
    targets = non_overlapping(len(tokens) - 1, max(length, train_seq_len)).scored
    return tokens[: (targets or max(1, len(tokens) - 1)) + 1]


def record(mode: ScoringMode, scoring: Scoring) -> tuple[float, TrainingReport | None]:
    """Record this rank's losses in the accumulator; return seconds, and the report of a mode that trains.

    The model gets its weights back.
    """
    ngram = scoring.settings.ngram
    bias = None
    if ngram.enabled:
        from birdie.score.ngram import NgramBias

        bias = NgramBias(scoring.tokens, ngram)
    scoring.sink = bias or scoring.accumulator
    began = time.perf_counter()
    report = mode.score(scoring)
    recorded = time.perf_counter()
    if bias is not None:
        bias.close(scoring.accumulator, scoring.world, scoring.device)
    ended = time.perf_counter()
    if report is None:
        return ended - began, None
    report = replace(report, score_seconds=report.score_seconds + ended - recorded)
    return report.score_seconds + report.train_seconds, report


def score(mode: ScoringMode, scoring: Scoring) -> tuple[Score, TrainingReport | None]:
    """Return the score, the same on all ranks, and the report of a mode that trains.

    Raises:
        RuleError, ConfigError: as `record`; a target was never scored.
        DataError: the loss is not finite.
    """
    seconds, report = record(mode, scoring)
    targets = len(scoring.tokens) - 1
    return scoring.accumulator.score(targets, seconds, scoring.world, scoring.device), report
