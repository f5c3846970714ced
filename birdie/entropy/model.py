"""Frequency tables and their description in few bytes.

A histogram of weights is a smooth hill, so its logarithm is written as a chain of straight pieces: a knot every
2**stride symbols, in sixteenths of a bit, predicted by continuing the line through the two knots before. Seventeen
small numbers stand for 255 frequencies. Single symbols that stick out (the clipped ends of a per-row grid) are spikes
added on top. Stride 0 is the other extreme: every symbol its own knot, for histograms of no shape, where a knot of 0
says that the symbol does not occur. `fit` weighs description against data and takes the cheapest.

From knots to integer frequencies all arithmetic is integer; only the search for good knots uses floats.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numba import njit
from numpy.typing import NDArray

from birdie.entropy.numbers import Reader, Writer, unzigzag, zigzag
from birdie.errors import ArtifactError

Counts = NDArray[np.int64]

MAX_STRIDE = 8
MAX_COARSENESS = 4
MAX_SPIKES = 16
MAX_LOG = 16 * 24
_HEADROOM = 16 * 18  # what the encoder leaves to knots; the rest is for spikes
# 2**(15 + i/16) for i = 0 … 15, rounded down: four nested square roots of an exact integer.
_POWERS = np.array([isqrt(isqrt(isqrt(isqrt(1 << 240 + i)))) for i in range(16)], np.int64)

# Contexts of the side information, one per kind of number.
_SUPPORT, _FORM, _FIRST, _SLOPE, _KNOT, _DENSE, _SPIKES, _PLACE, _HEIGHT = 8, 9, 10, 11, 12, 13, 17, 18, 19


@dataclass(frozen=True, slots=True)
class Shape:
    """A frequency table as described in the file.

    Attributes:
        low, high: first and last symbol that can occur.
        stride: knots lie 2**stride symbols apart, from `low` to the first at or past `high`.
        coarseness: knots count 2**coarseness sixteenths of a bit.
        knots: log frequencies, non-negative, up to a common offset.
        spikes: (symbol, log added to it in sixteenths of a bit), symbols rising.
    """

    low: int
    high: int
    stride: int
    coarseness: int
    knots: tuple[int, ...]
    spikes: tuple[tuple[int, int], ...] = ()

    def frequencies(self, size: int, precision: int) -> Counts:
        """Integer frequencies (size,) that sum to 2**precision; zero outside the support.

        Raises:
            ArtifactError: the description is out of range, or more symbols occur than there are slots.
        """
        logs = self._logs()
        present = logs >= 0 if self.stride else logs > 0
        if not 0 < int(present.sum()) <= 1 << precision or int(logs.max()) > MAX_LOG:
            raise ArtifactError("a frequency table of a stream is impossible; the file is damaged")
        logs = np.maximum(logs, 0)
        weights = np.where(present, _POWERS[logs & 15] << (logs >> 4), 0)
        out = np.zeros(size, np.int64)
        out[self.low : self.high + 1] = _normalised(weights, present, precision)
        return out

    def _logs(self) -> Counts:
        """Log frequency of each symbol of the support, in sixteenths of a bit."""
        knots = np.array(self.knots, np.int64) << self.coarseness
        if self.stride:
            where = np.arange(self.high - self.low + 1)
            left, along = knots[where >> self.stride], where & (1 << self.stride) - 1
            right = knots[np.minimum((where >> self.stride) + 1, knots.size - 1)]
            knots = left + ((right - left) * along + (1 << self.stride - 1) >> self.stride)
        for symbol, height in self.spikes:
            knots[symbol - self.low] = max(int(knots[symbol - self.low]) + height, 0 if self.stride else 1)
        return knots

    def put(self, writer: Writer, size: int) -> None:
        """Describe the table to `writer`."""
        writer.put(_SUPPORT, self.low)
        writer.put(_SUPPORT, size - 1 - self.high)
        writer.put(_FORM, self.stride * (MAX_COARSENESS + 1) + self.coarseness)
        knots = np.array(self.knots, np.int64)
        if self.stride:
            writer.put(_FIRST, int(knots[0]))
            slopes = np.diff(knots)
            writer.put_all(_SLOPE, zigzag(slopes[:1]))
            writer.put_all(_KNOT, zigzag(np.diff(slopes)))
        else:
            writer.put_chain(_DENSE, zigzag(np.diff(knots, prepend=0)), 3)
        writer.put(_SPIKES, len(self.spikes))
        before = self.low
        for symbol, height in self.spikes:
            writer.put(_PLACE, symbol - before)
            writer.put_signed(_HEIGHT, height)
            before = symbol

    @classmethod
    def take(cls, reader: Reader, size: int) -> "Shape":
        """Undo `put`; what could index out of range is checked here, the rest in `frequencies`."""
        low = reader.take(_SUPPORT, size - 1, "the first symbol")
        high = size - 1 - reader.take(_SUPPORT, size - 1 - low, "the last symbol")
        form = reader.take(_FORM, (MAX_STRIDE + 1) * (MAX_COARSENESS + 1) - 1, "the form of a table")
        stride, coarseness = divmod(form, MAX_COARSENESS + 1)
        count = knot_count(high - low + 1, stride)
        if stride:
            first = reader.take_all(_FIRST, 1)
            slope = unzigzag(reader.take_all(_SLOPE, min(count - 1, 1)))
            bends = unzigzag(reader.take_all(_KNOT, max(count - 2, 0)))
            knots = np.cumsum(np.concatenate([first, np.cumsum(np.concatenate([slope, bends]))]))
        else:
            knots = np.cumsum(unzigzag(reader.take_chain(_DENSE, count, 3)))
        if int(knots.min()) < 0 or int(knots.max()) > MAX_LOG:
            raise ArtifactError("a knot of a frequency table is out of range; the file is damaged")
        spikes = []
        symbol = low
        for _ in range(reader.take(_SPIKES, MAX_SPIKES, "the number of spikes")):
            symbol += reader.take(_PLACE, high - symbol, "the place of a spike")
            spikes.append((symbol, reader.take_signed(_HEIGHT)))
        return cls(low, high, stride, coarseness, tuple(knots.tolist()), tuple(spikes))


def knot_count(width: int, stride: int) -> int:
    """Knots that a support of `width` symbols needs."""
    return ((width - 1 + (1 << stride) - 1) >> stride) + 1


def _normalised(weights: Counts, present: NDArray[np.bool_], precision: int) -> Counts:
    """Frequencies in proportion to `weights`, at least 1 where present, that sum to 2**precision.

    Rounding leaves a small surplus or deficit; it is spread one by one over the symbols from the most frequent down.
    """
    total = int(weights.sum())
    frequencies = np.where(present, np.maximum(((weights << precision) + (total >> 1)) // total, 1), 0)
    order = np.argsort(-frequencies, kind="stable")
    order = order[: int(present.sum())]
    lacking = (1 << precision) - int(frequencies.sum())
    while lacking:
        step = 1 if lacking > 0 else -1
        able = order if step > 0 else order[frequencies[order] > 1]
        chosen = able[: abs(lacking)]
        frequencies[chosen] += step
        lacking -= step * chosen.size
    return frequencies


def cost(counts: Counts, frequencies: Counts, precision: int) -> float:
    """Bits that symbols with these counts cost under these frequencies; infinite where a frequency is missing."""
    seen = counts > 0
    if not frequencies[seen].all():
        return float("inf")
    return float((counts[seen] * (precision - np.log2(frequencies[seen]))).sum())


def fit(counts: Counts, precision: int, *, quick: bool = False) -> tuple[Shape, float]:
    """The cheapest description found for `counts` (size,), not all zero, and bits of data and description together.

    `quick` looks at one dense and one smooth form only: enough to compare ways of forming classes.
    """
    shapes = _dense(counts, (1,) if quick else range(MAX_COARSENESS + 1))
    for stride in (4,) if quick else (2, 3, 4, 5):
        shapes += _smooth(counts, stride, (0,) if quick else range(3))
    best, least = shapes[0], float("inf")
    for shape in shapes:
        bits = cost(counts, shape.frequencies(counts.size, precision), precision) + description_bits(shape)
        if bits < least:
            best, least = shape, bits
    return best, least


def description_bits(shape: Shape) -> float:
    """Rough size of a table's description."""
    knots = np.array(shape.knots, np.int64)
    bends = np.diff(knots, n=2) if shape.stride else np.diff(knots)
    return 24.0 + float((1.2 + 1.5 * np.log2(1 + np.abs(bends))).sum()) + 18.0 * len(shape.spikes)


def _dense(counts: Counts, coarsenesses: Iterable[int]) -> list[Shape]:
    seen = np.flatnonzero(counts)
    low, high = int(seen[0]), int(seen[-1])
    inside = counts[low : high + 1]
    logs = 16 * np.log2(np.maximum(inside, 1) / inside[inside > 0].min())
    shapes = []
    for coarseness in coarsenesses:
        knots = np.where(inside > 0, 1 + np.rint(logs / (1 << coarseness)).astype(np.int64), 0)
        knots = np.minimum(knots, MAX_LOG >> coarseness)
        shapes.append(Shape(low, high, 0, coarseness, tuple(knots.tolist())))
    return shapes


def _smooth(counts: Counts, stride: int, coarsenesses: Iterable[int]) -> list[Shape]:
    """Shapes of one stride, without and with spikes; empty where the support has too few symbols for it."""
    seen = np.flatnonzero(counts)
    low, high = int(seen[0]), int(seen[-1])
    inside = counts[low : high + 1].astype(np.float64)
    if inside.size < (3 << stride):
        return []
    logs, expected = _climb(inside, stride)
    excess = inside * np.log2(np.maximum(inside, 1e-9) / expected) - (inside - expected) * 1.4427
    spikes = np.sort(np.argsort(-excess, kind="stable")[:4])
    spikes = spikes[excess[spikes] > 24]
    shapes = []
    if spikes.size:
        calm = inside.copy()
        calm[spikes] = expected[spikes]
        plain, expected = _climb(calm, stride)
        heights = np.rint(16 * np.log2(np.maximum(inside[spikes], 0.5) / expected[spikes])).astype(np.int64)
        heights = np.minimum(heights, MAX_LOG - _HEADROOM)
        added = tuple(zip((spikes + low).tolist(), heights.tolist(), strict=True))
        shapes = [_quantised(plain, low, high, stride, coarseness, added) for coarseness in coarsenesses]
    return shapes + [_quantised(logs, low, high, stride, coarseness, ()) for coarseness in coarsenesses]


def _quantised(
    logs: NDArray[np.float64], low: int, high: int, stride: int, coarseness: int, spikes: tuple[tuple[int, int], ...]
) -> Shape:
    knots = np.rint(16 * (logs - logs.min()) / (1 << coarseness)).astype(np.int64)
    knots = np.minimum(knots, _HEADROOM >> coarseness)
    return Shape(low, high, stride, coarseness, tuple(knots.tolist()), spikes)


def _climb(inside: NDArray[np.float64], stride: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log2 frequencies at the knots that give `inside` the highest likelihood, and the counts they expect.

    The family is exponential with hat functions that sum to one, so generalised iterative scaling (Darroch and
    Ratcliff 1972) climbs without a step size.
    """
    logs = np.zeros(knot_count(inside.size, stride) + 1)
    expected = np.empty(inside.size)
    _scale_iteratively(inside, stride, logs, expected)
    return logs[:-1], expected


@njit(nogil=True, cache=True)
def _add_hats(values, stride, sums):  # type: ignore[no-untyped-def]
    """Add to sums (knots + 1,) what each knot's hat function sees of values (width,)."""
    width = 1.0 / (1 << stride)
    for i in range(values.size):
        along = (i & (1 << stride) - 1) * width
        sums[i >> stride] += values[i] * (1 - along)
        sums[(i >> stride) + 1] += values[i] * along


@njit(nogil=True, cache=True)
def _scale_iteratively(inside, stride, logs, expected):  # type: ignore[no-untyped-def]
    """Fill logs (knots + 1,), whose last place only takes what would fall outside, and expected (width,)."""
    knots, width, unit = logs.size - 1, inside.size, 1.0 / (1 << stride)
    wanted, seen, area = np.zeros(knots + 1), np.zeros(knots + 1), np.zeros(knots + 1)
    _add_hats(inside, stride, wanted)
    _add_hats(np.ones(width), stride, area)
    total = inside.sum()
    for k in range(knots):
        logs[k] = np.log2((wanted[k] + 0.3) / (area[k] + 1e-9))
    for step in range(24):
        highest = logs[:knots].max()
        mass = 0.0
        for i in range(width):
            k, along = i >> stride, (i & (1 << stride) - 1) * unit
            line = logs[k] * (1 - along) + logs[min(k + 1, knots - 1)] * along
            expected[i] = np.exp2(line - highest)
            mass += expected[i]
        for i in range(width):
            expected[i] *= total / mass
        if step == 23:
            break
        seen[:] = 0
        _add_hats(expected, stride, seen)
        for k in range(knots):
            logs[k] += np.log2((wanted[k] + 0.3) / (seen[k] + 0.3))
