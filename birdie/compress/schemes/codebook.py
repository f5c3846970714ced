"""Codebooks: every weight is one of k levels, which are wherever the weights are.

    weights ─► at most 4,096 bins ─► k-means, exact ─► levels as integers · step ─► the cheapest level for each weight

Levels fit the density, so they leave less error than as many on a grid. But an entropy coder does not charge for k: a
uniform grid with more levels and the same bytes leaves less error still (docs/schemes.md has figures). With a price
on bits the levels move towards that by themselves.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.importance import Importance, importance
from birdie.compress.kmeans import cheapest, kmeans, priced
from birdie.compress.log_steps import HIGHEST, LOWEST, indices_near, steps
from birdie.compress.scheme import Encoded, Integers, Sensitivity
from birdie.compress.schemes.decode_codebook import MOST
from birdie.compress.schemes.grid import SMALLEST, borrow, real_rows, vanishes
from birdie.compress.schemes.lossless import Lossless
from birdie.errors import ConfigError

BINS = 1 << 12
_SAMPLE = 1 << 18  # weights that the bins are laid by
_BLOCK = 1 << 20
_FINE = 32  # steps in the narrowest gap between levels
_RANGE = 1 << 22  # steps up to the outermost level, at most
_Array = NDArray[np.float64]
_Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Codebook:
    """k levels by weighted k-means.

    Attributes:
        k: levels, 2 to 256; fewer are stored where fewer do.
        rows: whether each row is divided by its root mean square first, which is stored.
        rate: what a bit is worth, in variances of the (weighted) weights; 0 lets levels ignore the coder. About
            2 · 4^(−b) leads to b bits a weight, if k is large enough for them.
    """

    k: int = 16
    rows: bool = False
    rate: float = 0.0

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if not 2 <= self.k <= MOST:
            raise ConfigError(f"codebook k={self.k} is out of range; choose 2 to {MOST} levels")
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"codebook rate={self.rate} is out of range; choose 0 or more variances for a bit")

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None, lam: float = 0.0) -> Encoded:
        """Find the levels and give each weight the cheapest; losslessly where levels lie too close for float32.

        `lam` is the price of a bit in units of the weighted squared error (rows and columns of mean weight 1), on top
        of `rate`.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
            ConfigError: the sensitivity is of another matrix.
        """
        rows = real_rows(name, weight)
        told = importance(name, sensitivity, *rows.shape)
        used = np.asarray(rows.any(axis=1))
        scale = root_mean_squares(rows) if self.rows else np.ones(1)
        if vanishes(weight, rows) or (self.rows and bool((scale[used] < SMALLEST).any())):
            return Lossless().encode(name, weight)
        indices = borrow(indices_near(np.maximum(scale, SMALLEST)), used) if self.rows else np.zeros(1, np.int32)
        step = steps(indices).astype(np.float64)
        plain, told = scaled(rows, step), Importance(told.rows * step**2, told.columns, told.told)
        values, weights, counts = _binned(plain, told, used)
        levels = kmeans(values, weights, self.k)
        variance = float(weights.sum() and (weights * values**2).sum() / counts.sum())
        price, bits = lam + self.rate * variance, np.zeros(len(levels))
        if price > 0:
            levels, bits = priced(values, weights, counts, levels, price)
        encoded = with_levels(weight, plain, levels, indices, price * bits, told)
        return encoded if encoded is not None else Lossless().encode(name, weight)


def root_mean_squares(rows: _Rows) -> _Array:
    """Of each row (rows,), without overflow."""
    peak = np.maximum(np.abs(rows).max(axis=1), SMALLEST).astype(np.float64)
    inside = np.stack([np.square(row / top, dtype=np.float64).mean() for row, top in zip(rows, peak, strict=True)])
    return np.asarray(peak * np.sqrt(inside), np.float64)


def scaled(rows: _Rows, step: _Array) -> _Rows:
    """`rows` divided by a step for each, or by one for all, in float32."""
    return rows if len(step) == 1 and step[0] == 1 else (rows / step[:, None]).astype(np.float32)


def with_levels(
    weight: Tensor, plain: _Rows, levels: _Array, indices: NDArray[np.int32], costs: _Array, told: Importance
) -> Encoded | None:
    """`plain`, rows divided by their steps, on `levels` (rising); None where no step is small enough for them.

    Args:
        weight: what is encoded: its shape and dtype are kept.
        indices: step index of each row, or one for all.
        costs: of each level, besides the error.
        told: weights of the error.
    """
    used = plain.any(axis=1)
    if len(indices) > 1 and not used.all() and 0 not in levels:
        at = int(np.searchsorted(levels, 0))  # rows of zeros stay so
        levels, costs = np.insert(levels, at, 0.0), np.insert(costs, at, costs.max(initial=0.0))
    numbers, unit = _whole(levels)
    fitting = unit + indices
    if unit <= LOWEST or int(fitting.min()) < LOWEST or int(fitting.max()) > HIGHEST:
        return None
    levels = np.asarray(numbers * float(steps(np.array([unit]))[0]), np.float64)
    if len(levels) != len(costs):
        costs = np.zeros(len(levels))
    symbols = np.empty(plain.shape, np.uint8)
    cheapest(plain, told.rows, told.columns, levels, costs, symbols)
    by_rows = int(len(indices) > 1)
    streams: tuple[Integers, ...] = (symbols, numbers[None], fitting.astype(np.int32)[:, None])
    return Encoded("codebook", tuple(weight.shape), weight.dtype, (len(levels), by_rows), streams)


def _whole(levels: _Array) -> tuple[NDArray[np.int32], int]:
    """Levels as rising integers of a step that is fine beside the gaps between them; the index of the step."""
    largest = float(np.abs(levels).max())
    if largest == 0:
        return np.zeros(1, np.int32), 0
    gap = float(np.diff(levels).min()) if len(levels) > 1 else 0.0
    unit = int(indices_near(np.array([max(gap / _FINE, largest / _RANGE)]))[0])
    exact = levels / float(steps(np.array([unit]))[0])
    return np.unique(np.rint(exact)).astype(np.int32), unit


def _binned(plain: _Rows, told: Importance, used: NDArray[np.bool_]) -> tuple[_Array, _Array, _Array]:
    """Mean, weight and number of the weights in at most `BINS` bins, by value; each value its own bin where they do.

    Bins are laid half evenly over the range, half by the share of weights in them: fine for the few and the many.
    """
    sample = plain.reshape(-1)[:: max(1, plain.size // _SAMPLE)].astype(np.float64)
    low, high = float(plain.min()), float(plain.max())
    places = np.unique(sample)
    if plain.size > _SAMPLE or len(places) > BINS:
        quantiles = np.quantile(sample, np.linspace(0, 1, BINS // 2), method="nearest")
        places = np.unique(np.concatenate([quantiles, np.linspace(low, high, BINS // 2)]))
    weights, firsts, counts = (np.zeros(len(places)) for _ in range(3))
    height = max(1, _BLOCK // plain.shape[1])
    for start in range(0, len(plain), height):
        rows = slice(start, start + height)
        if not used[rows].any():
            continue
        block = plain[rows][used[rows]].astype(np.float64)
        mass = (told.rows[rows][used[rows]][:, None] * told.columns).reshape(-1)
        bins = np.maximum(np.searchsorted(places, block.reshape(-1), side="right") - 1, 0)
        weights += np.bincount(bins, mass, len(places))
        firsts += np.bincount(bins, mass * block.reshape(-1), len(places))
        counts += np.bincount(bins, None, len(places))
    kept = counts > 0
    if not kept.any():
        return np.zeros(1), np.ones(1), np.ones(1)
    return firsts[kept] / weights[kept], weights[kept], counts[kept]
