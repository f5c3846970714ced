"""A stream of short documents, settings to match, the reference scorer, and cheating variants of the trainer, for the
tests of LoRA and of multi-phase TTT."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.model.gpt import GPT
from birdie.score.accumulator import Accumulator
from birdie.score.modes import LoRAMode
from birdie.score.ttt.lora import DocumentTrainer, RowAdamW, document_queue, new_adapters
from tests.model.technique_table import SMALL

BOS, CHUNK, CONTEXT = 1, 4, 10
TINY = dataclasses.replace(SMALL, num_layers=2)
SETTINGS = LoRAMode(rank=3, lr=0.02, chunk=CHUNK, batch_docs=3, weight_decay=0.1)
DOCUMENTS = [8, 1, 7, 9, 4, 14, 2, 1, 5]  # tokens of each, BOS included; the first has none


class ByteTable:
    """Every token but BOS has two bytes."""

    def count(self, _previous: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.where(targets == BOS, 0, 2)


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from two threads, which wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stream(seed: int = 0, documents: list[int] = DOCUMENTS) -> NDArray[np.uint16]:
    tokens = np.random.default_rng(seed).integers(2, 50, sum(documents) + 1).astype(np.uint16)
    tokens[np.cumsum(documents)[:-1]] = BOS
    return tokens


def new_accumulator(tokens: NDArray[np.uint16]) -> Accumulator:
    return Accumulator(tokens, ByteTable(), BOS, keep_losses=True)


def scored(
    model: GPT,
    tokens: NDArray[np.uint16],
    settings: LoRAMode = SETTINGS,
    *,
    kind: type[DocumentTrainer] = DocumentTrainer,
    context: int = CONTEXT,
) -> NDArray[np.float64]:
    """Losses of all targets, batch by batch."""
    accumulator, queue = new_accumulator(tokens), document_queue(tokens, BOS, settings.batch_docs)
    trainer = kind(model, tokens, accumulator, settings, context, min(settings.batch_docs, len(queue.begins)))
    for number in range(len(queue)):
        trainer.score(*queue.batch(number))
    accumulator.ledger.close()
    assert accumulator.losses is not None
    return accumulator.losses


class TrainFirst(DocumentTrainer):
    """Trains on a chunk, then scores it: illegal."""

    declares = True

    def _score_and_train(self, positions: NDArray[np.int64], first: int, rows: slice) -> None:
        sink, add = self.sink, self.sink.add
        if not self.declares:
            sink.ledger.learn = lambda *_: None  # type: ignore[method-assign]
        sink.add = lambda *_: None  # type: ignore[method-assign]
        super()._score_and_train(positions, first, rows)
        sink.add = add  # type: ignore[method-assign]
        chunk = self.settings.chunk
        inputs = positions[:, None] + np.arange(max(-first, chunk - self.context), chunk)
        with torch.no_grad():
            sink.add(positions, self._nats(inputs, chunk).numpy().astype(np.float64))


class TrainFirstUndeclared(TrainFirst):
    """Does so without declaring its steps to the ledger."""

    declares = False


class LoRAScorer:
    """Reference under the contract of `reference.Scorer`: one document after the other, one token at a time.

    Args:
        model: in evaluation mode.
        settings: of adapters and steps.
        context: most inputs of a window.
        bos_id: token that begins a document.
    """

    def __init__(self, model: GPT, settings: LoRAMode, context: int, bos_id: int) -> None:
        self._model, self._settings, self._context, self._bos_id = model, settings, context, bos_id
        self._adapters = new_adapters(model, 1, settings)
        self._optimizer = RowAdamW(self._adapters.tensors(), settings)
        self._document: list[int] = []  # its tokens so far

    def predict(self) -> Tensor:
        """Return the log-probabilities of the next token, (V,) float32."""
        position = len(self._document) - 1
        first = position // self._settings.chunk * self._settings.chunk
        with self._attached(), torch.no_grad():
            ids = self._window(first)
            logits: Tensor = self._model(ids, last_n=self._settings.chunk)[0, position - first]
        return logits.log_softmax(0).cpu()

    def reveal(self, token: int) -> None:
        """Take the next token; train on a complete chunk once its document continues."""
        chunk = self._settings.chunk
        if token == self._bos_id:
            self._adapters.reset(warm=self._settings.warm_a)
            self._optimizer.reset()
            self._document.clear()
        elif self._document and len(self._document) % chunk == 0:
            leaves = self._adapters.take(0, 1)
            targets = torch.tensor([[*self._document[1 - chunk :], token]] if chunk > 1 else [[token]])
            with self._attached(), torch.inference_mode(False), torch.enable_grad():
                ids = self._window(len(self._document) - chunk)
                loss = self._model.loss(ids, targets.to(ids.device))
                gradients = torch.autograd.grad(loss, leaves)
                self._optimizer.step(len(self._document) // chunk, slice(0, 1), leaves, gradients)
        self._document.append(token)

    @contextmanager
    def _attached(self) -> Iterator[None]:
        with self._adapters.attached(self._model), self._model.rotary.base_for_length(self._context):
            yield

    def _window(self, first: int) -> Tensor:
        """Return the window of the chunk that begins at `first`, as long as that of a full chunk: (1, length)."""
        begin, stop = max(0, first + self._settings.chunk - self._context), first + self._settings.chunk
        window = self._document[begin:stop]
        window += window[-1:] * (stop - begin - len(window))
        return torch.tensor([window], device=self._model.tok_emb.weight.device)
