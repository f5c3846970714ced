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

from birdie.entropy.side_information import MAX_NUMBER, SideReader, SideWriter, take_number, zigzag
from birdie.errors import ArtifactError
from birdie.system.kernels import inner, njit

Counts = NDArray[np.int64]

MAX_STRIDE = 8
MAX_COARSENESS = 4
MAX_SPIKES = 16
MAX_LOG = 16 * 24
_SCALINGS = 23  # steps
_ROUNDING = 1e-9  # share of an entropy that its rounding is far below
_NEWTON_STEPS, _NEWTON_SETTLED = 24, 1e-6  # at most; and the largest change of a log after which no other matters
_LAST_STRIDE, _FITTED_SPIKES = 5, 4  # of descriptions that are tried
_ROWS = 6  # of floats that the search works in
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
    """A frequency table as the file describes it."""

    # low, high: first and last symbol that can occur: the support
    low: int
    high: int
    stride: int  # knots lie 2**stride symbols apart, from `low` to the first at or past `high`
    coarseness: int  # knots count 2**coarseness sixteenths of a bit
    knots: tuple[int, ...]  # log frequencies, non-negative, up to a common offset
    spikes: tuple[tuple[int, int], ...] = ()  # (symbol, log added to it in sixteenths of a bit), symbols rising

    def frequencies(self, size: int, precision: int) -> Counts:
        """Return integer frequencies (size,) that sum to 2**precision; zero outside the support."""
        out = np.zeros(size, np.int64)
        form = np.array([self.stride, self.coarseness, len(self.knots), len(self.spikes)], np.int64)
        knots = np.array(self.knots, np.int64)
        spikes = np.array(self.spikes, np.int64).reshape(-1, 2)
        if not _frequencies(self.low, self.high, form, knots, spikes, precision, _scratch(size, precision), out):
            raise ArtifactError(_IMPOSSIBLE)
        return out

    def put(self, writer: SideWriter, size: int) -> None:
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


def take(reader: SideReader, classes: int, size: int, precision: int) -> Counts:
    """Read as many descriptions as there are classes; return their frequencies (classes, size)."""
    out = np.zeros((classes, size), np.int64)
    knots, spikes, form = np.empty(size + 1, np.int64), np.empty((MAX_SPIKES, 2), np.int64), np.empty(4, np.int64)
    if not _take_tables(*reader.source, _CONTEXTS, precision, form, knots, spikes, _scratch(size, precision), out):
        raise ArtifactError(_IMPOSSIBLE)
    return out


def _scratch(size: int, precision: int) -> Counts:
    """Return the memory that `_frequencies` needs for tables of `size` symbols."""
    return np.empty(2 * size + (1 << precision) + 2, np.int64)


def fit(counts: Counts, precision: int, *, newton: bool = False) -> tuple[Description, float]:
    """Return the cheapest description that was tried, and the bits of data and description together.

    Args:
        counts: (size,) the histogram, not all zero.
        newton: find the knots of the highest likelihood exactly, not only nearly; this takes longer.
    """
    occurring = np.flatnonzero(counts)
    low, high = int(occurring[0]), int(occurring[-1])
    support = np.ascontiguousarray(counts[low : high + 1], np.int64)
    total, width = int(support.sum()), support.size
    # The more data, the finer the forms that win. Symbols must not be too few for a stride.
    strides = [2] if total > _MANY else [2, 3] if total > _SOME else range(2, _LAST_STRIDE + 1)
    count = sum(width >= 3 << stride for stride in strides)
    values, floats = support.astype(np.float64), np.empty((_ROWS, width + 1))
    curves, expected = np.empty((2, count, width + 1))
    _fit_curves(values, curves, expected, floats)
    if newton:
        _refine_curves(values, curves, expected, floats)
    forms, spikes = np.zeros((2, 4), np.int64), np.zeros((2, _FITTED_SPIKES, 2), np.int64)
    knots, table = np.zeros((2, width), np.int64), np.empty(width, np.int64)
    memory = forms, knots, spikes, floats, table, _scratch(width, precision)
    bits = _describe(support, values, total, precision, curves, expected, *memory)
    form, knots, spikes = forms[0], knots[0], spikes[0]
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


@njit(nogil=True, cache=True, _nrt=False)
def _fit_curves(support, curves, expected, floats):  # type: ignore[no-untyped-def]
    """Fill a row of curves (log2 frequencies at the knots) and one of expected counts for each stride from 2 on."""
    for row in range(curves.shape[0]):
        _iterate_scaling(support, support.size, row + 2, curves[row], expected[row], floats)


@njit(nogil=True, cache=True, _nrt=False)
def _refine_curves(support, curves, expected, floats):  # type: ignore[no-untyped-def]
    """Move the curves of `_fit_curves` to the maximum of the likelihood: a kernel of its own, which few need."""
    for row in range(curves.shape[0]):
        _iterate_newton(support, support.size, row + 2, curves[row], expected[row], floats)


@njit(nogil=True, cache=True, _nrt=False)
def _describe(  # type: ignore[no-untyped-def]
    counts, support, total, precision, curves, expected, forms, knots, spikes, floats, table, scratch
):
    """Fill row 0 of forms, knots and spikes (index, height) with the cheapest description; return its bits.

    A form is stride, coarseness, and how many knots and spikes there are. `counts` is the support of the histogram; row
    1 is for the description that is tried.
    """
    rest, below, fitted = floats[0], floats[1], floats[2]
    width, least_count, entropy, least = counts.size, counts[0], 0.0, np.inf
    for i in range(width):
        if 0 < counts[i] < least_count:
            least_count = counts[i]
        entropy += support[i] * np.log2(max(support[i], 1.0))
    entropy = (total * np.log2(np.float64(total)) - entropy) * (1 - _ROUNDING)
    form, tried, added = forms[1], knots[1], spikes[1]
    for row in range(curves.shape[0]):
        stride, peaks = row + 2, _spikes(support, expected[row], added, rest)
        count = ((width - 1 + (1 << stride) - 1) >> stride) + 1
        if peaks:
            _iterate_scaling(rest, width, stride, below, fitted, floats)
            for spike in range(peaks):
                index = added[spike, 0]
                height = np.rint(16 * np.log2(max(support[index], 0.5) / fitted[index]))
                added[spike, 1] = min(np.int64(height), MAX_LOG - _HEADROOM)
        for attempt in range(0 if peaks else 1, 2):  # with spikes and without
            logs = curves[row] if attempt else below
            lowest = logs[0]
            for k in range(count):
                lowest = min(lowest, logs[k])
            for coarseness in range(1 if total > _MANY else 3):
                for k in range(count):
                    knot = np.int64(np.rint(16 * (logs[k] - lowest) / (1 << coarseness)))
                    tried[k] = min(knot, _HEADROOM >> coarseness)
                form[0], form[1], form[2], form[3] = stride, coarseness, count, 0 if attempt else peaks
                least = _keep_cheapest(counts, precision, entropy, least, forms, knots, spikes, table, scratch)
    for coarseness in range(2 if total > _MANY else 3 if total > _SOME else MAX_COARSENESS + 1):
        for i in range(width):
            log = 16 * np.log2(max(counts[i], 1) / least_count)
            tried[i] = min(1 + np.int64(np.rint(log / (1 << coarseness))), MAX_LOG >> coarseness) if counts[i] else 0
        form[0], form[1], form[2], form[3] = 0, coarseness, width, 0
        least = _keep_cheapest(counts, precision, entropy, least, forms, knots, spikes, table, scratch)
    return least


@inner
def _keep_cheapest(counts, precision, entropy, least, forms, knots, spikes, table, scratch):  # type: ignore[no-untyped-def]
    """Copy rows 1 to rows 0 if that description takes fewer than `least` bits; return the fewer of both.

    The bits of a description are rough; those of the data are infinite in a table that lacks one of the symbols.
    """
    form, tried, added = forms[1], knots[1], spikes[1]
    stride, bits = form[0], _TABLE_BITS + _SPIKE_BITS * form[3]
    for k in range(2 if stride else 1, form[2]):
        change = tried[k] - tried[k - 1]
        if stride:
            change -= tried[k - 1] - tried[k - 2]
        bits += _KNOT_BITS + 1.5 * np.log2(1.0 + abs(change))
    if bits + entropy >= least:
        return least
    for symbol in range(counts.size):
        table[symbol] = 0
    if not _frequencies(np.int64(0), counts.size - 1, form, tried, added, precision, scratch, table):
        return least
    data = 0.0
    for symbol in range(counts.size):
        if counts[symbol]:
            if not table[symbol]:
                return least
            data += counts[symbol] * (precision - np.log2(np.float64(table[symbol])))
    if bits + data >= least:
        return least
    for item in range(4):
        forms[0, item] = form[item]
    for knot in range(form[2]):
        knots[0, knot] = tried[knot]
    for spike in range(form[3]):
        spikes[0, spike, 0], spikes[0, spike, 1] = added[spike, 0], added[spike, 1]
    return bits + data


@inner
def _spikes(support, expected, added, rest):  # type: ignore[no-untyped-def]
    """Fill column 0 of `added` with the symbols that the curve misses by far, at most four, and `rest` without them.

    A spike pays where the share of a symbol in the divergence, in bits, is above 24 to name it.

    Returns:
        the number of spikes.
    """
    width, peaks = support.size, 0
    for i in range(width):  # so far what each symbol is above the curve
        surplus = support[i] - expected[i]
        rest[i] = support[i] * np.log2(max(support[i], 1e-9) / expected[i]) - surplus * 1.4427
    for _ in range(_FITTED_SPIKES):
        index = 0
        for i in range(width):
            if rest[i] > rest[index]:
                index = i
        if not rest[index] > 24:
            break
        rest[index] = -np.inf
        peaks += 1
    spike = 0
    for i in range(width):
        if spike < peaks and rest[i] == -np.inf:
            added[spike, 0], rest[i] = i, expected[i]
            spike += 1
        else:
            rest[i] = support[i]
    return peaks


@inner
def _add_hats(values, width, stride, sums):  # type: ignore[no-untyped-def]
    """Add to sums (knots + 1,) the inner product of each knot's hat function and values (width,)."""
    unit = 1.0 / (1 << stride)
    for i in range(width):
        along = (i & (1 << stride) - 1) * unit
        sums[i >> stride] += values[i] * (1 - along)
        sums[(i >> stride) + 1] += values[i] * along


@inner
def _expect(logs, knots, stride, total, width, expected):  # type: ignore[no-untyped-def]
    """Fill expected (width,), of sum `total`, with the curve through the knots: a geometric series between two."""
    highest, mass, unit = logs[0], 0.0, 1.0 / (1 << stride)
    for k in range(knots):
        highest = max(highest, logs[k])
    for k in range(knots):
        start = k << stride
        value = np.exp2(logs[k] - highest)
        factor = np.exp2((logs[min(k + 1, knots - 1)] - logs[k]) * unit)
        for i in range(start, min(start + (1 << stride), width)):
            expected[i] = value
            mass += value
            value *= factor
    scale = total / mass
    for i in range(width):
        expected[i] *= scale


@inner
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


@inner
def _iterate_scaling(support, width, stride, logs, expected, floats):  # type: ignore[no-untyped-def]
    """Fill log2 frequencies at the knots that nearly maximize the likelihood of `support`, and the expected counts.

    The frequencies form an exponential family in hat functions (linear interpolation) that sum to one everywhere. So
    generalized iterative scaling (Darroch and Ratcliff 1972) climbs without a step size.
    """
    unit, knots, total = 1.0 / (1 << stride), ((width - 1 + (1 << stride) - 1) >> stride) + 1, 0.0
    target, model, area = floats[3], floats[4], floats[5]  # the last element is outside
    for k in range(knots + 1):
        target[k] = area[k] = 0.0
    for i in range(width):
        expected[i] = 1.0
        total += support[i]
    _add_hats(support, width, stride, target)
    _add_hats(expected, width, stride, area)
    weights = logs
    for k in range(knots):
        weights[k] = (target[k] + 0.3) / (area[k] + 1e-9)
    for _ in range(_SCALINGS):
        mass = 0.0
        for k in range(knots + 1):
            model[k] = 0.0
        for k in range(knots):
            factor = weights[min(k + 1, knots - 1)] / weights[k]
            for _ in range(stride):
                factor = np.sqrt(factor)
            zeroth, first, _ = _moments(factor, stride, width - (k << stride))
            mass += weights[k] * zeroth
            model[k] += weights[k] * (zeroth - first * unit)
            model[k + 1] += weights[k] * first * unit
        scale, largest = total / mass, 0.0
        for k in range(knots):
            weights[k] *= (target[k] + 0.3) / (model[k] * scale + 0.3)
            largest = max(largest, weights[k])
        for k in range(knots):
            weights[k] /= largest
    for k in range(knots):
        logs[k] = np.log2(weights[k])
    _expect(logs, knots, stride, total, width, expected)


@inner
def _iterate_newton(support, width, stride, logs, expected, floats):  # type: ignore[no-untyped-def]
    """Find the maximum that `_iterate_scaling` approaches, by Newton's method from logs; fill expected.

    Only neighboring hats overlap: the curvature is tridiagonal.
    """
    unit, knots, total = 1.0 / (1 << stride), ((width - 1 + (1 << stride) - 1) >> stride) + 1, 0.0
    target, model, diagonal, beside, gradient = floats[0], floats[1], floats[2], floats[3], floats[4]
    for k in range(knots + 1):
        target[k] = 0.0
    for i in range(width):
        total += support[i]
    _add_hats(support, width, stride, target)
    for _ in range(_NEWTON_STEPS):
        highest, mass = logs[0], 0.0
        for k in range(knots):
            highest = max(highest, logs[k])
        for k in range(knots + 1):
            model[k] = diagonal[k] = beside[k] = 0.0
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
        lowest, moved = gradient[0], 0.0
        for k in range(knots):
            lowest = max(lowest, gradient[k])
        lowest -= _HEADROOM / 16
        for k in range(knots):
            moved = max(moved, abs(max(gradient[k], lowest) - logs[k]))
            logs[k] = max(gradient[k], lowest)
        if moved < _NEWTON_SETTLED:
            break
    _expect(logs, knots, stride, total, width, expected)


@njit(nogil=True, cache=True, _nrt=False)
def _frequencies(low, high, form, knots, spikes, precision, scratch, out):  # type: ignore[no-untyped-def]
    """Fill out (size,), zeros so far, from low to high; return False where no table can look so.

    Args:
        form: stride, coarseness, and how many of the knots and the spikes count.
        scratch: that of `_scratch`: logs, then symbols in order, then where those of each frequency start.
    """
    stride, coarseness, width = form[0], form[1], high - low + 1
    slots, total, present = np.int64(1) << precision, np.int64(0), np.int64(0)
    for i in range(width):
        left = knots[i >> stride] << coarseness
        if stride:
            right = knots[min((i >> stride) + 1, form[2] - 1)] << coarseness
            left += (right - left) * (i & (1 << stride) - 1) + (1 << stride - 1) >> stride
        scratch[i] = left
    for spike in range(form[3]):
        index = spikes[spike, 0] - low
        scratch[index] = max(scratch[index] + spikes[spike, 1], np.int64(stride == 0))
    for i in range(width):
        if scratch[i] > MAX_LOG:
            return False
        if stride or scratch[i] > 0:
            log = max(scratch[i], np.int64(0))
            out[low + i] = _POWERS[log & 15] << (log >> 4)
            total += out[low + i]
            present += 1
    if not 0 < present <= slots:
        return False
    remainder, highest = slots, np.int64(0)
    for symbol in range(low, high + 1):
        if out[symbol]:
            out[symbol] = max(((out[symbol] << precision) + (total >> 1)) // total, np.int64(1))
            highest = max(highest, out[symbol])
            remainder -= out[symbol]
    if not remainder:
        return True
    # Give the remainder of rounding, of either sign, to the symbols one by one from the most frequent down.
    start = 2 * width + highest
    for frequency in range(highest + 2):  # a counting sort, which is stable
        scratch[2 * width + frequency] = 0
    for symbol in range(low, high + 1):
        if out[symbol]:
            scratch[start - out[symbol] + 1] += 1
    for frequency in range(1, highest + 2):
        scratch[2 * width + frequency] += scratch[2 * width + frequency - 1]
    for symbol in range(low, high + 1):
        if out[symbol]:
            scratch[width + scratch[start - out[symbol]]] = symbol
            scratch[start - out[symbol]] += 1
    step = np.int64(1 if remainder > 0 else -1)
    while remainder:
        for index in range(width, width + present):
            if remainder and (step > 0 or out[scratch[index]] > 1):
                out[scratch[index]] += step
                remainder -= step
    return True


@njit(nogil=True, cache=True, _nrt=False)
def _take_tables(  # type: ignore[no-untyped-def]
    words, state, probability, count, contexts, precision, form, knots, spikes, scratch, out
):
    """Read a description for each row of out (classes, size), zeros so far, and fill it; return False on damage.

    The contexts are an array and `take_number` is called in few lines, which keeps the compiler's work small.
    """
    size = out.shape[1]
    for table in range(out.shape[0]):
        low = after = kind = np.int64(0)
        for index in range(3):
            number = take_number(words, state, probability, count, contexts[index])
            low, after, kind = after, kind, number
        high = size - 1 - after
        if low > high or kind >= (MAX_STRIDE + 1) * (MAX_COARSENESS + 1):
            return False
        stride = kind // (MAX_COARSENESS + 1)
        form[0], form[1], form[2] = (
            stride,
            kind % (MAX_COARSENESS + 1),
            ((high - low + (1 << stride) - 1) >> stride) + 1,
        )
        knot = slope = number = np.int64(0)
        for i in range(form[2]):
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
        form[3] = number
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
        if not _frequencies(low, high, form, knots, spikes, precision, scratch, out[table]):
            return False
    return True
