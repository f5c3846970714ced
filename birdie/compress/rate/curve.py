"""Rate–distortion curve of one matrix: the bits of a weight and the increase of the loss, at any scale.

    weights · √(Fisher information that remains after feedback) ──► rows of a spread each, one common shape
                                     scale ──► entropy of rounding, squared error ──► bits, ½ Σ F e²

In these units the error of a weight costs ½ e² nats wherever it is, so all matrices of a file take the same scale: one
bit less then costs the same loss everywhere (`birdie.compress.rate.allocation`). At high rate the error is
c · 2^(−2 bits); at low rate rows of nothing but zeros cost their energy, and no more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.row_blocks import blocks, every_nth_row
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.tensors import finite_rows
from birdie.compress.trellis.feedback import Feedback

SAMPLE = 1 << 16  # weights that give the common shape of rows
# log2 of scales in units of a row's spread; below, each octave costs one bit, and the sample would be too small.
_STEPS = np.arange(-4.0, 4.25, 0.25)
_GAIN = 12 * Trellis().distortion  # squared error of a trellis over that of a grid of the same bits

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Bits and loss of one matrix as functions of log2 of the scale.

    Attributes:
        columns: weights of a row.
        spread: log2 of the root mean square of each row, in units of the scale; rows of zeros are left out.
        rows: number of all rows.
        entropy: bits of a weight at `_STEPS`; error: squared error there, in units of the row's mean square.
        dense: share of weights that are not zero.
    """

    columns: int
    spread: Numbers
    rows: int
    entropy: Numbers
    error: Numbers
    dense: float

    @classmethod
    def of(cls, name: str, weight: Tensor, factors: Feedback) -> "Curve":
        """Return the curve of a matrix whose error feedback has these factors."""
        column = factors.column_weight
        energy = np.concatenate([block.astype(np.float64) ** 2 @ column for block in blocks(name, weight)])
        squares = energy * factors.row_weight / len(column)
        step = max(1, weight.numel() // SAMPLE)
        rows = finite_rows(name, every_nth_row(weight, 0, min(step, len(energy))))
        spread = np.sqrt(energy[:: min(step, len(energy))] / len(column))
        used = spread > 0
        if not used.any():
            return cls(len(column), np.zeros(0), len(energy), np.zeros(len(_STEPS)), np.zeros(len(_STEPS)), 0.0)
        sample = (rows[used] * column**0.5 / spread[used, None]).reshape(-1)
        sample = sample[:: max(1, len(sample) // SAMPLE)]
        entropy, error = zip(*(_rounded(sample, 2.0**log_scale) for log_scale in _STEPS), strict=True)
        spreads = np.log2(squares[squares > 0]) / 2
        dense = float(np.count_nonzero(sample)) / len(sample)
        return cls(len(column), spreads, len(energy), np.array(entropy), np.array(error), dense)

    @property
    def weights(self) -> int:
        """Number of weights of the matrix."""
        return self.rows * self.columns

    def bits(self, log_scale: float) -> float:
        """Return the mean bits of a weight at a scale."""
        steps = log_scale - self.spread
        fine = self.dense * np.maximum(_STEPS[0] - steps, 0)
        return float((np.interp(steps, _STEPS, self.entropy) + fine).sum()) / max(self.rows, 1)

    def loss(self, log_scale: float) -> float:
        """Return ½ Σ F e² at a scale, in the unit of the sensitivities."""
        steps = log_scale - self.spread
        error = np.interp(steps, _STEPS, self.error) * 4.0 ** np.minimum(steps - _STEPS[0], 0)
        gain = _GAIN ** np.clip(np.interp(steps, _STEPS, self.entropy), 0, 1)  # without bits a trellis gains nothing
        return float((4.0**self.spread * error * gain).sum()) * self.columns / 2

    def log_scale(self, bits: float) -> float:
        """Return log2 of the scale at which a weight takes so many bits, or the nearest possible number."""
        return scale_of_bits([self], bits)


def scale_of_bits(curves: list[Curve], bits: float) -> float:
    """Return log2 of the common scale at which the weights of all matrices take so many bits on average."""
    total = max(sum(curve.weights for curve in curves), 1)
    used = [curve.spread for curve in curves if curve.spread.size]
    if not used:
        return 0.0
    spreads = np.concatenate(used)
    low, high = float(spreads.min()) - 64, float(spreads.max()) + float(_STEPS[-1])
    for _ in range(60):
        middle = (low + high) / 2
        mean = sum(curve.weights * curve.bits(middle) for curve in curves) / total
        low, high = (middle, high) if mean > bits else (low, middle)
    return high


def _rounded(sample: Numbers, scale: float) -> tuple[float, float]:
    """Return the entropy of rounding to a grid, in bits, and the squared error."""
    symbols = np.rint(sample / scale).astype(np.int64)
    counts = np.bincount(symbols - symbols.min())
    p = counts[counts > 0] / len(symbols)
    return -float((p * np.log2(p)).sum()), float(((sample - symbols * scale) ** 2).mean())
