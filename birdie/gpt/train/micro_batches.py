"""Micro-batches: how many tokens go through the model at once. It changes memory and speed, not the gradient.

Chunks decide which tokens a step has (`accumulation` of them, over all ranks). A micro-batch is some chunks side by
side, or some rows of one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from birdie.system.ranges import named_range

Documents = Callable[[Tensor, int], Any]
"""(ids on the CPU, longest segment) → `bounds` for the model's loss, by which attention isolates documents."""


class BatchSource(Protocol):
    """Interface of a loader. Its state is a position in the stream of all ranks, the same on every rank."""

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of this rank's next chunk of a step, each (sequences, length) int64 on the CPU."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON can hold it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that position."""
        ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch on the device.

    Attributes:
        ids, targets: (rows, length).
        parts: micro-batches of this size in this rank's step; the loss is divided by it.
        arguments: further arguments of the loss, by name.
    """

    ids: Tensor
    targets: Tensor
    parts: float
    arguments: dict[str, Any]


def micro_batches(
    batches: BatchSource,
    lengths: Sequence[int],
    tokens: int,
    device: torch.device,
    documents: Documents | None = None,
    packed: bool = False,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step of one rank, with all of its tokens once.

    Args:
        batches: yields the chunks.
        lengths: for each chunk of this rank in the step, the length of the sequences into which its rows are cut; 0:
            rows stay as they are.
        tokens: of a micro-batch, from chunks of one length; 0: a chunk.
        device: to move tensors to.
        documents: finds the bounds for the loss.
        packed: whether rows are cut at `length` by these bounds alone.
    """
    chunks, done = len(lengths), 0
    while done < chunks:
        length = lengths[done]
        same_length = next((n for n, other in enumerate(lengths[done:]) if other != length), chunks - done)
        with named_range("data"):
            pairs = [batches.next()]
            group = max(1, tokens // pairs[0][0].numel()) if tokens else 1
            pairs += [batches.next() for _ in range(min(group, same_length) - 1)]
        done += len(pairs)
        rows = max(1, tokens // pairs[0][0].shape[1]) if tokens else sum(len(ids) for ids, _ in pairs)
        bounds = [] if documents is None else _bounds([ids for ids, _ in pairs], rows, length, documents, packed)
        with named_range("transfer"):
            x, y = (_to_device(device, [pair[side] for pair in pairs]) for side in (0, 1))
        for number, (ids, targets) in enumerate(zip(torch.split(x, rows), torch.split(y, rows), strict=True)):
            parts = chunks * pairs[0][0].numel() / ids.numel()
            if length and not packed:
                ids, targets = ids.reshape(-1, length), targets.reshape(-1, length)
            yield MicroBatch(ids, targets, parts, {"bounds": bounds[number]} if bounds else {})


def _bounds(chunks: list[Tensor], rows: int, length: int, documents: Documents, packed: bool) -> list[Any]:
    """Return the bounds of each micro-batch of `rows` rows."""
    ids = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    if packed:
        return [documents(part, length) for part in torch.split(ids, rows)]
    longest = length or ids.shape[1]
    return [documents(part.reshape(-1, longest), longest) for part in torch.split(ids, rows)]


def _to_device(device: torch.device, parts: list[Tensor]) -> Tensor:
    moved = [part.to(device, non_blocking=True) for part in parts]
    return moved[0] if len(moved) == 1 else torch.cat(moved)
