"""Bits per byte over a validation stream: the one metric that compares models with different tokenizers.

The stream is cut into non-overlapping windows of `seq_len` = L targets, as in the challenge's baseline: window w
predicts tokens w·L+1 … (w+1)·L from tokens w·L … (w+1)·L−1, and what is left over at the end is not scored. Other
covers are in `windows`, other ways through them in `forward` and `stream`; what losses come to is in `tally`.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from cyclopts import Parameter
from numpy.typing import NDArray

from birdie.errors import ConfigError, DataError
from birdie.runtime.callbacks import Progress
from birdie.runtime.distributed import World
from birdie.score.forward import LanguageModel, score_windows
from birdie.score.tally import BytesPerToken, Score, Tally
from birdie.score.windows import Windows, blocks

__all__ = ["Score", "ValidationSettings", "bits_per_byte", "whole_windows"]


@dataclass(frozen=True, slots=True)
class ValidationSettings:
    """How often and how much is validated."""

    batch_tokens: Annotated[
        int, Parameter(env_var=("VAL_BATCH_SIZE", "VAL_BATCH_TOKENS"), help="Tokens scored at a time, over all ranks.")
    ] = 524_288
    every: Annotated[
        int, Parameter(env_var="VAL_LOSS_EVERY", help="Steps between validations; 0 validates only at the end.")
    ] = 1000
    max_tokens: Annotated[
        int, Parameter(env_var="VAL_MAX_TOKENS", help="Score only this many tokens of the split; 0 scores all of it.")
    ] = 0

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise ConfigError(f"validation batch_tokens is {self.batch_tokens}; it must be at least 1")
        if self.every < 0:
            raise ConfigError(f"validation every is {self.every}; it must be 0 (only at the end) or a number of steps")
        if self.max_tokens < 0:
            raise ConfigError(f"validation max_tokens is {self.max_tokens}; it must be 0 (all) or a number of tokens")


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
        tokens: the stream.
        table: bytes per token of the tokenizer the stream was made with, or the bytes of every token (N,).
        seq_len: targets in a window.
        batch_tokens: targets scored at a time over all ranks; at least one window a rank.
        bos_id: the id that begins a document.
        device: of the model.
        world: ranks that share the windows; every rank gets the same answer.
        progress: called with (targets done, targets in all) of this rank after each batch.

    Raises:
        DataError: the stream is shorter than one window, bytes are given for another number of tokens, or the loss is
            not finite.
    """
    windows = whole_windows(len(tokens), seq_len)
    tally = Tally(tokens, table, bos_id)
    seconds = score_windows(
        model, tokens, windows, tally, batch_tokens=batch_tokens, device=device, world=world, progress=progress
    )
    return tally.score(windows.scored, seconds, world, device)


def whole_windows(tokens: int, seq_len: int) -> Windows:
    """The challenge's windows over a stream of `tokens`.

    Raises:
        DataError: there is not even one.
    """
    windows = blocks(tokens - 1, seq_len)
    if not len(windows):
        raise DataError(
            f"validation has {tokens:,} tokens, fewer than one window of {seq_len} + 1; "
            "score more tokens, or choose a shorter window"
        )
    return windows
