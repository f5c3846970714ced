"""Frequency tables of symbols, and their description in few bytes.

The histogram of weights is a smooth hill, so its logarithm is described as a piecewise linear curve: a knot every
2**stride symbols, in sixteenths of a bit, predicted by continuing the line through the two knots before. Seventeen
small numbers stand for 255 frequencies. Single symbols that stick out (the clipped ends of a per-row grid) are spikes,
added to the curve. Stride 0 is for histograms of no shape: every symbol is a knot, and a knot of 0 says that the symbol
does not occur. `fit` weighs the bits of the description against the bits of the data and takes the cheapest.

From knots to integer frequencies all arithmetic is integer; only the encoder's search for good knots uses floats.
"""

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.side_information import MAX_NUMBER, Reader, Writer, take_number, zigzag
from birdie.errors import ArtifactError
from birdie.system.kernels import njit

Counts = NDArray[np.int64]

MAX_STRIDE = 8
MAX_COARSENESS = 4
MAX_SPIKES = 16
MAX_LOG = 16 * 24
_SCALINGS = 23  # steps
_ROUNDING = 1e-9  # share of an entropy that its rounding is far below
_NEWTON_STEPS, _NEWTON_SETTLED = 24, 1e-6  # at most; and the largest change of a log after which no other matters
_LAST_STRIDE, _FITTED_SPIKES = 5, 4  # of descriptions that are tried
_TABLE_BITS, _SPIKE_BITS, _KNOT_BITS = 24.0, 18.0, 1.2  # of a description, about; a knot that bends takes more
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
        """Return integer frequencies (size,) that sum to 2**precision; zero outside the support."""
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
    """Read as many descriptions as there are classes; return their frequencies (classes, size)."""
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
    support = np.ascontiguousarray(counts[low : high + 1], np.int64)
    form, spikes = np.zeros(4, np.int64), np.zeros((_FITTED_SPIKES, 2), np.int64)
    knots = np.zeros(support.size, np.int64)
    bits = _fit(support, precision, newton, form, knots, spikes)
    stride, coarseness, knot, spike = form.tolist()
    added = tuple((low + symbol, height) for symbol, height in spikes[:spike].tolist())
    return Description(low, high, stride, coarseness, tuple(knots[:knot].tolist()), added), bits


def least_bits(counts: Counts) -> NDArray[np.float64]:
    """Return bits (tables,) that `fit` cannot undercut, for histograms (tables, size) of which none is all zero."""
    totals = counts.sum(1)
    logs = np.log2(np.maximum(counts, 1))
    entropy = totals * np.log2(totals) - (counts * logs).sum(1)
    occurring = counts > 0
    width = counts.shape[1] - np.argmax(occurring, 1) - np.argmax(occurring[:, ::-1], 1)
    fewest = (width - 1 >> _LAST_STRIDE) + 1  # knots
    bits: NDArray[np.float64] = entropy * (1 - _ROUNDING) + _TABLE_BITS + _KNOT_BITS * np.maximum(fewest - 2, 0)
    return bits


@njit(nogil=True, cache=True)
def _fit(counts, precision, newton, form, knots, spikes):  # type: ignore[no-untyped-def]
    """Fill form (stride, coarseness, knots, spikes), knots and spikes (index, height) of the cheapest description.

    `counts` is the support of the histogram. Returned are the bits. Loops stand where numpy has an expression of two
    arrays or a copy into a part of one: to compile those takes longer than all the rest of this kernel.
    """
    total, least_count = counts.sum(), counts.max()
    for count in counts:
        if 0 < count < least_count:
            least_count = count
    least, none = np.inf, np.zeros((0, 2), np.int64)
    support = counts.astype(np.float64)
    entropy = 0.0
    for count in support:
        entropy += count * np.log2(max(count, 1.0))
    entropy = (total * np.log2(np.float64(total)) - entropy) * (1 - _ROUNDING)
    # The more data, the finer the forms that win.
    coarsenesses = 1 if total > _MANY else 3
    for stride in range(2, 3 if total > _MANY else 4 if total > _SOME else _LAST_STRIDE + 1):
        if support.size < (3 << stride):  # too few symbols for it
            break
        # This maximum of the likelihood is refined, or that of the rest if some symbols are spikes.
        curve, expected = _iterate_scaling(support, stride)
        if newton:
            _iterate_newton(support, stride, curve, expected)
        peaks = _spikes(support, expected)
        if peaks.size:
            rest, added = support.copy(), np.empty((peaks.size, 2), np.int64)
            for index in peaks:
                rest[index] = expected[index]
            below, expected = _iterate_scaling(rest, stride)
            for row in range(peaks.size):
                index = peaks[row]
                height = np.rint(16 * np.log2(max(support[index], 0.5) / expected[index]))
                added[row, 0], added[row, 1] = index, min(np.int64(height), MAX_LOG - _HEADROOM)
            for coarseness in range(coarsenesses):
                tried = _quantized(below, coarseness)
                least = _keep_cheapest(
                    counts, stride, coarseness, tried, added, precision, entropy, least, form, knots, spikes
                )
        for coarseness in range(coarsenesses):
            tried = _quantized(curve, coarseness)
            least = _keep_cheapest(
                counts, stride, coarseness, tried, none, precision, entropy, least, form, knots, spikes
            )
    finest = 2 if total > _MANY else 3 if total > _SOME else MAX_COARSENESS + 1
    logs = 16 * np.log2(np.maximum(counts, 1) / least_count)
    for coarseness in range(finest):
        tried = np.zeros(counts.size, np.int64)
        for i in range(counts.size):
            if counts[i]:
                tried[i] = min(1 + np.int64(np.rint(logs[i] / (1 << coarseness))), MAX_LOG >> coarseness)
        least = _keep_cheapest(
            counts, np.int64(0), coarseness, tried, none, precision, entropy, least, form, knots, spikes
        )
    return least


@njit(nogil=True, cache=True)
def _keep_cheapest(  # type: ignore[no-untyped-def]
    counts, stride, coarseness, tried, added, precision, entropy, least, form, knots, spikes
):
    """Fill form, knots and spikes if a description takes fewer than `least` bits; return the fewer of both."""
    bits = _table_bits(stride, tried, added)
    if bits + entropy >= least:
        return least
    bits += _data_bits(counts, stride, coarseness, tried, added, precision)
    if bits >= least:
        return least
    form[0], form[1], form[2], form[3] = stride, coarseness, tried.size, len(added)
    for knot in range(tried.size):
        knots[knot] = tried[knot]
    for spike in range(len(added)):
        spikes[spike, 0], spikes[spike, 1] = added[spike, 0], added[spike, 1]
    return bits


@njit(nogil=True, cache=True)
def _spikes(support, expected):  # type: ignore[no-untyped-def]
    """Return the symbols that the curve misses by far, at most four, in their order.

    A spike pays where the share of a symbol in the divergence, in bits, is above 24 to name it.
    """
    excess = np.empty(support.size)
    for i in range(support.size):
        surplus = support[i] - expected[i]
        excess[i] = support[i] * np.log2(max(support[i], 1e-9) / expected[i]) - surplus * 1.4427
    peaks = np.zeros(support.size, np.bool_)
    for _ in range(_FITTED_SPIKES):
        index = np.argmax(excess)
        if not excess[index] > 24:
            break
        peaks[index], excess[index] = True, -np.inf
    return np.flatnonzero(peaks)


@njit(nogil=True, cache=True)
def _quantized(logs, coarseness):  # type: ignore[no-untyped-def]
    knots = np.rint(16 * (logs - logs.min()) / (1 << coarseness)).astype(np.int64)
    return np.minimum(knots, _HEADROOM >> coarseness)


@njit(nogil=True, cache=True)
def _add_hats(values, stride, sums):  # type: ignore[no-untyped-def]
    """Add to sums (knots + 1,) the inner product of each knot's hat function and values (width,)."""
    width = 1.0 / (1 << stride)
    for i in range(values.size):
        along = (i & (1 << stride) - 1) * width
        sums[i >> stride] += values[i] * (1 - along)
        sums[(i >> stride) + 1] += values[i] * along


@njit(nogil=True, cache=True)
def _expect(logs, stride, total, expected):  # type: ignore[no-untyped-def]
    """Fill expected (width,), of sum `total`, with the curve through the knots: a geometric series between two."""
    highest, mass, unit = logs.max(), 0.0, 1.0 / (1 << stride)
    for k in range(logs.size):
        start = k << stride
        value = np.exp2(logs[k] - highest)
        factor = np.exp2((logs[min(k + 1, logs.size - 1)] - logs[k]) * unit)
        for i in range(start, min(start + (1 << stride), expected.size)):
            expected[i] = value
            mass += value
            value *= factor
    scale = total / mass
    for i in range(expected.size):
        expected[i] *= scale


@njit(nogil=True, cache=True)
def _moments(factor, stride, count):  # type: ignore[no-untyped-def]
    """Return the sums of fⁱ, i fⁱ and i² fⁱ for i below `count`, at most 2**stride: what lies between two knots."""
    zeroth = first = second = 0.0
    if count < 1 << stride:
        value = 1.0
        for i in range(count):
            zeroth += value
            first += i * value
            second += i * i * value
            value *= factor
        return zeroth, first, second
    zeroth, half, power = 1.0, 1.0, factor
    for _ in range(stride):  # twice as many terms: the second half is the first one, moved
        second += power * (second + 2 * half * first + half * half * zeroth)
        first += power * (first + half * zeroth)
        zeroth += power * zeroth
        half, power = 2 * half, power * power
    return zeroth, first, second


@njit(nogil=True, cache=True)
def _iterate_scaling(support, stride):  # type: ignore[no-untyped-def]
    """Return log2 frequencies at the knots that nearly maximize the likelihood of `support`, and the expected counts.

    The frequencies form an exponential family in hat functions (linear interpolation) that sum to one everywhere. So
    generalized iterative scaling (Darroch and Ratcliff 1972) climbs without a step size.
    """
    width, unit = support.size, 1.0 / (1 << stride)
    knots = ((width - 1 + (1 << stride) - 1) >> stride) + 1
    target, model, area = np.zeros(knots + 1), np.zeros(knots + 1), np.zeros(knots + 1)  # the last one is outside
    _add_hats(support, stride, target)
    _add_hats(np.ones(width), stride, area)
    total = support.sum()
    weights = (target[:knots] + 0.3) / (area[:knots] + 1e-9)
    for _ in range(_SCALINGS):
        mass = 0.0
        model[:] = 0
        for k in range(knots):
            factor = weights[min(k + 1, knots - 1)] / weights[k]
            for _ in range(stride):
                factor = np.sqrt(factor)
            zeroth, first, _ = _moments(factor, stride, width - (k << stride))
            mass += weights[k] * zeroth
            model[k] += weights[k] * (zeroth - first * unit)
            model[k + 1] += weights[k] * first * unit
        scale = total / mass
        for k in range(knots):
            weights[k] *= (target[k] + 0.3) / (model[k] * scale + 0.3)
        weights /= weights.max()
    logs, expected = np.log2(weights), np.empty(width)
    _expect(logs, stride, total, expected)
    return logs, expected


@njit(nogil=True, cache=True)
def _iterate_newton(support, stride, logs, expected):  # type: ignore[no-untyped-def]
    """Find the maximum that `_iterate_scaling` approaches, by Newton's method from logs; fill expected.

    Only neighboring hats overlap: the curvature is tridiagonal.
    """
    knots, width, unit, total = logs.size, support.size, 1.0 / (1 << stride), support.sum()
    target, model = np.zeros(knots + 1), np.empty(knots + 1)
    diagonal, beside, gradient = np.empty(knots + 1), np.empty(knots + 1), np.empty(knots + 1)
    _add_hats(support, stride, target)
    for _ in range(_NEWTON_STEPS):
        highest, mass = logs.max(), 0.0
        model[:], diagonal[:], beside[:] = 0, 0, 0
        for k in range(knots):
            weight = np.exp2(logs[k] - highest)
            factor = np.exp2((logs[min(k + 1, knots - 1)] - logs[k]) * unit)
            zeroth, first, second = _moments(factor, stride, width - (k << stride))
            first, second = first * unit, second * unit**2
            mass += weight * zeroth
            model[k] += weight * (zeroth - first)
            model[k + 1] += weight * first
            diagonal[k] += weight * (zeroth - 2 * first + second)
            diagonal[k + 1] += weight * second
            beside[k] = weight * (first - second)
        scale = total / mass
        for k in range(knots + 1):
            gradient[k] = target[k] - model[k] * scale
            diagonal[k] = diagonal[k] * scale + 0.3
            beside[k] *= scale
        for k in range(1, knots):
            share = beside[k - 1] / diagonal[k - 1]
            diagonal[k] -= share * beside[k - 1]
            gradient[k] -= share * gradient[k - 1]
        for k in range(knots - 1, -1, -1):
            if k + 1 < knots:
                gradient[k] -= beside[k] * gradient[k + 1]
            gradient[k] /= diagonal[k]
        for k in range(knots):
            gradient[k] = logs[k] + min(max(gradient[k] / np.log(2.0), -2.0), 2.0)
        lowest, moved = gradient[:knots].max() - _HEADROOM / 16, 0.0
        for k in range(knots):
            moved = max(moved, abs(max(gradient[k], lowest) - logs[k]))
            logs[k] = max(gradient[k], lowest)
        if moved < _NEWTON_SETTLED:
            break
    _expect(logs, stride, total, expected)


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
        _distribute(low, high, remainder, present, out)
    return True


@njit(nogil=True, cache=True)
def _data_bits(counts, stride, coarseness, knots, spikes, precision):  # type: ignore[no-untyped-def]
    """Return the bits of symbols with these counts in a table; infinite if it lacks one of them."""
    frequencies = np.zeros(counts.size, np.int64)
    if not _frequencies(np.int64(0), counts.size - 1, stride, coarseness, knots, spikes, precision, frequencies):
        return np.inf
    bits = 0.0
    for symbol in range(counts.size):
        if counts[symbol]:
            if not frequencies[symbol]:
                return np.inf
            bits += counts[symbol] * (precision - np.log2(np.float64(frequencies[symbol])))
    return bits


@njit(nogil=True, cache=True)
def _table_bits(stride, knots, spikes):  # type: ignore[no-untyped-def]
    """Return roughly the bits that describe a table."""
    bits = _TABLE_BITS + _SPIKE_BITS * spikes.shape[0]
    for k in range(2 if stride else 1, knots.size):
        change = knots[k] - knots[k - 1]
        if stride:
            change -= knots[k - 1] - knots[k - 2]
        bits += _KNOT_BITS + 1.5 * np.log2(1.0 + abs(change))
    return bits


@njit(nogil=True, cache=True)
def _distribute(low, high, remainder, present, out):  # type: ignore[no-untyped-def]
    """Give the remainder of rounding, of either sign, to the symbols one by one from the most frequent down."""
    highest = out[low : high + 1].max()
    starts = np.zeros(highest + 2, np.int64)  # a counting sort, which is stable
    for symbol in range(low, high + 1):
        if out[symbol]:
            starts[highest - out[symbol] + 1] += 1
    for index in range(1, starts.size):
        starts[index] += starts[index - 1]
    order = np.empty(present, np.int64)
    for symbol in range(low, high + 1):
        if out[symbol]:
            order[starts[highest - out[symbol]]] = symbol
            starts[highest - out[symbol]] += 1
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
