"""TTT by LoRA: each document trains low-rank adapters of its own while it is scored; the model's weights stay fixed.

    document   [ chunk 0 ][ chunk 1 ][ chunk 2 ][ …        one forward pass: the losses of the chunk are recorded,
               window of chunk 2:                          their mean is differentiated, the adapters take a step;
               ═════════════════════════►                  the next chunk is predicted with the updated adapters

A chunk is predicted in a window that ends with it and has up to `context` inputs, recomputed each time. Loss and
gradient are of one forward pass, and the loss is in the ledger before the step: score first. The window of the last
chunk begins where that of a full chunk would, so nothing depends on where a document ends before it does. The last
chunk is not trained on: nothing comes after it.

Adapters start anew with each document, from one draw (`birdie.model.adapters`), so neither the batch nor the rank
changes a score beyond rounding. With `warm_a` A continues from the document before in the same row: that document was
scored, so it is legal, but then the order matters.

    stream ─► documents, each with the BOS after it as its last target ─► longest first ─► batches ─► ranks

Documents of about one length waste no padding, and with the longest batches first the short ones fill the gaps between
ranks at the end. A rank's batches are settled in advance (`balanced_batches`).

Sources: the challenge's first record of LoRA at test time (rank 8 on head, q and v; chunks of 256), parameter-golf#1530
(github.com/openai/parameter-golf/pull/1530: batches, longest first, more parts, chunks of 48), parameter-golf#1767 (α,
warm A).
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.model.adapters import Adapters
from birdie.model.gpt import GPT
from birdie.runtime.device import synchronize
from birdie.score.accumulator import Sink
from birdie.score.mode import Scoring, TrainingReport
from birdie.score.windows import Positions, document_begins

if TYPE_CHECKING:
    from birdie.score.modes import LoRAMode
    from birdie.score.ttt.multi_phase import SGDPhases

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

    def targets(self, number: int) -> int:
        """Return the number of targets of a batch."""
        begins, stops = self.batch(number)
        return int((stops - begins).sum())

    def cost(self, number: int, chunk: int, context: int) -> int:
        """Return the inputs of all forward passes of a batch, in windows of up to `context` that end with a chunk."""
        begins, stops = self.batch(number)
        firsts = np.arange(0, int((stops - begins)[0]), chunk)
        active = ((stops - begins)[None] > firsts[:, None]).sum(1)
        return int((active * np.minimum(firsts + chunk, context)).sum())


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
        model: in evaluation mode; frozen and adapted inside `score` only.
        tokens: (N + 1,) of the stream.
        sink: of the stream.
        settings: of adapters and steps.
        context: most inputs of a window.
        rows: most documents of a batch.

    Attributes:
        model, tokens, sink, settings, context: the arguments.
        device: of the model.
        adapters: as the last batch has left them.
        counts: (5,) float64: documents scored; steps, one for each chunk after which documents of a batch continue;
            targets trained on; sum of squares of B at the end of documents, and the number of its entries.
        score_seconds, train_seconds: of forward passes, and of gradients and steps.
    """

    def __init__(
        self, model: GPT, tokens: NDArray[np.integer], sink: Sink, settings: "LoRAMode", context: int, rows: int
    ) -> None:
        settings.check_chunk(context)
        self.model, self.sink, self.settings, self.context = model, sink, settings, context
        self.adapters = new_adapters(model, max(1, rows), settings)
        self._optimizer = RowAdamW(self.adapters.tensors(), settings)
        self.counts = torch.zeros(5, dtype=torch.float64)
        self.score_seconds = self.train_seconds = 0.0
        self.tokens, self.device = np.asarray(tokens), model.tok_emb.weight.device

    def score(self, begins: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Record the losses of the documents with these positions, longest first, training on each chunk."""
        chunk, lengths = self.settings.chunk, stops - begins
        self.adapters.reset(warm=self.settings.warm_a)
        self._optimizer.reset()
        with self.adapters.attached(self.model), self.model.rotary.base_for_length(self.context):
            for first in range(0, int(lengths[0]), chunk):
                # documents for which this chunk is the last need no gradient
                continuing, active = (int((lengths > position).sum()) for position in (first + chunk, first))
                for rows in self._row_groups(0, continuing, first):
                    self._score_and_train(begins[rows] + first, first, rows)
                for rows in self._row_groups(continuing, active, first):
                    self._score_last(begins[rows], lengths[rows], first, rows)
                self.counts[1] += continuing > 0
        self.counts[0] += len(begins)
        for b in self.adapters.up.values():
            self.counts[3] += float(torch.linalg.vector_norm(b[: len(begins)])) ** 2
            self.counts[4] += b[: len(begins)].numel()

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return int(self.counts[1])

    @property
    def targets_trained(self) -> int:
        """Number of targets trained on."""
        return int(self.counts[2])

    def diagnostics(self) -> str:
        """Return one line for the log, with the size that B has reached."""
        documents, _, _, squares, count = self.counts.tolist()
        rms = math.sqrt(squares / count) if count else 0.0
        return (
            f"TTT by LoRA of rank {self.settings.rank} on {', '.join(self.settings.parts)}: {documents:,.0f} "
            f"documents, {self.steps:,} steps, {self.targets_trained:,} tokens trained on after they were scored; "
            f"B at the end of documents: rms {rms:.3g}"
        )

    def _row_groups(self, low: int, high: int, first: int) -> Iterator[slice]:
        """Yield rows low … high − 1 in as few groups as memory allows."""
        length = min(first + self.settings.chunk, self.context)
        rows = max(1, _MAX_INPUTS.get(self.device.type, _MAX_INPUTS_GPU) // length)
        for begin in range(low, high, rows):
            yield slice(begin, min(begin + rows, high))

    def _score_and_train(self, positions: NDArray[np.int64], first: int, rows: slice) -> None:
        """Score a full chunk of documents that continue, at these positions, then train on it."""
        began = time.perf_counter()
        chunk = self.settings.chunk
        leaves = self.adapters.take(rows.start, rows.stop)
        inputs = positions[:, None] + np.arange(max(-first, chunk - self.context), chunk)
        with torch.inference_mode(False), torch.enable_grad():
            nats = self._nats(inputs, chunk)
        self.sink.add(positions, _array(nats))
        scored = time.perf_counter()
        self.score_seconds += scored - began
        self.sink.ledger.learn(*((int(position), int(position) + chunk) for position in positions))
        gradients = torch.autograd.grad(nats.mean(1).sum(), leaves)
        self._optimizer.step(first // chunk + 1, rows, leaves, gradients)
        synchronize(self.device)
        self.counts[2] += nats.numel()
        self.train_seconds += time.perf_counter() - scored

    def _score_last(self, begins: NDArray[np.int64], lengths: NDArray[np.int64], first: int, rows: slice) -> None:
        """Score the last chunk of documents, longest first."""
        began = time.perf_counter()
        self.adapters.take(rows.start, rows.stop)
        full = first + self.settings.chunk
        end = int(lengths[0])  # the padding of shorter rows comes after all that is scored
        inside = np.arange(max(0, full - self.context), end)
        with torch.no_grad():
            nats = _array(self._nats(begins[:, None] + np.minimum(inside, lengths[:, None] - 1), end - first))
        for row, (position, length) in enumerate(zip(begins + first, lengths - first, strict=True)):
            self.sink.add(position[None], nats[row : row + 1, :length])
        self.score_seconds += time.perf_counter() - began

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


def score_documents(
    scoring: Scoring, settings: "LoRAMode", *, context: int, phases: "SGDPhases | None" = None, restore: bool = True
) -> TrainingReport:
    """Record the losses of all targets, training adapters on each document, and the model in phases if there are any.

    Args:
        scoring: its model is in evaluation mode, with equal weights on all ranks; its accumulator is new.
        settings: of adapters and their steps.
        context: most inputs of a window.
        phases: of training the model itself; None: it stays fixed.
        restore: give the model its weights back after phases, however this ends.
    """
    model, world = scoring.model, scoring.world
    queue = document_queue(scoring.tokens, scoring.bos_id, settings.batch_docs)
    rows = min(settings.batch_docs, len(queue.begins))
    trainer = DocumentTrainer(model, scoring.tokens, scoring.sink, settings, context, rows)
    ends = [] if phases is None else phases.ends(len(queue.begins))
    initial = [p.detach().clone() for p in model.parameters()] if ends else []
    costs = [queue.cost(batch, settings.chunk, context) for batch in range(len(queue))]
    rounds = [
        (batches, [batches[i] for i in balanced_batches(costs[batches.start : batches.stop], world.rank, world.size)])
        for batches in _rounds(queue, ends)
    ]
    done, total = 0, sum(queue.targets(batch) for _, share in rounds for batch in share)
    try:
        for batches, share in rounds:
            for batch in share:
                trainer.score(*queue.batch(batch))
                done += queue.targets(batch)
                if scoring.progress is not None:
                    scoring.progress(done, total)
            if batches.stop == len(queue):
                break
            while phases and phases.completed < len(ends) and ends[phases.completed] <= batches.stop * queue.size:
                phases.run(ends[phases.completed], queue, trainer, world)
        if world.size > 1:
            trainer.counts = world.sum_(trainer.counts.to(scoring.device)).cpu()
        return TrainingReport(
            trainer.score_seconds,
            trainer.train_seconds + (phases.seconds if phases else 0.0),
            len(queue),
            trainer.steps + (phases.steps if phases else 0),
            trainer.targets_trained + (phases.tokens if phases else 0),
            trainer.diagnostics() + (phases.diagnostics() if phases else ""),
        )
    finally:
        if restore and initial:
            with torch.no_grad():
                for p, weight in zip(model.parameters(), initial, strict=True):
                    p.copy_(weight)


def _rounds(queue: DocumentQueue, ends: Sequence[int]) -> Iterator[range]:
    """Yield the batches, cut where all ranks meet for a phase."""
    first = 0
    for edge in sorted({-(-end // queue.size) for end in ends} | {len(queue)}):
        if edge > first:
            yield range(first, edge)
            first = edge
