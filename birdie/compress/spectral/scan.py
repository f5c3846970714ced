"""Scans: the order in which coefficients are coded, as matrices whose rows and columns have similar scales.

    none      memory order: the first axis against the rest
    planes    a matrix (first axis, second axis) for every index of the other axes, one below the other; the
              frequencies of the other axes in raster, zig-zag or Morton order, and within each axis by frequency
    blocks    a row for every block, its coefficients in one of those orders; only if blocks divide the tensor evenly

Frequencies are the classes of `Axes`. Scans only permute indices, in numpy, with the same code in both directions.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from birdie.compress.spectral.inverse import Axes
from birdie.compress.tensors import rows_columns

LAYOUTS = ("none", "planes", "blocks")  # by their numbers in the file
ORDERS = ("raster", "zigzag", "morton")
_Indices = NDArray[np.int64]
_Array = NDArray[np.integer]


def zigzag(points: _Indices) -> _Indices:
    """Return the order of `points` (points, axes; not negative) by the sum of their coordinates, as (points,) indices.

    The direction turns at each sum, as in JPEG (ITU-T T.81, figure 5).
    """
    sums = points.sum(axis=1)
    turn = np.where(sums % 2 == 0, -1, 1)[:, None]
    return np.lexsort([*reversed((points * turn).T), sums])


def morton(points: _Indices) -> _Indices:
    """Return the order of `points` (points, axes; not negative) along Morton's curve, as (points,) indices.

    Bits of the first axis lead. Points are sorted by one bit at a time, so any number of axes and points will do.
    """
    depth = int(points.max(initial=0)).bit_length()
    keys = [points[:, axis] >> bit & 1 for bit in range(depth) for axis in reversed(range(points.shape[1]))]
    return np.lexsort(keys) if keys else np.arange(len(points))


def raster(points: _Indices) -> _Indices:
    """Return the order of `points` (points, axes) with the last axis fastest, as (points,) indices."""
    return np.lexsort([*reversed(points.T)]) if points.shape[1] else np.arange(len(points))


def points_of(axes: tuple[_Indices, ...]) -> _Indices:
    """Return every combination of the coordinates of `axes`, the last fastest, as (points, axes)."""
    if not axes:
        return np.zeros((1, 0), np.int64)
    return np.stack([coordinates.ravel() for coordinates in np.meshgrid(*axes, indexing="ij")], axis=1)


@dataclass(frozen=True, slots=True)
class Scan:
    """Layout and order of the coefficients of one tensor for the coder.

    Attributes:
        layout: one of `LAYOUTS`.
        order: one of `ORDERS`; no effect where the layout is "none".
    """

    layout: str = "none"
    order: str = "raster"

    def fits(self, shape: tuple[int, ...], axes: Axes) -> bool:
        """Return whether a tensor of `shape` has this layout."""
        blocks = axes.blocks(shape)
        return self.layout != "blocks" or not any(size % block for size, block in zip(shape, blocks, strict=True))

    def matrix(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, int]:
        """Return rows and columns of the matrix that `arrange` returns."""
        if self.layout == "blocks":
            width = prod(axes.blocks(shape))
            return prod(shape) // width, width
        if self.layout == "planes":
            first, second, rest = _planes(shape)
            return rest * first, second
        return rows_columns(shape)

    def arrange(self, coefficients: _Array, axes: Axes) -> _Array:
        """Return coefficients (any shape) as the matrix (rows, columns) that is coded."""
        shape = coefficients.shape
        if self.layout == "none":
            return coefficients.reshape(rows_columns(shape))
        if self.layout == "blocks":
            split, transposed, order = self._blocks(shape, axes)
            blocks = coefficients.reshape(split).transpose(transposed)
            return blocks.reshape(self.matrix(shape, axes))[:, order]
        lines, across, order = self._orders(shape, axes)
        planes = coefficients.reshape(_planes(shape)).transpose(2, 0, 1)
        return planes[np.ix_(order, lines, across)].reshape(self.matrix(shape, axes))

    def restore(self, matrix: _Array, shape: tuple[int, ...], axes: Axes) -> _Array:
        """Return the coefficients of a coded matrix: the inverse of `arrange`."""
        if self.layout == "none":
            return matrix.reshape(shape)
        if self.layout == "blocks":
            split, transposed, order = self._blocks(shape, axes)
            blocks = matrix[:, np.argsort(order)].reshape([split[axis] for axis in transposed])
            return blocks.transpose(np.argsort(transposed)).reshape(shape)
        lines, across, order = (np.argsort(order) for order in self._orders(shape, axes))
        first, second, rest = _planes(shape)
        planes = matrix.reshape(rest, first, second)[np.ix_(order, lines, across)]
        return planes.transpose(1, 2, 0).reshape(shape)

    def _ordered(self, points: _Indices) -> _Indices:
        return {"raster": raster, "zigzag": zigzag, "morton": morton}[self.order](points)

    def _blocks(self, shape: tuple[int, ...], axes: Axes) -> tuple[list[int], list[int], _Indices]:
        """Return every axis as blocks and offsets in a block, the transposition to blocks first, the offsets' order."""
        lengths = axes.blocks(shape)
        split = [part for size, block in zip(shape, lengths, strict=True) for part in (size // block, block)]
        transposed = [*range(0, len(split), 2), *range(1, len(split), 2)]
        return split, transposed, self._ordered(points_of(tuple(np.arange(block) for block in lengths)))

    def _orders(self, shape: tuple[int, ...], axes: Axes) -> tuple[_Indices, _Indices, _Indices]:
        """Return the orders of the first and the second axis by frequency, and of the indices of all others."""
        classes = [np.zeros(1, np.int64)] * max(0, 2 - len(shape)) + [*axes.classes(shape)]
        lines, across = (np.argsort(axis, kind="stable") for axis in classes[:2])
        frequencies = points_of(tuple(classes[2:]))
        distinct, number = np.unique(frequencies, axis=0, return_inverse=True)
        rank = np.empty(len(distinct), np.int64)
        rank[self._ordered(distinct)] = np.arange(len(distinct))
        return lines, across, np.argsort(rank[number.ravel()], kind="stable")


def _planes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the sizes of the first axis, the second axis and all others together; a vector is one row."""
    first, second, *rest = (1,) * max(0, 2 - len(shape)) + shape
    return first, second, prod(rest)
