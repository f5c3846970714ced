"""A coarse tensor and a low-rank correction of its error: base + Σ step(k) · a(k) · b(k).

    lowrank   params (rank, then the base as an inner tensor as in decode_nested)

Streams after those of the base: a (rows × rank), b (rank × columns), step indices (rank × 1). The sum runs over k
from 0 in float64, every product but the last step's being of integers.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_steps import steps
from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.schemes import decode_nested
from birdie.compress.schemes.dequantize import SCALES, SIGNS, SYMBOLS, by_rows, real_matrix
from birdie.errors import ArtifactError


def _layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    rows, columns = real_matrix(shape, dtype)
    found = decode_nested.parts(shape, params[1:])
    if len(found) != 1 or not 1 <= params[0] <= min(rows, columns):
        raise ArtifactError(f"scheme lowrank has parameters {params}, none of ours; the file is corrupt or newer")
    left, right = StreamLayout(rows, params[0], SYMBOLS, SIGNS), StreamLayout(params[0], columns, SYMBOLS, SIGNS)
    return *found[0][2], left, right, StreamLayout(params[0], 1, SCALES)


def _decode(encoded: Encoded) -> Tensor:
    *inner, left, right, scales = encoded.streams
    base = decode_nested.decoded(encoded.shape, decode_nested.parts(encoded.shape, encoded.params[1:]), inner)[0]
    step = steps(scales).astype(np.float64)

    def corrected(rows: slice) -> NDArray[np.float64]:
        total = base[rows].astype(np.float64)
        for k in range(len(step)):
            total += left[rows, k : k + 1].astype(np.float64) * right[k] * step[k]
        return total

    return by_rows(encoded, corrected)


LOWRANK = Decoder(_layout, _decode)
