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
from numpy.typing import NDArray

from birdie.entropy.compiled import njit
from birdie.entropy.numbers import MAX_NUMBER, Reader, Writer, take_number, zigzag
from birdie.errors import ArtifactError

Counts = NDArray[np.int64]

MAX_STRIDE = 8
MAX_COARSENESS = 4
MAX_SPIKES = 16
MAX_LOG = 16 * 24
_PATIENT = 1024  # symbols up to which tables are fitted by Newton's method
_NEWTON = 24  # its steps
_HEADROOM = 16 * 18  # what the encoder leaves to knots; the rest is for spikes
# 2**(15 + i/16) for i = 0 … 15, rounded down: four nested square roots of an exact integer.
_POWERS = np.array([isqrt(isqrt(isqrt(isqrt(1 << 240 + i)))) for i in range(16)], np.int64)

_IMPOSSIBLE = "a frequency table of a stream is impossible; the file is damaged"

# Contexts of the side information, one per kind of number.
_SUPPORT, _FORM, _FIRST, _SLOPE, _KNOT, _DENSE, _SPIKES, _PLACE, _HEIGHT = 8, 9, 10, 11, 12, 13, 17, 18, 19

_CONTEXTS = np.array([_SUPPORT, _SUPPORT, _FORM, _FIRST, _SLOPE, _KNOT, _DENSE, 3, _SPIKES, _PLACE, _HEIGHT], np.int64)


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
        out = np.zeros(size, np.int64)
        knots = np.array(self.knots, np.int64)
        spikes = np.array(self.spikes, np.int64).reshape(-1, 2)
        if not _frequencies(self.low, self.high, self.stride, self.coarseness, knots, spikes, precision, out):
            raise ArtifactError(_IMPOSSIBLE)
        return out

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


def take(reader: Reader, classes: int, size: int, precision: int) -> Counts:
    """The frequencies (classes, size) of as many tables as `Shape.put` described.

    Raises:
        ArtifactError: a description is out of range, or more symbols occur than there are slots.
    """
    out = np.zeros((classes, size), np.int64)
    if not _take_tables(*reader.source, _CONTEXTS, precision, out):
        raise ArtifactError(_IMPOSSIBLE)
    return out


def knot_count(width: int, stride: int) -> int:
    """Knots that a support of `width` symbols needs."""
    return ((width - 1 + (1 << stride) - 1) >> stride) + 1


def cost(counts: Counts, frequencies: Counts, precision: int) -> float:
    """Bits that symbols with these counts cost under these frequencies; infinite where a frequency is missing."""
    seen = counts > 0
    if not frequencies[seen].all():
        return float("inf")
    return float((counts[seen] * (precision - np.log2(frequencies[seen]))).sum())


def fit(counts: Counts, precision: int, *, quick: bool = False, patient: bool = False) -> tuple[Shape, float]:
    """The cheapest description found for `counts` (size,), not all zero, and bits of data and description together.

    `quick` looks at one dense and one smooth form only: enough to compare ways of forming classes.
    `patient` climbs to the very top, which takes its time.
    """
    shapes = _dense(counts, (1,) if quick else range(MAX_COARSENESS + 1))
    for stride in (4,) if quick else (2, 3, 4, 5):
        shapes += _smooth(counts, stride, (0,) if quick else range(3), patient=patient)
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


def _smooth(counts: Counts, stride: int, coarsenesses: Iterable[int], *, patient: bool = False) -> list[Shape]:
    """Shapes of one stride, without and with spikes; empty where the support has too few symbols for it."""
    seen = np.flatnonzero(counts)
    low, high = int(seen[0]), int(seen[-1])
    inside = counts[low : high + 1].astype(np.float64)
    if inside.size < (3 << stride):
        return []
    logs, expected = _climb(inside, stride)
    if patient and inside.size <= _PATIENT:
        logs, expected = _top(inside, stride, logs)
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


def _top(
    inside: NDArray[np.float64], stride: int, logs: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What `_climb` is on its way to, by Newton's method from `logs`."""
    place = np.arange(inside.size)
    hats = np.maximum(0, 1 - np.abs(place[:, None] / (1 << stride) - np.arange(logs.size)))
    expected = inside
    for step in range(_NEWTON + 1):
        line = hats @ logs
        expected = np.exp2(line - line.max())
        expected *= inside.sum() / expected.sum()
        if step < _NEWTON:
            curvature = hats.T @ (hats * expected[:, None]) + 0.3 * np.eye(logs.size)
            logs = logs + np.clip(np.linalg.solve(curvature, hats.T @ (inside - expected)) / np.log(2), -2, 2)
            logs = np.maximum(logs, logs.max() - _HEADROOM / 16)
    return logs, expected


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


@njit(nogil=True, cache=True)
def _frequencies(low, high, stride, coarseness, knots, spikes, precision, out):  # type: ignore[no-untyped-def]
    """Fill out (size,), zeros so far, from low to high; False where no table can look so."""
    slots, total, present = np.int64(1) << precision, np.int64(0), np.int64(0)
    logs = np.empty(high - low + 1, np.int64)
    for i in range(logs.size):
        left = knots[i >> stride] << coarseness
        if stride:
            right = knots[min((i >> stride) + 1, knots.size - 1)] << coarseness
            left += (right - left) * (i & (1 << stride) - 1) + (1 << stride - 1) >> stride
        logs[i] = left
    for spike in range(spikes.shape[0]):
        place = spikes[spike, 0] - low
        logs[place] = max(logs[place] + spikes[spike, 1], np.int64(stride == 0))
    for i in range(logs.size):
        if logs[i] > MAX_LOG:
            return False
        if stride or logs[i] > 0:
            log = max(logs[i], np.int64(0))
            out[low + i] = _POWERS[log & 15] << (log >> 4)
            total += out[low + i]
            present += 1
    if not 0 < present <= slots:
        return False
    lacking = slots
    for symbol in range(low, high + 1):
        if out[symbol]:
            out[symbol] = max(((out[symbol] << precision) + (total >> 1)) // total, np.int64(1))
            lacking -= out[symbol]
    if lacking:
        _spread(low, high, lacking, slots, present, out)
    return True


@njit(nogil=True, cache=True)
def _spread(low, high, lacking, slots, present, out):  # type: ignore[no-untyped-def]
    """Hand what rounding left over, of either sign, to the symbols one by one from the most frequent down."""
    starts = np.zeros(slots + 2, np.int64)  # a counting sort: stable, and frequencies are at most `slots`
    for symbol in range(low, high + 1):
        if out[symbol]:
            starts[slots - out[symbol] + 1] += 1
    for place in range(1, starts.size):
        starts[place] += starts[place - 1]
    order = np.empty(present, np.int64)
    for symbol in range(low, high + 1):
        if out[symbol]:
            order[starts[slots - out[symbol]]] = symbol
            starts[slots - out[symbol]] += 1
    step = np.int64(1 if lacking > 0 else -1)
    while lacking:
        for place in range(present):
            if lacking and (step > 0 or out[order[place]] > 1):
                out[order[place]] += step
                lacking -= step


@njit(nogil=True, cache=True)
def _take_tables(words, state, probability, count, contexts, precision, out):  # type: ignore[no-untyped-def]
    """Undo `Shape.put` and apply it, for each row of out (classes, size), zeros so far; False where it cannot be."""
    size = out.shape[1]
    for kind in range(out.shape[0]):
        # One array for the contexts, and few places that take numbers: both keep the compiler's work small.
        low = after = form = np.int64(0)
        for place in range(3):
            number = take_number(words, state, probability, count, contexts[place])
            low, after, form = after, form, number
        high = size - 1 - after
        if low > high or form >= (MAX_STRIDE + 1) * (MAX_COARSENESS + 1):
            return False
        stride, coarseness = form // (MAX_COARSENESS + 1), form % (MAX_COARSENESS + 1)
        knots = np.empty(((high - low + (1 << stride) - 1) >> stride) + 1, np.int64)
        knot = slope = before = np.int64(0)
        for i in range(knots.size):
            chained = before if before < contexts[7] else contexts[7]
            context = contexts[3 + i if i < 2 else 5] if stride else contexts[6] + chained
            before = take_number(words, state, probability, count, context)
            step = (before >> 1) ^ -(before & 1)
            slope = (slope + step if i else np.int64(0)) if stride else step
            knot = before if stride and not i else knot + slope
            if not 0 <= knot <= MAX_LOG:
                return False
            knots[i] = knot
        number = take_number(words, state, probability, count, contexts[8])
        if number > MAX_SPIKES:
            return False
        spikes = np.empty((number, 2), np.int64)
        for i in range(2 * number):
            taken = take_number(words, state, probability, count, contexts[9 + (i & 1)])
            if i & 1:
                spikes[i >> 1, 1] = (taken >> 1) ^ -(taken & 1)
            else:
                spikes[i >> 1, 0] = taken + (spikes[(i >> 1) - 1, 0] if i else low)
                if spikes[i >> 1, 0] > high:
                    return False
            if taken > MAX_NUMBER:
                return False
        if not _frequencies(low, high, stride, coarseness, knots, spikes, precision, out[kind]):
            return False
    return True
