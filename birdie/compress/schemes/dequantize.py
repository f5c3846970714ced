"""Symbols on uniform grids back to numbers: w = symbol · step, in float32, cast once.

    grid      a step per row                      params ()
              a step per `group` columns of a row params (group,)
    ternary   the same, symbols −1, 0 and 1       params (group,)

The decoding half of `grid` and `ternary`.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_steps import steps
from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.tensors import REAL_DTYPES, rows_columns
from birdie.entropy.hints import Hints
from birdie.errors import ArtifactError
from birdie.runtime.kernels import njit

_BLOCK = 1 << 12  # elements worked on at a time: they stay in the nearest cache
_PART = 1 << 16
SYMBOLS, SCALES = Hints(role="symbols"), Hints(role="scales")
SIGNS = np.dtype(np.int8)


def real_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """(rows, columns) of a tensor that holds real numbers.

    Raises:
        ArtifactError: it is empty, or of another kind.
    """
    rows, columns = rows_columns(shape)
    if dtype not in REAL_DTYPES or rows * columns == 0:
        raise ArtifactError(f"a tensor of {dtype} and shape {shape} cannot be quantized; the file is corrupt")
    return rows, columns


def by_rows(encoded: Encoded, values: Callable[[slice], NDArray[np.float64]]) -> Tensor:
    """The tensor whose rows are `values` of a slice of them (some rows, columns), none NaN.

    They are held to the finite range of float32 and of the dtype, rounded to float32 and cast once.
    """
    rows, columns = rows_columns(encoded.shape)
    limit = min(torch.finfo(encoded.dtype).max, torch.finfo(torch.float32).max)
    out = torch.empty(rows, columns, dtype=encoded.dtype)
    height = max(1, _PART // columns)
    for start in range(0, rows, height):
        part = slice(start, start + height)
        out[part] = torch.from_numpy(np.clip(values(part), -limit, limit).astype(np.float32))
    return out.reshape(encoded.shape)


def _groups(
    shape: tuple[int, ...], dtype: torch.dtype, group: int, kind: np.dtype[np.integer]
) -> tuple[StreamLayout, ...]:
    rows, columns = real_matrix(shape, dtype)
    if not 1 <= group <= columns:
        raise ArtifactError(f"a group of {group} columns does not fit rows of {columns}; the file is corrupt")
    return StreamLayout(rows, columns, SYMBOLS, kind), StreamLayout(rows, -(-columns // group), SCALES)


def _grid_layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    if len(params) > 1:
        raise ArtifactError(f"scheme grid takes at most one parameter but the file gives {len(params)}")
    return _groups(shape, dtype, params[0] if params else real_matrix(shape, dtype)[1], np.dtype(np.int32))


def _ternary_layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    if len(params) != 1:
        raise ArtifactError(f"scheme ternary takes one parameter but the file gives {len(params)}")
    return _groups(shape, dtype, params[0], SIGNS)


def _decode(encoded: Encoded) -> Tensor:
    symbols, scales = encoded.streams
    # The step is rounded up, so the largest symbol may stand for a little more than the dtype's largest number.
    limit = np.float32(min(torch.finfo(encoded.dtype).max, torch.finfo(torch.float32).max))
    out = torch.from_numpy(np.empty(symbols.shape, f"u{encoded.dtype.itemsize}")).view(encoded.dtype)
    step = steps(scales)
    symbols = np.ascontiguousarray(symbols)
    group = encoded.params[0] if encoded.params else symbols.shape[1]
    if encoded.dtype is torch.float32:
        _dequantise(symbols, step, group, limit, out.numpy())
    elif encoded.dtype is torch.bfloat16:
        _dequantise(symbols, step, group, limit, out.view(torch.uint16).numpy())
    else:
        height = max(1, _BLOCK // symbols.shape[1])
        exact = np.empty((height, symbols.shape[1]), np.float32)
        for row in range(0, len(step), height):
            rows = slice(row, row + height)
            part = exact[: len(step[rows])]
            _dequantise(symbols[rows], step[rows], group, limit, part)
            out[rows] = torch.from_numpy(part).to(encoded.dtype)
    return out.reshape(encoded.shape)


def _ternary_decode(encoded: Encoded) -> Tensor:
    symbols = encoded.streams[0]
    if int(symbols.min()) < -1 or int(symbols.max()) > 1:
        raise ArtifactError("a ternary symbol is not -1, 0 or 1; the file is corrupt")
    return _decode(encoded)


@njit(nogil=True, cache=True)
def _dequantise(symbols, step, group, limit, out):  # type: ignore[no-untyped-def]
    """out = symbol · step of its group, held to ± limit; 16-bit words are bfloat16, rounded to nearest, ties even."""
    width = min(group, _BLOCK)
    values = np.empty(width, np.float32)
    bits = values.view(np.uint32)
    limits = np.empty(1, np.float32)
    limits[0] = limit
    most = limits.view(np.uint32)[0]
    for row in range(symbols.shape[0]):
        for place in range(step.shape[1]):
            end = min((place + 1) * group, symbols.shape[1])
            for start in range(place * group, end, width):
                cells, target = symbols[row, start : min(start + width, end)], out[row, start:end]
                for i in range(cells.size):
                    values[i] = np.float32(cells[i]) * step[row, place]
                    # On bit patterns, sign aside, comparing is cheaper: no product is NaN.
                    size = bits[i] & np.uint32(0x7FFFFFFF)
                    bits[i] = (size if size < most else most) | (bits[i] & np.uint32(0x80000000))
                if out.itemsize == 4:
                    for i in range(cells.size):
                        target[i] = values[i]
                else:
                    for i in range(cells.size):
                        odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
                        target[i] = np.uint16((bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))


GRID, TERNARY = Decoder(_grid_layout, _decode), Decoder(_ternary_layout, _ternary_decode)
