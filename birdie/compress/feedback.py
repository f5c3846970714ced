"""Error feedback: triangular factors of the Fisher information of rows and columns.

When a column is quantized and the columns not yet quantized are moved to compensate its error, only the pivot of the
Hessian's LDL factorization remains of the Hessian's weight on that column (GPTQ, arXiv 2210.17323). The same holds for
rows under the output covariance.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.compress.scheme import Sensitivity
from birdie.errors import WeightsError

BLOCK = 32  # rows that a trellis path runs through before its errors are fed back
INPUT_DAMPING, OUTPUT_DAMPING = 0.01, 0.1  # of the mean of the diagonal
FLOOR = 1e-3  # of the mean: the least that a row's Fisher counts
_ATTEMPTS = 5

Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Feedback:
    """How quantization errors are fed back, and what each row and column weighs once they are.

    Attributes:
        order: columns in the order they are quantized.
        columns: (columns, columns) in that order: the error of j times [j, k] is subtracted from column k > j.
        rows: (rows, rows): the error of row i times [i, k] is subtracted from row k of a later block; (0, 0) without.
        column_weight, row_weight: what is left of the Fisher of each, in their own order.
        feeds_columns: whether anything is fed to later columns.
    """

    order: NDArray[np.int64]
    columns: Matrix
    rows: Matrix
    column_weight: NDArray[np.float64]
    row_weight: NDArray[np.float64]
    feeds_columns: bool

    def energy(self, matrix: Matrix) -> NDArray[np.float64]:
        """Return w H wᵀ of each row w, (rows, columns) → (rows,): what leaving it out costs."""
        unit = torch.from_numpy(self.columns.T.astype(np.float64))
        ordered = torch.from_numpy(matrix[:, self.order].T.astype(np.float64))
        parts = torch.linalg.solve_triangular(unit, ordered, upper=False, unitriangular=True).numpy()
        return np.asarray((parts**2 * self.column_weight[self.order, None]).sum(0))


def feedback(sensitivity: Sensitivity | None, rows: int, columns: int, *, output: bool = True) -> Feedback:
    """Return the factors for a matrix (rows, columns); without sensitivity nothing is fed back and all weigh alike.

    Args:
        sensitivity: of the matrix.
        rows, columns: its shape.
        output: whether errors are fed back to rows too, where their covariance is known.

    Raises:
        WeightsError: the sensitivity is of another shape or not finite.
    """
    order, along, weight = np.arange(columns), np.zeros((columns, columns), np.float32), np.ones(columns)
    down, row_weight = np.zeros((0, 0), np.float32), np.ones(rows)
    hessian = None if sensitivity is None else sensitivity.hessian
    fisher = None if sensitivity is None else sensitivity.row_fisher
    if hessian is not None:
        matrix = _checked(hessian.double().numpy(), (columns, columns), "Hessian")
        order = np.argsort(-matrix.diagonal(), kind="stable")
        lower = _inverse_root(matrix[np.ix_(order, order)], INPUT_DAMPING)
        along = (lower / lower.diagonal()).T.astype(np.float32)
        weight = np.empty(columns)
        weight[order] = lower.diagonal() ** -2.0
    if fisher is not None:
        row_weight = _checked(fisher.double().numpy(), (rows,), "row Fisher")
        row_weight = np.maximum(row_weight, FLOOR * row_weight.mean())
        if not row_weight.any():
            row_weight = np.ones(rows)
    if sensitivity is not None and sensitivity.output is not None and output and rows > BLOCK:
        matrix = _checked(sensitivity.output.double().numpy(), (rows, rows), "output covariance")
        down, row_weight = _blocks(_inverse_root(matrix, OUTPUT_DAMPING))
    return Feedback(order, along, down, weight, row_weight, hessian is not None)


def _checked(values: NDArray[np.float64], shape: tuple[int, ...], kind: str) -> NDArray[np.float64]:
    if values.shape != shape or not np.isfinite(values).all():
        raise WeightsError(f"a {kind} of shape {values.shape} is not finite or not {shape}; calibrate this model again")
    return values


def _inverse_root(matrix: NDArray[np.float64], damping: float) -> NDArray[np.float64]:
    """Return L of matrix⁻¹ = L Lᵀ, L lower triangular; the damping grows until the factorization succeeds."""
    mean = float(matrix.diagonal().mean())
    if mean <= 0:
        return np.eye(len(matrix))
    one = torch.eye(len(matrix), dtype=torch.float64)
    for attempt in range(_ATTEMPTS):
        damped = torch.from_numpy(matrix) + one * (mean * damping * 10.0**attempt)
        # The lower factor of the reversed matrix is, reversed, the upper U of matrix = U Uᵀ; L is the transpose of U⁻¹.
        root, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            return np.asarray(torch.linalg.solve_triangular(root.flip(0, 1), one, upper=True).T.contiguous())
    return np.diag(np.maximum(matrix.diagonal(), FLOOR * mean) ** -0.5)


def _blocks(lower: NDArray[np.float64]) -> tuple[Matrix, NDArray[np.float64]]:
    """Return the coefficients from each block of rows to those after it, and what is left of each row's weight."""
    rows = len(lower)
    down, weight = np.zeros((rows, rows), np.float32), np.empty(rows)
    for start in range(0, rows, BLOCK):
        block = slice(start, min(start + BLOCK, rows))
        inverse = np.linalg.inv(lower[block, block])
        weight[block] = (inverse**2).sum(0)
        down[block, block.stop :] = (lower[block.stop :, block] @ inverse).T
    return down, weight
