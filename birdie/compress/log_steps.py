"""Quantization steps as small integers: step(k) = TABLE[k mod 16] · 2^(k div 16), in float32.

A step is stored as its log2 index k in sixteenths of an octave. The table is pinned (a test holds its hash), and
scaling by a power of two is exact, so a step is the same number on every machine. Sixteenths are fine enough: an
index rounded to the nearest is off by at most 2.2 %, which costs less than 0.001 bit per weight at equal distortion,
while every doubling of the resolution costs one more bit per row.
"""

import numpy as np
from numpy.typing import NDArray

from birdie.errors import ArtifactError

PER_OCTAVE = 16
LOWEST = -126 * PER_OCTAVE  # the smallest normal float32
HIGHEST = 128 * PER_OCTAVE - 1

# round(2^23 · 2^(i/16)): the significands as integers.
TABLE = (
    8388608, 8760003, 9147842, 9552851, 9975792, 10417458, 10878679, 11360319,
    11863283, 12388516, 12937002, 13509772, 14107901, 14732511, 15384775, 16065917,
)  # fmt: skip


def steps(indices: NDArray[np.integer]) -> NDArray[np.float32]:
    """The step of each log2 index, float32, exact.

    Raises:
        ArtifactError: an index is outside [LOWEST, HIGHEST].
    """
    wide = np.asarray(indices, dtype=np.int64)
    if wide.size and (int(wide.min()) < LOWEST or int(wide.max()) > HIGHEST):
        raise ArtifactError(f"a step index is outside [{LOWEST}, {HIGHEST}]; the file is corrupt")
    significands = np.array(TABLE, dtype=np.float32)[wide % PER_OCTAVE]
    values: NDArray[np.float32] = np.ldexp(significands, (wide // PER_OCTAVE - 23).astype(np.int32))
    return values


def indices_above(wanted: NDArray[np.floating]) -> NDArray[np.int32]:
    """The smallest index whose step is at least `wanted` (positive), within range."""
    guess = indices_near(wanted)
    guess = np.where(steps(guess) < wanted, np.minimum(guess + 1, HIGHEST), guess)
    below = np.maximum(guess - 1, LOWEST)
    return np.where(steps(below) >= wanted, below, guess).astype(np.int32)


def indices_near(wanted: NDArray[np.floating]) -> NDArray[np.int32]:
    """The index whose step is nearest to `wanted` (positive) in ratio, within range."""
    exact = np.rint(np.log2(wanted.astype(np.float64)) * PER_OCTAVE)
    indices: NDArray[np.int32] = np.clip(exact, LOWEST, HIGHEST).astype(np.int32)
    return indices


def indices_shared(wanted: float, rows: int) -> NDArray[np.int32]:
    """(rows,) indices of one step (positive), within range: the first rows a sixteenth coarser, for the mean to fit."""
    exact = float(np.log2(wanted)) * PER_OCTAVE
    below = int(np.floor(exact))
    indices = np.full(rows, below)
    indices[: round((exact - below) * rows)] += 1
    within: NDArray[np.int32] = np.clip(indices, LOWEST, HIGHEST).astype(np.int32)
    return within
