"""Error feedback on both sides of a matrix: triangular factors of the input Hessian and of the output covariance.

Quantizing W to W − E costs about ½ tr(G E H Eᵀ), H = mean x xᵀ of the inputs, G = Σ g gᵀ of the output gradients. When
a column is quantized and the columns not yet quantized move to compensate its error, the pivot of H's LDL factorization
is all that remains of H's weight on that column (GPTQ: Frantar et al. 2022, arXiv 2210.17323). That is Babai's nearest
plane algorithm for the lattice of grid points under the norm of H, columns in the order of quantization (Chen et al.
2025, arXiv 2507.18553). The same holds for rows under G; feedback on both sides: Tseng et al. 2025, arXiv 2505.22988.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.compress.scheme import Sensitivity, TapCovariance
from birdie.errors import WeightsError

BLOCK = 32  # rows that a trellis path runs through before its errors are fed back
# Added to the diagonal, as a share of its mean: calibration sees few samples, so small eigenvalues are underestimated.
INPUT_DAMPING, OUTPUT_DAMPING = 0.01, 0.1
FLOOR = 1e-3  # smallest Fisher information of a row, as a share of the mean
_ATTEMPTS = 5

Matrix = NDArray[np.float32]


class ColumnBlock(NamedTuple):
    """Feedback among some columns, by any Hessian."""

    # (columns, columns), upper triangular with ones on the diagonal: the error of column j times [j, k] is subtracted
    # from column k > j
    coefficients: Matrix
    pivots: NDArray[np.float64]  # (columns,), what remains of the Hessian's weight on each column


@dataclass(frozen=True, slots=True)
class BlockFeedback:
    """Feedback within blocks of columns, one block after the other; between blocks the inputs do not correlate.

    Columns are counted in the order of quantization.
    """

    blocks: tuple[ColumnBlock, ...]

    def within(self, part: slice) -> Matrix:
        """Return the coefficients (j, k) among the columns of `part`; entries k ≤ j are not used."""
        out = np.zeros((part.stop - part.start,) * 2, np.float32)
        for block, _, local, inside in self._parts(part):
            out[inside, inside] = block.coefficients[local, local]
        return out

    def apply(self, left: Matrix, part: slice, errors: Matrix) -> None:
        """Subtract from all columns after `part` in `left` (columns, rows) what `errors` (part, rows) ask for."""
        for block, columns, local, inside in self._parts(part):
            if local.stop < len(block.pivots):
                left[columns][local.stop :] -= block.coefficients[local, local.stop :].T @ errors[inside]

    def energy(self, matrix: Matrix) -> NDArray[np.float64]:
        """Return w H wᵀ of each row w, (rows, columns) → (rows,).

        By the factors H = C⁻¹ D C⁻ᵀ of each block: a weighted sum of squares after one triangular solve.
        """
        total = np.zeros(len(matrix))
        for block, columns, _, _ in self._parts(slice(0, matrix.shape[1])):
            unit, ordered = (
                torch.from_numpy(part.T.astype(np.float64)) for part in (block.coefficients, matrix[:, columns])
            )
            parts = torch.linalg.solve_triangular(unit, ordered, upper=False, unitriangular=True).numpy()
            total += (parts**2 * block.pivots[:, None]).sum(0)
        return total

    def _parts(self, part: slice) -> Iterator[tuple[ColumnBlock, slice, slice, slice]]:
        """Yield (block, its columns, those of `part` within the block, the same within `part`)."""
        start = 0
        for block in self.blocks:
            stop = start + len(block.pivots)
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                local, inside = slice(first - start, last - start), slice(first - part.start, last - part.start)
                yield block, slice(start, stop), local, inside
            start = stop


@dataclass(frozen=True, slots=True)
class TapFeedback:
    """Feedback by a `TapCovariance`, without a matrix of all columns: dense in a channel, of rank one between channels.

    Let c be the shared part, and column j tap t of a channel that m channels follow. If the columns after it are free,
    they move by −H_FF⁻¹ H_Fj, where H_FF is block diagonal plus c 1 1ᵀ. By Sherman and Morrison, with β the regression
    of tap t on the later taps of its channel, α = T⁻¹ 1 of these, τ = T⁻¹ 1 of a whole channel,
    σ = 1ᵀα + m 1ᵀτ and g = c (1 − 1ᵀβ) / (1 + c σ), the later taps move by −(β + g α) and later channels by −g τ. What
    remains of H's weight on column j is the pivot of T plus g (1 − 1ᵀβ). Columns of other scales are brought to one
    before, and back after.
    """

    covariance: TapCovariance  # of the inputs, damped
    # beta, alpha: (taps, taps), row t, column of a later tap; zeros elsewhere
    beta: NDArray[np.float64]
    alpha: NDArray[np.float64]
    tau: NDArray[np.float64]  # (taps,)
    gain: NDArray[np.float64]  # (columns,), g
    scales: NDArray[np.float64]  # (columns,), roots of the power of columns

    @classmethod
    def of(cls, covariance: TapCovariance, columns: int) -> "tuple[TapFeedback, NDArray[np.float64]]":
        """Return the feedback and the pivots (columns,)."""
        taps, c = covariance.taps, covariance.shared
        lower = _inverse_root(taps, 0.0)
        count, ones = len(taps), np.ones(len(taps))
        beta = -np.tril(lower / lower.diagonal(), -1).T
        # The inverse of a trailing block of T is the product of the trailing block of L with its transpose.
        alpha = np.zeros_like(beta)
        for tap in range(count - 1):
            rest = lower[tap + 1 :, tap + 1 :]
            alpha[tap, tap + 1 :] = rest @ rest.sum(0)
        tau = lower @ (lower.T @ ones)
        unexplained = 1 - beta.sum(1)
        following = np.arange(columns // count)[::-1, None]
        gain = c * unexplained / (1 + c * (alpha.sum(1) + following * tau.sum()))
        pivots = lower.diagonal() ** -2.0 + gain * unexplained
        power = np.ones(columns) if covariance.power is None else covariance.power
        return cls(covariance, beta, alpha, tau, gain.reshape(-1), power**0.5), pivots.reshape(-1) * power

    def within(self, part: slice) -> Matrix:
        """Return a block of the matrix of all coefficients."""
        return self._between(part, part, self.scales[part])

    def apply(self, left: Matrix, part: slice, errors: Matrix) -> None:
        """Subtract a matrix product from the rest of the last channel, and a product of two vectors from later ones."""
        taps = len(self.tau)
        end = min(-(-part.stop // taps) * taps, len(left))  # of the channel
        if part.stop < end:
            rest = slice(part.stop, end)
            left[rest] -= self._between(part, rest, self.scales[rest]).T @ errors
        if end < len(left) and self.covariance.shared:
            moved = (self.gain[part] * self.scales[part]).astype(np.float32) @ errors
            later = left[end:].reshape(-1, taps, left.shape[1])
            later += (self.tau[:, None] / self.scales[end:].reshape(-1, taps, 1)).astype(np.float32) * moved

    def energy(self, matrix: Matrix) -> NDArray[np.float64]:
        """Return it channel by channel."""
        taps = len(self.tau)
        scaled = matrix.astype(np.float64) * self.scales
        by_channel = scaled.reshape(len(matrix), matrix.shape[1] // taps, taps)
        same = ((by_channel @ self.covariance.taps) * by_channel).sum((1, 2))
        return np.asarray(same + self.covariance.shared * by_channel.sum((1, 2)) ** 2)

    def _between(self, first: slice, second: slice, scales: NDArray[np.float64]) -> Matrix:
        """Return the coefficients from the columns of `first` to later ones of `second`, whose scales are `scales`."""
        channels, taps = zip(
            *(divmod(np.arange(part.start, part.stop), len(self.tau)) for part in (first, second)), strict=True
        )
        gain = self.gain[first, None]
        same = self.beta[np.ix_(*taps)] + gain * self.alpha[np.ix_(*taps)]
        between = -np.where(channels[0][:, None] == channels[1], same, gain * self.tau[taps[1]])
        return np.asarray(between * self.scales[first, None] / scales, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Feedback:
    """Coefficients of error feedback, and the weights of rows and columns that remain after it."""

    order: NDArray[np.int64]  # columns in the order of quantization
    # feedback from column to column, in that order; None for inputs that do not correlate
    columns: BlockFeedback | TapFeedback | None
    # (rows, rows): the error of row i times [i, k] is subtracted from row k of a later block; (0, 0) without feedback
    # to rows
    rows: Matrix
    # column_weight, row_weight: Fisher information that remains of each, in the order of the matrix
    column_weight: NDArray[np.float64]
    row_weight: NDArray[np.float64]
    # (columns,) scales of columns that are taken to be alike but for these; None: all are of one scale
    equal: NDArray[np.float64] | None = None
    at_large: bool = False  # as of `Sensitivity`
    # whether a path of the trellis runs along the rows, and `order`, `columns` and `rows` are those of the transpose
    along: bool = False

    def of_rows(self, rows: slice) -> "Feedback":
        """Return the factors of some rows of a matrix without feedback to rows."""
        return self if rows == slice(None) else replace(self, row_weight=self.row_weight[rows])

    @property
    def feeds(self) -> bool:
        """Return whether errors are fed to later columns or rows."""
        return self.columns is not None or self.rows.size > 0

    def energy(self, matrix: Matrix) -> NDArray[np.float64]:
        """Return w H wᵀ of each row w, (outputs, inputs) → (outputs,): the cost of setting the row to zero."""
        if self.columns is None:
            return np.asarray(matrix.astype(np.float64) ** 2 @ self.column_weight)
        return self.columns.energy(matrix[:, self.order])


def feedback(sensitivity: Sensitivity | None, rows: int, columns: int, *, output: bool = True) -> Feedback:
    """Return the factors for a matrix (rows, columns); without sensitivity nothing is fed back and all weights are 1.

    Args:
        rows, columns: shape of the matrix.
        output: whether errors are fed back to rows too, if the output covariance is known.
    """
    by_column: BlockFeedback | TapFeedback | None = None
    order, column_weight = np.arange(columns), np.ones(columns)
    row_factors, row_weight = np.zeros((0, 0), np.float32), np.ones(rows)
    known = Sensitivity() if sensitivity is None else sensitivity
    if known.rows_are_inputs and known.output is not None and rows > 1:
        return _along_rows(known, rows, columns, output=output)
    if known.hessian is not None:
        block, order = _block(_checked(known.hessian.double().numpy(), (columns, columns), "Hessian"))
        by_column = BlockFeedback((block,))
        column_weight[order] = block.pivots
    elif known.blocks is not None:
        _checked(known.blocks.diagonal().double().numpy(), (columns,), "Hessian's diagonal")
        parts = [_block(_checked(block.double().numpy(), block.shape, "Hessian")) for block in known.blocks.blocks]
        order = np.concatenate(
            [members.numpy()[part] for members, (_, part) in zip(known.blocks.columns, parts, strict=True)]
        )
        by_column = BlockFeedback(tuple(block for block, _ in parts))
        column_weight[order] = np.concatenate([block.pivots for block, _ in parts])
    elif known.taps is not None and known.taps.correlates:
        by_column, column_weight = TapFeedback.of(known.taps, columns)
    elif known.taps is not None:
        column_weight = known.taps.diagonal(columns)
    if known.row_fisher is not None:
        row_weight = _checked(known.row_fisher.double().numpy(), (rows,), "row Fisher")
        # What is assumed of a row far below or above the others is meant.
        floored = known.is_measured or row_weight == 0
        row_weight = np.where(floored, np.maximum(row_weight, FLOOR * row_weight.mean()), row_weight)
        if not row_weight.any():
            row_weight = np.ones(rows)
    if known.output is not None and output and rows > BLOCK:
        matrix = _checked(known.output.double().numpy(), (rows, rows), "output covariance")
        row_factors, row_weight = _blocks(
            _inverse_root(matrix, INPUT_DAMPING if known.rows_have_inputs else OUTPUT_DAMPING)
        )
    power = None if known.taps is None else known.taps.power
    equal = None if power is None else power**-0.5
    return Feedback(order, by_column, row_factors, column_weight, row_weight, equal, known.at_large)


def _along_rows(known: Sensitivity, rows: int, columns: int, *, output: bool) -> Feedback:
    """Return the factors of a matrix (inputs, outputs): those of its transpose, but in the order in which rows lie."""
    assert known.output is not None
    lower = _inverse_root(_checked(known.output.double().numpy(), (rows, rows), "Hessian"), INPUT_DAMPING)
    by_input = ColumnBlock((lower / lower.diagonal()).T.astype(np.float32), lower.diagonal() ** -2.0)
    factors, weight = np.zeros((0, 0), np.float32), np.ones(columns)
    if known.hessian is not None and output and columns > BLOCK:
        matrix = _checked(known.hessian.double().numpy(), (columns, columns), "output covariance")
        factors, weight = _blocks(_inverse_root(matrix, OUTPUT_DAMPING))
    elif (part := known.blocks if known.hessian is None else known.hessian) is not None:
        weight = _checked(part.diagonal().double().numpy(), (columns,), "output covariance's diagonal")
        weight = np.maximum(weight, FLOOR * weight.mean()) if weight.any() else np.ones(columns)
    columns_of_transpose = BlockFeedback((by_input,))
    return Feedback(
        *(np.arange(rows), columns_of_transpose, factors, weight, by_input.pivots), at_large=known.at_large, along=True
    )


def _block(matrix: NDArray[np.float64]) -> tuple[ColumnBlock, NDArray[np.int64]]:
    """Return the feedback by a Hessian, and the order of its columns.

    Columns with the largest inputs are first: their errors still find many columns that can compensate them.
    """
    order = np.argsort(-matrix.diagonal(), kind="stable")
    lower = _inverse_root(matrix[np.ix_(order, order)], INPUT_DAMPING)
    # GPTQ's update: with H⁻¹ = L Lᵀ, column k > j moves by the error of j times L[k, j] / L[j, j], and the weight that
    # remains on column j is the pivot 1 / L[j, j]².
    return ColumnBlock((lower / lower.diagonal()).T.astype(np.float32), lower.diagonal() ** -2.0), order


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
    identity = torch.eye(len(matrix), dtype=torch.float64, device="cpu")
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
