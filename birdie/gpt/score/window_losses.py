"""Windows over a stream, and their losses: non-overlapping or sliding, over the whole stream or within each document.

    tokens   0 1 2 3 4 5 6 7 8 9        position i: input token i, target token i + 1
    non-overlapping [─────)[─────)      length T, every target is scored; a remainder shorter than T is left out
    sliding  [═════)                    length T, stride S: the first window scores all its targets,
               [───══)                  the others their last S, so that each target but the first T
                 [───══)                has at least T − S + 1 inputs before it
    per document                        sliding windows that start anew with each document: no context across BOS

Sliding windows start at 0, S, 2S, …. A window is kept if it is the first or has an input at its position T − S, so the
scored ranges are disjoint and complete (the record of 2026-03-19, corrected by parameter-golf#1218,
github.com/openai/parameter-golf/pull/1218).

    windows ─► this rank's share ─► batches of one shape ─► model ─► losses

Where only the last positions of a window are scored, the last layer and the head compute those alone: the other
positions contribute only keys and values. Sums are float64 whatever the model computes in, so batches and ranks change
a score only by the rounding of the model's arithmetic. `reference.WindowScorer` is the reference.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.model.rotary import Rotary
from birdie.gpt.score.mode import Losses, Scoring

Positions = NDArray[np.int64]
Nats = NDArray[np.float64]

_MAX_INPUTS = {"cpu": 2048}
_MAX_INPUTS_GPU = 65_536


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows in order; window i has inputs begins[i] … stops[i] − 1 and scores positions firsts[i] … stops[i] − 1.

    Attributes:
        begins, firsts, stops: (windows,) int64.
        length: inputs of a full window; the last one, and those of short documents, have fewer.
    """

    begins: Positions
    firsts: Positions
    stops: Positions
    length: int

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def scored(self) -> int:
        """Number of targets that the windows score."""
        return int((self.stops - self.firsts).sum())

    @property
    def inputs(self) -> int:
        """Number of inputs of all windows together."""
        return int((self.stops - self.begins).sum())

    def select(self, first: int, stop: int) -> "Windows":
        """Return windows first … stop − 1."""
        return self._take(slice(first, stop))

    def share(self, rank: int, size: int) -> "Windows":
        """Return the contiguous share of one of `size` ranks; the numbers of windows differ by at most one."""
        return self.select(len(self) * rank // size, len(self) * (rank + 1) // size)

    def batches(self, tokens: int) -> Iterator["Windows"]:
        """Yield neighbors of one shape, with up to `tokens` inputs together (at least one window)."""
        for run in self._runs():
            yield from run.groups(max(1, tokens // int(run.stops[0] - run.begins[0])))

    def groups(self, count: int) -> Iterator["Windows"]:
        """Yield neighbors of one shape, up to `count` windows together."""
        for run in self._runs():
            for first in range(0, len(run), count):
                yield run.select(first, min(first + count, len(run)))

    def by_shape(self) -> "Windows":
        """Return the windows sorted by shape, the longest first: large batches where the order is free."""
        return self._take(np.lexsort((self.begins, self.firsts - self.begins, self.begins - self.stops)))

    def by_position(self) -> "Windows":
        """Return the windows sorted by the first position they score."""
        return self._take(np.argsort(self.firsts, kind="stable"))

    def _runs(self) -> Iterator["Windows"]:
        """Yield maximal runs of windows with one length and one number of scored targets."""
        lengths, scored = self.stops - self.begins, self.stops - self.firsts
        change = np.flatnonzero((np.diff(lengths) != 0) | (np.diff(scored) != 0)) + 1
        for first, stop in zip((0, *change), (*change, len(self)), strict=True):
            if stop > first:
                yield self.select(first, stop)

    def _take(self, index: slice | NDArray[np.integer]) -> "Windows":
        return Windows(self.begins[index], self.firsts[index], self.stops[index], self.length)


def sliding(targets: int, length: int, stride: int) -> Windows:
    """Return windows of `length` every `stride` tokens that score all targets once.

    Raises:
        ConfigError: the stride is not from 1 to the length.
    """
    return _sliding_within(np.array([0]), np.array([targets]), length, stride)


def per_document(begins: NDArray[np.integer], targets: int, length: int, stride: int) -> Windows:
    """Return sliding windows within each document; the BOS that begins the next document is a document's last target.

    Args:
        begins: positions of the inputs that begin documents, ascending; tokens before the first are a document as well.
        targets: number of targets of the stream.
        length: most inputs of a window.
        stride: as in `sliding`.
    """
    inside = np.asarray(begins, dtype=np.int64)
    starts = np.union1d([0], inside[inside < targets])
    return _sliding_within(starts, np.append(starts[1:], targets), length, stride)


def segments(targets: int, count: int, context: int) -> Windows:
    """Return `count` (or a few fewer) segments of one length, but for the last, that score all targets once.

    The first scores all its targets; the others have `context` inputs that are not scored, or all there are before.
    """
    context = min(context, max(0, targets - 1))
    stride = max(1, -(-(targets - context) // count))
    return sliding(targets, context + stride, stride)


def document_begins(tokens: NDArray[np.integer], bos_id: int) -> Positions:
    """Return the positions at which documents begin."""
    return np.flatnonzero(np.asarray(tokens) == bos_id)


def _sliding_within(starts: Positions, ends: Positions, length: int, stride: int) -> Windows:
    """Return sliding windows within each of the ranges starts[i] … ends[i] − 1."""
    _check_stride(length, stride)
    lengths = ends - starts
    starts, ends, lengths = starts[lengths > 0], ends[lengths > 0], lengths[lengths > 0]
    additional = np.maximum(0, -(-(lengths - length) // stride))  # windows after the first with a target to score
    count = 1 + additional
    owner = np.repeat(np.arange(len(starts)), count)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    begins = starts[owner] + number * stride
    stops = np.minimum(begins + length, ends[owner])
    firsts = np.where(number == 0, begins, begins + length - stride)
    return Windows(begins, firsts, stops, length)


def _check_stride(length: int, stride: int) -> None:
    if length < 1:
        raise ConfigError(f"windows of {length} tokens have no inputs; give a length of at least 1")
    if not 1 <= stride <= length:
        raise ConfigError(f"stride {stride} does not fit windows of {length} tokens; give 1 to {length}")


class LanguageModel(Protocol):
    """Module that returns the loss of each target."""

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "none"]) -> Tensor:
        """Return nats (B, S), with reduction "none", of targets (B, S) after the last S of ids (B, T)."""
        ...


def windows_of(scoring: Scoring) -> Windows:
    """Return the windows that the shared settings ask for; they score every target of the stream once."""
    settings, targets = scoring.settings, len(scoring.tokens) - 1
    stride = settings.stride or scoring.length
    if settings.documents:
        begins = document_begins(scoring.tokens, scoring.bos_id)
        return per_document(begins, targets, scoring.length, stride)
    return sliding(targets, scoring.length, stride)


def score_windows(scoring: Scoring, windows: Windows) -> Iterator[Losses]:
    """Yield the losses of this rank's share of `windows`, batch by batch.

    Args:
        scoring: a temperature other than 1 needs a model whose call returns logits, as a `GPT`'s does.
        windows: over the positions of the stream; a rank has at least one in a batch.
    """
    world, inputs = scoring.world, scoring.window_batch_tokens // scoring.world.size
    share = windows.share(world.rank, world.size).by_shape()
    for batch in share.batches(min(inputs, max_inputs(scoring.device))):
        yield window_losses(scoring, batch)


def window_losses(scoring: Scoring, batch: Windows) -> Losses:
    """Return the losses of the scored targets of windows of one shape."""
    model, temperature = scoring.model, scoring.settings.temperature
    length, scored = int(batch.stops[0] - batch.begins[0]), int(batch.stops[0] - batch.firsts[0])
    ids, targets = ids_and_targets(scoring.tokens, batch.begins, length, scoring.device)
    targets = targets[:, length - scored :]
    with torch.inference_mode(), rotary_base_of(model, batch.length):
        if temperature == 1.0 and scoring.hint_tokens is None:
            nats = model.loss(ids, targets, reduction="none")
            return Losses(batch.firsts, nats.float().cpu().numpy().astype(np.float64))
        logits = model(ids, last_n=scored) / temperature
        hints = hints_at(scoring.hint_tokens, batch.firsts, scored)
        return Losses(batch.firsts, *losses_of_logits(logits, targets, hints))


def ids_and_targets(
    tokens: NDArray[np.uint16], begins: Positions, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the `length` inputs from each of `begins` on, and the token after each, both (rows, length) int64."""
    rows = np.asarray(tokens)[begins[:, None] + np.arange(length + 1)].astype(np.int64)
    return torch.from_numpy(rows[:, :-1]).to(device), torch.from_numpy(rows[:, 1:]).to(device)


def max_inputs(device: torch.device) -> int:
    """Return the most inputs of one forward pass of a rank; windows are independent, so it changes no score.

    On a CPU larger passes lose more time to memory than they gain; a GPU would run out of memory.
    """
    return _MAX_INPUTS.get(device.type, _MAX_INPUTS_GPU)


def rotary_base_of(model: LanguageModel, length: int) -> AbstractContextManager[None]:
    """Return a context in which a GPT uses the rotary base of windows of `length`, however short one is.

    A base that grows with the sequence would tell in a short last window of a document where the document ends.
    """
    rotary = getattr(model, "rotary", None)
    return rotary.base_for_length(length) if isinstance(rotary, Rotary) else nullcontext()


def losses_of_logits(logits: Tensor, targets: Tensor, hints: Tensor | None = None) -> tuple[Nats, Nats | None]:
    """Return nats of targets (rows, n), and log-probabilities of the tokens `hints` (rows, n), from logits."""
    logp = logits.float().log_softmax(-1)
    nats = -logp.gather(-1, targets[..., None])[..., 0].cpu().numpy().astype(np.float64)
    if hints is None:
        return nats, None
    return nats, logp.gather(-1, hints.to(logp.device)[..., None])[..., 0].cpu().numpy().astype(np.float64)


def hints_at(hint_tokens: NDArray[np.integer] | None, firsts: Positions, count: int) -> Tensor | None:
    """Return the hint tokens of `count` positions from each of `firsts` on, (rows, count) int64."""
    if hint_tokens is None:
        return None
    return torch.from_numpy(hint_tokens[firsts[:, None] + np.arange(count)].astype(np.int64))
