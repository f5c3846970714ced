"""Tensors stored otherwise than as bit planes: the decoding half.

    1 halves        half bytes, for two or more small integers packed in a word (GPTQ, AWQ, HQQ, fp4 pairs)
    2 values        the integers themselves, where they fit in 32 bits
    3 differences   each minus the one before in row-major order: indices that rise
    4 listed        floats of few magnitudes: the number n of each in their rising list, −1 − n with the sign bit, and
                    the list as gaps; what was rounded to a grid, tables of sines

The numbers are a parameter of the lossless scheme in the file.
"""

import numpy as np
import torch
from torch import Tensor

from birdie.compress.scheme import Integers, StreamLayout
from birdie.compress.tensors import Bits, from_bits, rows_columns
from birdie.entropy.hints import Hints
from birdie.entropy.planes import blocks
from birdie.errors import ArtifactError

HALVES, VALUES, DIFFERENCES, LISTED = 1, 2, 3, 4
_WIDE = (torch.int32, torch.uint32, torch.int64, torch.uint64)
DTYPES: dict[int, tuple[torch.dtype, ...]] = {  # that take each form
    HALVES: (torch.uint8, torch.int8, torch.uint16, torch.int16, *_WIDE, torch.float4_e2m1fn_x2),
    VALUES: _WIDE,
    DIFFERENCES: _WIDE,
    LISTED: (torch.float16, torch.bfloat16, torch.float32),
}
_SYMBOLS, _GAPS = Hints(role="symbols"), Hints(role="scales")


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """The streams of a tensor stored by the form in `params`: one, and for LISTED the list.

    Raises:
        ArtifactError: there is no such form for tensors of this shape and dtype.
    """
    rows, columns = rows_columns(shape)
    wanted = 2 if params[0] == LISTED else 1
    known = dtype in DTYPES.get(params[0], ()) and len(params) == wanted
    if not known or rows * columns == 0 or (params[0] == LISTED and not 1 <= params[1] <= rows * columns):
        raise ArtifactError(
            f"scheme lossless has parameters {params} for {dtype} of shape {shape}; the file is corrupt or newer"
        )
    if params[0] == HALVES:
        return (StreamLayout(2 * dtype.itemsize * rows, columns, _SYMBOLS, np.dtype(np.uint8)),)
    values = StreamLayout(rows, columns, _SYMBOLS)
    return (values, StreamLayout(1, params[1], _GAPS)) if params[0] == LISTED else (values,)


def decode(
    streams: tuple[Integers, ...], params: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The tensor that `streams`, of the shapes of `layout`, stand for.

    Raises:
        ArtifactError: they hold what no tensor of `dtype` does.
    """
    if params[0] == LISTED:
        words = _from_list(streams[0], streams[1], dtype)
    elif params[0] == HALVES:
        words = _from_halves(streams[0], shape, dtype)
    else:
        words = _from_values(streams[0], params[0], dtype)
    return from_bits(words, shape, dtype)


def _from_halves(halves: Integers, shape: tuple[int, ...], dtype: torch.dtype) -> Bits:
    """Words (rows, columns) of half bytes; those of one row of words stand in rows of their own, the lowest first."""
    if int(halves.max()) > 15 or int(halves.min()) < 0:
        raise ArtifactError("a half byte is above 15; the file is corrupt")
    rows, columns = rows_columns(shape)
    parts = halves.reshape(rows, 2 * dtype.itemsize, columns)
    out = np.zeros((rows, columns), f"u{dtype.itemsize}")
    for block in blocks(rows, columns):
        for index in range(parts.shape[1]):
            part = parts[block[0], index, block[1]].astype(out.dtype)
            out[block] |= part << out.dtype.type(4 * index)
    return out


def _from_values(values: Integers, form: int, dtype: torch.dtype) -> Bits:
    if form == DIFFERENCES:
        values = np.cumsum(values, dtype=np.int64).reshape(values.shape)
    limits = np.iinfo(f"{'i' if dtype.is_signed else 'u'}{dtype.itemsize}")
    if int(values.min()) < limits.min or int(values.max()) > limits.max:
        raise ArtifactError(f"an integer is outside {limits.min}…{limits.max}; the file is corrupt")
    out: Bits = values.astype(f"u{dtype.itemsize}")
    return out


def _from_list(numbers: Integers, gaps: Integers, dtype: torch.dtype) -> Bits:
    """Words (rows, columns): magnitude n of the list, with the sign bit for −1 − n."""
    sizes = np.cumsum(gaps[0], dtype=np.int64)
    sign = 1 << (8 * dtype.itemsize - 1)
    if int(gaps[0, 0]) < 0 or (gaps[0, 1:] < 1).any() or int(sizes[-1]) >= sign:
        raise ArtifactError(f"the list of a tensor's magnitudes does not rise within {dtype}; the file is corrupt")
    if int(numbers.min()) < -sizes.size or int(numbers.max()) >= sizes.size:
        raise ArtifactError(f"a number is beyond a list of {sizes.size:,} magnitudes; the file is corrupt")
    words = np.concatenate([sizes, sizes[::-1] + sign]).astype(
        f"u{dtype.itemsize}"
    )  # negative numbers count from the end
    out: Bits = np.empty(numbers.shape, words.dtype)
    for block in blocks(*numbers.shape):
        out[block] = words[numbers[block]]
    return out
