"""Ternary and binary weights: −s, 0 and s, or −s and s, with a scale s for every few columns of a row.

For given weights d of the squared errors the best scale is exact, not a rule of thumb: whichever weights become ±1, s =
Σ d·|w| / Σ d over them, and the error falls by (Σ d·|w|)² / Σ d; the best set is those above s / 2, so it is a
prefix of the weights sorted by magnitude, and prefix sums try them all. (Ternary Weight Networks, arXiv 1605.04711,
takes the threshold 0.7 · mean |w| instead.) With a price on bits, weights near the threshold become zeros, which are
common and so cheap.

Base-3 packing spends 1.6 bits on a weight, five to a byte, whatever the weights are; an entropy coder spends what the
share of zeros is worth: 1.58 bits at a third, 1.37 at a half.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.importance import importance
from birdie.compress.log_steps import indices_near, steps
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.grid import SMALLEST, borrow, real_rows, vanishes
from birdie.compress.schemes.lossless import Lossless
from birdie.errors import ConfigError

GROUP = 128  # columns that share a scale
_ROUNDS = 4
_BLOCK = 1 << 20
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ternary:
    """Symbols −1, 0, 1 and a scale per group.

    Attributes:
        group: columns that share a scale, at least 1.
        binary: −1 and 1 only (zeros stay where a whole group is zero).
    """

    group: int = GROUP
    binary: bool = False

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if self.group < 1:
            raise ConfigError(f"ternary group={self.group} is out of range; choose 1 or more columns")

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None, lam: float = 0.0) -> Encoded:
        """Fit scales by least squares, weighted by the sensitivity's diagonal; losslessly where scales are too small.

        `lam` is the price of a bit in units of the weighted squared error (rows and columns of mean weight 1).

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
            ConfigError: the sensitivity is of another matrix.
        """
        rows = real_rows(name, weight)
        told = importance(name, sensitivity, *rows.shape)
        group = min(self.group, rows.shape[1])
        sizes = _grouped(np.abs(rows), group)
        used = np.asarray(sizes.any(axis=2))
        columns = _grouped(told.columns[None], group)
        scale = np.zeros(used.shape)
        for block in _blocks(sizes):
            scale[block] = _mean(sizes[block], columns) if self.binary else _best(sizes[block], columns)
        kept = used[..., None] & (sizes > 0 if self.binary else sizes > scale[..., None] / 2)
        if lam > 0 and not self.binary:
            scale, kept = _priced(sizes, columns, told.rows, scale, kept, lam)
        used = np.asarray(kept.any(axis=2))
        if vanishes(weight, rows) or bool((scale[used] < SMALLEST).any()):
            return Lossless().encode(name, weight)
        indices = borrow(indices_near(np.maximum(scale, SMALLEST)).reshape(-1), used.reshape(-1)).reshape(used.shape)
        if self.binary:
            symbols = np.where(rows < 0, -1, 1) * np.repeat(used, group, axis=1)[:, : rows.shape[1]]
        else:
            if lam == 0:
                kept = used[..., None] & (sizes > steps(indices)[..., None] / 2)
            symbols = np.sign(rows) * kept.reshape(len(rows), -1)[:, : rows.shape[1]]
        return Encoded("ternary", tuple(weight.shape), weight.dtype, (group,), (symbols.astype(np.int8), indices))


def _grouped(rows: NDArray[np.floating], group: int) -> NDArray[np.floating]:
    """(rows, groups, group), zeros where the last group has fewer columns."""
    missing = -rows.shape[1] % group
    return np.pad(rows, ((0, 0), (0, missing))).reshape(len(rows), -1, group)


def _blocks(sizes: NDArray[np.floating]) -> list[slice]:
    height = max(1, _BLOCK // (sizes.shape[1] * sizes.shape[2]))
    return [slice(start, start + height) for start in range(0, len(sizes), height)]


def _mean(sizes: NDArray[np.floating], columns: NDArray[np.floating]) -> _Array:
    mean: _Array = (sizes * columns).sum(axis=2) / columns.sum(axis=2)
    return mean


def _best(sizes: NDArray[np.floating], columns: NDArray[np.floating]) -> _Array:
    """The scale of each group that leaves the least error."""
    order = np.argsort(-sizes, axis=2, kind="stable")
    weights = np.take_along_axis(np.broadcast_to(columns, sizes.shape), order, axis=2)
    counted = np.cumsum(weights, axis=2)
    total = np.cumsum(weights * np.take_along_axis(sizes, order, axis=2), axis=2)
    scales = total / np.maximum(counted, np.finfo(np.float64).tiny)
    best = np.argmax(scales * total, axis=2)[..., None]
    found: _Array = np.take_along_axis(scales, best, axis=2)[..., 0]
    return found


def _priced(
    sizes: NDArray[np.floating],
    columns: NDArray[np.floating],
    rows: _Array,
    scale: _Array,
    kept: NDArray[np.bool_],
    lam: float,
) -> tuple[_Array, NDArray[np.bool_]]:
    """Scales and what stays ±1 when a bit costs `lam`: few rounds of choosing symbols, then scales, then prices."""
    total = float((columns > 0).sum()) * len(sizes)
    for _ in range(_ROUNDS):
        share = min(max(float(kept.sum()) / total, 1 / total), 1 - 1 / max(total, 2))
        price = lam * (1 + np.log2((1 - share) / share))
        for block in _blocks(sizes):
            s, part = scale[block][..., None], sizes[block]
            keep = (columns * rows[block, None, None] * s * (2 * part - s) > price) & (part > 0)
            weights = columns * keep
            counted = weights.sum(axis=2)
            scale[block] = np.where(
                counted > 0, (weights * part).sum(axis=2) / np.maximum(counted, 1e-300), scale[block]
            )
            kept[block] = keep
    return scale, kept
