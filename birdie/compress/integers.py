"""Integers stored otherwise than as bit planes: the decoding half.

    1 halves        half bytes, for two or more small integers packed in a word (GPTQ, AWQ, HQQ, fp4 pairs)
    2 values        the integers themselves, where they fit in 32 bits
    3 differences   each minus the one before in row-major order: indices that rise

The numbers are a parameter of the lossless scheme in the file.
"""

import numpy as np
import torch
from torch import Tensor

from birdie.compress.scheme import Integers, StreamLayout
from birdie.compress.tensors import Bits, from_bits, rows_columns
from birdie.entropy.planes import blocks
from birdie.entropy.stream import Hints
from birdie.errors import ArtifactError

HALVES, VALUES, DIFFERENCES = 1, 2, 3
_WIDE = (torch.int32, torch.uint32, torch.int64, torch.uint64)
DTYPES: dict[int, tuple[torch.dtype, ...]] = {  # that take each form
    HALVES: (torch.uint8, torch.int8, torch.uint16, torch.int16, *_WIDE, torch.float4_e2m1fn_x2),
    VALUES: _WIDE,
    DIFFERENCES: _WIDE,
}
_SYMBOLS = Hints(role="symbols")


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """The one stream of a tensor stored by the form in `params`.

    Raises:
        ArtifactError: there is no such form for tensors of this shape and dtype.
    """
    rows, columns = rows_columns(shape)
    if len(params) != 1 or dtype not in DTYPES.get(params[0], ()) or rows * columns == 0:
        raise ArtifactError(
            f"scheme lossless has parameters {params} for {dtype} of shape {shape}; the file is corrupt or newer"
        )
    if params[0] == HALVES:
        return (StreamLayout(2 * dtype.itemsize * rows, columns, _SYMBOLS, np.dtype(np.uint8)),)
    return (StreamLayout(rows, columns, _SYMBOLS),)


def decode(stream: Integers, form: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor that `stream` stands for.

    Raises:
        ArtifactError: it holds what no tensor of `dtype` does.
    """
    words = _from_halves(stream, shape, dtype) if form == HALVES else _from_values(stream, form, dtype)
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
