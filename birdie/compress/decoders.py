"""Integers back to tensors: the decoding half of every scheme, and nothing of the encoders.

    lossless   bit planes of any dtype                              params ()
               integers as half bytes, values or differences        params (code of integers.DTYPES,)
               floats as numbers in the list of their magnitudes    params (integers.LISTED, length of the list)
    grid       symbol · step of its row, in float32, cast once      params ()
    cast       lossless planes of a float rounded to 16 bits        params (code of CAST_DTYPES,)

Every decoder is a pure function in fixed order, so a file decodes to the same bits on every machine.
"""

import numpy as np
import torch
from torch import Tensor

from birdie.compress import integers
from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.steps import steps
from birdie.compress.tensors import FORMATS, REAL_DTYPES, from_bits, rows_columns
from birdie.entropy.compiled import njit
from birdie.entropy.planes import join, plane_dtypes, plane_hints, word_dtype
from birdie.entropy.stream import Hints
from birdie.errors import ArtifactError

CAST_DTYPES = (torch.float16, torch.bfloat16)
_BLOCK = 1 << 12  # elements worked on at a time: they stay in the nearest cache
SYMBOLS, SCALES = Hints(role="symbols"), Hints(role="scales")


def _plane_layout(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StreamLayout, ...]:
    rows, columns = rows_columns(shape)
    if rows * columns == 0:
        return ()
    word, words = FORMATS[dtype]
    kinds = zip(plane_hints(word), plane_dtypes(word), strict=True)
    return tuple(StreamLayout(rows, columns * words, hints, kind) for hints, kind in kinds)


def _join_planes(encoded: Encoded, dtype: torch.dtype) -> Tensor:
    """The tensor of `dtype` whose bit planes are the streams of `encoded`."""
    if not encoded.streams:
        return torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)[:0].reshape(encoded.shape)
    form = FORMATS[dtype][0]
    (kind, *more), first = plane_dtypes(form), encoded.streams[0]
    if more or dtype is torch.bool or not (first.dtype == kind and first.flags.c_contiguous and first.flags.writeable):
        return from_bits(join(encoded.streams, form), encoded.shape, dtype)
    return from_bits(first.view(word_dtype(form)), encoded.shape, dtype)  # one plane is the tensor itself


def _no_params(scheme: str, params: tuple[int, ...]) -> None:
    if params:
        raise ArtifactError(f"scheme {scheme} takes no parameters but the file gives {len(params)}")


def _lossless_layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    return integers.layout(shape, dtype, params) if params else _plane_layout(shape, dtype)


def _lossless_decode(encoded: Encoded) -> Tensor:
    if encoded.params:
        return integers.decode(encoded.streams, encoded.params, encoded.shape, encoded.dtype)
    return _join_planes(encoded, encoded.dtype)


def _grid_layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    _no_params("grid", params)
    if dtype not in REAL_DTYPES:
        raise ArtifactError(f"scheme grid cannot hold a tensor of {dtype}; the file is corrupt")
    rows, columns = rows_columns(shape)
    if rows * columns == 0:
        raise ArtifactError("scheme grid cannot hold an empty tensor; the file is corrupt")
    return StreamLayout(rows, columns, SYMBOLS), StreamLayout(rows, 1, SCALES)


def _grid_decode(encoded: Encoded) -> Tensor:
    symbols, scales = encoded.streams
    # The step is rounded up, so the largest symbol may stand for a little more than the dtype's largest number.
    limit = np.float32(min(torch.finfo(encoded.dtype).max, torch.finfo(torch.float32).max))
    out = torch.from_numpy(np.empty(symbols.shape, f"u{encoded.dtype.itemsize}")).view(encoded.dtype)
    step = steps(scales[:, 0])
    symbols = np.ascontiguousarray(symbols)
    if encoded.dtype is torch.float32:
        _dequantise(symbols, step, limit, out.numpy())
    elif encoded.dtype is torch.bfloat16:
        _dequantise(symbols, step, limit, out.view(torch.uint16).numpy())
    else:
        height = max(1, _BLOCK // symbols.shape[1])
        exact = np.empty((height, symbols.shape[1]), np.float32)
        for row in range(0, len(step), height):
            rows = slice(row, row + height)
            part = exact[: len(step[rows])]
            _dequantise(symbols[rows], step[rows], limit, part)
            out[rows] = torch.from_numpy(part).to(encoded.dtype)
    return out.reshape(encoded.shape)


@njit(nogil=True, cache=True)
def _dequantise(symbols, step, limit, out):  # type: ignore[no-untyped-def]
    """out = symbol · step of its row, held to ± limit; 16-bit words are bfloat16, rounded to the nearest, ties even."""
    columns = symbols.shape[1]
    values = np.empty(min(columns, _BLOCK), np.float32)
    bits = values.view(np.uint32)
    limits = np.empty(1, np.float32)
    limits[0] = limit
    most = limits.view(np.uint32)[0]
    for row in range(symbols.shape[0]):
        for start in range(0, columns, _BLOCK):
            cells, target = symbols[row, start : start + _BLOCK], out[row, start : start + _BLOCK]
            for i in range(cells.size):
                values[i] = np.float32(cells[i]) * step[row]
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


def _cast_dtype(params: tuple[int, ...]) -> torch.dtype:
    if len(params) != 1 or not 0 <= params[0] < len(CAST_DTYPES):
        raise ArtifactError(f"scheme cast has parameters {params}, none of ours; the file is corrupt or newer")
    return CAST_DTYPES[params[0]]


def _cast_layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    if dtype not in (torch.float32, torch.float64):
        raise ArtifactError(f"scheme cast cannot hold a tensor of {dtype}; the file is corrupt")
    return _plane_layout(shape, _cast_dtype(params))


def _cast_decode(encoded: Encoded) -> Tensor:
    return _join_planes(encoded, _cast_dtype(encoded.params)).to(encoded.dtype)


DECODERS: dict[str, Decoder] = {
    "lossless": Decoder(_lossless_layout, _lossless_decode),
    "grid": Decoder(_grid_layout, _grid_decode),
    "cast": Decoder(_cast_layout, _cast_decode),
}


def decode(encoded: Encoded) -> Tensor:
    """The tensor that `encoded` stands for."""
    return DECODERS[encoded.scheme].decode(encoded)
