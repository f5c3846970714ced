"""Decoding half of trellis-coded quantization: numbers m on paths, steps of rows and of columns.

    w = (m + odd/2) · step(row) · step(column), the state and so `odd` following from the parities above in the column

Where the number of states is negative one path runs along the rows instead: the state follows from the number before.
Of 16 columns and more, a row of nothing but m = 0 is a row of zeros: those that count for nothing are left out so.
The steps of rows have a common exponent in sixteenths of an octave, one more for as many of the first rows as the file
says: so sizes are steady in it though what tells rows apart is coarse. A plain grid is the trellis of one state.
Products are taken in float32 in this order, so that every machine agrees.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_steps import HIGHEST, LOWEST, PER_OCTAVE, steps
from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.schemes.dequantize import SCALES, real_matrix
from birdie.entropy.hints import Hints
from birdie.entropy.trellis import STATES, chunk_rows, machine
from birdie.errors import ArtifactError
from birdie.runtime.kernels import njit

EMPTY = 16  # columns from which on a row of zeros is one
MOST = 1 << 23  # the largest |m| that encoders write: twice that is exact in float32
RESOLUTIONS = (1, 2, 4, 8, 16)  # of the streams of steps, to an octave


def _layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    rows, columns = real_matrix(shape, dtype)
    if (
        len(params) != 5
        or abs(params[0]) not in STATES
        or params[1] not in RESOLUTIONS
        or params[2] not in (0, *RESOLUTIONS)
        or not LOWEST <= params[3] <= HIGHEST
        or not 0 <= params[4] < rows
    ):
        raise ArtifactError(f"scheme trellis has parameters {params} for {rows} rows; the file is corrupt or newer")
    symbols = StreamLayout(rows, columns, Hints("symbols", states=params[0]))
    return (symbols, StreamLayout(rows, 1, SCALES), StreamLayout(columns, 1, SCALES))[: 3 if params[2] else 2]


def _decode(encoded: Encoded) -> Tensor:
    symbols, paths = np.ascontiguousarray(encoded.streams[0]), machine(encoded.params[0])
    out = np.empty(symbols.shape, np.float32)
    _values(symbols, paths.odd, paths.next_state, paths.mask, chunk_rows(symbols.shape[1]), *both_steps(encoded), out)
    limit = min(torch.finfo(encoded.dtype).max, torch.finfo(torch.float32).max)
    return torch.from_numpy(out).clamp_(-limit, limit).to(encoded.dtype).reshape(encoded.shape)


def both_steps(encoded: Encoded) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The steps of rows and of columns: exponents of the streams, and of the rows the common one, finer for the first.

    Raises:
        ArtifactError: an index is out of range.
    """
    symbols, rows, *columns = encoded.streams
    _, down, along, base, finer = encoded.params
    indices = rows[:, 0].astype(np.int64) * (PER_OCTAVE // down) + base
    indices[:finer] += 1
    if not columns:
        return steps(indices), np.ones(symbols.shape[1], np.float32)
    return steps(indices), steps(columns[0][:, 0].astype(np.int64) * (PER_OCTAVE // along))


@njit(nogil=True, cache=True)
def _values(symbols, odd, following, mask, height, row, column, out):  # type: ignore[no-untyped-def]
    rows, columns = symbols.shape
    state = np.zeros(columns, np.uint8)
    for i in range(rows):
        if i % height == 0:
            state[:] = 0
        step = row[i] * np.float32(0.5)
        if columns >= EMPTY and not symbols[i].any():
            step = np.float32(0)
        for j in range(columns):
            m = np.int64(symbols[i, j])
            out[i, j] = np.float32(2 * m + odd[state[j & mask]]) * step * column[j]
            state[j & mask] = following[state[j & mask], m & 1]


TRELLIS = Decoder(_layout, _decode)
