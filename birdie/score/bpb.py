"""Bits per byte over a validation stream: the one metric that compares models with different tokenizers.

    bpb = (Σ nll in nats / ln 2) / Σ bytes

over every scored target token, where the bytes of a target are what the tokenizer's byte table charges it after the
token before it, or what a byte sidecar says (control tokens such as BOS cost a prediction but no bytes). The stream is
cut into non-overlapping windows of `seq_len` = L targets, as in the challenge's baseline: window w predicts tokens
w·L+1 … (w+1)·L from tokens w·L … (w+1)·L−1, and what is left over at the end is not scored.

Sums are float64 whatever the model computes in. The confidence interval treats documents as the independent units: it
is that of a ratio of two sums (delta method), so long documents weigh as much as they do in the score itself.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import numpy as np
import torch
from cyclopts import Parameter
from numpy.typing import NDArray
from torch import Tensor

from birdie.device import synchronize
from birdie.distributed import World
from birdie.errors import ConfigError, DataError

LN2 = math.log(2.0)

MAX_FORWARD_TOKENS = 65_536
"""Most targets in one forward pass of a rank: windows are independent, so this bounds memory and changes no score."""


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


class LanguageModel(Protocol):
    """What is scored: a module that gives the loss of each target."""

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "none"]) -> Tensor:
        """ids, targets (B, T) → nats (B, T) with reduction "none"."""
        ...


class BytesPerToken(Protocol):
    """A byte table: what each target costs in bytes of text."""

    def count(self, previous: NDArray[np.integer], targets: NDArray[np.integer]) -> NDArray[np.int64]:
        """Bytes of each of `targets` after the token in `previous` at the same place."""
        ...


@dataclass(frozen=True, slots=True)
class Score:
    """Bits per byte and all it was made of.

    Attributes:
        bpb: bits per byte of text.
        val_loss: mean nats per target token (not comparable between tokenizers).
        tokens: targets scored.
        bytes: bytes of text they stand for.
        documents: documents they come from.
        ci95: half width of the 95 % confidence interval of `bpb` over documents; NaN with fewer than two.
        seconds: time the scoring took.
    """

    bpb: float
    val_loss: float
    tokens: int
    bytes: int
    documents: int
    ci95: float
    seconds: float


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
    progress: Callable[[float, float | None], None] | None = None,
) -> Score:
    """Score `model` on the stream `tokens` (N,).

    Args:
        table: bytes per token of the tokenizer the stream was made with, or the bytes of every token (N,).
        seq_len: targets in a window.
        batch_tokens: targets scored at a time over all ranks; at least one window a rank.
        bos_id: the id that begins a document.
        world: ranks that share the windows; every rank gets the same answer.
        progress: called with (targets done, targets in all) of this rank after each batch.

    Raises:
        DataError: the stream is shorter than one window, bytes are given for another number of tokens, or the loss is
            not finite.
    """
    world = world or World()
    windows = (len(tokens) - 1) // seq_len
    if windows < 1:
        raise DataError(
            f"validation has {len(tokens):,} tokens, fewer than one window of {seq_len} + 1; "
            "score more tokens, or choose a shorter window"
        )
    if isinstance(table, np.ndarray) and len(table) != len(tokens):
        raise DataError(f"bytes are given for {len(table):,} tokens, but {len(tokens):,} are scored; give as many")
    started = time.perf_counter()
    mine = _share(windows, world)
    document_of = np.cumsum(np.asarray(tokens[: windows * seq_len + 1]) == bos_id)
    sums = np.zeros((2, int(document_of[-1]) + 1))
    batch = max(1, min(batch_tokens // world.size, MAX_FORWARD_TOKENS) // seq_len)
    for first in range(mine.start, mine.stop, batch):
        last = min(first + batch, mine.stop)
        span = np.asarray(tokens[first * seq_len : last * seq_len + 1]).astype(np.int64)
        ids, targets = span[:-1], span[1:]
        with torch.inference_mode():
            x, y = (torch.from_numpy(a.reshape(-1, seq_len)).to(device) for a in (ids, targets))
            nats = model.loss(x, y, reduction="none").float().cpu().numpy().astype(np.float64).ravel()
        places = slice(first * seq_len + 1, last * seq_len + 1)
        document = document_of[places]
        bytes_ = table[places] if isinstance(table, np.ndarray) else table.count(ids, targets)
        size = sums.shape[1]
        sums[0] += np.bincount(document, weights=nats, minlength=size)
        sums[1] += np.bincount(document, weights=bytes_, minlength=size)
        if progress is not None:
            progress((last - mine.start) * seq_len, len(mine) * seq_len)
    synchronize(device)
    sums = _reduce(sums, world, device)
    return _score(sums, windows * seq_len, np.bincount(document_of[1:]), time.perf_counter() - started)


def _share(windows: int, world: World) -> range:
    """The contiguous windows of this rank: sizes differ by at most one."""
    return range(windows * world.rank // world.size, windows * (world.rank + 1) // world.size)


def _reduce(sums: NDArray[np.float64], world: World, device: torch.device) -> NDArray[np.float64]:
    if world.size == 1:
        return sums
    home = device if device.type == "cuda" else torch.device("cpu")
    return world.sum_(torch.from_numpy(sums).to(home)).cpu().numpy()


def _score(sums: NDArray[np.float64], tokens: int, targets_of: NDArray[np.integer], seconds: float) -> Score:
    nats, size = sums
    total_nats, total_bytes = float(nats.sum()), float(size.sum())
    if not math.isfinite(total_nats):
        raise DataError("the validation loss is not finite: the model's weights or its arithmetic have broken down")
    if total_bytes <= 0:
        raise DataError(
            "the validation targets stand for no bytes of text; is this the tokenizer the shards were made with?"
        )
    scored = targets_of > 0
    bits = nats[: len(targets_of)][scored] / LN2
    bytes_ = size[: len(targets_of)][scored]
    bpb = total_nats / LN2 / total_bytes
    documents = int(scored.sum())
    ci95 = math.nan
    if documents > 1:
        residual = bits - bpb * bytes_
        variance = float(residual @ residual) * documents / (documents - 1)
        ci95 = 1.96 * math.sqrt(variance) / total_bytes
    return Score(bpb, total_nats / tokens, tokens, round(total_bytes), documents, ci95, seconds)
