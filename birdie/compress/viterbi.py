"""Quantizing a matrix column by column: a path through the trellis down each, its errors fed back to what follows.

    column ─► Viterbi: squared error + λ · bits ─► numbers ─► error ─► rows below (outputs), columns after (inputs)

The feedback is GPTQ's (Frantar et al. 2022, arXiv 2210.17323) on the input side; on the output side the same between
blocks of rows (Tseng et al. 2025, arXiv 2505.22988, feed back on both). Within a block the trellis is searched
as a whole (Viterbi 1967; trellis-coded quantization: Marcellin & Fischer 1990). Where nothing is fed back one path runs
along all rows: each path that starts anew costs a bit or more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.compress.feedback import BLOCK, Feedback
from birdie.entropy.trellis import chunk_rows, machine, odd_states
from birdie.runtime.kernels import njit

Matrix = NDArray[np.float32]
COLUMNS = 64  # updated at once by a product of matrices
REACH = 96  # numbers up to ± this have a rate; beyond, errors alone count
STRETCH, OVERLAP = 4096, 256  # of a long path: searched at once, and looked ahead
BINS, PER_OCTAVE, LOWEST = 56, 4, -4  # of the expected deviation in steps: from 2**LOWEST up
_SAMPLE, _LONG_SAMPLE = 1 << 17, 1 << 20  # weights on which rates are learned; of one path, which is quick to find
_PRIOR = 64.0  # observations that the expected rates are worth
_DOUBT = 16  # weights of the usual size that a row or column is taken to have besides its own
_CELLS, _SPAN = 512, 8.0  # of the histogram of normalised weights, up to so many deviations


@dataclass(frozen=True, slots=True)
class Rates:
    """Bits of each number: table (bins, 2, 2 · REACH + 1) by the expected deviation of a weight; its bin is a sum."""

    table: Matrix
    row: Matrix
    column: Matrix


def rates(scaled: Matrix) -> Rates:
    """What the coder will charge about, for weights `scaled` (rows, columns) in steps.

    A weight's deviation is that of its row times that of its column; what is left has one histogram.
    """
    power = scaled.astype(np.float64) ** 2
    mean = max(float(power.mean()), 1e-12)
    row = np.sqrt((power.sum(1) + _DOUBT * mean) / (scaled.shape[1] + _DOUBT))
    column = np.sqrt((power.sum(0) / mean + _DOUBT) / (scaled.shape[0] + _DOUBT))
    size = np.abs(scaled) / (row[:, None] * column).astype(np.float32)
    counts = np.bincount(np.minimum(size * (_CELLS / _SPAN), _CELLS - 1).astype(np.int64).ravel(), minlength=_CELLS)
    edges = np.linspace(0, _SPAN, _CELLS + 1)
    prior = np.exp(-(((edges[1:] + edges[:-1]) / 2) ** 2) / 2) + 1e-4
    mass = counts / counts.sum() + 0.02 * prior / prior.sum()
    cumulative = np.concatenate([[0.0], np.cumsum(mass / mass.sum())])
    deviation = 2.0 ** (np.arange(BINS) / PER_OCTAVE + LOWEST)
    place = np.arange(-REACH, REACH + 2)[None, None] - 0.5 + np.array([0.0, 0.5])[None, :, None]
    x = place / deviation[:, None, None]
    below = 0.5 + 0.5 * np.sign(x) * np.interp(np.abs(x), edges, cumulative)
    bits = -np.log2(np.diff(below, axis=2) + 2.0**-18)
    bins = [np.log2(part) * PER_OCTAVE for part in (row, column)]
    return Rates(
        bits.astype(np.float32), (bins[0] - LOWEST * PER_OCTAVE).astype(np.float32), bins[1].astype(np.float32)
    )


def quantize(
    weight: Matrix, feedback: Feedback, row: Matrix, column: Matrix, states: int, weight_of_rate: float
) -> NDArray[np.int32]:
    """Numbers (rows, columns) for `weight` under the steps of rows and columns.

    Args:
        weight: (rows, columns), left as it is.
        feedback: of both sides.
        row: steps of rows; 0 for one that is left out, whose numbers are all 0.
        states: of the trellis; minus so many for one path along the rows, which nothing may be fed back on.
        weight_of_rate: squared errors in steps that a bit is worth; 0 ignores bits.
    """
    columns = weight.shape[1]
    quantized = _quantized if states > 0 else _quantized_along
    inverse: Matrix = np.divide(1, row, out=np.zeros_like(row), where=row > 0)
    rated = rates(weight * inverse[:, None] / column)
    if weight_of_rate > 0:
        some = np.arange(0, columns, max(1, weight.size // (_SAMPLE if states > 0 else _LONG_SAMPLE)))
        sample = Rates(rated.table, rated.row, rated.column[some])
        plain = np.arange(len(some)), np.zeros((len(some),) * 2, np.float32), np.zeros((0, 0), np.float32)
        unfed = Feedback(*plain, np.ones(len(some)), np.ones(len(row)), False)
        tried = quantized(weight[:, some], unfed, row, column[some], states, weight_of_rate, sample)
        rated = _observed(sample, tried, states, rated)
    return quantized(weight, feedback, row, column, states, weight_of_rate, rated)


def cost(
    weight: Matrix, numbers: NDArray[np.int32], row: Matrix, column: Matrix, states: int, weight_of_rate: float
) -> float:
    """What `quantize` minimises where nothing is fed back: squared errors in steps, and bits as a coder charges."""
    inverse: Matrix = np.divide(1, row, out=np.zeros_like(row), where=row > 0)
    scaled: Matrix = weight * inverse[:, None] / column
    expected = rates(scaled)
    rated = _observed(expected, numbers, states, expected)
    odd = odd_states(numbers, states)
    return float(_cost(scaled, inverse, numbers, odd, rated.table, rated.row, rated.column, weight_of_rate))


def _observed(sample: Rates, numbers: NDArray[np.int32], states: int, rated: Rates) -> Rates:
    """`rated` after what was seen: how often each number came, by expected deviation and state."""
    counts = np.zeros(rated.table.shape)
    _count(numbers, odd_states(numbers, states), sample.row, sample.column, counts)
    model = 2.0 ** -rated.table.astype(np.float64)
    total = counts.sum(2, keepdims=True)
    mixed = (counts + _PRIOR * model / model.sum(2, keepdims=True)) / (total + _PRIOR)
    return Rates(-np.log2(mixed).astype(np.float32), rated.row, rated.column)


def _quantized(
    weight: Matrix,
    feedback: Feedback,
    row: Matrix,
    column: Matrix,
    states: int,
    weight_of_rate: float,
    rated: Rates,
) -> NDArray[np.int32]:
    rows, columns = weight.shape
    paths = machine(states)
    before = _predecessors(paths.next_state)
    left = np.ascontiguousarray(weight.T[feedback.order])  # (columns, rows), in the order of quantization
    steps, places = column[feedback.order], rated.column[feedback.order]
    numbers = np.empty(left.shape, np.int32)
    errors = np.empty((COLUMNS, rows), np.float32)
    height = chunk_rows(columns)
    shared = feedback.rows, paths.odd, before, rated.table, rated.row, np.float32(weight_of_rate), height
    for start in range(0, columns, COLUMNS):
        stop = min(start + COLUMNS, columns)
        part = slice(start, stop)
        _block(left[part], steps[part], places[part], row, feedback.columns[part, part], *shared, numbers[part], errors)
        if stop < columns and feedback.feeds_columns:
            left[stop:] -= feedback.columns[part, stop:].T @ errors[: stop - start]
    out = np.empty((columns, rows), np.int32)
    out[feedback.order] = numbers
    return np.ascontiguousarray(out.T)


def _quantized_along(
    weight: Matrix,
    feedback: Feedback,  # noqa: ARG001 (in the place of `_quantized`)
    row: Matrix,
    column: Matrix,
    states: int,
    weight_of_rate: float,
    rated: Rates,
) -> NDArray[np.int32]:
    paths, numbers = machine(states), np.zeros(weight.shape, np.int32)
    weight, height = np.ascontiguousarray(weight), chunk_rows(weight.shape[1])
    tables = rated.table, rated.row, rated.column, np.float32(weight_of_rate)
    _along(weight, row, column, paths.odd, _predecessors(paths.next_state), *tables, height, STRETCH, numbers)
    return numbers


def _predecessors(following: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(states, 2, 2): the two (state, parity) that lead to each state; of a single state both parities of itself."""
    found: list[list[list[int]]] = [[] for _ in following]
    for state, pair in enumerate(following):
        for parity, after in enumerate(pair):
            found[after].append([state, parity])
    return np.array(found, np.int64)


@njit(nogil=True, cache=True)
def _count(numbers, odd, row_places, places, counts):  # type: ignore[no-untyped-def]
    for i in range(numbers.shape[0]):
        for j in range(numbers.shape[1]):
            m = numbers[i, j]
            bin_ = min(max(np.int64(row_places[i] + places[j] + np.float32(0.5)), 0), counts.shape[0] - 1)
            if -REACH <= m <= REACH:
                counts[bin_, odd[i, j], m + REACH] += 1


@njit(nogil=True, cache=True)
def _cost(scaled, inverse, numbers, odd, table, row_places, places, weight_of_rate):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(numbers.shape[0]):
        if inverse[i] == 0:
            continue
        for j in range(numbers.shape[1]):
            m = numbers[i, j]
            off = scaled[i, j] - m - 0.5 * odd[i, j]
            total += off * off
            if -REACH <= m <= REACH:
                bin_ = min(max(np.int64(row_places[i] + places[j] + np.float32(0.5)), 0), table.shape[0] - 1)
                total += weight_of_rate * table[bin_, odd[i, j], m + REACH]
    return total


@njit(inline="always")
def _try(u, bits, weight_of_rate, costs, candidates):  # type: ignore[no-untyped-def]
    """The best number near `u` steps for a grid that is shifted or not and of either parity, and what it costs."""
    for o in range(2):
        place = u - np.float32(0.5) * np.float32(o)
        for b in range(2):
            m = np.int64(b + 2 * np.rint((place - np.float32(b)) * np.float32(0.5)))
            off = place - np.float32(m)
            best = off * off
            if -REACH <= m <= REACH:
                best += weight_of_rate * bits[o, m + REACH]
                other = m - 2 if m > 0 else m + 2  # the next one nearer to zero, or beyond it
                off = place - np.float32(other)
                less = off * off + weight_of_rate * bits[o, other + REACH]
                if less < best:
                    best, m = less, other
            costs[o, b] = best
            candidates[o, b] = m


@njit(inline="always")
def _select(cost, next_cost, chosen, before, odd, costs):  # type: ignore[no-untyped-def]
    """The cheaper way into each state."""
    for s in range(cost.size):
        s0, b0, s1, b1 = before[s, 0, 0], before[s, 0, 1], before[s, 1, 0], before[s, 1, 1]
        zero, one = cost[s0] + costs[odd[s0], b0], cost[s1] + costs[odd[s1], b1]
        chosen[s] = one < zero
        next_cost[s] = min(zero, one)


@njit(nogil=True, cache=True)
def _block(  # type: ignore[no-untyped-def]
    left, steps, places, row, forward, down, odd, before, table, row_places, weight_of_rate, height, numbers, errors
):
    """Quantize columns `left` (columns, rows) one after the other; their errors at the time end in `errors`."""
    count, rows = left.shape
    states = before.shape[0]
    fed_down = down.shape[0] == rows
    cost, next_cost = np.empty(states, np.float32), np.empty(states, np.float32)
    length = BLOCK if fed_down else rows
    chosen = np.empty((length, states), np.uint8)
    candidates, costs = np.empty((length, 2, 2), np.int32), np.empty((2, 2), np.float32)
    target = np.empty(rows, np.float32)
    for j in range(count):
        target[:] = left[j]
        state = 0
        first = 0
        while first < rows:
            last = min((first // length + 1) * length, rows, (first // height + 1) * height)
            if first % height == 0:
                state = 0
            for s in range(states):
                cost[s] = np.float32(1e30)
            cost[state] = np.float32(0)
            for i in range(first, last):
                if row[i] == 0:  # left out: the only number is 0
                    costs[:, 0] = np.float32(0)
                    costs[:, 1] = np.float32(1e30)
                    candidates[i - first, :, 0] = 0
                    _select(cost, next_cost, chosen[i - first], before, odd, costs)
                    cost, next_cost = next_cost, cost
                    continue
                u = target[i] / (row[i] * steps[j])
                bin_ = min(max(np.int64(row_places[i] + places[j] + np.float32(0.5)), 0), table.shape[0] - 1)
                _try(u, table[bin_], weight_of_rate, costs, candidates[i - first])
                _select(cost, next_cost, chosen[i - first], before, odd, costs)
                cost, next_cost = next_cost, cost
            end: int = np.argmin(cost)  # type: ignore[assignment]
            state = end
            for i in range(last - 1, first - 1, -1):
                side = chosen[i - first, end]
                end, parity = before[end, side, 0], before[end, side, 1]
                m = candidates[i - first, odd[end], parity]
                numbers[j, i] = m
                value = (np.float32(m) + np.float32(0.5) * np.float32(odd[end])) * row[i] * steps[j]
                errors[j, i] = left[j, i] - value  # of the column as it came
                target[i] -= value  # of what was aimed at
            if fed_down:
                for i in range(first, last):
                    e = target[i]
                    for k in range(last, rows):
                        target[k] -= e * down[i, k]
            first = last
        for k in range(j + 1, count):
            factor = forward[j, k]
            if factor != 0:
                for i in range(rows):
                    left[k, i] -= factor * errors[j, i]


@njit(nogil=True, cache=True)
def _along(  # type: ignore[no-untyped-def]
    weight, row, steps, odd, before, table, row_places, places, weight_of_rate, height, stretch, numbers
):
    """Quantize `weight` (rows, columns) on one path along the rows, searched in stretches that overlap."""
    columns = weight.shape[1]
    states = before.shape[0]
    cost, next_cost = np.empty(states, np.float32), np.empty(states, np.float32)
    chosen = np.empty((stretch + OVERLAP, states), np.uint8)
    candidates, costs = np.zeros((stretch + OVERLAP, 2, 2), np.int32), np.empty((2, 2), np.float32)
    state = 0
    first = 0
    while first < weight.size:
        start = first % (height * columns)
        if start == 0:
            state = 0
        stop = min(first - start + height * columns, weight.size)  # of the chunk
        last = min(first + stretch + OVERLAP, stop)
        for s in range(states):
            cost[s] = np.float32(1e30)
        cost[state] = np.float32(0)
        for t in range(first, last):
            i, j = t // columns, t % columns
            if row[i] == 0:
                costs[:, 0] = np.float32(0)
                costs[:, 1] = np.float32(1e30)
                candidates[t - first, :, 0] = 0
            else:
                bin_ = min(max(np.int64(row_places[i] + places[j] + np.float32(0.5)), 0), table.shape[0] - 1)
                _try(weight[i, j] / (row[i] * steps[j]), table[bin_], weight_of_rate, costs, candidates[t - first])
            _select(cost, next_cost, chosen[t - first], before, odd, costs)
            cost, next_cost = next_cost, cost
        end: int = np.argmin(cost)  # type: ignore[assignment]
        kept = last if last == stop else first + stretch
        for t in range(last - 1, first - 1, -1):
            if t == kept - 1:
                state = end
            side = chosen[t - first, end]
            end, parity = before[end, side, 0], before[end, side, 1]
            numbers[t // columns, t % columns] = candidates[t - first, odd[end], parity]
        first = kept
