"""Stacks of matrices: tensors (matrices, rows, columns), such as the experts of a layer, encoded as one tall matrix.

    (experts, out, in) ──as_matrix──► (experts · out, in) ──► rows with scales of their own ──► file, with the shape

Rows of a convolution are its output channels, with all inputs and taps of each. In a stack, that would make one row of
a complete expert, with a single scale. Three dimensions can be either, so the sizes decide: a convolution has far fewer
taps than `_LEAST`, and rarely more inputs than outputs. Calibration knows more: the rows of its sensitivity decide.
"""

from torch import Tensor

from birdie.compress.scheme import Sensitivity

_LEAST = 64  # rows and columns of a matrix in a stack
_LEAST_USED = 8  # columns of one that is known not to be a convolution


def is_stack(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of `shape` is a stack of matrices; a table (1, positions, features) is a stack of one."""
    if len(shape) != 3 or shape[2] < _LEAST:
        return False
    count, rows, _ = shape
    return rows > 1 if count == 1 else rows >= max(_LEAST, 2 * count)


def as_matrix(weight: Tensor) -> Tensor:
    """Return a stack of matrices as the matrix of all their rows; any other tensor as it is."""
    return weight.flatten(0, 1) if is_stack(tuple(weight.shape)) else weight


def used_as_matrix(weight: Tensor) -> Tensor:
    """Return a weight that no convolution uses as the matrix of all rows of its stack, or as it is.

    Where the first dimension is long, it is that of inputs or outputs, and the two others belong together.
    """
    if weight.ndim != 3 or weight.shape[2] < _LEAST_USED:
        return weight
    count, rows, _ = weight.shape
    return weight.flatten(0, 1) if (rows > 1 if count == 1 else rows >= 2 * count) else weight


def with_rows(weight: Tensor, sensitivity: Sensitivity | None) -> Tensor:
    """Return a weight as the matrix that its sensitivity is of."""
    if weight.ndim != 3 or weight.shape[1] == 1 or sensitivity is None or sensitivity.row_fisher is None:
        return weight
    count, rows, _ = weight.shape
    return weight.flatten(0, 1) if len(sensitivity.row_fisher) == count * rows else weight
