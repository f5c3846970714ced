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
from birdie.compress.scheme import SCALES, SYMBOLS, Cost, Decoder, Encoded, StreamLayout, elementwise
from birdie.compress.spectral.inverse import KINDS, LIFTING, MAX_EDGE, MAX_LEVELS, Axes, invert
from birdie.compress.spectral.scan import LAYOUTS, ORDERS, Scan
from birdie.compress.tensors import real_matrix, rows_columns, tensor_of_rows
from birdie.errors import ArtifactError


def transform_of(params: tuple[int, ...]) -> tuple[Axes, Scan]:
    """Return the transform and the scan that `params` describe.

    Raises:
        ArtifactError: they are impossible.
    """
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
    """Return the layout of symbols and scale indices.

    Raises:
        ArtifactError: the parameters are impossible for this shape.
    """
    real_matrix(shape, dtype)
    axes, scan = transform_of(params)
    if not scan.fits(shape, axes):
        raise ArtifactError(f"a tensor of shape {shape} has no blocks of {axes.blocks(shape)}; the file is corrupt")
    rows, columns = scan.matrix(shape, axes)
    return StreamLayout(rows, columns, SYMBOLS), StreamLayout(1, prod(axes.counts(shape)), SCALES)


def decode(encoded: Encoded) -> Tensor:
    """Return the weights of an encoded tensor."""
    symbols, indices = encoded.streams
    axes, scan = transform_of(encoded.params)
    values = np.array(scan.restore(symbols, encoded.shape, axes), np.float64, order="C")
    scales = scales_of(indices).astype(np.float64)
    values *= scales[0, 0] if scales.size == 1 else per_coefficient(scales, encoded.shape, axes)
    invert(axes, values)
    matrix = values.reshape(rows_columns(encoded.shape))
    return tensor_of_rows(encoded.shape, encoded.dtype, lambda rows: matrix[rows])


def per_coefficient(of_classes: NDArray[np.float64], shape: tuple[int, ...], axes: Axes) -> NDArray[np.float64]:
    """Return an array with one value per coefficient from values per combination of classes."""
    grid = of_classes.reshape(axes.counts(shape))
    for axis, classes in enumerate(axes.classes(shape)):
        grid = np.take(grid, classes, axis=axis)
    return grid


def _cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    output, axes = elementwise(shape, dtype, params), transform_of(params)[0]
    taps = sum(length for length in axes.blocks(shape) if length > 1) if axes.kind == "dct" else 8 * len(shape)
    return Cost(output.operations * (2 + taps), output.bytes + 16 * output.operations)  # coefficients in float64, twice


DECODER = Decoder("spectral", 9, layout, decode, _cost)
