"""Rotated rows back to where they were: a randomised Hadamard transform, undone.

    rotation   params (seed, then one or two inner tensors as in decode_nested), which are added

Of n columns the first p, the largest power of two ≤ n, are multiplied by signs and by the orthonormal Hadamard matrix;
then, if n > p, the last p. That is a rotation for any n. Sums and differences only, in float64 and in a fixed order,
and one product at the end: the same bits on every machine.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.schemes import decode_nested
from birdie.compress.schemes.dequantize import by_rows, real_matrix
from birdie.errors import ArtifactError

SEEDS = 1 << 16
_HALF_ROOT = 0.7071067811865476  # of 2


def signs(count: int, seed: int) -> NDArray[np.float64]:
    """`count` signs that `seed` gives: the top bits of a 32-bit integer hash (two rounds of multiply and xor-shift)."""
    word = (np.arange(count, dtype=np.uint64) + np.uint64((seed << 24) + 1)) * np.uint64(0x9E3779B1)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        word = word & np.uint64(0xFFFFFFFF)
        word = (word ^ (word >> np.uint64(15))) * np.uint64(factor)
    return 1.0 - 2.0 * ((word >> np.uint64(31)) & np.uint64(1)).astype(np.float64)


def turn(columns: NDArray[np.float64], seed: int, back: bool = True) -> None:
    """Rotate the columns (columns, rows) of a matrix, rows last, in place; `back` undoes it."""
    count = len(columns)
    size = 1 << (count.bit_length() - 1)
    parts = [(columns[:size], 2 * seed), (columns[count - size :], 2 * seed + 1)][: 1 + (size < count)]
    for part, own in reversed(parts) if back else parts:
        sign = signs(size, own)[:, None]
        part *= 1.0 if back else sign
        half = 1
        while half < size:
            pairs = part.reshape(-1, 2, half, part.shape[1])
            total = pairs[:, 0] + pairs[:, 1]
            np.subtract(pairs[:, 0], pairs[:, 1], out=pairs[:, 1])
            pairs[:, 0] = total
            half *= 2
        doubled = size.bit_length() - 1
        part *= 2.0 ** -(doubled // 2) * (_HALF_ROOT if doubled % 2 else 1.0) * (sign if back else 1.0)


def _layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    real_matrix(shape, dtype)
    found = decode_nested.parts(shape, params[1:])
    if not 1 <= len(found) <= 2 or not 0 <= params[0] < SEEDS:
        raise ArtifactError(f"scheme rotation has parameters {params}, none of ours; the file is corrupt or newer")
    return tuple(each for part in found for each in part[2])


def _decode(encoded: Encoded) -> Tensor:
    found = decode_nested.parts(encoded.shape, encoded.params[1:])
    addends = decode_nested.decoded(encoded.shape, found, encoded.streams)

    def turned(rows: slice) -> NDArray[np.float64]:
        total = np.array(addends[0][rows].T, np.float64, order="C")
        for each in addends[1:]:
            total += each[rows].T
        turn(total, encoded.params[0])
        return total.T

    return by_rows(encoded, turned)


ROTATION = Decoder(_layout, _decode)
