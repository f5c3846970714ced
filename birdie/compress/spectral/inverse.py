"""Inverse transforms of a tensor's axes in numpy, with the exact arithmetic of the decoder.

    identity     no transform
    dct          the orthonormal DCT-II in blocks of `edge` along each axis; the remainder of an axis, or a shorter
                 axis, is one block
    wavelet53    LeGall 5/3 and CDF 9/7 over `levels` octaves of each axis by lifting (Sweldens 1996; ISO 15444-1,
    wavelet97    annex F), mirrored at the ends, low band first; constants keep their norm
    hadamard     the rotation of `birdie.compress.schemes.rotation`, seed 0

Transforms are separable, axis by axis; axes of length 1 are unchanged. The basis of the DCT is rounded from big
integers, everything else is sums, products and quotients in float64 in a fixed order: the same bits on every machine.
"""

from dataclasses import dataclass
from functools import cache
from math import isqrt, prod

import numpy as np
from numpy.typing import NDArray

from birdie.compress.schemes.rotation import rotate
from birdie.compress.tensors import rows_columns

KINDS = ("identity", "dct", "wavelet53", "wavelet97", "hadamard")  # by their numbers in the file
MAX_EDGE = 64
MAX_LEVELS = 16
# Factors by which odd and even samples are changed in turn by the sum of their neighbors, and the low band's scale.
LIFTING = {
    "wavelet53": ((-0.5, 0.25), 1.4142135623730951),
    "wavelet97": (
        (-1.586134342059924, -0.052980118572961, 0.882911075530934, 0.443506852043971),
        1.1496043988602418,
    ),
}
_PI = 0x3243F6A8885A308D313198A2E03707344A4093822299F31D0  # π · 2^192
_BITS = 192
_BLOCK = 1 << 15  # elements transformed at a time
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Axes:
    """Transform of the axes of a tensor, as described in the file."""

    kind: str  # one of `KINDS`
    edge: int  # length of a DCT's blocks
    levels: int  # octaves of a wavelet
    kernel: bool = False  # whether only the third axis and those after it are transformed: the taps of a convolution

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the length of a block along each axis; 1 if the axis is not transformed."""
        touched = [size if index >= 2 or not self.kernel else 1 for index, size in enumerate(shape)]
        if self.kind == "dct":
            return tuple(min(size, self.edge) for size in touched)
        return tuple(touched) if self.kind in LIFTING else (1,) * len(shape)

    def counts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many frequency classes each axis has."""
        blocks = self.blocks(shape)
        if self.kind not in LIFTING:
            return blocks
        return tuple(len(octaves(block, self.levels)) + 1 for block in blocks)

    def classes(self, shape: tuple[int, ...]) -> tuple[NDArray[np.int64], ...]:
        """Return the class of each index of each axis: frequency in its block, or wavelet band (0 is lowest)."""
        classes = []
        for size, block in zip(shape, self.blocks(shape), strict=True):
            if self.kind == "dct" or block == 1:
                classes.append(np.arange(size, dtype=np.int64) % block)
            else:
                bands = np.zeros(size, np.int64)
                for band, (low, high) in enumerate(reversed(octaves(size, self.levels)), 1):
                    bands[low:high] = band
                classes.append(bands)
        return tuple(classes)


def octaves(size: int, levels: int) -> list[tuple[int, int]]:
    """Return (length of the low band, length that is split) of each octave of an axis, the finest first."""
    splits: list[tuple[int, int]] = []
    while size > 1 and len(splits) < levels:
        splits.append(((size + 1) // 2, size))
        size = (size + 1) // 2
    return splits


@cache
def cosines(size: int) -> _Array:
    """Return the orthonormal DCT-II of `size` points, (frequency, sample): the doubles nearest to the exact numbers."""
    one = 1 << _BITS
    table = []
    for quarter in range(size + 1):  # cos(π · quarter / 2n) by its series
        angle = _PI * quarter // (2 * size)
        square, term, total, count = angle * angle >> _BITS, one, one, 0
        while abs(term) > 1:
            term = -((term * square >> _BITS) // ((count + 1) * (count + 2)))
            total, count = total + term, count + 2
        table.append(total)

    def cosine(angle: int) -> int:
        angle = min(angle % (4 * size), -angle % (4 * size))
        return table[angle] if angle <= size else -table[2 * size - angle]

    first, other = isqrt((one << _BITS) // size), isqrt((2 * one << _BITS) // size)
    scaled = [
        [(other if k else first) * cosine((2 * i + 1) * k) / (one << _BITS) for i in range(size)] for k in range(size)
    ]
    return np.array(scaled)


def lift(signal: _Array, kind: str, levels: int, back: bool = True) -> None:
    """Apply the wavelet transform down the columns of `signal` (samples, columns), overwriting it; `back` undoes it."""
    factors, scale = LIFTING[kind]
    sizes = octaves(len(signal), levels)
    for half, size in reversed(sizes) if back else sizes:
        if back:
            even, odd = signal[:half] / scale, signal[half:size] * scale
        else:
            even, odd = signal[0:size:2].copy(), signal[1:size:2].copy()
        for index, factor in reversed([*enumerate(factors)]) if back else enumerate(factors):
            amount = -factor if back else factor
            if index % 2 == 0:  # mirrored: the last even sample repeats beyond the end
                after = np.concatenate([even[1:], even[-1:]])[: len(odd)]
                odd += amount * (even[: len(odd)] + after)
            else:
                edges = np.concatenate([odd[:1], odd, odd[-1:]])
                even += amount * (edges[:half] + edges[1 : half + 1])
        if back:
            signal[0:size:2], signal[1:size:2] = even, odd
        else:
            signal[:half], signal[half:size] = even * scale, odd / scale


def invert(axes: Axes, coefficients: _Array) -> None:
    """Undo the transform of `coefficients` (any shape, C order), overwriting them."""
    shape = coefficients.shape
    if axes.kind == "hadamard":
        rows = coefficients.reshape(rows_columns(shape))
        for part in _parts(len(rows), rows.shape[1]):
            block = rows[part].T.copy()
            rotate(block, 0)
            rows[part] = block.T
        return
    for index, length in reversed([*enumerate(axes.blocks(shape))]):
        size = shape[index]
        if length < 2:
            continue
        lines = coefficients.reshape(prod(shape[:index]), size, prod(shape[index + 1 :]))
        for start in range(0, size, length):
            _undo(axes, lines[:, start : start + length])


def _parts(count: int, width: int) -> list[slice]:
    height = max(1, _BLOCK // max(1, width))
    return [slice(start, start + height) for start in range(0, count, height)]


def _undo(axes: Axes, lines: _Array) -> None:
    """Undo the transform of one block (lines, samples, columns) of an axis in place; samples come first in memory."""
    size = lines.shape[1]
    for part in _parts(len(lines), size * lines.shape[2]):
        for across in _parts(lines.shape[2], size):
            block = lines[part, :, across].transpose(1, 0, 2)
            signals = block.reshape(size, -1).copy()
            if axes.kind == "dct":  # frequencies in rising order
                basis = cosines(size)
                total = basis[0][:, None] * signals[0]
                for frequency in range(1, size):
                    total += basis[frequency][:, None] * signals[frequency]
                signals = total
            else:
                lift(signals, axes.kind, axes.levels)
            block[:] = signals.reshape(block.shape)
