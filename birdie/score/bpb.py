"""Validation: bits per byte in non-overlapping windows, the one metric that compares models of different tokenizers.

The stream is cut into windows of `seq_len` = L targets, as in the challenge's baseline: window w predicts tokens
w·L + 1 … (w + 1)·L from tokens w·L … (w + 1)·L − 1, and a remainder at the end is not scored. The metric is defined in
`accumulator`; other modes of scoring are listed in `settings`.
"""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.model.gpt import GPT
from birdie.runtime.callbacks import Progress
from birdie.runtime.distributed import World
from birdie.score.accumulator import Accumulator, BytesPerToken, Score
from birdie.score.mode import Scoring
from birdie.score.windows import LanguageModel, non_overlapping, require_target, score_windows, sliding

__all__ = ["Score", "bits_per_byte"]


def bits_per_byte(
    model: LanguageModel,
    tokens: NDArray[np.uint16],
    table: BytesPerToken | NDArray[np.uint16],
    *,
    seq_len: int,
    batch_tokens: int,
    bos_id: int,
    device: torch.device,
    world: World | None = None,
    progress: Progress | None = None,
) -> Score:
    """Score `model` on the stream `tokens` (N,).

    Args:
        model: in evaluation mode.
        tokens: of the stream.
        table: byte table of the tokenizer the stream was made with, or the bytes of every token (N,).
        seq_len: targets in a window; a shorter text is one window.
        batch_tokens: targets in a batch over all ranks; at least one window a rank.
        bos_id: token that begins a document.
        device: of the model.
        world: ranks that share the windows; every rank returns the same score.
        progress: called with (targets done, total) of this rank after each batch.
    """
    require_target(len(tokens))
    targets = len(tokens) - 1
    windows = non_overlapping(targets, seq_len) if targets >= seq_len else sliding(targets, seq_len, seq_len)
    accumulator, world = Accumulator(tokens, table, bos_id), world or World()
    gpt = cast(GPT, model)  # of which windows need the losses alone
    scoring = Scoring(gpt, tokens, accumulator, seq_len, bos_id, device, batch_tokens=batch_tokens, world=world)
    return accumulator.score(windows.scored, score_windows(scoring, windows, progress), world, device)
