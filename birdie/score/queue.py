"""Documents in the order they are scored when order is free: longest first, in batches, and which rank takes which.

    stream ─► documents, each with the BOS after it as its last target ─► longest first ─► batches ─► ranks

Documents of about one length waste no padding, and the longest batches first leave short ones to fill the gaps between
ranks at the end. Which rank takes a batch is settled before (`dealt`), or by asking (`SharedCounter`).

Source: openai/parameter-golf #1530. Longest first is not left to right: each document is scored by itself, so no score
depends on it, until something is learned that stays from one document to another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Queue:
    """Documents, longest first; document d has places begins[d] … stops[d] − 1 of the stream.

    Attributes:
        begins, stops: (documents,) int64.
        size: documents in a batch; the last has fewer.
    """

    begins: _Places
    stops: _Places
    size: int

    def __len__(self) -> int:
        return -(-len(self.begins) // self.size)

    def batch(self, number: int) -> tuple[_Places, _Places]:
        """begins and stops of the documents of a batch."""
        part = slice(number * self.size, (number + 1) * self.size)
        return self.begins[part], self.stops[part]

    def places(self, number: int) -> int:
        """Places of the documents of a batch."""
        begins, stops = self.batch(number)
        return int((stops - begins).sum())

    def cost(self, number: int, chunk: int, context: int) -> int:
        """Inputs that pass the model when a batch is scored in windows of up to `context` that end with its chunks."""
        begins, stops = self.batch(number)
        firsts = np.arange(0, int((stops - begins)[0]), chunk)
        active = ((stops - begins)[None] > firsts[:, None]).sum(1)
        return int((active * np.minimum(firsts + chunk, context)).sum())


def queue(tokens: NDArray[np.integer], bos_id: int, size: int) -> Queue:
    """The documents of `tokens` (N + 1,), which have its N places among them; what is before the first BOS is one too.

    Args:
        tokens: of the stream.
        bos_id: what documents begin with.
        size: documents in a batch.
    """
    targets = len(tokens) - 1
    inside = np.flatnonzero(np.asarray(tokens)[:targets] == bos_id)
    begins = np.union1d([0], inside).astype(np.int64) if targets > 0 else np.empty(0, np.int64)
    stops = np.append(begins[1:], targets) if len(begins) else begins
    order = np.lexsort((begins, begins - stops))
    return Queue(begins[order], stops[order], size)


def dealt(costs: Sequence[int], rank: int, size: int) -> list[int]:
    """Which of the batches of these costs are one rank's: each goes to the rank that has least to do so far.

    All ranks find the same; among equals the first rank is taken. In order, so that the costliest should come first.
    """
    loads, mine = [0] * size, []
    for number, cost in enumerate(costs):
        taker = loads.index(min(loads))
        loads[taker] += cost
        if taker == rank:
            mine.append(number)
    return mine
