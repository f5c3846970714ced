"""Codebooks back to numbers: w = level of the symbol · step, one step for all rows or one for each.

    codebook   params (levels, 0: one step, 1: a step per row)

Levels are integers that rise, so that they are the same numbers everywhere; the product is rounded once to float32.
"""

import numpy as np
import torch
from torch import Tensor

from birdie.compress.log_steps import steps
from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.schemes.dequantize import SCALES, SYMBOLS, by_rows, real_matrix
from birdie.errors import ArtifactError

MOST = 256  # levels
LARGEST = 1 << 23  # level: exact in float32


def _layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    rows, columns = real_matrix(shape, dtype)
    if len(params) != 2 or not 1 <= params[0] <= MOST or not 0 <= params[1] <= 1:
        raise ArtifactError(f"scheme codebook has parameters {params}, none of ours; the file is corrupt or newer")
    symbols = StreamLayout(rows, columns, SYMBOLS, np.dtype(np.uint8))
    return symbols, StreamLayout(1, params[0], SCALES), StreamLayout(rows if params[1] else 1, 1, SCALES)


def _decode(encoded: Encoded) -> Tensor:
    symbols, levels, scales = encoded.streams
    if int(symbols.max()) >= levels.size:
        raise ArtifactError(f"a symbol is beyond a codebook of {levels.size} levels; the file is corrupt")
    if int(levels.min()) < -LARGEST or int(levels.max()) > LARGEST or (np.diff(levels[0].astype(np.int64)) < 1).any():
        raise ArtifactError("the levels of a codebook do not rise within 24 bits; the file is corrupt")
    table, step = levels[0].astype(np.float64), np.broadcast_to(steps(scales), (len(symbols), 1))
    return by_rows(encoded, lambda rows: table[symbols[rows]] * step[rows])


CODEBOOK = Decoder(_layout, _decode)
