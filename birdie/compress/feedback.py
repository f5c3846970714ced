"""Error feedback on both sides of a matrix: triangular factors of the input Hessian and of the output covariance.

Quantizing W to W − E costs about ½ tr(G E H Eᵀ), H = mean x xᵀ of the inputs, G = Σ g gᵀ of the output gradients. When
a column is quantized and the columns not yet quantized move to compensate its error, the pivot of H's LDL factorization
is all that remains of H's weight on that column (GPTQ: Frantar et al. 2022, arXiv 2210.17323). That is Babai's nearest
plane algorithm for the lattice of grid points under the norm of H, columns in the order of quantization (Chen et al.
2025, arXiv 2507.18553). The same holds for rows under G; feedback on both sides: Tseng et al. 2025, arXiv 2505.22988.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.compress.scheme import Sensitivity
from birdie.errors import WeightsError

BLOCK = 32  # rows that a trellis path runs through before its errors are fed back
# Added to the diagonal, as a share of its mean: calibration sees few samples, so small eigenvalues are underestimated.
INPUT_DAMPING, OUTPUT_DAMPING = 0.01, 0.1
FLOOR = 1e-3  # smallest Fisher information of a row, as a share of the mean
_ATTEMPTS = 5

Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Feedback:
    """Coefficients of error feedback, and the weights of rows and columns that remain after it.

    Attributes:
        order: columns in the order of quantization.
        columns: (columns, columns) in that order: the error of j times [j, k] is subtracted from column k > j.
        rows: (rows, rows): the error of row i times [i, k] is subtracted from row k of a later block; (0, 0) without
            feedback to rows.
        column_weight, row_weight: Fisher information that remains of each, in the order of the matrix.
        feeds_columns: whether errors are fed to later columns.
    """

    order: NDArray[np.int64]
    columns: Matrix
    rows: Matrix
    column_weight: NDArray[np.float64]
    row_weight: NDArray[np.float64]
    feeds_columns: bool

    def energy(self, matrix: Matrix) -> NDArray[np.float64]:
        """Return w H wᵀ of each row w, (rows, columns) → (rows,): the cost of setting the row to zero."""
        # H = C⁻¹ D C⁻ᵀ with C = `columns`, which is unit triangular, and D the pivots, which are the column weights: so
        # w H wᵀ is a weighted sum of squares after one triangular solve.
        unit = torch.from_numpy(self.columns.T.astype(np.float64))
        ordered = torch.from_numpy(matrix[:, self.order].T.astype(np.float64))
        parts = torch.linalg.solve_triangular(unit, ordered, upper=False, unitriangular=True).numpy()
        return np.asarray((parts**2 * self.column_weight[self.order, None]).sum(0))


def feedback(sensitivity: Sensitivity | None, rows: int, columns: int, *, output: bool = True) -> Feedback:
    """Return the factors for a matrix (rows, columns); without sensitivity nothing is fed back and all weights are 1.

    Args:
        sensitivity: of the matrix.
        rows, columns: shape of the matrix.
        output: whether errors are fed back to rows too, if the output covariance is known.

    Raises:
        WeightsError: the sensitivity has another shape or is not finite.
    """
    order, column_factors, column_weight = (
        np.arange(columns),
        np.zeros((columns, columns), np.float32),
        np.ones(columns),
    )
    row_factors, row_weight = np.zeros((0, 0), np.float32), np.ones(rows)
    hessian = None if sensitivity is None else sensitivity.hessian
    fisher = None if sensitivity is None else sensitivity.row_fisher
    if hessian is not None:
        matrix = _checked(hessian.double().numpy(), (columns, columns), "Hessian")
        # Columns with the largest inputs first: their errors still find many columns that can compensate them.
        order = np.argsort(-matrix.diagonal(), kind="stable")
        lower = _inverse_root(matrix[np.ix_(order, order)], INPUT_DAMPING)
        # GPTQ's update: with H⁻¹ = L Lᵀ, column k > j moves by the error of j times L[k, j] / L[j, j], and the weight
        # that remains on column j is the pivot 1 / L[j, j]².
        column_factors = (lower / lower.diagonal()).T.astype(np.float32)
        column_weight = np.empty(columns)
        column_weight[order] = lower.diagonal() ** -2.0
    if fisher is not None:
        row_weight = _checked(fisher.double().numpy(), (rows,), "row Fisher")
        row_weight = np.maximum(row_weight, FLOOR * row_weight.mean())
        if not row_weight.any():
            row_weight = np.ones(rows)
    if sensitivity is not None and sensitivity.output is not None and output and rows > BLOCK:
        matrix = _checked(sensitivity.output.double().numpy(), (rows, rows), "output covariance")
        row_factors, row_weight = _blocks(_inverse_root(matrix, OUTPUT_DAMPING))
    return Feedback(order, column_factors, row_factors, column_weight, row_weight, hessian is not None)


def _checked(values: NDArray[np.float64], shape: tuple[int, ...], kind: str) -> NDArray[np.float64]:
    if values.shape != shape or not np.isfinite(values).all():
        raise WeightsError(
            f"a {kind} of shape {values.shape} is not finite or not of shape {shape}; calibrate this model again"
        )
    return values


def _inverse_root(matrix: NDArray[np.float64], damping: float) -> NDArray[np.float64]:
    """Return the lower triangular L with matrix⁻¹ = L Lᵀ; the damping grows until the factorization succeeds."""
    mean = float(matrix.diagonal().mean())
    if mean <= 0:
        return np.eye(len(matrix))
    identity = torch.eye(len(matrix), dtype=torch.float64)
    for attempt in range(_ATTEMPTS):
        damped = torch.from_numpy(matrix) + identity * (mean * damping * 10.0**attempt)
        # With the reversed matrix = R Rᵀ, R reversed is the upper triangular U of matrix = U Uᵀ, so matrix⁻¹ = U⁻ᵀ U⁻¹
        # and L = U⁻ᵀ. This needs one Cholesky factorization and one solve, and never forms the inverse.
        root, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            return np.asarray(torch.linalg.solve_triangular(root.flip(0, 1), identity, upper=True).T.contiguous())
    return np.diag(np.maximum(matrix.diagonal(), FLOOR * mean) ** -0.5)


def _blocks(lower: NDArray[np.float64]) -> tuple[Matrix, NDArray[np.float64]]:
    """Return the coefficients from each block of rows to the rows after it, and the weight that remains of each row.

    A block version of the factors of columns: within a block the trellis needs all rows at once, so errors are only fed
    from a block to later ones, and the block of L takes the part of the pivot.
    """
    rows = len(lower)
    coefficients, weight = np.zeros((rows, rows), np.float32), np.empty(rows)
    for start in range(0, rows, BLOCK):
        block = slice(start, min(start + BLOCK, rows))
        inverse = np.linalg.inv(lower[block, block])
        weight[block] = (inverse**2).sum(0)
        coefficients[block, block.stop :] = (lower[block.stop :, block] @ inverse).T
    return coefficients, weight
