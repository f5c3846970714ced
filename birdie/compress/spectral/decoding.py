"""Decoder of the spectral scheme: symbol · scale of its class, then the inverse transform.

    spectral   params (kind of transform, edge, levels, 1: kernels only, layout, order)
    streams: symbols as the layout orders them; scale indices for every combination of the axes' classes, one row

Products and transform are computed in float64 and rounded once to float32. The decoder is separate from the encoder
(`birdie.compress.schemes.spectral`) because the Tucker scheme holds spectral parts, and the encoder tries Tucker.
"""

from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_scales import scales_of
from birdie.compress.scheme import (
    BLOCK,
    INT16,
    SCALES,
    SYMBOLS,
    Cost,
    Decoder,
    Encoded,
    StreamLayout,
    in_blocks,
)
from birdie.compress.schemes.rotation import rotation_cost
from birdie.compress.spectral.inverse import KINDS, LIFTING, MAX_EDGE, MAX_LEVELS, Axes, invert
from birdie.compress.spectral.scan import LAYOUTS, ORDERS, Scan
from birdie.compress.tensors import real_matrix, rows_columns, tensor_of_blocks
from birdie.entropy.planes import Block
from birdie.errors import ArtifactError

_BLOCK = 1 << 20  # elements of several rows transformed at a time: fewer take longer between transforms than in them


def transform_of(params: tuple[int, ...]) -> tuple[Axes, Scan]:
    """Return the transform and the scan that `params` describe."""
    kind, edge, levels, kernel, layout, order = params if len(params) == 6 else (-1,) * 6
    if (
        not 0 <= kind < len(KINDS)
        or not (2 <= edge <= MAX_EDGE if KINDS[kind] == "dct" else edge == 0)
        or not (1 <= levels <= MAX_LEVELS if KINDS[kind] in LIFTING else levels == 0)
        or not 0 <= kernel <= 1
        or not 0 <= layout < len(LAYOUTS)
        or not 0 <= order < len(ORDERS)
    ):
        raise ArtifactError(f"scheme spectral has parameters {params}; the file is corrupt or newer")
    return Axes(KINDS[kind], edge, levels, bool(kernel)), Scan(LAYOUTS[layout], ORDERS[order])


def params_of(axes: Axes, scan: Scan) -> tuple[int, ...]:
    """Return the parameters that `transform_of` reads."""
    edge, levels = (axes.edge if axes.kind == "dct" else 0), (axes.levels if axes.kind in LIFTING else 0)
    return (
        KINDS.index(axes.kind),
        edge,
        levels,
        int(axes.kernel),
        LAYOUTS.index(scan.layout),
        ORDERS.index(scan.order),
    )


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of symbols and scale indices."""
    real_matrix(shape, dtype)
    axes, scan = transform_of(params)
    if not scan.fits(shape, axes):
        raise ArtifactError(f"a tensor of shape {shape} has no blocks of {axes.blocks(shape)}; the file is corrupt")
    rows, columns = scan.matrix(shape, axes)
    return StreamLayout(rows, columns, SYMBOLS), StreamLayout(1, prod(axes.counts(shape)), SCALES, INT16)


def decode(encoded: Encoded) -> Tensor:
    """Return the weights of an encoded tensor."""
    symbols, indices = encoded.streams
    axes, scan = transform_of(encoded.params)
    shape = encoded.shape or (1,)
    coefficients = scan.restore(symbols, shape, axes)
    scales = scales_of(indices).astype(np.float64)

    def inverted(block: Block) -> NDArray[np.float64]:
        first = slice(None) if len(shape) < 2 else block[0]
        values = np.array(coefficients[first], np.float64, order="C")
        values *= scales[0, 0] if scales.size == 1 else per_coefficient(scales, shape, axes, first)
        invert(axes, values)
        return values.reshape(-1, rows_columns(shape)[1])

    return tensor_of_blocks(encoded.shape, encoded.dtype, inverted, _together(shape, axes))


def per_coefficient(
    of_classes: NDArray[np.float64], shape: tuple[int, ...], axes: Axes, first: slice = slice(None)
) -> NDArray[np.float64]:
    """Return an array with one value per coefficient from values per combination of classes.

    Only for the indices `first` of the first axis.
    """
    grid = of_classes.reshape(axes.counts(shape))
    for axis, classes in enumerate(axes.classes(shape)):
        grid = np.take(grid, classes if axis else classes[first], axis=axis)
    return grid


def _together(shape: tuple[int, ...], axes: Axes) -> int:
    """Return how many elements are transformed at a time: complete blocks of the first axis, and complete rows."""
    rows, columns = rows_columns(shape)
    unit = columns * (axes.blocks(shape)[0] if len(shape) > 1 else 1)
    size = BLOCK if unit == columns else _BLOCK
    return min(max(1, size // unit) * unit, rows * columns)


def _cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    axes, scan = transform_of(params)
    shape, count = shape or (1,), prod(shape)
    operations = {
        "dct": 3 * sum(length for length in axes.blocks(shape) if length > 1),
        "hadamard": rotation_cost(shape, dtype).operations // count,
    }.get(axes.kind, 32 * len(shape) if axes.kind in LIFTING else 0)
    # A scan sorts the points of the axes after the second, or those of a block.
    points = {"none": 0, "planes": prod(shape[2:]) + sum(shape[:2]), "blocks": prod(axes.blocks(shape))}[scan.layout]
    cost = in_blocks(shape, dtype, 20 + operations, _together(shape, axes))
    classes = prod(axes.counts(shape))
    scanned = 0 if scan.layout == "none" else 4 * count
    return Cost(cost.operations + 400 * points + 8 * classes, cost.bytes + scanned + 24 * classes + 100 * points)


DECODER = Decoder("spectral", layout, decode, _cost)
