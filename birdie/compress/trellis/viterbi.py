"""Viterbi search for trellis-coded quantization, one column after the other, with error feedback to what follows.

    column ─► Viterbi: squared error + λ · bits ─► numbers ─► error ─► rows below (outputs), columns after (inputs)

The numbers of a column are a path through the trellis: the state before a weight selects one of two grids half a scale
apart, and the parity of the number selects the next state. Dynamic programming finds the cheapest path: the cost of a
state is the least cost of any path that ends in it, so per weight only the two ways into each state are compared
(Viterbi 1967; trellis-coded quantization: Marcellin & Fischer 1990). The cost of a number is its squared error plus λ
times its bits under an estimate of the coder's probabilities, which makes the search entropy-constrained.

The feedback is GPTQ's (Frantar et al. 2022, arXiv 2210.17323) on the input side; on the output side the same between
blocks of rows (Tseng et al. 2025, arXiv 2505.22988, feed back on both). Where nothing is fed back, one path runs along
all rows: every path that starts anew costs a bit or more.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birdie.compress.trellis.feedback import BLOCK, Feedback, feedback
from birdie.compress.trellis.register import register
from birdie.compress.trellis.vectors import (
    WIDTH,
    at_most,
    choose,
    less,
    load,
    load_even,
    load_odd,
    plus,
    splat,
    store,
    store_bits,
)
from birdie.entropy.trellis_states import chunk_rows, odd_states
from birdie.system.kernels import inlined, njit

Matrix = NDArray[np.float32]
COLUMNS = 64  # columns whose feedback to later columns is applied in one matrix product, as in GPTQ's lazy batches
REACH = 96  # numbers up to ± this have a rate; beyond, only errors count
# Rows after a block with feedback that its paths look ahead, before the feedback reaches them. A path that ends
# greedily after every 32 rows loses 0.056 bit a weight with 32 states, 0.07 with 256.
AHEAD = 64
STRETCH, OVERLAP = 4096, 256  # weights of a long path that are searched at once, and those looked ahead
BINS, PER_OCTAVE, LOWEST = 56, 4, -4  # bins of the expected deviation in scales, from 2**LOWEST up
_SAMPLE, _LONG_SAMPLE = 1 << 17, 1 << 20  # weights on which rates are learned; more for one path, which is fast to find
_PRIOR = 64.0  # pseudo-count of the expected rates, in observations
_PSEUDO_COUNT = 16  # weights of typical size added to each row and column before its deviation is estimated
_NO_ZEROS = np.zeros((0, 0), np.bool_)
_BUCKETS, _SPAN = 512, 8.0  # histogram of normalized weights, up to this many deviations


@dataclass(frozen=True, slots=True)
class Rates:
    """Bits of each number by the expected deviation of its weight."""

    table: Matrix  # (bins, 2, 2 · REACH + 1): bits of number n − REACH on either grid, by bin of the deviation
    # row, column: logarithmic deviations; the bin of weight (i, j) is the rounded row[i] + column[j]
    row: Matrix
    column: Matrix


def rates(scaled: Matrix) -> Rates:
    """Return an estimate of the coder's bits for weights `scaled` (rows, columns), which are divided by their scales.

    A weight's deviation is modeled as that of its row times that of its column; the normalized weights share one
    histogram. The bits of a number are −log2 of the histogram's mass in the interval that rounds to it.
    """
    power = scaled.astype(np.float64) ** 2
    mean = max(float(power.mean()), 1e-12)
    row = np.sqrt((power.sum(1) + _PSEUDO_COUNT * mean) / (scaled.shape[1] + _PSEUDO_COUNT))
    column = np.sqrt((power.sum(0) / mean + _PSEUDO_COUNT) / (scaled.shape[0] + _PSEUDO_COUNT))
    size = np.abs(scaled) / (row[:, None] * column).astype(np.float32)
    counts = np.bincount(
        np.minimum(size * (_BUCKETS / _SPAN), _BUCKETS - 1).astype(np.int64).ravel(), minlength=_BUCKETS
    )
    edges = np.linspace(0, _SPAN, _BUCKETS + 1)
    prior = np.exp(-(((edges[1:] + edges[:-1]) / 2) ** 2) / 2) + 1e-4
    mass = counts / counts.sum() + 0.02 * prior / prior.sum()
    cumulative = np.concatenate([[0.0], np.cumsum(mass / mass.sum())])
    deviation = 2.0 ** (np.arange(BINS) / PER_OCTAVE + LOWEST)
    bounds = np.arange(-REACH, REACH + 2)[None, None] - 0.5 + np.array([0.0, 0.5])[None, :, None]
    x = bounds / deviation[:, None, None]
    below = 0.5 + 0.5 * np.sign(x) * np.interp(np.abs(x), edges, cumulative)
    bits = -np.log2(np.diff(below, axis=2) + 2.0**-18)
    bins = [np.log2(part) * PER_OCTAVE for part in (row, column)]
    return Rates(
        bits.astype(np.float32), (bins[0] - LOWEST * PER_OCTAVE).astype(np.float32), bins[1].astype(np.float32)
    )


def quantize(
    weight: Matrix,
    factors: Feedback,
    row: Matrix,
    column: Matrix,
    states: int,
    weight_of_rate: float,
    *,
    zeros: NDArray[np.bool_] | None = None,
    row_prices: Matrix | None = None,
) -> NDArray[np.int32]:
    """Return numbers (rows, columns) that quantize `weight` with scales row(i) · column(j).

    Args:
        weight: (rows, columns), not changed.
        row: scales of rows; 0 for a row that is left out, whose numbers are all 0.
        column: scales of columns.
        states: of the trellis; negative for one path along the rows, as feedback along rows needs it.
        weight_of_rate: λ, the price of a bit in squared scales; 0 ignores bits.
        zeros: (rows, columns), for one state: these take the number 0, and what errors would be fed to them goes on to
            later ones.
        row_prices: (rows,), for paths down the columns: factors of λ of each row; None: all are 1.
    """
    columns = weight.shape[1]
    inverse: Matrix = np.divide(1, row, out=np.zeros_like(row), where=row > 0)
    bit_costs = rates(weight * inverse[:, None] / column)
    if weight_of_rate > 0:
        # The bits depend on the numbers, which depend on the bits: quantize a sample of columns once with the expected
        # bits, count the numbers, and use the counts for the final pass.
        chosen = np.arange(0, columns, max(1, weight.size // (_SAMPLE if states > 0 else _LONG_SAMPLE)))
        sample = Rates(bit_costs.table, bit_costs.row, bit_costs.column[chosen])
        unfed = feedback(None, len(row), len(chosen))
        some = weight[:, chosen], unfed, row, column[chosen], states, weight_of_rate, sample
        draft = _search(*some, row_prices=row_prices)
        bit_costs = _with_counts(sample, draft, states, bit_costs)
    held = _NO_ZEROS if zeros is None else zeros
    return _search(weight, factors, row, column, states, weight_of_rate, bit_costs, held, row_prices)


def cost(
    weight: Matrix, numbers: NDArray[np.int32], row: Matrix, column: Matrix, states: int, weight_of_rate: float
) -> float:
    """Return the objective of `quantize` without feedback: squared errors in scales + `weight_of_rate` · bits."""
    inverse: Matrix = np.divide(1, row, out=np.zeros_like(row), where=row > 0)
    scaled: Matrix = weight * inverse[:, None] / column
    expected = rates(scaled)
    bit_costs = _with_counts(expected, numbers, states, expected)
    odd = odd_states(numbers, states)
    return float(_cost(scaled, inverse, numbers, odd, bit_costs.table, bit_costs.row, bit_costs.column, weight_of_rate))


def _with_counts(sample: Rates, numbers: NDArray[np.int32], states: int, prior: Rates) -> Rates:
    """Return the rates of `prior` updated by the counts of `numbers` in a sample, by expected deviation and grid."""
    counts = np.zeros(prior.table.shape)
    _count(numbers, odd_states(numbers, states), sample.row, sample.column, counts)
    model = 2.0 ** -prior.table.astype(np.float64)
    total = counts.sum(2, keepdims=True)
    mixed = (counts + _PRIOR * model / model.sum(2, keepdims=True)) / (total + _PRIOR)
    return Rates(-np.log2(mixed).astype(np.float32), prior.row, prior.column)


def _search(
    weight: Matrix,
    factors: Feedback,
    row: Matrix,
    column: Matrix,
    states: int,
    weight_of_rate: float,
    bit_costs: Rates,
    zeros: NDArray[np.bool_] = _NO_ZEROS,
    row_prices: Matrix | None = None,
) -> NDArray[np.int32]:
    """Quantize on one path along the rows, or down the columns in the order of the feedback, by blocks of `COLUMNS`."""
    paths, height = _paths(abs(states)), chunk_rows(weight.shape[1])
    if states < 0 and not factors.along:
        along = np.zeros(weight.shape, np.int32)
        tables = bit_costs.table, bit_costs.row, bit_costs.column, np.float32(weight_of_rate)
        _quantize_rows(np.ascontiguousarray(weight), row, column, paths, *tables, height, STRETCH, along)
        return along
    # (columns, rows) in the order of quantization, each column on a path of its own; or rows, all of them on one path
    turn = (lambda part: part) if factors.along else np.transpose
    left = np.array(turn(weight)[factors.order], np.float32, order="C")
    sides = (row, bit_costs.row), (column, bit_costs.column)
    (scales, bins), (path_scales, path_bins) = sides if factors.along else sides[::-1]
    scales, bins = scales[factors.order], bins[factors.order]
    held = np.ascontiguousarray(turn(zeros)[factors.order]) if zeros.size else zeros
    numbers = np.empty(left.shape, np.int32)
    errors = np.empty((COLUMNS, left.shape[1]), np.float32)
    lengths = (height, left.shape[1]) if factors.along else (1, height)
    prices = np.full(len(weight), weight_of_rate, np.float32)
    if row_prices is not None:
        prices *= row_prices
    ones = np.ones(weight.shape[1], np.float32)
    prices, path_prices = (prices, ones) if factors.along else (ones, prices)
    shared = factors.rows, paths, bit_costs.table, path_bins, path_prices, *lengths, np.zeros(1, np.int64)
    for start in range(0, len(left), COLUMNS):
        stop = min(start + COLUMNS, len(left))
        part = slice(start, stop)
        forward = np.zeros((stop - start,) * 2, np.float32) if factors.columns is None else factors.columns.within(part)
        _quantize_columns(
            left[part],
            start,
            scales[part],
            bins[part],
            prices[part],
            path_scales,
            forward,
            *shared,
            held[part],
            numbers[part],
            errors,
        )
        if factors.columns is not None:
            factors.columns.apply(left, part, errors[: stop - start])
    out = np.empty_like(numbers)
    out[factors.order] = numbers
    return np.ascontiguousarray(turn(out))


@cache
def _paths(states: int) -> tuple[NDArray[Any], ...]:
    """Return oddness, parity and order of the ways of a register, its states in the machine's order, the first eight.

    The last has oddness, parity, order and the inverted order of the first eight ways, 1 or 0.
    """
    odd, parity, swapped, original = register(states)
    eight = np.zeros((4, WIDTH), np.float32)
    for line, values in zip(eight, (odd, parity, swapped, 1 - swapped), strict=True):
        line[: values.size] = values[:WIDTH]
    return odd, parity, swapped, np.argsort(original), eight


@njit(nogil=True, cache=True, _nrt=False)
def _count(numbers, odd, row_bins, column_bins, counts):  # type: ignore[no-untyped-def]
    """Add the occurrences of each number to `counts` (bins, 2, 2 · REACH + 1)."""
    for i in range(numbers.shape[0]):
        for j in range(numbers.shape[1]):
            m = numbers[i, j]
            bin_ = min(max(np.int64(row_bins[i] + column_bins[j] + np.float32(0.5)), 0), counts.shape[0] - 1)
            if -REACH <= m <= REACH:
                counts[bin_, odd[i, j], m + REACH] += 1


@njit(nogil=True, cache=True, _nrt=False)
def _cost(scaled, inverse, numbers, odd, table, row_bins, column_bins, weight_of_rate):  # type: ignore[no-untyped-def]
    """Return Σ squared error + weight_of_rate · bits, without rows whose inverse scale is 0."""
    total = 0.0
    for i in range(numbers.shape[0]):
        if inverse[i] == 0:
            continue
        for j in range(numbers.shape[1]):
            m = numbers[i, j]
            off = scaled[i, j] - m - 0.5 * odd[i, j]
            total += off * off
            if -REACH <= m <= REACH:
                bin_ = min(max(np.int64(row_bins[i] + column_bins[j] + np.float32(0.5)), 0), table.shape[0] - 1)
                total += weight_of_rate * table[bin_, odd[i, j], m + REACH]
    return total


# Inlined functions hold no references: to count those of their arrays takes longer than all the rest.
@inlined
def _best_numbers(u, table, bin_, weight_of_rate, costs, candidates, step):  # type: ignore[no-untyped-def]
    """Find the best number near `u` scales for both grids and both parities, and its cost.

    The nearest number of a parity has the least error, but the next one of that parity towards zero may have so many
    fewer bits that it is cheaper; further ones are not tried.
    """
    for o in range(2):
        shifted = u - np.float32(0.5) * np.float32(o)
        for b in range(2):
            m = np.int64(b + 2 * np.rint((shifted - np.float32(b)) * np.float32(0.5)))
            off = shifted - np.float32(m)
            best = off * off
            if -REACH <= m <= REACH:
                best += weight_of_rate * table[bin_, o, m + REACH]
                closer = m - 2 if m > 0 else m + 2  # of the same parity, towards zero or just across it
                off = shifted - np.float32(closer)
                less = off * off + weight_of_rate * table[bin_, o, closer + REACH]
                if less < best:
                    best, m = less, closer
            costs[o, b] = best
            candidates[step, o, b] = m


@inlined
def _select_paths(cost, now, chosen, step, costs, odd, parity, swapped, first, metrics):  # type: ignore[no-untyped-def]
    """Select the cheaper of the two ways into each state: one step of the dynamic programming.

    Costs are read from element `now` of `cost` on, which is 0 or the number of states, and written to the other half.
    Bit n of chosen[step] says that the way into state n comes from the second of its two states.
    """
    states = cost.size >> 1
    half, then = states >> 1, states - now
    if half < WIDTH:
        bits = 0
        for j in range(odd.size):
            for top in range(min(states, 2)):
                one = cost[now + 2 * j] + costs[odd[j], parity[j] ^ top]
                two = cost[now + ((2 * j + 1) & (states - 1))] + costs[odd[j], parity[j] ^ top ^ 1]
                second = (two < one) | (swapped[j] & (two == one))
                bits |= second << (j + half * top)
                cost[then + j + half * top] = min(one, two)
        chosen[step, 0] = bits
        return
    # Oddness, parity and order of eight neighbors are those of the first eight, all of them as they are or inverted.
    nothing = splat(np.float32(0))
    is_odd, is_other = less(nothing, load(first, 0)), less(nothing, load(first, WIDTH))
    for o in range(2):
        even = choose(is_odd, splat(costs[1 - o, 0]), splat(costs[o, 0]))
        uneven = choose(is_odd, splat(costs[1 - o, 1]), splat(costs[o, 1]))
        store(metrics, 2 * o * WIDTH, choose(is_other, uneven, even))
        store(metrics, (2 * o + 1) * WIDTH, choose(is_other, even, uneven))
    for j in range(0, half, WIDTH):
        one, two = load_even(cost, now + 2 * j), load_odd(cost, now + 2 * j)
        kind = (2 * odd[j] + parity[j]) * WIDTH
        tie = less(nothing, load(first, (2 + swapped[j]) * WIDTH))
        for top in range(2):
            by_one, by_two = plus(one, load(metrics, kind)), plus(two, load(metrics, kind ^ WIDTH))
            second, into = choose(tie, at_most(by_two, by_one), less(by_two, by_one)), j + half * top
            store(cost, then + into, choose(second, by_two, by_one))
            store_bits(chosen, (step * states + into) // WIDTH, second)
            kind ^= WIDTH


@inlined
def _cheapest(cost, now, order):  # type: ignore[no-untyped-def]
    """Return the cheapest state, of equal ones the first in `order`."""
    end = order[0]
    for state in order:
        if cost[now + state] < cost[now + end]:
            end = state
    return end


@inlined
def _trace(state, chosen, step, odd, parity, states):  # type: ignore[no-untyped-def]
    """Return the state before `state`, its oddness and the parity of the number between them."""
    j, top = state & (odd.size - 1), state >= odd.size
    second = np.int64(chosen[step, state >> 3]) >> (state & 7) & 1
    return (2 * j + second) & (states - 1), odd[j], parity[j] ^ top ^ second


@njit(nogil=True, cache=True)
def _quantize_columns(  # type: ignore[no-untyped-def]
    left,
    begin,
    scales,
    column_bins,
    column_prices,
    row,
    forward,
    down,
    paths,
    table,
    row_bins,
    row_prices,
    chained,
    height,
    path_state,
    zeros,
    numbers,
    errors,
):
    """Quantize columns `left` (columns, rows) one after the other, with feedback to later rows and columns.

    `begin` is the number of the first one. `chained` columns in a row are one path, whose state `path_state` (1,) holds
    between calls; a path starts again after `height` rows. `zeros` (columns, rows) tells which numbers must be 0; it
    may be empty. `errors` receives the errors that are fed to later columns; they are taken before the feedback from
    the column's own earlier rows.
    """
    count, rows = left.shape
    odd, parity, swapped, order, eight = paths
    states, metrics = order.size, np.empty(4 * WIDTH, np.float32)
    fed_down = down.shape[0] == rows
    cost, now = np.empty(2 * states, np.float32), np.int64(0)  # a literal would be a type of its own
    length, ahead = (BLOCK, AHEAD) if fed_down else (rows, 0)
    chosen = np.empty((length + ahead, max(states // WIDTH, 1)), np.uint8)
    candidates, costs = np.empty((length + ahead, 2, 2), np.int32), np.empty((2, 2), np.float32)
    target = np.empty(rows, np.float32)
    for j in range(count):
        for i in range(rows):
            target[i] = left[j, i]
        state = path_state[0] if (begin + j) % chained else np.int64(0)
        first = 0
        while first < rows:
            stop = min(rows, (first // height + 1) * height)  # of the path
            last = min((first // length + 1) * length, stop)
            stop = min(last + ahead, stop)
            if first > 0 and first % height == 0:
                state = np.int64(0)
            for s in range(states):
                cost[now + s] = np.float32(1e30)
            cost[now + state] = np.float32(0)
            for i in range(first, stop):
                # 0 is the only number of a row that is left out and of a zero to keep: only even parity is possible.
                if row[i] == 0 or scales[j] == 0 or (zeros.size > 0 and zeros[j, i]):
                    costs[:, 0] = np.float32(0)
                    costs[:, 1] = np.float32(1e30)
                    candidates[i - first, :, 0] = 0
                else:
                    u = target[i] / (row[i] * scales[j])
                    bin_ = min(max(np.int64(row_bins[i] + column_bins[j] + np.float32(0.5)), 0), table.shape[0] - 1)
                    _best_numbers(u, table, bin_, row_prices[i] * column_prices[j], costs, candidates, i - first)
                    if row_prices[i] != row_prices[-1]:  # one unit for all rows of the path: the loss
                        costs *= row_prices[-1] / row_prices[i]
                _select_paths(cost, now, chosen, i - first, costs, odd, parity, swapped, eight, metrics)
                now = states - now
            end = _cheapest(cost, now, order)
            for i in range(stop - 1, last - 1, -1):
                end, o, b = _trace(end, chosen, i - first, odd, parity, states)
            state = end
            for i in range(last - 1, first - 1, -1):
                end, o, b = _trace(end, chosen, i - first, odd, parity, states)
                m = candidates[i - first, o, b]
                numbers[j, i] = m
                value = (np.float32(m) + np.float32(0.5) * np.float32(o)) * row[i] * scales[j]
                errors[j, i] = left[j, i] - value  # of the column before feedback from its rows
                target[i] -= value  # of the column after it: the error that is fed to later rows
            if fed_down:
                for i in range(first, last):
                    e = target[i]
                    for k in range(last, rows):
                        target[k] -= e * down[i, k]
            first = last
        path_state[0] = state
        for k in range(j + 1, count):
            factor = forward[j, k]
            if factor != 0:
                for i in range(rows):
                    left[k, i] -= factor * errors[j, i]


@njit(nogil=True, cache=True)
def _quantize_rows(  # type: ignore[no-untyped-def]
    weight, row, scales, paths, table, row_bins, column_bins, weight_of_rate, height, stretch, numbers
):
    """Quantize `weight` (rows, columns) on one path along the rows, searched in stretches that overlap.

    The memory of the search grows with its length. Paths that end in different states merge when traced back, so the
    decisions of a stretch are final once the search has looked `OVERLAP` weights ahead.
    """
    columns = weight.shape[1]
    odd, parity, swapped, order, eight = paths
    states, metrics = order.size, np.empty(4 * WIDTH, np.float32)
    cost, now = np.empty(2 * states, np.float32), np.int64(0)  # a literal would be a type of its own
    chosen = np.empty((stretch + OVERLAP, max(states // WIDTH, 1)), np.uint8)
    candidates, costs = np.zeros((stretch + OVERLAP, 2, 2), np.int32), np.empty((2, 2), np.float32)
    state = np.int64(0)
    first = 0
    while first < weight.size:
        start = first % (height * columns)
        if start == 0:
            state = np.int64(0)
        stop = min(first - start + height * columns, weight.size)  # of the chunk
        last = min(first + stretch + OVERLAP, stop)
        for s in range(states):
            cost[now + s] = np.float32(1e30)
        cost[now + state] = np.float32(0)
        for t in range(first, last):
            i, j = t // columns, t % columns
            if row[i] == 0:
                costs[:, 0] = np.float32(0)
                costs[:, 1] = np.float32(1e30)
                candidates[t - first, :, 0] = 0
            else:
                bin_ = min(max(np.int64(row_bins[i] + column_bins[j] + np.float32(0.5)), 0), table.shape[0] - 1)
                _best_numbers(
                    weight[i, j] / (row[i] * scales[j]), table, bin_, weight_of_rate, costs, candidates, t - first
                )
            _select_paths(cost, now, chosen, t - first, costs, odd, parity, swapped, eight, metrics)
            now = states - now
        end = _cheapest(cost, now, order)
        kept = last if last == stop else first + stretch
        for t in range(last - 1, first - 1, -1):
            if t == kept - 1:
                state = end
            end, o, b = _trace(end, chosen, t - first, odd, parity, states)
            numbers[t // columns, t % columns] = candidates[t - first, o, b]
        first = kept
