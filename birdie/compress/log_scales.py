"""Quantization scales as small integers: scale(k) = TABLE[k mod 16] · 2^(k div 16), in float32.

A scale is stored as its log2 index k in sixteenths of an octave. The table is pinned (a test holds its hash), and
multiplying by a power of two is exact, so a scale is the same number on every machine. Sixteenths are fine enough: an
index rounded to the nearest is off by at most 2.2 %, which costs less than 0.001 bit per weight at equal distortion,
while every doubling of the resolution costs one more bit per row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birdie.errors import ArtifactError

PER_OCTAVE = 16
LOWEST = -126 * PER_OCTAVE  # the smallest normal float32
HIGHEST = 128 * PER_OCTAVE - 1
SMALLEST = float(np.finfo(np.float32).tiny)  # no scale is below it

# round(2^23 · 2^(i/16)): the significands as integers.
TABLE = (
    8388608, 8760003, 9147842, 9552851, 9975792, 10417458, 10878679, 11360319,
    11863283, 12388516, 12937002, 13509772, 14107901, 14732511, 15384775, 16065917,
)  # fmt: skip
_INDICES = np.arange(LOWEST, HIGHEST + 1)
_SCALES = np.ldexp(np.array(TABLE, np.float32)[_INDICES % PER_OCTAVE], (_INDICES // PER_OCTAVE - 23).astype(np.int32))


def scales_of(indices: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the scale of each log2 index, float32, exact."""
    if indices.size and (int(indices.min()) < LOWEST or int(indices.max()) > HIGHEST):
        raise ArtifactError(f"a scale index is outside [{LOWEST}, {HIGHEST}]; the file is corrupt")
    values: NDArray[np.float32] = _SCALES[np.subtract(indices, LOWEST, dtype=np.int64)]
    return values


def nearest_indices(scales: NDArray[np.floating]) -> NDArray[np.int32]:
    """Return the index whose scale is nearest to each of `scales` (positive) in ratio, within range."""
    exact = np.rint(np.log2(scales.astype(np.float64)) * PER_OCTAVE)
    indices: NDArray[np.int32] = np.clip(exact, LOWEST, HIGHEST).astype(np.int32)
    return indices


def covering_indices(scales: NDArray[np.floating]) -> NDArray[np.int32]:
    """Return the smallest index whose scale is at least each of `scales` (positive), within range."""
    guess = nearest_indices(scales)
    guess = np.where(scales_of(guess) < scales, np.minimum(guess + 1, HIGHEST), guess)
    below = np.maximum(guess - 1, LOWEST)
    return np.where(scales_of(below) >= scales, below, guess).astype(np.int32)


def shared_indices(scale: float, rows: int) -> NDArray[np.int32]:
    """Return (rows,) indices for one scale (positive) shared by all rows of a tensor, within range.

    Some of the first rows take the next index, a sixteenth of an octave coarser, so many that the mean exponent is
    exact: a budget search can then change the size of a tensor with one scale in small amounts.
    """
    exact = float(np.log2(scale)) * PER_OCTAVE
    below = int(np.floor(exact))
    indices = np.full(rows, below)
    indices[: round((exact - below) * rows)] += 1
    within: NDArray[np.int32] = np.clip(indices, LOWEST, HIGHEST).astype(np.int32)
    return within


def stored_indices(
    scales: NDArray[np.floating],
    used: NDArray[np.bool_],
    rounded: Callable[[NDArray[Any]], NDArray[np.int32]] = nearest_indices,
) -> NDArray[np.int32] | None:
    """Return the index of each scale that is used, any shape; None if one of these is smaller than float32 has.

    Others repeat the index before them (`fill_unused`).
    """
    if bool((scales[used] < SMALLEST).any()):
        return None
    indices = rounded(np.maximum(scales, SMALLEST))
    return fill_unused(indices.reshape(-1), used.reshape(-1)).reshape(scales.shape)


def fill_unused(indices: NDArray[np.int32], used: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return `indices` (rows,) with that of each unused row replaced by that of the nearest used row above it.

    Unused rows above the first used one take its index. Rows of zeros decode to zeros under any scale; a repeated index
    costs the fewest bits.
    """
    if not used.any():
        return np.zeros_like(indices)
    source = np.maximum.accumulate(np.where(used, np.arange(len(indices)), -1))
    return indices[np.where(source < 0, int(np.argmax(used)), source)]
