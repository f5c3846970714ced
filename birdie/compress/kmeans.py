"""Weighted k-means in one dimension: the exact optimum, and entropy-constrained k-means, which also pays for labels.

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
_ROUNDS = 100  # Lloyd iterations, at most


def kmeans(values: _Array, weights: _Array, k: int) -> _Array:
    """Return the centers, at most `k`, that minimize Σ weight · (value − center)².

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
    # Prefix sums of mass · x^p give the error of any interval in constant time. They lose digits where x is far from
    # zero, so the values are centered and scaled first.
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
    """Return the bounds of the best k clusters, (k + 1,) indices from 0 to n, by dynamic programming.

    `previous` and `current` are the columns E(·, m − 1) and E(·, m); `back` keeps every best i for the way back.
    """
    n = sums.shape[1] - 1
    back = np.zeros((k + 1, n + 1), np.int32)
    previous, current = np.empty(n + 1), np.empty(n + 1)
    for j in range(n + 1):
        previous[j] = _error(sums, 0, j)
    stack = np.empty((64, 4), np.int64)
    for m in range(2, k + 1):
        depth = 1
        # Ranges still to do: first and last j, first and last i. The middle j is solved first; its best i bounds the i
        # of both halves, because the best i is monotone in j.
        stack[0] = np.array([m, n, m - 1, n - 1])
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
    """Return the weighted squared error of values i … j − 1 about their mean: Σ w x² − (Σ w x)² / Σ w."""
    mass = sums[0, j] - sums[0, i]
    if mass <= 0:
        return 0.0
    first = sums[1, j] - sums[1, i]
    return max(sums[2, j] - sums[2, i] - first * first / mass, 0.0)


def entropy_constrained_kmeans(
    values: _Array, weights: _Array, counts: _Array, centers: _Array, price: float
) -> tuple[_Array, _Array]:
    """Return centers that trade error for bits, and the bits of the label of each.

    Args:
        values: (n,).
        weights: (n,), weight of the squared error of all numbers that a value represents.
        counts: (n,), how many numbers each value represents.
        centers: initial centers, (k,), rising.
        price: Lagrange multiplier of a bit, in units of the weighted squared error.

    Returns:
        (centers, bits), both (at most k,): centers that no value chooses are dropped.
    """
    bits = np.full(len(centers), np.log2(len(centers)))
    for _ in range(_ROUNDS):
        # Lloyd's two steps with the Lagrangian error + price · bits: assign each value to the cheapest label, then move
        # centers to their means and set the bits of a label to −log2 of its share. Neither step raises the total.
        cost = weights[:, None] * (values[:, None] - centers) ** 2 + price * counts[:, None] * bits
        labels = cost.argmin(axis=1)
        totals, mass, firsts = (np.bincount(labels, of, len(centers)) for of in (counts, weights, weights * values))
        used = totals > 0
        moved: _Array = np.asarray(firsts[used] / mass[used], np.float64)
        rates = np.log2(totals.sum() / totals[used])
        done = len(moved) == len(centers) and bool(np.allclose(rates, bits, atol=1e-3))
        centers, bits = moved, rates
        if done:
            break
    order = np.argsort(centers)
    return centers[order], bits[order]


@njit(nogil=True, cache=True)
def assign_levels(values, rows, columns, levels, bits, out):  # type: ignore[no-untyped-def]
    """Set out(r, c) to the index of the level with the least rows(r) · columns(c) · (value − level)² + bits(index).

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
