"""Importance of each weight: the product of a row factor and a column factor from its sensitivity.

A scheme without error feedback can use the diagonal of the input Hessian: without correlations between columns, the
expected loss of an error e is ½ Σ row(i) · column(j) · e(i, j)².
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.scheme import Sensitivity
from birdie.errors import ConfigError

Factors = NDArray[np.float64]
_ROW_FLOOR, _COLUMN_FLOOR = 1e-3, 1e-6  # shares of the mean: factors are estimates, so none is certainly zero


@dataclass(frozen=True, slots=True)
class Importance:
    """Factors of rows (rows,) and columns (columns,), float64, positive, of mean 1; all 1 without a sensitivity."""

    rows: Factors
    columns: Factors


def importance(name: str, sensitivity: Sensitivity | None, rows: int, columns: int) -> Importance:
    """Return the factors of a (rows, columns) matrix; ones where the sensitivity has no values."""
    fisher = None if sensitivity is None else sensitivity.row_fisher
    hessian = None if sensitivity is None else sensitivity.hessian
    power = None if sensitivity is None else sensitivity.input_power()
    if hessian is not None and tuple(hessian.shape) != (columns, columns):
        raise ConfigError(
            f"the Hessian of {name!r} is {tuple(hessian.shape)} but the weight has {columns} columns; calibrate again"
        )
    row_factors = _factors(name, fisher, rows, _ROW_FLOOR)
    column_factors = _factors(name, power, columns, _COLUMN_FLOOR)
    return Importance(row_factors, column_factors)


def _factors(name: str, diagonal: Tensor | None, count: int, floor: float) -> Factors:
    if diagonal is None:
        return np.ones(count)
    if tuple(diagonal.shape) != (count,):
        raise ConfigError(f"the sensitivity of {name!r} is of {diagonal.numel()} rows, not {count}; calibrate again")
    values: Factors = diagonal.detach().cpu().double().numpy()
    if not np.isfinite(values).all() or float(values.min()) < 0:
        raise ConfigError(f"the sensitivity of {name!r} has entries that are negative or not finite; calibrate again")
    mean = float(values.mean())
    return np.maximum(values / mean, floor) if mean > 0 else np.ones(count)
