"""Weighted k-means of numbers on a line: the exact optimum, and the one that also pays for the entropy of its labels.

In one dimension clusters are intervals, so dynamic programming over the sorted numbers finds the best ones: with
E(j, m) the least error of the first j numbers in m clusters, E(j, m) = min over i of E(i, m − 1) + error(i … j), and
the best i never falls as j grows, so divide and conquer fills a column in O(n log n). (Ckmeans.1d.dp, Wang & Song 2011;
arXiv 1701.07204.) Lloyd's iterations, which may stop at a worse optimum, are only used where labels have a price:
entropy-constrained quantization (Chou, Lookabaugh & Gray 1989), which has no such structure.
"""

import numpy as np
from numpy.typing import NDArray

from birdie.runtime.kernels import njit

_Array = NDArray[np.float64]
_ROUNDS = 100


def kmeans(values: _Array, weights: _Array, k: int) -> _Array:
    """Return the at most `k` centers that leave the least Σ weight · (value − center)².

    Args:
        values: (n,), rising.
        weights: (n,), positive.

    Returns:
        (at most k,), rising: fewer where there are fewer different values.
    """
    k = min(k, len(values))
    mass = weights / weights.mean()
    middle = float((mass * values).mean())
    spread = float(np.sqrt((mass * (values - middle) ** 2).mean()))
    if spread == 0 or k == 1:
        return np.array([middle])
    x = (values - middle) / spread
    sums = np.zeros((3, len(x) + 1))
    for power in range(3):
        np.cumsum(mass * x**power, out=sums[power, 1:])
    ends = _split(sums, k)
    totals, firsts = np.diff(sums[0, ends]), np.diff(sums[1, ends])
    centers: _Array = np.unique(firsts / totals * spread + middle)
    return centers


@njit(nogil=True, cache=True)
def _split(sums, k):  # type: ignore[no-untyped-def]
    """Return where the best k clusters begin and end, (k + 1,) from 0 to n, by dynamic programming."""
    n = sums.shape[1] - 1
    back = np.zeros((k + 1, n + 1), np.int32)
    previous, current = np.empty(n + 1), np.empty(n + 1)
    for j in range(n + 1):
        previous[j] = _error(sums, 0, j)
    stack = np.empty((64, 4), np.int64)
    for m in range(2, k + 1):
        depth = 1
        stack[0] = np.array([m, n, m - 1, n - 1])  # first and last j, first and last i: halves still to do
        while depth:
            depth -= 1
            low, high, first, last = stack[depth]
            j = (low + high) // 2
            best, split = np.inf, first
            for i in range(first, min(last, j - 1) + 1):
                cost = previous[i] + _error(sums, i, j)
                if cost < best:
                    best, split = cost, i
            current[j] = best
            back[m, j] = split
            if j < high:
                stack[depth] = np.array([j + 1, high, split, last])
                depth += 1
            if low < j:
                stack[depth] = np.array([low, j - 1, first, split])
                depth += 1
        previous, current = current, previous
    ends = np.empty(k + 1, np.int64)
    ends[k] = n
    for m in range(k, 0, -1):
        ends[m - 1] = back[m, ends[m]]
    return ends


@njit(nogil=True, cache=True)
def _error(sums, i, j):  # type: ignore[no-untyped-def]
    mass = sums[0, j] - sums[0, i]
    if mass <= 0:
        return 0.0
    first = sums[1, j] - sums[1, i]
    return max(sums[2, j] - sums[2, i] - first * first / mass, 0.0)


def priced(values: _Array, weights: _Array, counts: _Array, centers: _Array, price: float) -> tuple[_Array, _Array]:
    """Return centers that trade error for bits, starting from `centers`, and the bits of each one's label.

    Args:
        values: (n,).
        weights: (n,), of the squared error of all that a value stands for.
        counts: (n,), how many numbers each value stands for.
        centers: where to begin, (k,), rising.
        price: of a bit, in units of the weighted squared error.

    Returns:
        (centers, bits), both (at most k,): centers that no value chooses are dropped.
    """
    bits = np.full(len(centers), np.log2(len(centers)))
    for _ in range(_ROUNDS):
        cost = weights[:, None] * (values[:, None] - centers) ** 2 + price * counts[:, None] * bits
        labels = cost.argmin(axis=1)
        seen, mass, firsts = (np.bincount(labels, of, len(centers)) for of in (counts, weights, weights * values))
        kept = seen > 0
        moved: _Array = np.asarray(firsts[kept] / mass[kept], np.float64)
        rates = np.log2(seen.sum() / seen[kept])
        done = len(moved) == len(centers) and bool(np.allclose(rates, bits, atol=1e-3))
        centers, bits = moved, rates
        if done:
            break
    order = np.argsort(centers)
    return centers[order], bits[order]


@njit(nogil=True, cache=True)
def cheapest(values, rows, columns, levels, bits, out):  # type: ignore[no-untyped-def]
    """out(r, c) = index of the level with the least rows(r) · columns(c) · (value − level)² + bits(index).

    Levels rise, so the search goes outwards from the nearest and stops where the error alone costs too much.
    """
    least = bits.min()
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            value, weight = np.float64(values[row, column]), rows[row] * columns[column]
            nearest = np.searchsorted(levels, value)
            best, index = np.inf, 0
            for candidate in range(nearest, levels.size):
                error = weight * (levels[candidate] - value) ** 2
                if error + least >= best:
                    break
                if error + bits[candidate] < best:
                    best, index = error + bits[candidate], candidate
            for candidate in range(nearest - 1, -1, -1):
                error = weight * (levels[candidate] - value) ** 2
                if error + least >= best:
                    break
                if error + bits[candidate] < best:
                    best, index = error + bits[candidate], candidate
            out[row, column] = index
