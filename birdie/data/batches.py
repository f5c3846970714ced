"""Training batches out of shards: memory-mapped, resumable to the exact batch, prefetched, split over ranks.

Every step is `accumulation` spans of L = batch_tokens / accumulation targets, over all ranks together, and span i is a
pure function of (shards, settings, i). In micro-step m, rank r of W takes span m·W + r: so 1, 2 or 8 ranks see the same
tokens a step, and a loader's state is one number, the spans handed out.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birdie.data.orders import Order, Spans, Stream, spans_of
from birdie.errors import ConfigError, DataError

Batch = tuple[Tensor, Tensor]

_DEPTH = 2  # batches made ahead


class _Prefetcher:
    """A daemon thread that makes items `first`, `first + step`, … ahead of time, a few at most."""

    def __init__(self, make: Callable[[int], Batch], first: int, step: int) -> None:
        self._queue: Queue[Batch | BaseException] = Queue(_DEPTH)
        self._stop, self._full = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make, first, step), name="birdie-batches", daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[int], Batch], index: int, step: int) -> None:
        while not self._stop.is_set():
            try:
                item: Batch | BaseException = make(index)
            except BaseException as error:
                item = error
                self._stop.set()
            self._queue.put(item)
            if self._queue.full() or self._stop.is_set():
                self._full.set()
            index += step

    def get(self) -> Batch:
        """The next item; an exception of the thread is raised here."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def fill(self) -> None:
        """Wait until all that is made ahead is made, or making failed, which `get` will tell."""
        self._full.wait()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        try:
            while True:  # an empty queue lets a blocked put through, and the thread then sees the flag
                self._queue.get_nowait()
        except Empty:
            self._thread.join()


class Batches:
    """Endless micro-batches of one rank.

    Args:
        paths: training shards in stream order.
        batch_tokens: target tokens a step, over all ranks and micro-steps.
        seq_len: T.
        accumulation: spans a step is cut into, over all ranks; a rank makes accumulation / world_size micro-steps.
        rank: this process.
        world_size: number of processes.
        order: in which the shards are read (`birdie.data.orders`).
        seed: of an order that is drawn.
        bos_id: what documents begin with, for an order that asks where.
        pin_memory: hand out page-locked tensors, for copies to CUDA that overlap with work.

    Raises:
        ConfigError: the sizes do not divide.
        DataError: a shard is malformed, or there are too few tokens.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        batch_tokens: int,
        seq_len: int,
        accumulation: int = 8,
        rank: int = 0,
        world_size: int = 1,
        order: Order = "sequential",
        seed: int = 0,
        bos_id: int = 1,
        pin_memory: bool = False,
    ) -> None:
        rows = _rows_per_span(batch_tokens, seq_len, accumulation, world_size)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} is not one of world_size={world_size} ranks")
        if seed < 0:
            raise ConfigError(f"seed={seed} must not be negative")
        if not paths:
            raise DataError("there are no training shards; give files named *_train_*.bin")
        sizes = {"rows": rows, "seq_len": seq_len, "accumulation": accumulation}
        spans = spans_of(order, Stream(paths), seed=seed, bos_id=bos_id, **sizes)
        self._make = partial(_make_batch, spans, pin_memory)
        self._rank, self._world_size = rank, world_size
        self._handed_out = 0  # spans, over all ranks
        self._prefetcher: _Prefetcher | None = None

    def next(self) -> Batch:
        """The next micro-batch: inputs and targets, int64 (B, T) on the CPU; read-only, as the two may share memory.

        In packed order both are (1, B · T).

        After `close`, prefetching starts anew.

        Raises:
            Exception: whatever making the batch raised.
        """
        try:
            batch = self._ahead().get()
        except BaseException:
            self.close()
            raise
        self._handed_out += self._world_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the batches handed out end, in spans over all ranks: the same number on every rank and world size."""
        return {"spans": self._handed_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches that were handed out when `state` was taken; the first ones are made meanwhile.

        Raises:
            ConfigError: not such a state, or not at a micro-step of this world size.
        """
        spans = state.get("spans")
        if not isinstance(spans, int) or spans < 0 or spans % self._world_size:
            raise ConfigError(
                f"loader state {state!r} does not fit {self._world_size} ranks; resume with the checkpoint's world size"
            )
        self.close()
        self._handed_out = spans
        self._ahead().fill()

    def _ahead(self) -> _Prefetcher:
        if self._prefetcher is None:
            self._prefetcher = _Prefetcher(self._make, self._handed_out + self._rank, self._world_size)
            weakref.finalize(self, self._prefetcher.close)  # a thread still busy when Python exits would abort it
        return self._prefetcher

    def close(self) -> None:
        """Stop the prefetching thread."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


def _make_batch(spans: Spans, pin_memory: bool, index: int) -> Batch:
    rows = spans(index)  # copied by numpy: torch would start a second pool of threads for it, beside the trainer's
    x, y = (torch.from_numpy(np.ascontiguousarray(part)) for part in (rows[:, :-1], rows[:, 1:]))
    return (x.pin_memory(), y.pin_memory()) if pin_memory else (x, y)


def _rows_per_span(batch_tokens: int, seq_len: int, accumulation: int, world_size: int) -> int:
    """Rows B of a micro-batch."""
    sizes = {
        "batch_tokens": batch_tokens,
        "seq_len": seq_len,
        "accumulation": accumulation,
        "world_size": world_size,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if accumulation % world_size:
        raise ConfigError(f"world_size={world_size} must divide accumulation={accumulation}")
    if batch_tokens % (accumulation * seq_len):
        raise ConfigError(
            f"batch_tokens={batch_tokens} must be a multiple of accumulation={accumulation} × seq_len={seq_len} "
            f"= {accumulation * seq_len}"
        )
    return batch_tokens // (accumulation * seq_len)
