"""Training batches from shards: resumable at the exact batch, prefetched, and split over ranks.

A step has `accumulation` chunks of batch_tokens / accumulation targets, over all ranks together, and chunk i is a pure
function of (shards, settings, i). In micro-step m, rank r of W reads chunk m·W + r. So 1, 2 or 8 ranks read the same
tokens in a step, and the state of a loader is one number: how many chunks were consumed.
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

from birdie.errors import ConfigError, DataError
from birdie.gpt.data.data_order import Order
from birdie.gpt.data.sampler import Sampler, TokenSequence, make_sampler
from birdie.gpt.data.shards import MAX_VOCAB

Batch = tuple[Tensor, Tensor]

_PREFETCHED = 2  # batches made ahead


class _Prefetcher:
    """Daemon thread that makes items `first`, `first + step`, … ahead of time, `_PREFETCHED` at most."""

    def __init__(self, make: Callable[[int], Batch], first: int, step: int) -> None:
        self._queue: Queue[Batch | BaseException] = Queue(_PREFETCHED)
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
        """Return the next item, or raise the exception that ended the thread."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def fill(self) -> None:
        """Wait until the queue is full or the thread has failed; a failure is raised by `get`."""
        self._full.wait()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        try:
            while True:  # an empty queue unblocks a waiting put, after which the thread checks the stop flag
                self._queue.get_nowait()
        except Empty:
            self._thread.join()


class Batches:
    """Endless iterator over the batches of one rank, one chunk each.

    Args:
        paths: training shards, in order.
        batch_tokens: targets of a step, over all ranks and micro-steps.
        seq_len: T, targets of a row.
        accumulation: chunks of a step, over all ranks; a rank does accumulation / world_size micro-steps.
        rank: index of this process.
        world_size: number of processes.
        order: order in which the shards are read (`birdie.gpt.data.sampler`).
        seed: of the random orders.
        bos_id: first token of every document; the packed order needs it.
        vocab_size: every token id is below it.
        pin_memory: return page-locked tensors, which can be copied to CUDA asynchronously.
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
        vocab_size: int = MAX_VOCAB,
        pin_memory: bool = False,
    ) -> None:
        rows = _rows_per_chunk(batch_tokens, seq_len, accumulation, world_size)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} is not one of world_size={world_size} ranks")
        if seed < 0:
            raise ConfigError(f"seed={seed} must not be negative")
        if not paths:
            raise DataError("there are no training shards; give files named *_train_*.bin")
        sizes = {"rows": rows, "seq_len": seq_len, "accumulation": accumulation}
        sampler = make_sampler(order, TokenSequence(paths, vocab_size), seed=seed, bos_id=bos_id, **sizes)
        self._make = partial(_make_batch, sampler, pin_memory)
        self._rank, self._world_size = rank, world_size
        self._consumed = 0  # chunks, over all ranks
        self._prefetcher: _Prefetcher | None = None

    def next(self) -> Batch:
        """Return inputs and targets of the next chunk, int64 (B, T) on the CPU; packed, (1, B · T).

        The two may share memory, so do not write to them. After `close`, prefetching starts again.
        """
        try:
            batch = self._started().get()
        except BaseException:
            self.close()
            raise
        self._consumed += self._world_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the number of chunks consumed by all ranks; it is the same on every rank and world size."""
        return {"spans": self._consumed}  # the key that existing checkpoints have

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the chunks that `state` counts, and wait until the first batches are prefetched."""
        chunks = state.get("spans")
        if not isinstance(chunks, int) or chunks < 0 or chunks % self._world_size:
            raise ConfigError(
                f"loader state {state!r} does not fit {self._world_size} ranks; resume with the checkpoint's world size"
            )
        self.close()
        self._consumed = chunks
        self._started().fill()

    def _started(self) -> _Prefetcher:
        if self._prefetcher is None:
            self._prefetcher = _Prefetcher(self._make, self._consumed + self._rank, self._world_size)
            weakref.finalize(self, self._prefetcher.close)  # Python aborts if it exits while the thread still works
        return self._prefetcher

    def close(self) -> None:
        """Stop the prefetching thread."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


def _make_batch(sampler: Sampler, pin_memory: bool, index: int) -> Batch:
    rows = sampler(index)  # numpy makes the copies: torch would start a second thread pool beside the trainer's
    x, y = (torch.from_numpy(np.ascontiguousarray(part)) for part in (rows[:, :-1], rows[:, 1:]))
    return (x.pin_memory(), y.pin_memory()) if pin_memory else (x, y)


def _rows_per_chunk(batch_tokens: int, seq_len: int, accumulation: int, world_size: int) -> int:
    """Return B, the rows of a chunk."""
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
