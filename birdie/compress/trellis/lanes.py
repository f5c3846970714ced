"""Viterbi search without error feedback, on 32 paths side by side: one instruction of the processor advances many.

    columns     32 columns at a time, a path down each
    along rows  one path, cut into segments; 32 segments at a time, each with a stretch of its neighbors

The searches are those of `viterbi`. Decisions merge when they are traced back a few dozen weights: the segments of a
long path, searched from a little before to a little after, therefore agree where they meet. Where they do not, a
segment is searched again from the state that the one before it ends in.

The price of bits is not looked up but follows from a density. For weights of Student's t distribution with ν degrees of
freedom and scale s, a number at x has (ν + 1) / 2 · log2(1 + x² / (ν s²)) bits and a constant. Squared error plus the
price of a bit times these bits is least, to second order, for the number next to u / (1 + g / (ν s² + u²)), with
g = (ν + 1) · price / (2 ln 2): so weights are shrunk, and then only distances count. For a Gaussian this is exact
(g / (ν s² + u²) → D / σ², the shrinkage of reverse water-filling). At low rates, where most numbers are 0, the numbers'
own frequencies are needed, which `birdie.compress.trellis.viterbi` learns.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from birdie.compress.trellis.register import register
from birdie.compress.trellis.vectors import WIDTH, choose, less, load, plus, store, store_bits
from birdie.entropy.trellis_states import chunk_rows, machine
from birdie.system.kernels import inner, njit

Matrix = NDArray[np.float32]
LANES = 32
SEARCHED = (4, 8, 16, 32, 128, 256)  # states; 64 are searched with counted bits, as ever, so that files stay the same
MOST_SURVIVORS = 1 << 25  # in a lane; each takes four bytes for all lanes
LARGEST = 32_000  # of the numbers: int16
FINE = 1.25  # deviations, in scales, from which the density prices bits as well as counts do: about two bits a weight
_LENGTH = 1024  # weights of a segment
_OVERLAP = 96  # weights of its neighbors on either side: 19 times the memory of 32 states, 12 times that of 256
_SAMPLE = 1 << 16  # weights from which the density is estimated
_PSEUDO_COUNT = 16  # weights of typical size added to each row and column before its power is estimated
_APART = 1 << 16  # energies of a typical row that a row has, or that have its energy
_TINY = 1e-90  # below the square of the smallest float32
_LEAST = 1e-20  # power of a row that is left out: not 0, which nothing is divided by
_MOST = 1e30  # power of a row: beyond, nothing is shrunk, and squares overflow
_NEUTRAL = np.float32(1e30)  # an integer, so that every path costs nothing there


@dataclass(frozen=True, slots=True)
class WeightDensity:
    """Density of the weights of a matrix: Student's t, scaled by row and column."""

    row: NDArray[np.float64]  # (rows,) mean squares
    column: Matrix  # (columns,) mean squares, about 1
    freedom: float  # degrees of freedom ν, above 4

    @classmethod
    def of(cls, weight: Matrix) -> "WeightDensity":
        """Estimate the density of `weight` (rows, columns) by second and fourth moments."""
        rows, columns = weight.shape
        row, column = np.empty(rows), np.zeros(columns)
        _squares(weight, row, column)
        typical = float(np.median(row[row > 0])) if row.any() else 0.0
        apart = (row > typical * _APART) | ((row > 0) & (row < typical / _APART))
        if apart.any():  # they tell nothing about other rows
            others = cls.of(np.ascontiguousarray(weight[~apart]))
            row = np.where(apart, row / columns, 0)
            row[~apart] = others.row
            return cls(row, others.column, others.freedom)
        mean = max(float(row.sum()) / weight.size, _TINY)
        row = (row + _PSEUDO_COUNT * mean) / (columns + _PSEUDO_COUNT)
        column = (column / mean + _PSEUDO_COUNT) / (rows + _PSEUDO_COUNT)
        picked = slice(None, None, max(1, weight.size // _SAMPLE))
        fourth = float(np.mean((weight[picked].astype(np.float64) ** 2 / row[picked, None] / column) ** 2))
        return cls(row, column.astype(np.float32), 4 + 6 / max(fourth - 3, 0.01))

    @property
    def even(self) -> bool:
        """Return whether columns are alike: none of a sixteenth of them is below a quarter of the mean deviation."""
        return bool(np.count_nonzero(self.column < 1 / 16) * 16 <= self.column.size)


class FeedbackFactors(NamedTuple):
    """Factors of a search."""

    inverse: Matrix  # (rows,) 1 / scale of rows, 0 for a row that is left out
    inverse_column: Matrix  # (columns,) the same
    power: Matrix  # (rows,) ν s² of rows in squared scales
    column_power: Matrix  # (columns,) factors of it
    gain: np.float32  # (ν + 1) · price / (2 ln 2)
    code: tuple[int, int, int, int]  # of the machine, see `_code`

    @classmethod
    def of(cls, density: WeightDensity, row: Matrix, column: Matrix, states: int, price: float) -> "FeedbackFactors":
        """Return the factors for the arguments of `quantize`."""
        inverse: Matrix = np.divide(1, row, out=np.zeros_like(row), where=row > 0)
        inverse_column: Matrix = np.float32(1) / column
        nu = density.freedom
        power = (density.row * inverse.astype(np.float64) ** 2 * (nu - 2)).clip(_LEAST, _MOST).astype(np.float32)
        gain = np.float32((nu + 1) * price / (2 * math.log(2)))
        return cls(inverse, inverse_column, power, density.column / column**2, gain, _code(abs(states)))


def suits(density: WeightDensity, most: NDArray[np.float64], row: Matrix, column: Matrix, states: int) -> bool:
    """Return whether `quantize` does about as well as `birdie.compress.trellis.viterbi` with these scales.

    `most` (rows,) is the largest magnitude of each row.
    """
    used = row > 0
    height = min(len(row), chunk_rows(len(column)))
    typical = math.sqrt(float(np.mean(density.row[used] / row[used].astype(np.float64) ** 2)))
    largest = float(np.max(most[used] / row[used])) / float(column.min())
    suited = states in SEARCHED and height * states <= MOST_SURVIVORS
    return suited and typical >= FINE * float(column.mean()) and largest <= LARGEST


def quantize(
    weight: Matrix, density: WeightDensity, row: Matrix, column: Matrix, states: int, price: float
) -> NDArray[np.int16]:
    """Return numbers (rows, columns) that quantize `weight` with scales row(i) · column(j).

    Args:
        weight: (rows, columns); divided by its scales it stays within `LARGEST`.
        row: scales of rows; 0 for a row that is left out, whose numbers are all 0. A path along rows has none.
        column: scales of columns.
        states: of the trellis, 4 or more; negative for one path along the rows.
        price: of a bit, in squared scales.
    """
    rows, columns = weight.shape
    numbers = np.empty(weight.shape, np.int16)
    search = _search_columns if states > 0 else _search_rows
    factors = FeedbackFactors.of(density, row, column, states, price)
    height = min(chunk_rows(columns), rows)
    search(np.ascontiguousarray(weight), *factors[:-1], _paths(abs(states)), height, numbers)
    return numbers


@cache
def _paths(states: int) -> tuple[NDArray[np.int64], ...]:
    """Return oddness and parity of the ways of a register, and its states in the machine's order."""
    odd, parity, _, original = register(states)
    return odd.astype(np.int64), parity.astype(np.int64), np.argsort(original)


def _code(states: int) -> tuple[int, int, int, int]:
    """Return (states, shift, flip, log2(states) − 1) of a machine: s leads to s >> 1 ^ odd · shift ^ parity · flip.

    The top bit of `shift` alone is set in the top bit of the next state. So a state's top bit says whether the state
    before it was odd, and the two ways into it differ in parity only.
    """
    following = machine(states).next_state
    return states, int(following[1, 0]), int(following[0, 0] ^ following[0, 1]), states.bit_length() - 2


@njit(nogil=True, cache=True, _nrt=False)
def _squares(weight, row, column):  # type: ignore[no-untyped-def]
    """Fill `row` with the sums of squares of rows, add those of columns to `column`."""
    for i in range(weight.shape[0]):
        total = 0.0
        values = weight[i]
        for j in range(values.size):
            square = np.float64(values[j]) * np.float64(values[j])
            column[j] += square
        for j in range(values.size):
            total += np.float64(values[j]) * np.float64(values[j])
        row[i] = total


@inner
def _shrunk(value, power, gain):  # type: ignore[no-untyped-def]
    """Return the weight to which the nearest number is the best one, bits included."""
    spread = power + value * value
    return value * (spread / (spread + gain))


@njit(nogil=True, cache=True)
def _search(u, odd_price, start, begin, end, paths, cost, following, survivors, numbers, ends):  # type: ignore[no-untyped-def]
    """Fill `numbers` (length, LANES) from row `begin` on with the cheapest paths through `u` (length, LANES).

    Path l is in state start[l] at row `begin`; if that is negative, in any. Its state at row `end` is put in ends[l].
    `odd_price` (length,) is added for odd numbers. Returns the states at row `begin`.
    """
    odd, parity, order = paths
    states, half, length = order.size, odd.size, u.shape[0]
    metric, least = np.empty((4, LANES), np.float32), np.empty(LANES, np.float32)
    cost[:] = np.float32(0)
    for i in range(length):
        if i == begin:
            for lane in range(LANES):
                for s in range(states):
                    if start[lane] >= 0:
                        cost[s, lane] = np.float32(0) if s == start[lane] else np.float32(1e30)
        values = u[i]
        for c in range(4):  # 2 · parity + odd
            offset, extra = np.float32(0.25) * np.float32(c), odd_price[i] if c >= 2 else np.float32(0)
            for lane in range(LANES):
                error = values[lane] * np.float32(0.5) - offset
                error -= np.rint(error)
                metric[c, lane] = error * error + extra
        for j in range(half):
            for lane in range(0, LANES, WIDTH):
                even, uneven = load(metric, odd[j] * LANES + lane), load(metric, (2 + odd[j]) * LANES + lane)
                for top in range(2):
                    first = 2 * j + (parity[j] ^ top)  # from which an even number leads here
                    zero = plus(load(cost, first * LANES + lane), even)
                    one = plus(load(cost, (first ^ 1) * LANES + lane), uneven)
                    better, into = less(one, zero), (j + half * top) * LANES + lane
                    store(following, into, choose(better, one, zero))
                    store_bits(survivors, (i * states * LANES + into) // WIDTH, better)
        cost, following = following, cost
        if i & 63 == 63:  # costs stay small, so that float32 tells them apart
            for lane in range(LANES):
                least[lane] = cost[0, lane]
            for s in range(1, states):
                for lane in range(LANES):
                    least[lane] = min(least[lane], cost[s, lane])
            for s in range(states):
                for lane in range(LANES):
                    cost[s, lane] -= least[lane]
    state = np.zeros(LANES, np.int32)
    for lane in range(LANES):
        for s in order:
            if cost[s, lane] < cost[state[lane], lane]:
                state[lane] = s
    for i in range(length - 1, begin - 1, -1):
        if i == end - 1:
            for lane in range(LANES):
                ends[lane] = state[lane]
        values, bits, out = u[i], survivors[i], numbers[i]
        for lane in range(LANES):
            n = state[lane]
            j, uneven = n & (half - 1), np.int32(bits[n, lane // WIDTH]) >> (lane % WIDTH) & 1
            state[lane] = 2 * j + (parity[j] ^ uneven ^ (n >= half))
            rounded = np.rint(values[lane] * np.float32(0.5) - np.float32(0.25) * np.float32(odd[j] + 2 * uneven))
            out[lane] = 2 * np.int32(rounded) + uneven
    return state


@njit(nogil=True, cache=True)
def _search_columns(  # type: ignore[no-untyped-def]
    weight, inverse, inverse_column, power, column_power, gain, paths, height, numbers
):
    """Quantize down the columns; paths begin in state 0 at every `height` rows."""
    rows, columns = weight.shape
    states = paths[-1].size
    u, survivors = np.zeros((height, LANES), np.float32), np.empty((height, states, LANES // WIDTH), np.uint8)
    cost, following = np.empty((states, LANES), np.float32), np.empty((states, LANES), np.float32)
    out, odd_price = np.empty((height, LANES), np.int16), np.empty(height, np.float32)
    start, ends = np.zeros(LANES, np.int32), np.empty(LANES, np.int32)
    for first in range(0, rows, height):
        count = min(height, rows - first)
        for i in range(count):
            odd_price[i] = np.float32(0) if inverse[first + i] > 0 else np.float32(1e9)
        for left in range(0, columns, LANES):
            width = min(LANES, columns - left)
            for i in range(count):
                source, values = weight[first + i], u[i]
                scale, spread = inverse[first + i], power[first + i]
                if width == LANES:
                    for lane in range(LANES):
                        scaled = source[left + lane] * scale * inverse_column[left + lane]
                        values[lane] = _shrunk(scaled, spread * column_power[left + lane], gain)
                else:
                    for lane in range(width):
                        scaled = source[left + lane] * scale * inverse_column[left + lane]
                        values[lane] = _shrunk(scaled, spread * column_power[left + lane], gain)
            _search(
                u[:count], odd_price[:count], start, np.int64(0), count, paths, cost, following, survivors, out, ends
            )
            for i in range(count):
                used = inverse[first + i] > 0
                for lane in range(width):
                    numbers[first + i, left + lane] = out[i, lane] if used else 0


@njit(nogil=True, cache=True)
def _search_rows(  # type: ignore[no-untyped-def]
    weight, inverse, inverse_column, power, column_power, gain, paths, height, numbers
):
    """Quantize on one path along the rows, which begins in state 0 at every `height` rows."""
    rows, columns = weight.shape
    states, length = paths[-1].size, _LENGTH + 2 * _OVERLAP
    u, survivors = np.empty((length, LANES), np.float32), np.empty((length, states, LANES // WIDTH), np.uint8)
    cost, following = np.empty((states, LANES), np.float32), np.empty((states, LANES), np.float32)
    out, odd_price = np.empty((length, LANES), np.int16), np.zeros(length, np.float32)
    start, ends, overlap = np.empty(LANES, np.int32), np.empty(LANES, np.int32), np.int64(_OVERLAP)
    flat = numbers.reshape(-1)
    for top in range(0, rows, height):
        chunk, stop = top * columns, min(top + height, rows) * columns
        state = np.int32(0)
        for first in range(chunk, stop, LANES * _LENGTH):
            for lane in range(LANES):
                begin = first + lane * _LENGTH - _OVERLAP
                t = max(begin, chunk)
                i, j = t // columns, t % columns
                for k in range(length):
                    if begin + k < chunk or begin + k >= stop:
                        u[k, lane] = _NEUTRAL
                        continue
                    scaled = weight[i, j] * inverse[i] * inverse_column[j]
                    u[k, lane] = _shrunk(scaled, power[i] * column_power[j], gain)
                    j += 1
                    if j == columns:
                        i, j = i + 1, 0
            start[:] = -1
            start[0] = state
            agreed = False
            while not agreed:
                begins = _search(
                    u, odd_price, start, overlap, overlap + _LENGTH, paths, cost, following, survivors, out, ends
                )
                agreed = True
                for lane in range(1, LANES):
                    if begins[lane] != ends[lane - 1] and first + lane * _LENGTH < stop:
                        agreed = False
                    start[lane] = ends[lane - 1]
            state = ends[LANES - 1]
            for lane in range(LANES):
                begin = first + lane * _LENGTH
                for k in range(min(_LENGTH, stop - begin)):
                    flat[begin + k] = out[_OVERLAP + k, lane]
