"""Ternary and binary scheme: weights −s, 0 and s, or −s and s, with a scale s for every group of columns of a row.

    ternary   params (group_size,); streams: symbols −1, 0, 1 (rows, columns), scale indices (rows, groups)

With weights d of the squared errors the best scale is computed exactly: for any set of weights that become ±1,
s = Σ d·|w| / Σ d over the set, and the error falls by (Σ d·|w|)² / Σ d. In the best set all |w| are above s / 2, so it
is a prefix of the weights sorted by magnitude, and prefix sums try them all. (Ternary Weight Networks, arXiv
1605.04711, uses the threshold 0.7 · mean |w| instead.)

Base-3 packing takes 1.6 bits per weight, five weights in a byte, for any weights. An entropy coder takes less if zeros
are frequent: 1.58 bits if a third of the weights are zeros, 1.5 if a half are.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.importance import importance
from birdie.compress.log_scales import scales_of, stored_indices
from birdie.compress.scheme import Decoder, Encoded, Scheme, Sensitivity, Spec, StreamLayout
from birdie.compress.schemes import grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import real_rows, underflows
from birdie.entropy.factors import Factors
from birdie.errors import ArtifactError, ConfigError

GROUP_SIZE = 128  # columns that share a scale
INT8 = np.dtype(np.int8)
_BLOCK = 1 << 20  # weights worked on at a time
_Array = NDArray[np.float64]


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of symbols and scale indices."""
    if len(params) != 1:
        raise ArtifactError(f"scheme ternary takes one parameter but the file gives {len(params)}")
    return grid.grouped_layout(shape, dtype, params[0], INT8)


def decode(encoded: Encoded) -> Tensor:
    """Return symbol · scale, as a grid does."""
    symbols = encoded.streams[0]
    if int(symbols.min()) < -1 or int(symbols.max()) > 1:
        raise ArtifactError("a ternary symbol is not -1, 0 or 1; the file is corrupt")
    return grid.decode(encoded)


def _factors(encoded: Encoded) -> Factors:
    return replace(grid.factors(encoded), most=1)


DECODER = Decoder("ternary", 5, layout, decode, grid.cost, _factors, inner="rows")


@dataclass(frozen=True, slots=True)
class Ternary(Scheme):
    """Symbols −1, 0, 1 and a scale per group of columns.

    Attributes:
        group_size: columns that share a scale, at least 1.
        binary: whether only −1 and 1 are used (a group of zeros keeps its zeros).
    """

    decoder = DECODER
    specs = (
        Spec("ternary", "−s, 0 or s with a scale per group", lambda *, group_size=GROUP_SIZE: Ternary(group_size)),
        Spec("binary", "−s or s with a scale per group", lambda *, group_size=GROUP_SIZE: Ternary(group_size, True)),
    )

    group_size: int = GROUP_SIZE
    binary: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"ternary group_size={self.group_size} is out of range; choose 1 or more columns")

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None) -> Encoded:
        """Fit scales by least squares, weighted by the sensitivity's diagonal; losslessly if scales are too small.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
            ConfigError: the sensitivity belongs to another matrix.
        """
        rows = real_rows(name, weight)
        weights = importance(name, sensitivity, *rows.shape)
        group_size = min(self.group_size, rows.shape[1])
        magnitudes = _grouped(np.abs(rows), group_size)
        used = np.asarray(magnitudes.any(axis=2))
        columns = _grouped(weights.columns[None], group_size)
        scales = np.zeros(used.shape)
        for block in _blocks(magnitudes):
            scales[block] = (
                _mean_scales(magnitudes[block], columns) if self.binary else _best_scales(magnitudes[block], columns)
            )
        indices = stored_indices(scales, used)
        if indices is None or underflows(weight, rows):
            return Lossless().encode(name, weight)
        if self.binary:
            symbols = np.where(rows < 0, -1, 1) * np.repeat(used, group_size, axis=1)[:, : rows.shape[1]]
        else:
            nonzero = used[..., None] & (magnitudes > scales_of(indices)[..., None] / 2)
            symbols = np.sign(rows) * nonzero.reshape(len(rows), -1)[:, : rows.shape[1]]
        return Encoded("ternary", tuple(weight.shape), weight.dtype, (group_size,), (symbols.astype(np.int8), indices))


def _grouped(rows: NDArray[np.floating], group_size: int) -> NDArray[np.floating]:
    """Return (rows, groups, group_size), zeros where the last group has fewer columns."""
    missing = -rows.shape[1] % group_size
    return np.pad(rows, ((0, 0), (0, missing))).reshape(len(rows), -1, group_size)


def _blocks(magnitudes: NDArray[np.floating]) -> list[slice]:
    height = max(1, _BLOCK // (magnitudes.shape[1] * magnitudes.shape[2]))
    return [slice(start, start + height) for start in range(0, len(magnitudes), height)]


def _mean_scales(magnitudes: NDArray[np.floating], columns: NDArray[np.floating]) -> _Array:
    mean: _Array = (magnitudes * columns).sum(axis=2) / columns.sum(axis=2)
    return mean


def _best_scales(magnitudes: NDArray[np.floating], columns: NDArray[np.floating]) -> _Array:
    """Return the scale of each group that leaves the least error, by prefix sums over sorted magnitudes."""
    order = np.argsort(-magnitudes, axis=2, kind="stable")
    weights = np.take_along_axis(np.broadcast_to(columns, magnitudes.shape), order, axis=2)
    mass = np.cumsum(weights, axis=2)
    total = np.cumsum(weights * np.take_along_axis(magnitudes, order, axis=2), axis=2)
    scales = total / np.maximum(mass, np.finfo(np.float64).tiny)
    best = np.argmax(scales * total, axis=2)[..., None]
    chosen: _Array = np.take_along_axis(scales, best, axis=2)[..., 0]
    return chosen
