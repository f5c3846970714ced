"""A stream of short documents, settings to match, and cheating variants of the trainer, for the tests of LoRA and of
multi-phase TTT."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.model.gpt import GPT
from birdie.score.accumulator import Accumulator
from birdie.score.ttt.lora import DocumentTrainer, LoRAMode, document_queue
from tests.model.test_techniques import SMALL

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
