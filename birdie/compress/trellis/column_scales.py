"""Choice of the scales of columns by rate and distortion: columns share a scale unless separate scales save bits.

The ideal scale of a column is that of its Fisher information. A common scale costs more bits: half of log2 of the
arithmetic over the geometric mean of the Fisher information, for each weight. But separate scales cost bits as well:
those of their indices, which few rows share in small convolutions, and those that an adaptive coder pays to learn
deviations that scales have made less alike. Columns of weights that are nearly zero, as dead channels have, take no
bits at any scale.

All this is in bits. Let u be the mean square of a column's weights over the distortion at its scale. The trellis takes
about ½ log2(1 + u) bits for a weight, as a Gaussian source at any rate, and leaves the distortion times u / (1 + u).
The loss counts in bits by the Lagrange multiplier of the file (`birdie.compress.schemes.trellis`). An adaptive coder
pays about ½ log2(1 + 2 n v) bits to learn a deviation from n numbers, v being the variance of logarithmic deviations.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import numbers

_ROUNDS = 6  # of the search for indices that cost less; the cost hardly falls after two or three
WIDEST = 100  # octaves between a scale and the mean one, at most: their squares stay far within float64
_PSEUDO_COUNT = 0.1  # of an index that no column has

Values = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a matrix, as their scales are chosen."""

    power: Values  # (columns,) mean square of the weights of each, divided by the scales of their rows
    fisher: Values  # (columns,) Fisher information of each; a column of Fisher information 1 has the ideal scale 1
    rows: int  # of the matrix
    distortion: float  # mean squared error at high rate, in squared scales
    resolution: int  # indices per octave

    def scales(self) -> tuple[Values | None, float]:
        """Return the scale of each column, None for a common scale, and a gain that all scales are multiplied by."""
        exponents = -0.5 * np.log2(self.fisher)
        octaves = (exponents - exponents.mean()).clip(-WIDEST, WIDEST)
        indices = np.rint(octaves * self.resolution).astype(np.int64)
        common = np.zeros_like(indices)
        cheapest = common, self._gain(common)
        least = self._bits(*cheapest)
        for _ in range(_ROUNDS):
            if indices.min() == indices.max():
                break
            gain = self._gain(indices)
            bits = self._bits(indices, gain) + 8 * len(numbers.encode(indices[:, None]))
            if bits < least:
                cheapest, least = (indices, gain), bits
            better = self._nearest(indices, gain)
            if np.array_equal(better, indices):
                break
            indices = better
        indices, gain = cheapest
        return (None if indices is common else 2.0 ** (indices / self.resolution)), gain

    def _ratio(self, indices: Indices, gain: float) -> tuple[Values, Values]:
        """Return the squared scales, and the mean square of the weights over the distortion at these."""
        squared = gain**2 * 4.0 ** (indices / self.resolution)
        return squared, self.power / (squared * self.distortion)

    def _gain(self, indices: Indices) -> float:
        """Return the gain at which the mean of F s² is 1, as it is with ideal scales.

        Where many weights take no bits a larger gain would cost less by this model. In fact it is harmful: half a scale
        of error in each weight then exceeds the weights.
        """
        return math.sqrt(1 / float(np.mean(self.fisher * 4.0 ** (indices / self.resolution))))

    def _weight_bits(self, indices: Indices, gain: float) -> Values:
        """Return the bits of each column's weights, and their loss in bits."""
        squared, ratio = self._ratio(indices, gain)
        loss = self.fisher * squared * ratio / (1 + ratio) / (2 * math.log(2))
        return self.rows * (0.5 * np.log2(1 + ratio) + loss)

    def _bits(self, indices: Indices, gain: float) -> float:
        """Return the bits of the matrix without those of the indices."""
        _, ratio = self._ratio(indices, gain)
        variance = float(np.log1p(ratio).var()) / 4
        learning = 0.5 * len(ratio) * math.log2(1 + 2 * self.rows * variance)
        return float(self._weight_bits(indices, gain).sum()) + learning

    def _nearest(self, indices: Indices, gain: float) -> Indices:
        """Return for each column the index that costs least, given how often each is used."""
        levels = np.arange(indices.min(), indices.max() + 1)
        counts = np.bincount(indices - levels[0]) + _PSEUDO_COUNT
        bits = -np.log2(counts / counts.sum())
        costs = [self._weight_bits(level, gain) + cost for level, cost in zip(levels, bits, strict=True)]
        return np.asarray(levels[np.argmin(costs, axis=0)])
