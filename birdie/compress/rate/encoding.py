"""Work on jobs: several at a time on threads, shared out over ranks, and taken up again after a process died.

jobs ──encode──► integers ──code──► coded tensors
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from birdie.compress.coding import Coded, Quantized, code, estimate, join_parts
from birdie.compress.rate.job import Job
from birdie.compress.rate.jobs import IN_FLIGHT
from birdie.compress.scheme import Blocks
from birdie.compress.state import EncodedState
from birdie.entropy.hints import Effort
from birdie.system.callbacks import Progress
from birdie.system.distributed import World, share_out
from birdie.system.mapped import release, require_complete
from birdie.system.threads import Room

T = TypeVar("T")


class Records(Protocol):
    """Coded tensors outside of memory (`birdie.artifact.resume`)."""

    def recall(self, key: str) -> Coded | None:
        """Return what was kept under this key by a process that died."""
        ...

    def keep(self, key: str, coded: Coded) -> Coded:
        """Keep a coded tensor; return it with payloads that are not in memory."""
        ...


class Meter:
    """Counter of coded tensors for a progress callback.

    Args:
        progress: called with (done, total).
        rounds: expected number of times that all tensors are coded; the total grows if there are more.
    """

    def __init__(self, progress: Progress | None = None, rounds: int = 1) -> None:
        self.progress, self.rounds, self.done, self.total = progress, rounds, 0, 0

    def begin(self, tensors: int) -> None:
        """Start a round in which `tensors` tensors are coded."""
        self.total = max(self.total, self.rounds * tensors, self.done + tensors)

    def count(self) -> None:
        """Count one tensor."""
        self.done += 1
        self.total = max(self.total, self.done)
        self._report(self.done)

    def show(self, more: float) -> None:
        """Report work that lasts, as so many tensors beyond those that are coded."""
        self._report(self.done + more)

    def finish(self) -> None:
        """Report that all tensors are coded."""
        self._report(self.total)

    def _report(self, done: float) -> None:
        require_complete()
        if self.progress is not None:
            self.progress(done, self.total)


def payload_bytes(state: EncodedState) -> int:
    """Return the bytes of the payloads of coded tensors: the size of a file, but for its header."""
    return sum(tensor.bytes for tensor in state.tensors.values() if isinstance(tensor, Coded))


@dataclass(slots=True)
class Encoder:
    """Encodes and codes jobs. No byte depends on its settings but the effort.

    Attributes:
        effort: of the entropy coder.
        size: bytes of the file that holds a state of coded tensors.
        workers: threads; None uses every core.
        keeps_integers: whether coded tensors keep their integers, because they will be decoded to measure them.
        world: ranks that share the jobs out; all call the same methods with the same jobs.
        records: takes the coded tensors of a model that is too large for memory.
        meter: counts coded tensors.
    """

    effort: Effort = "max"
    size: Callable[[EncodedState], int] = payload_bytes
    workers: int | None = None
    keeps_integers: bool = False
    world: World = field(default_factory=World)
    records: Records | None = None
    meter: Meter = field(default_factory=Meter)

    def code(self, jobs: Sequence[Job], exponent: float = 0.0, *, draft: bool = False) -> dict[str, Coded]:
        """Encode and code jobs."""

        def work(job: Job, rows: slice) -> Coded:
            key = "" if self.records is None else f"{self.effort} {draft} {job.key(rows, exponent)}"
            coded = None if self.records is None else self.records.recall(key)
            if coded is None:
                encoded = job.encode(rows, exponent, draft=draft)
                release(job.rows(rows))
                coded = code(encoded, self.effort, keep=self.keeps_integers)
                if self.records is not None:
                    coded = self.records.keep(key, coded)
            self.meter.count()
            return coded

        self.meter.begin(len(jobs))
        parts = self._by_blocks(jobs, work)
        return {job.name: join_parts(tuple(job.tensor.shape), job.tensor.dtype, parts[job.name]) for job in jobs}

    def encode(self, jobs: Sequence[Job], exponent: float) -> Mapping[str, Quantized]:
        """Encode jobs to measure them: coded as well only where integers take too much memory."""
        if not self.keeps_integers:
            return self.code(jobs, exponent)
        parts = self._by_blocks(jobs, lambda job, rows: job.encode(rows, exponent))
        return {job.name: Blocks.of(tuple(job.tensor.shape), job.tensor.dtype, parts[job.name]) for job in jobs}

    def coded(self, state: EncodedState) -> EncodedState:
        """Return a state with all of its tensors coded."""
        with ThreadPoolExecutor(self.workers or os.cpu_count()) as pool:
            tensors = pool.map(self._coded, state.tensors.values())
            return EncodedState(dict(zip(state.tensors, tensors, strict=True)), state.ties)

    def estimate(self, jobs: Sequence[Job], exponent: float = 0.0) -> dict[str, tuple[float, float]]:
        """Return about the bytes of each job in a fraction of the time: of its weights, and of what describes them."""

        def work(job: Job, rows: slice) -> tuple[float, float]:
            encoded = job.encode(rows, exponent, draft=True)
            release(job.rows(rows))
            return estimate(encoded)

        return {name: self._total(parts) for name, parts in self._by_blocks(jobs, work).items()}

    def estimated(self, tensors: Mapping[str, Coded]) -> dict[str, tuple[float, float]]:
        """Return the same of coded tensors."""
        with ThreadPoolExecutor(self.workers or os.cpu_count()) as pool:
            parts = pool.map(estimate, tensors.values())
            return {name: self._total([part]) for name, part in zip(tensors, parts, strict=True)}

    def _total(self, parts: Iterable[tuple[float, float]]) -> tuple[float, float]:
        data, tables = zip(*parts, strict=True)
        return sum(data), sum(tables) if self.effort == "fast" else 0.0

    def _coded(self, tensor: Quantized) -> Coded:
        if isinstance(tensor, Coded):
            return tensor
        coded = code(tensor, self.effort, keep=self.keeps_integers)
        self.meter.count()
        return coded

    def _by_blocks(self, jobs: Sequence[Job], work: Callable[[Job, slice], T]) -> dict[str, list[T]]:
        """Do work on the blocks of jobs, several at a time, but not so many that their copies take much memory."""
        room = Room(IN_FLIGHT)
        blocks = {(job.name, index): (job, rows) for job in jobs for index, rows in enumerate(job.blocks)}
        sizes = {part: job.rows(rows).numel() for part, (job, rows) in blocks.items()}

        def one(part: tuple[str, int]) -> T:
            with room.taken(sizes[part]):
                return work(*blocks[part])

        def several(parts: Sequence[tuple[str, int]]) -> dict[tuple[str, int], T]:
            with ThreadPoolExecutor(self.workers or os.cpu_count()) as pool:
                return dict(zip(parts, pool.map(one, parts), strict=True))

        done: dict[str, list[T]] = {job.name: [] for job in jobs}
        for (name, _), result in share_out(self.world, sizes, several).items():
            done[name].append(result)
        return done
