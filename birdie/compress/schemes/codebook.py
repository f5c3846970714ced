"""Codebook scheme: every weight is one of k levels, fitted to the distribution of the weights.

    codebook   params (levels, 0: one scale, 1: a scale per row)
    streams: symbols (rows, columns), levels as rising integers (1, levels), scale indices (1 or rows, 1)

    weights ─► at most 4,096 bins ─► k-means, exact ─► levels as integers · scale ─► the cheapest level for each weight

In one dimension clusters are intervals, so dynamic programming over the sorted numbers finds the best ones: with
E(j, m) the least error of the first j numbers in m clusters, E(j, m) = min over i of E(i, m − 1) + error(i … j), and
the best i never falls as j grows, so divide and conquer fills a column in O(n log n). (Ckmeans.1d.dp, Wang & Song 2011;
arXiv 1701.07204.) Lloyd's iterations, which may stop at a worse optimum, are only used where labels have a price.

*Experimental.* k fitted levels leave less error than k levels of a grid. But an entropy coder does not charge for k: a
uniform grid with more levels and the same bytes leaves less error still. Measured: 1.03–1.06 times the bytes of a plain
grid at equal error (docs/schemes.md). With a price on bits (entropy-constrained quantization: Chou, Lookabaugh & Gray
1989) the levels approach a uniform grid, and the ratio becomes 1.00.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.importance import Importance, importance
from birdie.compress.log_scales import HIGHEST, LOWEST, SMALLEST, nearest_indices, scales_of, stored_indices
from birdie.compress.scheme import (
    INT16,
    SCALES,
    SYMBOLS,
    Cost,
    Decoder,
    Encoded,
    Integers,
    Scheme,
    Sensitivity,
    Spec,
    StreamLayout,
    in_blocks,
)
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import (
    real_matrix,
    real_rows,
    rows_are_apart,
    rows_columns,
    tensor_of_blocks,
    underflows,
)
from birdie.entropy.planes import Block
from birdie.errors import ArtifactError, ConfigError
from birdie.system.kernels import inner, njit

MAX_LEVELS = 256
LARGEST = 1 << 23  # largest integer level: exact in float32
BINS = 1 << 12  # bins of the histogram of weights
_SAMPLE = 1 << 18  # weights from which the bins are chosen
_BLOCK = 1 << 20  # weights worked on at a time
_FINE = 32  # levels are integers of a scale; this many scales fit in the narrowest gap between levels
_RANGE = 1 << 22  # most scales up to the outermost level
_ROUNDS = 100  # Lloyd iterations, at most
_Array = NDArray[np.float64]
_Rows = NDArray[np.float32]


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of symbols, levels and scale indices."""
    rows, columns = real_matrix(shape, dtype)
    if len(params) != 2 or not 1 <= params[0] <= MAX_LEVELS or not 0 <= params[1] <= 1:
        raise ArtifactError(f"scheme codebook has parameters {params}; the file is corrupt or newer")
    symbols = StreamLayout(rows, columns, SYMBOLS, np.dtype(np.uint8))
    return symbols, StreamLayout(1, params[0], SCALES), StreamLayout(rows if params[1] else 1, 1, SCALES, INT16)


def decode(encoded: Encoded) -> Tensor:
    """Return level of the symbol · scale; levels are integers, the product is rounded once to float32."""
    symbols, levels, indices = encoded.streams
    if int(symbols.max()) >= levels.size:
        raise ArtifactError(f"a symbol is beyond a codebook of {levels.size} levels; the file is corrupt")
    if int(levels.min()) < -LARGEST or int(levels.max()) > LARGEST or (np.diff(levels[0].astype(np.int64)) < 1).any():
        raise ArtifactError("the levels of a codebook do not rise within 24 bits; the file is corrupt")
    table, per_row = levels[0].astype(np.float64), encoded.params[1]
    if not per_row:
        table *= scales_of(indices)[0, 0]

    def values(block: Block) -> _Array:
        numbers = table[symbols[block]]
        return np.asarray(numbers * scales_of(indices[block[0]])) if per_row else numbers

    return tensor_of_blocks(encoded.shape, encoded.dtype, values)


def cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    """Return the cost of decoding levels times scales."""
    values = in_blocks(shape, dtype, 24)
    return Cost(values.operations + 100 * params[1] * rows_columns(shape)[0], values.bytes)


DECODER = Decoder("codebook", 6, layout, decode, cost, inner="rows")


@dataclass(frozen=True, slots=True)
class Codebook(Scheme):
    """Codebook of k levels by weighted k-means.

    Attributes:
        k: number of levels, 2 to 256; fewer are stored if fewer suffice.
        per_row: whether each row is divided by its root mean square first, which is stored as its scale; also without
            it, if one row is so large that one codebook would lose the others.
        rate: price of a bit, in variances of the (weighted) weights; 0 ignores bits. About 2 · 4^(−b) leads to b bits
            per weight, if k is large enough for them.
    """

    decoder = DECODER
    specs = (
        Spec(
            "codebook",
            "k levels by exact k-means",
            example="codebook:k=16",
        ),
    )

    k: int = 16
    per_row: bool = False
    rate: float = 0.0

    def __post_init__(self) -> None:
        if not 2 <= self.k <= MAX_LEVELS:
            raise ConfigError(f"codebook k={self.k} is out of range; choose 2 to {MAX_LEVELS} levels")
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"codebook rate={self.rate} is out of range; choose 0 or more variances for a bit")

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None) -> Encoded:
        """Fit the levels and assign the cheapest to each weight; losslessly if levels are too close for float32.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
            ConfigError: the sensitivity belongs to another matrix.
        """
        rows = real_rows(name, weight)
        weights = importance(name, sensitivity, *rows.shape)
        used = np.asarray(rows.any(axis=1))
        apart = rows_are_apart(rows)
        by_row = self.per_row or apart
        indices = stored_indices(root_mean_squares(rows), used) if by_row else np.zeros(1, np.int32)
        if indices is None or underflows(weight, rows):
            return Lossless().encode(name, weight)
        stored = scales_of(indices).astype(np.float64)
        scaled = scale_rows(rows, stored)
        if not apart:  # else one row would take all levels
            weights = Importance(weights.rows * stored**2, weights.columns)
        values, masses, counts = _binned(scaled, weights, used)
        levels = kmeans(values, masses, self.k)
        variance = float(masses.sum() and (masses * values**2).sum() / counts.sum())
        price, bits = self.rate * variance, np.zeros(len(levels))
        if price > 0:
            levels, bits = entropy_constrained_kmeans(values, masses, counts, levels, price)
        encoded = encode_levels(weight, scaled, levels, indices, price * bits, weights)
        return encoded if encoded is not None else Lossless().encode(name, weight)


def root_mean_squares(rows: _Rows) -> _Array:
    """Return the root mean square of each row (rows,), without overflow."""
    peak = np.maximum(np.abs(rows).max(axis=1), SMALLEST).astype(np.float64)
    relative = np.stack([np.square(row / top, dtype=np.float64).mean() for row, top in zip(rows, peak, strict=True)])
    return np.asarray(peak * np.sqrt(relative), np.float64)


def scale_rows(rows: _Rows, scales: _Array) -> _Rows:
    """Return `rows` divided by a scale for each, or by one for all, in float32."""
    return rows if len(scales) == 1 and scales[0] == 1 else (rows / scales[:, None]).astype(np.float32)


def encode_levels(
    weight: Tensor, scaled: _Rows, levels: _Array, indices: NDArray[np.int32], costs: _Array, weights: Importance
) -> Encoded | None:
    """Encode `scaled`, rows divided by their scales, on `levels` (rising); None if no scale is small enough.

    Args:
        weight: the tensor that is encoded; only its shape and dtype are used.
        scaled: (rows, columns).
        levels: (k,).
        indices: scale index of each row, or one for all.
        costs: price of each level, added to the error.
        weights: factors of the errors.
    """
    used = scaled.any(axis=1)
    if not used.all() and 0 not in levels:  # rows of zeros must decode to zeros
        if len(levels) == MAX_LEVELS:
            nearest = int(np.abs(levels).argmin())
            levels, costs = np.delete(levels, nearest), np.delete(costs, nearest)
        zero = int(np.searchsorted(levels, 0))
        levels, costs = np.insert(levels, zero, 0.0), np.insert(costs, zero, costs.max(initial=0.0))
    numbers, index = _integer_levels(levels)
    stored = index + indices
    if index <= LOWEST or int(stored.min()) < LOWEST or int(stored.max()) > HIGHEST:
        return None
    levels = np.asarray(numbers * float(scales_of(np.array([index]))[0]), np.float64)
    if len(levels) != len(costs):
        costs = np.zeros(len(levels))
    symbols = np.empty(scaled.shape, np.uint8)
    assign_levels(scaled, weights.rows, weights.columns, levels, costs, symbols)
    if not used.all():
        symbols[~used] = np.searchsorted(levels, 0)  # also where another level is cheaper
    per_row = int(len(indices) > 1)
    streams: tuple[Integers, ...] = (symbols, numbers[None], stored.astype(np.int32)[:, None])
    return Encoded("codebook", tuple(weight.shape), weight.dtype, (len(levels), per_row), streams)


def _integer_levels(levels: _Array) -> tuple[NDArray[np.int32], int]:
    """Return the levels as rising integers of one scale, fine compared with the gaps between levels, and its index."""
    largest = float(np.abs(levels).max())
    if largest == 0:
        return np.zeros(1, np.int32), 0
    gap = float(np.diff(levels).min()) if len(levels) > 1 else 0.0
    index = int(nearest_indices(np.array([max(gap / _FINE, largest / _RANGE)]))[0])
    exact = levels / float(scales_of(np.array([index]))[0])
    return np.unique(np.rint(exact)).astype(np.int32), index


def _binned(scaled: _Rows, weights: Importance, used: NDArray[np.bool_]) -> tuple[_Array, _Array, _Array]:
    """Return mean, mass and count of the weights in at most `BINS` bins, by value.

    Half of the bins are spaced evenly over the range, half by quantiles: fine for rare large weights and for frequent
    small ones. If there are few distinct values, each has its bin.
    """
    sample = scaled.reshape(-1)[:: max(1, scaled.size // _SAMPLE)].astype(np.float64)
    low, high = float(scaled.min()), float(scaled.max())
    edges = np.unique(sample)
    if scaled.size > _SAMPLE or len(edges) > BINS:
        quantiles = np.quantile(sample, np.linspace(0, 1, BINS // 2), method="nearest")
        edges = np.unique(np.concatenate([quantiles, np.linspace(low, high, BINS // 2)]))
    masses, moments, counts = (np.zeros(len(edges)) for _ in range(3))
    height = max(1, _BLOCK // scaled.shape[1])
    for start in range(0, len(scaled), height):
        rows = slice(start, start + height)
        if not used[rows].any():
            continue
        block = scaled[rows][used[rows]].astype(np.float64)
        mass = (weights.rows[rows][used[rows]][:, None] * weights.columns).reshape(-1)
        bins = np.maximum(np.searchsorted(edges, block.reshape(-1), side="right") - 1, 0)
        masses += np.bincount(bins, mass, len(edges))
        moments += np.bincount(bins, mass * block.reshape(-1), len(edges))
        counts += np.bincount(bins, None, len(edges))
    occupied = counts > 0
    if not occupied.any():
        return np.zeros(1), np.ones(1), np.ones(1)
    return moments[occupied] / masses[occupied], masses[occupied], counts[occupied]


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
        previous[j] = _error(sums, np.int64(0), j)
    stack = np.empty((64, 4), np.int64)
    for m in range(2, k + 1):
        depth = 1
        # Ranges still to do: first and last j, first and last i. The middle j is solved first; its best i bounds the i
        # of both halves, because the best i is monotone in j.
        stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = m, n, m - 1, n - 1
        while depth:
            depth -= 1
            low, high, first, last = stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3]
            j = (low + high) // 2
            best, split = np.inf, first
            for i in range(first, min(last, j - 1) + 1):
                cost = previous[i] + _error(sums, i, j)
                if cost < best:
                    best, split = cost, i
            current[j] = best
            back[m, j] = split
            if j < high:
                stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = j + 1, high, split, last
                depth += 1
            if low < j:
                stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = low, j - 1, first, split
                depth += 1
        previous, current = current, previous
    ends = np.empty(k + 1, np.int64)
    ends[k] = n
    for m in range(k, 0, -1):
        ends[m - 1] = back[m, ends[m]]
    return ends


@inner
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
