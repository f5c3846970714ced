"""Spectral coefficients back to weights: symbol · step of its class, and the transform undone.

    spectral   params (kind of transform, edge, levels, 1: kernels only, layout, order)

Streams: the symbols as the layout has them, and the index of a step for every combination of the classes of the axes,
row-major in one row. Products and transform in float64, rounded once to float32.
"""

from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_steps import steps
from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.schemes.decode_transform import KINDS, LARGEST_EDGE, LIFTING, MOST_LEVELS, Axes, invert
from birdie.compress.schemes.dequantize import SCALES, SYMBOLS, by_rows, real_matrix
from birdie.compress.spectral.scan import LAYOUTS, ORDERS, Scan
from birdie.compress.tensors import rows_columns
from birdie.errors import ArtifactError


def described(params: tuple[int, ...]) -> tuple[Axes, Scan]:
    """What `params` say.

    Raises:
        ArtifactError: nothing that there is.
    """
    kind, edge, levels, kernel, layout, order = params if len(params) == 6 else (-1,) * 6
    if (
        not 0 <= kind < len(KINDS)
        or not (2 <= edge <= LARGEST_EDGE if KINDS[kind] == "dct" else edge == 0)
        or not (1 <= levels <= MOST_LEVELS if KINDS[kind] in LIFTING else levels == 0)
        or not 0 <= kernel <= 1
        or not 0 <= layout < len(LAYOUTS)
        or not 0 <= order < len(ORDERS)
    ):
        raise ArtifactError(f"scheme spectral has parameters {params}, none of ours; the file is corrupt or newer")
    return Axes(KINDS[kind], edge, levels, bool(kernel)), Scan(LAYOUTS[layout], ORDERS[order])


def parameters(axes: Axes, scan: Scan) -> tuple[int, ...]:
    """The params that `described` reads."""
    edge, levels = (axes.edge if axes.kind == "dct" else 0), (axes.levels if axes.kind in LIFTING else 0)
    return (
        KINDS.index(axes.kind),
        edge,
        levels,
        int(axes.kernel),
        LAYOUTS.index(scan.layout),
        ORDERS.index(scan.order),
    )


def _layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    real_matrix(shape, dtype)
    axes, scan = described(params)
    if not scan.fits(shape, axes):
        raise ArtifactError(f"a tensor of shape {shape} has no blocks of {axes.blocks(shape)}; the file is corrupt")
    rows, columns = scan.matrix(shape, axes)
    return StreamLayout(rows, columns, SYMBOLS), StreamLayout(1, prod(axes.counts(shape)), SCALES)


def _decode(encoded: Encoded) -> Tensor:
    symbols, scales = encoded.streams
    axes, scan = described(encoded.params)
    values = np.array(scan.restore(symbols, encoded.shape, axes), np.float64, order="C")
    step = steps(scales).astype(np.float64)
    values *= step[0, 0] if step.size == 1 else spread(step, encoded.shape, axes)
    invert(axes, values)
    matrix = values.reshape(rows_columns(encoded.shape))
    return by_rows(encoded, lambda rows: matrix[rows])


def spread(of_classes: NDArray[np.float64], shape: tuple[int, ...], axes: Axes) -> NDArray[np.float64]:
    """A number for each combination of classes → the number of each coefficient."""
    grid = of_classes.reshape(axes.counts(shape))
    for axis, classes in enumerate(axes.classes(shape)):
        grid = np.take(grid, classes, axis=axis)
    return grid


SPECTRAL = Decoder(_layout, _decode)
