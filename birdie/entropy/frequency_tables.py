"""Frequency tables of symbols, and their description in few bytes.

The histogram of weights is a smooth hill, so its logarithm is described as a piecewise linear curve: a knot every
2**stride symbols, in sixteenths of a bit, predicted by continuing the line through the two knots before. Seventeen
small numbers stand for 255 frequencies. Single symbols that stick out (the clipped ends of a per-row grid) are spikes,
added to the curve. Stride 0 is for histograms of no shape: every symbol is a knot, and a knot of 0 says that the symbol
does not occur. `fit` weighs the bits of the description against the bits of the data and takes the cheapest.

From knots to integer frequencies all arithmetic is integer; only the encoder's search for good knots uses floats.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.side_information import MAX_NUMBER, Reader, Writer, take_number, zigzag
from birdie.errors import ArtifactError
from birdie.runtime.kernels import njit

Counts = NDArray[np.int64]

MAX_STRIDE = 8
MAX_COARSENESS = 4
MAX_SPIKES = 16
MAX_LOG = 16 * 24
_NEWTON_STEPS = 24
_SOME, _MANY = 1 << 12, 1 << 16  # symbols from which fewer forms are worth trying
_HEADROOM = 16 * 18  # range of logs that the encoder leaves to knots; the rest is for spikes
# 2**(15 + i/16) for i = 0 … 15, rounded down: four nested square roots of an exact integer.
_POWERS = np.array([isqrt(isqrt(isqrt(isqrt(1 << 240 + i)))) for i in range(16)], np.int64)

_IMPOSSIBLE = "a frequency table of a stream is impossible; the file is damaged"

# Contexts of the side information, one per kind of number.
_SUPPORT, _FORM, _FIRST, _SLOPE, _KNOT, _DENSE, _SPIKES, _SPIKE_SYMBOL, _HEIGHT = 8, 9, 10, 11, 12, 13, 17, 18, 19
_DENSE_MOST = 3  # the largest difference of knots with a context of its own, at stride 0

_CONTEXTS = np.array(
    [_SUPPORT, _SUPPORT, _FORM, _FIRST, _SLOPE, _KNOT, _DENSE, _DENSE_MOST, _SPIKES, _SPIKE_SYMBOL, _HEIGHT], np.int64
)


@dataclass(frozen=True, slots=True)
class Description:
    """A frequency table as the file describes it.

    Attributes:
        low, high: first and last symbol that can occur: the support.
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
        """Return integer frequencies (size,) that sum to 2**precision; zero outside the support.

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
        """Write the description to the side information."""
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
            writer.put_chain(_DENSE, zigzag(np.diff(knots, prepend=0)), _DENSE_MOST)
        writer.put(_SPIKES, len(self.spikes))
        previous = self.low
        for symbol, height in self.spikes:
            writer.put(_SPIKE_SYMBOL, symbol - previous)
            writer.put_signed(_HEIGHT, height)
            previous = symbol


def take(reader: Reader, classes: int, size: int, precision: int) -> Counts:
    """Read as many descriptions as there are classes; return their frequencies (classes, size).

    Raises:
        ArtifactError: a description is out of range, or more symbols occur than there are slots.
    """
    out = np.zeros((classes, size), np.int64)
    if not _take_tables(*reader.source, _CONTEXTS, precision, out):
        raise ArtifactError(_IMPOSSIBLE)
    return out


def knot_count(width: int, stride: int) -> int:
    """Return the number of knots that a support of `width` symbols needs."""
    return ((width - 1 + (1 << stride) - 1) >> stride) + 1


def fit(counts: Counts, precision: int, *, newton: bool = False) -> tuple[Description, float]:
    """Return the cheapest description that was tried, and the bits of data and description together.

    Args:
        counts: (size,) the histogram, not all zero.
        newton: find the knots of the highest likelihood exactly, not only nearly; this takes longer.
    """
    occurring = np.flatnonzero(counts)
    low, high = int(occurring[0]), int(occurring[-1])
    total = int(counts.sum())
    # The more data, the finer the forms that win.
    finest = 2 if total > _MANY else 3 if total > _SOME else MAX_COARSENESS + 1
    tried = _dense(counts[low : high + 1], range(finest))
    for stride in (2,) if total > _MANY else (2, 3) if total > _SOME else (2, 3, 4, 5):
        tried += _smooth(counts[low : high + 1], stride, range(1 if total > _MANY else 3), newton=newton)
    best, least = tried[0], float("inf")
    for form in tried:
        bits = _cost(counts, low, high, *form, precision)
        if bits < least:
            best, least = form, bits
    stride, coarseness, knots, spikes = best
    added = tuple((low + int(index), int(height)) for index, height in spikes)
    return Description(low, high, stride, coarseness, tuple(knots.tolist()), added), least


_Form = tuple[int, int, Counts, Counts]  # stride, coarseness, knots, spikes as (index in the support, height)
_NO_SPIKES = np.zeros((0, 2), np.int64)


def _dense(support: Counts, coarsenesses: Iterable[int]) -> list[_Form]:
    """Return the forms of stride 0."""
    logs = 16 * np.log2(np.maximum(support, 1) / support[support > 0].min())
    forms = []
    for coarseness in coarsenesses:
        knots = np.where(support > 0, 1 + np.rint(logs / (1 << coarseness)).astype(np.int64), 0)
        forms.append((0, coarseness, np.minimum(knots, MAX_LOG >> coarseness), _NO_SPIKES))
    return forms


def _smooth(counts: Counts, stride: int, coarsenesses: Iterable[int], *, newton: bool = False) -> list[_Form]:
    """Return forms of one stride, with and without spikes; none where the support has too few symbols for it."""
    support = counts.astype(np.float64)
    if support.size < (3 << stride):
        return []
    logs, expected = _iterative_scaling(support, stride)
    if newton:
        logs, expected = _newton(support, stride, logs)
    # A spike pays where the curve misses a symbol by far: its share of the divergence, in bits, against 24 to name it.
    excess = support * np.log2(np.maximum(support, 1e-9) / expected) - (support - expected) * 1.4427
    spikes = np.sort(np.argsort(-excess, kind="stable")[:4])
    spikes = spikes[excess[spikes] > 24]
    forms = [_quantized(logs, stride, coarseness, _NO_SPIKES) for coarseness in coarsenesses]
    if spikes.size:
        without_spikes = support.copy()
        without_spikes[spikes] = expected[spikes]
        smooth_logs, expected = _iterative_scaling(without_spikes, stride)
        heights = np.rint(16 * np.log2(np.maximum(support[spikes], 0.5) / expected[spikes])).astype(np.int64)
        added = np.stack([spikes, np.minimum(heights, MAX_LOG - _HEADROOM)], 1)
        forms = [_quantized(smooth_logs, stride, coarseness, added) for coarseness in coarsenesses] + forms
    return forms


def _quantized(logs: NDArray[np.float64], stride: int, coarseness: int, spikes: Counts) -> _Form:
    knots = np.rint(16 * (logs - logs.min()) / (1 << coarseness)).astype(np.int64)
    return stride, coarseness, np.minimum(knots, _HEADROOM >> coarseness), spikes


def _iterative_scaling(support: NDArray[np.float64], stride: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return log2 frequencies at the knots that nearly maximize the likelihood of `support`, and the expected counts.

    The frequencies form an exponential family in hat functions (linear interpolation) that sum to one everywhere. So
    generalized iterative scaling (Darroch and Ratcliff 1972) climbs without a step size.
    """
    logs = np.zeros(knot_count(support.size, stride) + 1)
    expected = np.empty(support.size)
    _iterate_scaling(support, stride, logs, expected)
    return logs[:-1], expected


def _newton(
    support: NDArray[np.float64], stride: int, logs: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the maximum that `_iterative_scaling` approaches, by Newton's method from `logs`."""
    logs, expected = logs.copy(), np.empty(support.size)
    _iterate_newton(support, stride, logs, expected)
    return logs, expected


@njit(nogil=True, cache=True)
def _add_hats(values, stride, sums):  # type: ignore[no-untyped-def]
    """Add to sums (knots + 1,) the inner product of each knot's hat function and values (width,)."""
    width = 1.0 / (1 << stride)
    for i in range(values.size):
        along = (i & (1 << stride) - 1) * width
        sums[i >> stride] += values[i] * (1 - along)
        sums[(i >> stride) + 1] += values[i] * along


@njit(nogil=True, cache=True)
def _iterate_scaling(support, stride, logs, expected):  # type: ignore[no-untyped-def]
    """Fill logs (knots + 1,), whose last entry only takes what would fall outside, and expected (width,)."""
    knots, width, unit = logs.size - 1, support.size, 1.0 / (1 << stride)
    target, model, area = np.zeros(knots + 1), np.zeros(knots + 1), np.zeros(knots + 1)
    _add_hats(support, stride, target)
    _add_hats(np.ones(width), stride, area)
    total = support.sum()
    for k in range(knots):
        logs[k] = np.log2((target[k] + 0.3) / (area[k] + 1e-9))
    for step in range(24):
        highest = logs[:knots].max()
        mass = 0.0
        for i in range(width):
            k, along = i >> stride, (i & (1 << stride) - 1) * unit
            curve = logs[k] * (1 - along) + logs[min(k + 1, knots - 1)] * along
            expected[i] = np.exp2(curve - highest)
            mass += expected[i]
        for i in range(width):
            expected[i] *= total / mass
        if step == 23:
            break
        model[:] = 0
        _add_hats(expected, stride, model)
        for k in range(knots):
            logs[k] += np.log2((target[k] + 0.3) / (model[k] + 0.3))


@njit(nogil=True, cache=True)
def _iterate_newton(support, stride, logs, expected):  # type: ignore[no-untyped-def]
    """Improve logs (knots,) and fill expected (width,). Only neighboring hats overlap: the curvature is tridiagonal."""
    knots, width, unit, total = logs.size, support.size, 1.0 / (1 << stride), support.sum()
    gradient, diagonal, beside = np.empty(knots), np.empty(knots), np.empty(knots)
    for step in range(_NEWTON_STEPS + 1):
        highest, mass = logs.max(), 0.0
        for i in range(width):
            k, along = i >> stride, (i & (1 << stride) - 1) * unit
            curve = logs[k] * (1 - along) + logs[min(k + 1, knots - 1)] * along
            expected[i] = np.exp2(curve - highest)
            mass += expected[i]
        for i in range(width):
            expected[i] *= total / mass
        if step == _NEWTON_STEPS:
            break
        gradient[:], diagonal[:], beside[:] = 0, 0.3, 0
        for i in range(width):
            k, along = i >> stride, (i & (1 << stride) - 1) * unit
            missing = support[i] - expected[i]
            gradient[k] += missing * (1 - along)
            diagonal[k] += expected[i] * (1 - along) ** 2
            if along > 0:
                gradient[k + 1] += missing * along
                diagonal[k + 1] += expected[i] * along**2
                beside[k] += expected[i] * along * (1 - along)
        for k in range(1, knots):
            share = beside[k - 1] / diagonal[k - 1]
            diagonal[k] -= share * beside[k - 1]
            gradient[k] -= share * gradient[k - 1]
        for k in range(knots - 1, -1, -1):
            if k + 1 < knots:
                gradient[k] -= beside[k] * gradient[k + 1]
            gradient[k] /= diagonal[k]
        for k in range(knots):
            logs[k] += min(max(gradient[k] / np.log(2.0), -2.0), 2.0)
        lowest = logs.max() - _HEADROOM / 16
        for k in range(knots):
            logs[k] = max(logs[k], lowest)


@njit(nogil=True, cache=True)
def _frequencies(low, high, stride, coarseness, knots, spikes, precision, out):  # type: ignore[no-untyped-def]
    """Fill out (size,), zeros so far, from low to high; return False where no table can look so."""
    slots, total, present = np.int64(1) << precision, np.int64(0), np.int64(0)
    logs = np.empty(high - low + 1, np.int64)
    for i in range(logs.size):
        left = knots[i >> stride] << coarseness
        if stride:
            right = knots[min((i >> stride) + 1, knots.size - 1)] << coarseness
            left += (right - left) * (i & (1 << stride) - 1) + (1 << stride - 1) >> stride
        logs[i] = left
    for spike in range(spikes.shape[0]):
        index = spikes[spike, 0] - low
        logs[index] = max(logs[index] + spikes[spike, 1], np.int64(stride == 0))
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
    remainder = slots
    for symbol in range(low, high + 1):
        if out[symbol]:
            out[symbol] = max(((out[symbol] << precision) + (total >> 1)) // total, np.int64(1))
            remainder -= out[symbol]
    if remainder:
        _distribute(low, high, remainder, slots, present, out)
    return True


@njit(nogil=True, cache=True)
def _cost(counts, low, high, stride, coarseness, knots, spikes, precision):  # type: ignore[no-untyped-def]
    """Return the bits of symbols with these counts and, roughly, those of the table; infinite if it lacks a symbol.

    `spikes` count symbols from `low`.
    """
    frequencies, shifted = np.zeros(counts.size, np.int64), spikes.copy()
    shifted[:, 0] += low
    if not _frequencies(low, high, stride, coarseness, knots, shifted, precision, frequencies):
        return np.inf
    bits = 24.0 + 18.0 * spikes.shape[0]
    for symbol in range(counts.size):
        if counts[symbol]:
            if not frequencies[symbol]:
                return np.inf
            bits += counts[symbol] * (precision - np.log2(np.float64(frequencies[symbol])))
    for k in range(2 if stride else 1, knots.size):
        change = knots[k] - knots[k - 1]
        if stride:
            change -= knots[k - 1] - knots[k - 2]
        bits += 1.2 + 1.5 * np.log2(1.0 + abs(change))
    return bits


@njit(nogil=True, cache=True)
def _distribute(low, high, remainder, slots, present, out):  # type: ignore[no-untyped-def]
    """Give the remainder of rounding, of either sign, to the symbols one by one from the most frequent down."""
    starts = np.zeros(slots + 2, np.int64)  # a counting sort: stable, and frequencies are at most `slots`
    for symbol in range(low, high + 1):
        if out[symbol]:
            starts[slots - out[symbol] + 1] += 1
    for index in range(1, starts.size):
        starts[index] += starts[index - 1]
    order = np.empty(present, np.int64)
    for symbol in range(low, high + 1):
        if out[symbol]:
            order[starts[slots - out[symbol]]] = symbol
            starts[slots - out[symbol]] += 1
    step = np.int64(1 if remainder > 0 else -1)
    while remainder:
        for index in range(present):
            if remainder and (step > 0 or out[order[index]] > 1):
                out[order[index]] += step
                remainder -= step


@njit(nogil=True, cache=True)
def _take_tables(words, state, probability, count, contexts, precision, out):  # type: ignore[no-untyped-def]
    """Read a description for each row of out (classes, size), zeros so far, and fill it; return False on damage.

    The contexts are an array and `take_number` is called in few lines, which keeps the compiler's work small.
    """
    size = out.shape[1]
    for table in range(out.shape[0]):
        low = after = form = np.int64(0)
        for index in range(3):
            number = take_number(words, state, probability, count, contexts[index])
            low, after, form = after, form, number
        high = size - 1 - after
        if low > high or form >= (MAX_STRIDE + 1) * (MAX_COARSENESS + 1):
            return False
        stride, coarseness = form // (MAX_COARSENESS + 1), form % (MAX_COARSENESS + 1)
        knots = np.empty(((high - low + (1 << stride) - 1) >> stride) + 1, np.int64)
        knot = slope = number = np.int64(0)
        for i in range(knots.size):
            dense = contexts[6] + (number if number < contexts[7] else contexts[7])
            context = contexts[3 + i if i < 2 else 5] if stride else dense
            number = take_number(words, state, probability, count, context)
            step = (number >> 1) ^ -(number & 1)
            slope = (slope + step if i else np.int64(0)) if stride else step
            knot = number if stride and not i else knot + slope
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
        if not _frequencies(low, high, stride, coarseness, knots, spikes, precision, out[table]):
            return False
    return True
