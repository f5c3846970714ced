"""Adapters that learn one document while it is scored, many documents side by side; the model itself stays as it is.

    document   [ chunk 0 ][ chunk 1 ][ chunk 2 ][ …        one forward: the losses of the chunk are entered,
               window of chunk 2:                          their mean is differentiated, the adapters take a step;
               ═════════════════════════►                  the next chunk is predicted with what they learned

A chunk is predicted in a window that ends with it and has up to `context` inputs, computed anew each time. Loss and
gradient are of one forward under the parameters of that moment, and the loss is in the ledger before the step: score
first. The window of the last chunk begins where that of a whole chunk would, so that nothing depends on where a
document ends before it does. The last chunk is not learned from: nothing comes after it.

Documents do not touch one another: adapters start anew with each, from one draw (`birdie.model.adapters`). So neither
the batch nor the rank changes a score, beyond rounding. With `warm_a` the As go on as the document before in the same
row left them, which is legal, for that was scored, but then the order matters.

Source: openai/parameter-golf's day-0 record of LoRA at test time (rank 8 on head, q, v; chunks of 256), #1530 (batches,
more parts, chunks of 48), #1767 (α, warm A).
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from cyclopts import Parameter
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import ConfigError
from birdie.model.adapters import PARTS, Adapters, Part
from birdie.model.gpt import GPT
from birdie.runtime.device import synchronize
from birdie.score.tally import Tally

Order = Literal["fixed", "claimed"]
_AT_ONCE = {"cpu": 8192}  # inputs of a pass with gradients: beyond, a CPU gains nothing and needs memory
_AT_ONCE_ELSEWHERE = 65_536
_COUNTS = ("rank", "chunk", "batch_docs")
_POSITIVE = ("eps",)
_RATES = ("lr", "weight_decay", "alpha")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Adapters for each document while it is scored; the defaults are those of #1530.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    rank: Annotated[int, Parameter(env_var="TTT_LORA_RANK", help="Rank of the adapters.")] = 96
    alpha: Annotated[
        float, Parameter(env_var="TTT_LORA_ALPHA", help="What adapters add is scaled by alpha over rank; 0: by 1.")
    ] = 0.0
    parts: Annotated[
        tuple[Part, ...],
        Parameter(negative=(), help="What is adapted: q, k, v, o (around attention), mlp (around the MLP), head."),
    ] = PARTS
    lr: Annotated[float, Parameter(env_var="TTT_LORA_LR", help="Learning rate of AdamW.")] = 1e-4
    beta1: Annotated[float, Parameter(env_var="TTT_BETA1", help="Decay of AdamW's first moment.")] = 0.0
    beta2: Annotated[float, Parameter(env_var="TTT_BETA2", help="Decay of AdamW's second moment.")] = 0.999
    eps: Annotated[float, Parameter(help="AdamW's epsilon.")] = 1e-10
    weight_decay: Annotated[float, Parameter(env_var="TTT_WEIGHT_DECAY", help="Weight decay of AdamW.")] = 0.5
    chunk: Annotated[
        int, Parameter(env_var="TTT_CHUNK_SIZE", help="Tokens of a document that are scored before a step.")
    ] = 48
    context: Annotated[
        int, Parameter(env_var="TTT_EVAL_SEQ_LEN", help="Most inputs of a window; 0: the length of evaluation.")
    ] = 0
    batch_docs: Annotated[int, Parameter(env_var="TTT_BATCH_SIZE", help="Documents side by side on a rank.")] = 64
    warm_a: Annotated[
        bool, Parameter(env_var="TTT_WARM_START_A", help="A goes on from the document before; B starts at zero.")
    ] = False
    order: Annotated[
        Order, Parameter(help="Which rank takes a batch: fixed (settled before), claimed (whoever is free).")
    ] = "fixed"
    seed: Annotated[int, Parameter(help="Of the first A.")] = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"lora {name} is {getattr(self, name)}; it must be at least 1")
        for name in (*_RATES, *_POSITIVE):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (name in _POSITIVE and not value):
                raise ConfigError(f"lora {name} is {value}; it must be a number {_least(name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"lora {name} is {getattr(self, name)}; it must be in [0, 1)")
        if not self.parts or any(part not in PARTS or self.parts.count(part) > 1 for part in self.parts):
            raise ConfigError(f"lora parts are {', '.join(self.parts)}; choose of {', '.join(PARTS)}, each once")
        if self.context < 0:
            raise ConfigError(f"lora context is {self.context}; it must be at least 0")
        if self.context and self.chunk > self.context:
            raise ConfigError(
                f"chunks of {self.chunk} tokens do not fit windows of {self.context}; give smaller chunks"
            )
        if self.order not in get_args(Order):
            raise ConfigError(f"lora order is {self.order!r}; choose fixed or claimed")
        if self.warm_a and self.order == "claimed":
            raise ConfigError("with warm_a a score depends on which rank takes a batch; leave order fixed")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"lora seed is {self.seed}; it must be from 0 to {2**63 - 1}")

    def adapters(self, model: GPT, rows: int) -> Adapters:
        """New adapters for so many documents."""
        return Adapters(model, rows, self.rank, alpha=self.alpha or None, parts=self.parts, seed=self.seed)


def _least(name: str) -> str:
    return "above 0" if name in _POSITIVE else "of at least 0"


class RowAdamW:
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) of rows of tensors that take each step or stay behind.

    Args:
        tensors: (rows, …) each; what moves are views of their rows.
        settings: rates and decays.
    """

    def __init__(self, tensors: Sequence[Tensor], settings: LoraSettings) -> None:
        self._settings = settings
        self._second = [torch.zeros_like(p) for p in tensors]
        self._first = [torch.zeros_like(p) for p in tensors] if settings.beta1 else None

    def reset(self) -> None:
        """As new."""
        for moment in (*self._second, *(self._first or ())):
            moment.zero_()

    @torch.no_grad()
    def step(self, number: int, rows: slice, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step `number`, from 1, of some rows, which have taken all before it; moves the leaves in place."""
        s = self._settings
        rate, spread = -s.lr / (1 - s.beta1**number), math.sqrt(1 - s.beta2**number)
        for i, (p, g) in enumerate(zip(leaves, gradients, strict=True)):
            squares = self._second[i][rows]
            squares.mul_(s.beta2).addcmul_(g, g, value=1 - s.beta2)
            mean = g if self._first is None else self._first[i][rows].lerp_(g, 1 - s.beta1)
            p.mul_(1 - s.lr * s.weight_decay)
            p.addcdiv_(mean, squares.sqrt().div_(spread).add_(s.eps), value=rate)


class DocumentLearner:
    """Scores batches of documents into a tally, adapting to each.

    Args:
        model: in evaluation mode; frozen and adapted inside `score` only.
        tokens: (N + 1,) of the stream.
        tally: of the stream.
        settings: of adapters and steps.
        context: most inputs of a window.
        rows: documents of a batch, at most.

    Attributes:
        model, tokens, tally, settings, context: as given.
        device: of the model.
        adapters: as the last batch has left them.
        counts: (5,) float64: documents scored; steps, one for each chunk that documents of a batch go on after;
            targets learned from; squares of B at the end of documents, and how many.
        score_seconds, adapt_seconds: of passes, and of gradients and steps.

    Raises:
        ConfigError: chunks are longer than the context.
    """

    def __init__(
        self, model: GPT, tokens: NDArray[np.integer], tally: Tally, settings: LoraSettings, context: int, rows: int
    ) -> None:
        if settings.chunk > context:
            raise ConfigError(f"chunks of {settings.chunk} tokens do not fit windows of {context}; give smaller chunks")
        self.model, self.tally, self.settings, self.context = model, tally, settings, context
        self.adapters = settings.adapters(model, max(1, rows))
        self._optimizer = RowAdamW(self.adapters.tensors(), settings)
        self.counts = torch.zeros(5, dtype=torch.float64)
        self.score_seconds = self.adapt_seconds = 0.0
        self.tokens, self.device = np.asarray(tokens), model.tok_emb.weight.device

    def score(self, begins: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Enter the losses of the documents with these places, longest first, learning as they come.

        Raises:
            RuleError: a place was scored before.
        """
        chunk, lengths = self.settings.chunk, stops - begins
        self.adapters.reset(warm=self.settings.warm_a)
        self._optimizer.reset()
        with self.adapters.attached(self.model), self.model.rotary.base_for_length(self.context):
            for first in range(0, int(lengths[0]), chunk):
                # those whose chunk is their last need no gradient
                further, active = (int((lengths > place).sum()) for place in (first + chunk, first))
                for rows in self._parts(0, further, first):
                    self._learning(begins[rows] + first, first, rows)
                for rows in self._parts(further, active, first):
                    self._ending(begins[rows], lengths[rows], first, rows)
                self.counts[1] += further > 0
        self.counts[0] += len(begins)
        for b in self.adapters.up.values():
            self.counts[3] += float(torch.linalg.vector_norm(b[: len(begins)])) ** 2
            self.counts[4] += b[: len(begins)].numel()

    @property
    def steps(self) -> int:
        """Taken so far."""
        return int(self.counts[1])

    @property
    def learned(self) -> int:
        """Targets learned from."""
        return int(self.counts[2])

    def evidence(self) -> str:
        """What was done, as a line for the log."""
        documents, _, _, squares, count = self.counts.tolist()
        size = math.sqrt(squares / count) if count else 0.0
        s = self.settings
        return (
            f"adapted by LoRA of rank {s.rank} on {', '.join(s.parts)}: {documents:,.0f} documents, "
            f"{self.steps:,} steps, {self.learned:,} tokens learned from after they were scored; "
            f"B at the end of documents: rms {size:.3g}"
        )

    def _parts(self, low: int, high: int, first: int) -> Iterator[slice]:
        """Rows low … high − 1 in as few parts as memory allows."""
        length = min(first + self.settings.chunk, self.context)
        most = max(1, _AT_ONCE.get(self.device.type, _AT_ONCE_ELSEWHERE) // length)
        for begin in range(low, high, most):
            yield slice(begin, min(begin + most, high))

    def _learning(self, places: NDArray[np.int64], first: int, rows: slice) -> None:
        """A whole chunk of documents that go on, at these places: score it, then learn from it."""
        began = time.perf_counter()
        chunk = self.settings.chunk
        leaves = self.adapters.take(rows.start, rows.stop)
        inputs = places[:, None] + np.arange(max(-first, chunk - self.context), chunk)
        with torch.inference_mode(False), torch.enable_grad():
            nats = self._nats(inputs, chunk)
        self.tally.add(places, _array(nats))
        scored = time.perf_counter()
        self.score_seconds += scored - began
        self.tally.ledger.learn(*((int(place), int(place) + chunk) for place in places))
        gradients = torch.autograd.grad(nats.mean(1).sum(), leaves)
        self._optimizer.step(first // chunk + 1, rows, leaves, gradients)
        synchronize(self.device)
        self.counts[2] += nats.numel()
        self.adapt_seconds += time.perf_counter() - scored

    def _ending(self, begins: NDArray[np.int64], lengths: NDArray[np.int64], first: int, rows: slice) -> None:
        """The last chunk of documents, longest first: score it."""
        began = time.perf_counter()
        self.adapters.take(rows.start, rows.stop)
        whole = first + self.settings.chunk
        end = int(lengths[0])  # what fills the shorter rows comes after all that is scored
        inside = np.arange(max(0, whole - self.context), end)
        with torch.no_grad():
            nats = _array(self._nats(begins[:, None] + np.minimum(inside, lengths[:, None] - 1), end - first))
        for row, (place, length) in enumerate(zip(begins + first, lengths - first, strict=True)):
            self.tally.add(place[None], nats[row : row + 1, :length])
        self.score_seconds += time.perf_counter() - began

    def _nats(self, inputs: NDArray[np.int64], last: int) -> Tensor:
        """Losses at the last places of `inputs` (rows, length): (rows, last)."""
        ids, targets = (
            torch.from_numpy(self.tokens[places].astype(np.int64)).to(self.device)
            for places in (inputs, inputs[:, -last:] + 1)
        )
        nats: Tensor = self.model.loss(ids, targets, reduction="none")
        return nats


def _array(nats: Tensor) -> NDArray[np.float64]:
    return nats.detach().float().cpu().numpy().astype(np.float64)


class LoraScorer:
    """One document after the other under the contract of `scorer`: what the batches are held against.

    Args:
        model: in evaluation mode.
        settings: of adapters and steps.
        context: most inputs of a window.
        bos_id: what documents begin with.
    """

    def __init__(self, model: GPT, settings: LoraSettings, context: int, bos_id: int) -> None:
        self._model, self._settings, self._context, self._bos_id = model, settings, context, bos_id
        self._adapters = settings.adapters(model, 1)
        self._optimizer = RowAdamW(self._adapters.tensors(), settings)
        self._seen: list[int] = []  # of this document

    def predict(self) -> Tensor:
        """Log-probabilities of the next token, (V,) float32."""
        place = len(self._seen) - 1
        first = place // self._settings.chunk * self._settings.chunk
        with self._attached(), torch.no_grad():
            ids = self._window(first)
            logits: Tensor = self._model(ids, last_n=self._settings.chunk)[0, place - first]
        return logits.log_softmax(0).cpu()

    def reveal(self, token: int) -> None:
        """The next token is this; a chunk that is complete is learned from, once its document goes on."""
        chunk = self._settings.chunk
        if token == self._bos_id:
            self._adapters.reset(warm=self._settings.warm_a)
            self._optimizer.reset()
            self._seen.clear()
        elif self._seen and len(self._seen) % chunk == 0:
            leaves = self._adapters.take(0, 1)
            targets = torch.tensor([[*self._seen[1 - chunk :], token]] if chunk > 1 else [[token]])
            with self._attached(), torch.inference_mode(False), torch.enable_grad():
                ids = self._window(len(self._seen) - chunk)
                loss = self._model.loss(ids, targets.to(ids.device))
                gradients = torch.autograd.grad(loss, leaves)
                self._optimizer.step(len(self._seen) // chunk, slice(0, 1), leaves, gradients)
        self._seen.append(token)

    @contextmanager
    def _attached(self) -> Iterator[None]:
        with self._adapters.attached(self._model), self._model.rotary.base_for_length(self._context):
            yield

    def _window(self, first: int) -> Tensor:
        """The window of the chunk that begins at `first`, as long as a whole one: (1, length)."""
        begin, stop = max(0, first + self._settings.chunk - self._context), first + self._settings.chunk
        window = self._seen[begin:stop]
        window += window[-1:] * (stop - begin - len(window))
        return torch.tensor([window], device=self._model.tok_emb.weight.device)
