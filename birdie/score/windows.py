"""Which targets are scored in which window: exact, disjoint covers of a stream.

    tokens   0 1 2 3 4 5 6 7 8 9        place i: input token i, target token i + 1
    blocks   [─────)[─────)             length T, each scored whole; what does not fill a window is left out
    sliding  [═════)                    length T, stride S: the first is scored whole,
               [───══)                  the others in their last S places, so that each
                 [───══)                target but the first T has at least T − S + 1 inputs
    documents                           sliding in each document by itself: nothing is seen across BOS

Sliding windows start at 0, S, 2S, …; those are kept that are first or have an input at their place T − S, so what is
scored is disjoint and complete (openai/parameter-golf, the record of 2026-03-19 and the correction of #1218).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.errors import ConfigError

_Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows in order; window i sees inputs begins[i] … stops[i] − 1 and scores places firsts[i] … stops[i] − 1.

    Attributes:
        begins, firsts, stops: (windows,) int64.
        length: inputs of a whole window; the last, and those of short documents, have fewer.
    """

    begins: _Places
    firsts: _Places
    stops: _Places
    length: int

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def scored(self) -> int:
        """Targets scored by all windows."""
        return int((self.stops - self.firsts).sum())

    @property
    def inputs(self) -> int:
        """Tokens that all windows together pass through the model."""
        return int((self.stops - self.begins).sum())

    def part(self, first: int, stop: int) -> "Windows":
        """Windows first … stop − 1."""
        return self._of(slice(first, stop))

    def share(self, rank: int, size: int) -> "Windows":
        """The contiguous windows of one of `size` ranks; numbers differ by at most one."""
        return self.part(len(self) * rank // size, len(self) * (rank + 1) // size)

    def batches(self, tokens: int) -> Iterator["Windows"]:
        """Runs of neighbours of one length and one number of scored places, of up to `tokens` inputs (at least one)."""
        for run in self._runs():
            yield from run.groups(max(1, tokens // int(run.stops[0] - run.begins[0])))

    def groups(self, count: int) -> Iterator["Windows"]:
        """The same of up to `count` windows."""
        for run in self._runs():
            for first in range(0, len(run), count):
                yield run.part(first, min(first + count, len(run)))

    def _runs(self) -> Iterator["Windows"]:
        lengths, scored = self.stops - self.begins, self.stops - self.firsts
        change = np.flatnonzero((np.diff(lengths) != 0) | (np.diff(scored) != 0)) + 1
        for first, stop in zip((0, *change), (*change, len(self)), strict=True):
            if stop > first:
                yield self.part(first, stop)

    def sorted(self) -> "Windows":
        """The same windows, those of one shape together, the longest first: no order is better where none learns."""
        order = np.lexsort((self.begins, self.firsts - self.begins, self.begins - self.stops))
        return self._of(order)

    def by_place(self) -> "Windows":
        """The same windows in the order of what they score."""
        return self._of(np.argsort(self.firsts, kind="stable"))

    def _of(self, which: slice | NDArray[np.integer]) -> "Windows":
        return Windows(self.begins[which], self.firsts[which], self.stops[which], self.length)


def blocks(targets: int, length: int) -> Windows:
    """Windows of `length` end to end; up to length − 1 targets at the end are in none."""
    _check(length, length)
    begins = np.arange(targets // length, dtype=np.int64) * length
    return Windows(begins, begins, begins + length, length)


def sliding(targets: int, length: int, stride: int) -> Windows:
    """Windows of `length` every `stride` places that score all targets once.

    Raises:
        ConfigError: the stride is not from 1 to the length.
    """
    return _slid(np.array([0]), np.array([targets]), length, stride)


def documents(begins: NDArray[np.integer], targets: int, length: int, stride: int) -> Windows:
    """Sliding windows in each document by itself; the BOS after a document is its last target.

    Args:
        begins: places of the inputs that documents begin with, ascending; what is before the first is a document too.
        targets: of the stream.
        length: most inputs of a window.
        stride: as in `sliding`.

    Raises:
        ConfigError: the stride is not from 1 to the length.
    """
    inside = np.asarray(begins, dtype=np.int64)
    starts = np.union1d([0], inside[inside < targets])
    return _slid(starts, np.append(starts[1:], targets), length, stride)


def _slid(starts: _Places, ends: _Places, length: int, stride: int) -> Windows:
    """Sliding windows within each of the spans starts … ends."""
    _check(length, stride)
    lengths = ends - starts
    starts, ends, lengths = starts[lengths > 0], ends[lengths > 0], lengths[lengths > 0]
    further = np.maximum(0, -(-(lengths - length) // stride))  # windows after the first that have a place to score
    count = 1 + further
    span = np.repeat(np.arange(len(starts)), count)
    number = np.arange(len(span)) - np.repeat(np.cumsum(count) - count, count)
    begins = starts[span] + number * stride
    stops = np.minimum(begins + length, ends[span])
    firsts = np.where(number == 0, begins, begins + length - stride)
    return Windows(begins, firsts, stops, length)


def _check(length: int, stride: int) -> None:
    if length < 1:
        raise ConfigError(f"a window of {length} tokens sees nothing; give at least 1")
    if not 1 <= stride <= length:
        raise ConfigError(f"stride {stride} does not fit windows of {length} tokens; give 1 to {length}")
