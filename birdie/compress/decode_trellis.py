"""Decoding half of trellis-coded quantization: numbers m on paths, steps of rows and of columns.

    w = (m + odd/2) · step(row) · step(column), the state and so `odd` following from the parities above in the column

A plain grid is the trellis of one state. Products are taken in float32 in this order, so that every machine agrees.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.steps import PER_OCTAVE, steps
from birdie.compress.tensors import REAL_DTYPES, rows_columns
from birdie.entropy.compiled import njit
from birdie.entropy.stream import Hints
from birdie.entropy.trellis import STATES, chunk_rows, machine
from birdie.errors import ArtifactError

MOST = 1 << 23  # the largest |m|: twice that is exact in float32


def _layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    if len(params) != 3 or params[0] not in STATES or PER_OCTAVE % max(params[1], 1) or PER_OCTAVE % max(params[2], 1):
        raise ArtifactError(f"scheme trellis has parameters {params}, none of ours; the file is corrupt or newer")
    if params[1] < 1 or params[2] < 0:
        raise ArtifactError(f"scheme trellis has parameters {params}, none of ours; the file is corrupt or newer")
    rows, columns = rows_columns(shape)
    if dtype not in REAL_DTYPES or rows * columns == 0:
        raise ArtifactError(f"scheme trellis cannot hold a tensor of {dtype} and shape {shape}; the file is corrupt")
    symbols = StreamLayout(rows, columns, Hints("symbols", states=params[0]))
    scales = Hints("scales")
    return (symbols, StreamLayout(rows, 1, scales), *([StreamLayout(columns, 1, scales)] if params[2] else []))


def _decode(encoded: Encoded) -> Tensor:
    symbols, row_steps, *columns = encoded.streams
    states, row_resolution, column_resolution = encoded.params
    if symbols.size and max(int(symbols.max()), -int(symbols.min())) > MOST:
        raise ArtifactError(f"a number of scheme trellis is beyond {MOST:,}; the file is corrupt")
    row = stepped(row_steps[:, 0], row_resolution)
    column = stepped(columns[0][:, 0], column_resolution) if columns else np.ones(symbols.shape[1], np.float32)
    out = values(np.ascontiguousarray(symbols), states, row, column)
    limit = float(min(torch.finfo(encoded.dtype).max, torch.finfo(torch.float32).max))
    return torch.from_numpy(out).clamp_(-limit, limit).to(encoded.dtype).reshape(encoded.shape)


def stepped(indices: NDArray[np.integer], resolution: int) -> NDArray[np.float32]:
    """The step of each index, which counts 1/`resolution` octaves."""
    return steps(indices.astype(np.int64) * (PER_OCTAVE // resolution))


def values(
    symbols: NDArray[np.integer], states: int, row: NDArray[np.float32], column: NDArray[np.float32]
) -> NDArray[np.float32]:
    """What `symbols` (rows, columns) stand for under the steps of rows and columns."""
    paths = machine(states)
    out = np.empty(symbols.shape, np.float32)
    _values(symbols, paths.odd, paths.following, chunk_rows(symbols.shape[1]), row, column, out)
    return out


@njit(nogil=True, cache=True)
def _values(symbols, odd, following, height, row, column, out):  # type: ignore[no-untyped-def]
    state = np.zeros(symbols.shape[1], np.uint8)
    half = np.float32(0.5)
    for i in range(symbols.shape[0]):
        if i % height == 0:
            state[:] = 0
        step = row[i] * half
        for j in range(symbols.shape[1]):
            m = np.int64(symbols[i, j])
            out[i, j] = np.float32(2 * m + odd[state[j]]) * step * column[j]
            state[j] = following[state[j], m & 1]


TRELLIS = Decoder(_layout, _decode)
