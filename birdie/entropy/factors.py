"""Factors that turn the numbers of a scheme into weights, for a coder that writes weights at once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Factors:
    """Weights are number · row · column, computed in float32 in this order, and clamped."""

    rows: NDArray[np.float32]  # (rows, groups) factors of rows, or of each group of columns of a row
    columns: NDArray[np.float32]  # (columns,), or empty
    group_size: int  # columns that share a factor of a row
    halves: bool  # numbers count halves: each is doubled, and one is added in odd states of a trellis
    limit: float  # largest magnitude of a weight
    most: int = 1 << 23  # largest magnitude of a number; another one is a sign of damage
