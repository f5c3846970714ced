"""Documents of a stream, and the adapters that each trains while it is scored; what the modes of TTT by LoRA share."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.gpt.model.adapters import Adapters
from birdie.gpt.model.gpt import GPT
from birdie.gpt.score.mode import Losses, Scoring, TrainingReport
from birdie.gpt.score.window_losses import Positions, document_begins
from birdie.system.device import synchronize

if TYPE_CHECKING:
    from birdie.gpt.score.modes.ttt_lora import LoRAMode

_MAX_INPUTS = {"cpu": 8192}  # of a pass with gradients: beyond, a CPU gains nothing and needs memory
_MAX_INPUTS_GPU = 65_536


def new_adapters(model: GPT, rows: int, settings: "LoRAMode") -> Adapters:
    """Return new adapters for `rows` documents."""
    alpha = settings.alpha or None
    return Adapters(model, rows, settings.rank, alpha=alpha, parts=settings.parts, seed=settings.seed)


class RowAdamW:
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) of which rows of tensors take each step or stay behind.

    Args:
        tensors: (rows, …) each; the parameters of a step are views of their rows.
        settings: rates and decays.
    """

    def __init__(self, tensors: Sequence[Tensor], settings: "LoRAMode") -> None:
        self._settings = settings
        self._second = [torch.zeros_like(p) for p in tensors]
        self._first = [torch.zeros_like(p) for p in tensors] if settings.beta1 else None

    def reset(self) -> None:
        """Set all moments to zero."""
        for moment in (*self._second, *(self._first or ())):
            moment.zero_()

    @torch.no_grad()
    def step(self, number: int, rows: slice, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take step `number`, from 1, with some rows, which have taken all steps before; update leaves in place."""
        s = self._settings
        rate, correction = -s.lr / (1 - s.beta1**number), math.sqrt(1 - s.beta2**number)
        for i, (p, g) in enumerate(zip(leaves, gradients, strict=True)):
            squares = self._second[i][rows]
            squares.mul_(s.beta2).addcmul_(g, g, value=1 - s.beta2)
            mean = g if self._first is None else self._first[i][rows].lerp_(g, 1 - s.beta1)
            p.mul_(1 - s.lr * s.weight_decay)
            p.addcdiv_(mean, squares.sqrt().div_(correction).add_(s.eps), value=rate)


@dataclass(frozen=True, slots=True)
class DocumentQueue:
    """Documents, longest first; document d has positions begins[d] … stops[d] − 1 of the stream.

    Attributes:
        begins, stops: (documents,) int64.
        size: documents in a batch; the last has fewer.
    """

    begins: Positions
    stops: Positions
    size: int

    def __len__(self) -> int:
        return -(-len(self.begins) // self.size)

    def batch(self, number: int) -> tuple[Positions, Positions]:
        """Return begins and stops of the documents of a batch."""
        part = slice(number * self.size, (number + 1) * self.size)
        return self.begins[part], self.stops[part]

    def cost(self, number: int, chunk: int, context: int) -> int:
        """Return the inputs of all forward passes of a batch, in windows of up to `context` that end with a chunk."""
        begins, stops = self.batch(number)
        firsts = np.arange(0, int((stops - begins)[0]), chunk)
        active = ((stops - begins)[None] > firsts[:, None]).sum(1)
        return int((active * np.minimum(firsts + chunk, context)).sum())

    def rounds(self, ends: Sequence[int]) -> Iterator[range]:
        """Yield the batches, cut after those that hold the documents at which all ranks meet."""
        first = 0
        for edge in sorted({-(-end // self.size) for end in ends} | {len(self)}):
            if edge > first:
                yield range(first, edge)
                first = edge


def document_queue(tokens: NDArray[np.integer], bos_id: int, size: int) -> DocumentQueue:
    """Return the documents of `tokens` (N + 1,), in batches of `size`; tokens before the first BOS are one as well."""
    targets = len(tokens) - 1
    inside = document_begins(tokens[:targets], bos_id)
    begins = np.union1d([0], inside).astype(np.int64) if targets > 0 else np.empty(0, np.int64)
    stops = np.append(begins[1:], targets) if len(begins) else begins
    order = np.lexsort((begins, begins - stops))
    return DocumentQueue(begins[order], stops[order], size)


def balanced_batches(costs: Sequence[int], rank: int, size: int) -> list[int]:
    """Return the indices of one rank's batches: each batch goes to the rank with the least cost so far.

    All ranks compute the same; among equals the first rank is taken. Costs should descend.
    """
    loads, share = [0] * size, []
    for number, cost in enumerate(costs):
        taker = loads.index(min(loads))
        loads[taker] += cost
        if taker == rank:
            share.append(number)
    return share


class DocumentTrainer:
    """Scorer of batches of documents that trains adapters on each.

    Args:
        scoring: its model is in evaluation mode; frozen and adapted inside `score` only.

    Attributes:
        adapters: as the last batch has left them.
        counts: (5,) float64: documents scored; steps, one for each chunk after which documents of a batch continue;
            targets trained on; sum of squares of B at the end of documents, and the number of its entries.
        seconds: of gradients and steps.
    """

    def __init__(self, scoring: Scoring, settings: "LoRAMode", queue: DocumentQueue) -> None:
        self.model, self.settings, self.queue = scoring.model, settings, queue
        self.context = settings.context_of(scoring.length)
        settings.check_chunk(self.context)
        self.tokens, self.ledger = np.asarray(scoring.tokens), scoring.ledger
        self.device, self.world = scoring.device, scoring.world
        self.adapters = new_adapters(self.model, max(1, min(queue.size, len(queue.begins))), settings)
        self._optimizer = RowAdamW(self.adapters.tensors(), settings)
        self.counts = torch.zeros(5, dtype=torch.float64)
        self.seconds = 0.0

    def share(self, batches: range) -> list[int]:
        """Return this rank's share of consecutive batches."""
        costs = [self.queue.cost(batch, self.settings.chunk, self.context) for batch in batches]
        return [batches[i] for i in balanced_batches(costs, self.world.rank, self.world.size)]

    def score(self, batch: int) -> Iterator[Losses]:
        """Yield the losses of the documents of a batch, longest first, and train on each chunk once it is recorded."""
        begins, stops = self.queue.batch(batch)
        chunk, lengths = self.settings.chunk, stops - begins
        self.adapters.reset(warm=self.settings.warm_a)
        self._optimizer.reset()
        with self.adapters.attached(self.model), self.model.rotary.base_for_length(self.context):
            for first in range(0, int(lengths[0]), chunk):
                # documents for which this chunk is the last need no gradient
                continuing, active = (int((lengths > position).sum()) for position in (first + chunk, first))
                for rows in self._row_groups(0, continuing, first):
                    yield from self._score_and_train(begins[rows] + first, first, rows)
                for rows in self._row_groups(continuing, active, first):
                    yield from self._score_last(begins[rows], lengths[rows], first, rows)
                self.counts[1] += continuing > 0
        self.counts[0] += len(begins)
        for b in self.adapters.up.values():
            self.counts[3] += float(torch.linalg.vector_norm(b[: len(begins)])) ** 2
            self.counts[4] += b[: len(begins)].numel()

    def report(self) -> TrainingReport:
        """Return what all ranks did; every rank must call it, once."""
        if self.world.size > 1:
            self.counts = self.world.sum_(self.counts.to(self.device)).cpu()
        documents, steps, tokens, squares, count = self.counts.tolist()
        rms = math.sqrt(squares / count) if count else 0.0
        diagnostics = (
            f"TTT by LoRA of rank {self.settings.rank} on {', '.join(self.settings.parts)}: {documents:,.0f} "
            f"documents, {steps:,.0f} steps, {tokens:,.0f} tokens trained on after they were scored; "
            f"B at the end of documents: rms {rms:.3g}"
        )
        return TrainingReport(self.seconds, len(self.queue), int(steps), int(tokens), diagnostics)

    def _row_groups(self, low: int, high: int, first: int) -> Iterator[slice]:
        """Yield rows low … high − 1 in as few groups as memory allows."""
        length = min(first + self.settings.chunk, self.context)
        rows = max(1, _MAX_INPUTS.get(self.device.type, _MAX_INPUTS_GPU) // length)
        for begin in range(low, high, rows):
            yield slice(begin, min(begin + rows, high))

    def _score_and_train(self, positions: Positions, first: int, rows: slice) -> Iterator[Losses]:
        """Yield a full chunk of documents that continue, at these positions, then train on it."""
        chunk = self.settings.chunk
        leaves = self.adapters.take(rows.start, rows.stop)
        inputs = positions[:, None] + np.arange(max(-first, chunk - self.context), chunk)
        with torch.inference_mode(False), torch.enable_grad():
            nats = self._nats(inputs, chunk)
        yield Losses(positions, _array(nats))
        began = time.perf_counter()
        self.ledger.learn(*((int(position), int(position) + chunk) for position in positions))
        gradients = torch.autograd.grad(nats.mean(1).sum(), leaves)
        self._optimizer.step(first // chunk + 1, rows, leaves, gradients)
        synchronize(self.device)
        self.counts[2] += nats.numel()
        self.seconds += time.perf_counter() - began

    def _score_last(self, begins: Positions, lengths: Positions, first: int, rows: slice) -> Iterator[Losses]:
        """Yield the last chunk of each of these documents, longest first."""
        self.adapters.take(rows.start, rows.stop)
        full = first + self.settings.chunk
        end = int(lengths[0])  # the padding of shorter rows comes after all that is scored
        inside = np.arange(max(0, full - self.context), end)
        with torch.no_grad():
            nats = _array(self._nats(begins[:, None] + np.minimum(inside, lengths[:, None] - 1), end - first))
        for row, (position, length) in enumerate(zip(begins + first, lengths - first, strict=True)):
            yield Losses(position[None], nats[row : row + 1, :length])

    def _nats(self, inputs: NDArray[np.int64], last_n: int) -> Tensor:
        """Return the losses at the last positions of `inputs` (rows, length): (rows, last_n)."""
        ids, targets = (
            torch.from_numpy(self.tokens[positions].astype(np.int64)).to(self.device)
            for positions in (inputs, inputs[:, -last_n:] + 1)
        )
        nats: Tensor = self.model.loss(ids, targets, reduction="none")
        return nats


def _array(nats: Tensor) -> NDArray[np.float64]:
    return nats.detach().float().cpu().numpy().astype(np.float64)
