"""Decoding half of trellis-coded quantization: numbers m on paths, steps of rows and of columns.

    w = (m + odd/2) · step(row) · step(column), the state and so `odd` following from the parities above in the column

The steps of rows have a common exponent in sixteenths of an octave, one more for as many of the first rows as the file
says: so sizes are steady in it though what tells rows apart is coarse. A plain grid is the trellis of one state. Products are taken in float32 in this order, so that every machine agrees.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.steps import HIGHEST, LOWEST, PER_OCTAVE, steps
from birdie.compress.tensors import REAL_DTYPES, rows_columns
from birdie.entropy.compiled import njit
from birdie.entropy.stream import Hints
from birdie.entropy.trellis import STATES, chunk_rows, machine
from birdie.errors import ArtifactError

MOST = 1 << 23  # the largest |m|: twice that is exact in float32
RESOLUTIONS = (1, 2, 4, 8, 16)  # of the streams of steps, to an octave


def _layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    rows, columns = rows_columns(shape)
    if len(params) != 5 or params[0] not in STATES or params[1] not in RESOLUTIONS or params[2] not in (0, *RESOLUTIONS):
        raise ArtifactError(f"scheme trellis has parameters {params}, none of ours; the file is corrupt or newer")
    if not LOWEST <= params[3] <= HIGHEST or not 0 <= params[4] < max(rows, 1):
        raise ArtifactError(f"scheme trellis has steps {params[3:]} for {rows} rows; the file is corrupt")
    if dtype not in REAL_DTYPES or rows * columns == 0:
        raise ArtifactError(f"scheme trellis cannot hold a tensor of {dtype} and shape {shape}; the file is corrupt")
    symbols = StreamLayout(rows, columns, Hints("symbols", states=params[0]))
    scales = Hints("scales")
    return (symbols, StreamLayout(rows, 1, scales), *([StreamLayout(columns, 1, scales)] if params[2] else []))


def _decode(encoded: Encoded) -> Tensor:
    symbols = encoded.streams[0]
    if max(int(symbols.max()), -int(symbols.min())) > MOST:
        raise ArtifactError(f"a number of scheme trellis is beyond {MOST:,}; the file is corrupt")
    row, column = both_steps(encoded)
    out = values(np.ascontiguousarray(symbols), encoded.params[0], row, column)
    limit = float(min(torch.finfo(encoded.dtype).max, torch.finfo(torch.float32).max))
    return torch.from_numpy(out).clamp_(-limit, limit).to(encoded.dtype).reshape(encoded.shape)


def both_steps(encoded: Encoded) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The steps of rows and of columns: exponents of the streams, and of the rows the common one, finer for the first.

    Raises:
        ArtifactError: an index is out of range.
    """
    symbols, rows, *columns = encoded.streams
    _, row_resolution, column_resolution, base, finer = encoded.params
    indices = rows[:, 0].astype(np.int64) * (PER_OCTAVE // row_resolution) + base
    indices[:finer] += 1
    if not columns:
        return steps(indices), np.ones(symbols.shape[1], np.float32)
    return steps(indices), steps(columns[0][:, 0].astype(np.int64) * (PER_OCTAVE // column_resolution))


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
