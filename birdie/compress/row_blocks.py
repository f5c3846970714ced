"""Blocks of rows: large tensors, stacks of matrices and flat vectors are encoded in parts.

A block of a large tensor takes little memory. A stack is a tensor (matrices, rows, columns), such as the experts of a
layer. It is encoded as one tall matrix, and its matrices differ in the scales of their columns, so the coder learns
those of each from the beginning:

    (experts, out, in) ──as_matrix──► (experts · out, in) ──► rows with scales of their own ──► file, with the shape

Rows of a convolution are its output channels, with all inputs and taps of each. In a stack, that would make one row of
a complete expert, with a single scale. Three dimensions can be either, so the sizes decide: a convolution has far fewer
taps than `_LEAST`, and rarely more inputs than outputs. Calibration knows more: the rows of its sensitivity decide.

A long vector, in which sharded training keeps layers of different sizes one after the other, is encoded as rows of
`ROW` elements with scales of their own, and what is left over:

    (n,) ──folded──► (n // ROW, ROW), (n mod ROW,)
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.scheme import Sensitivity
from birdie.compress.tensors import finite_rows, row_sums, rows_columns
from birdie.entropy.rans_tiles import height as tile_rows
from birdie.entropy.trellis_states import chunk_rows
from birdie.system.mapped import release

_LEAST = 64  # rows and columns of a matrix in a stack
# Elements of a vector that share a scale. Rows of 64 take 2 % more bytes by default; of 256 they save 1.5 %, and a
# layer that begins or ends within a row loses half as much again.
ROW = 128
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


def folded(vector: Tensor) -> Tensor:
    """Return a vector as a matrix of rows of `ROW` elements, without what is left over."""
    return vector[: len(vector) // ROW * ROW].view(-1, ROW)


def with_rows(weight: Tensor, sensitivity: Sensitivity | None) -> Tensor:
    """Return a weight as the matrix that its sensitivity is of."""
    if weight.ndim != 3 or weight.shape[1] == 1 or sensitivity is None or sensitivity.row_fisher is None:
        return weight
    count, rows, _ = weight.shape
    return weight.flatten(0, 1) if len(sensitivity.row_fisher) == count * rows else weight


LARGE = 1 << 25  # elements of a tensor above which it is encoded in blocks
_BLOCK = 1 << 24  # elements of a block, about
_APART = 2.0**32  # energies of a typical row that a row has which tells nothing about the others
_MATRICES = 1 << 15  # elements of a block of complete matrices, at least: a smaller block does not pay for its header


def row_blocks(weight: Tensor) -> list[slice]:
    """Return the parts of the first dimension in which a tensor is encoded; one if it is not large.

    A block has whole tiles of the coder, at whose ends paths through a trellis begin anew in any case, and the last one
    is not much smaller than others: few rows would not be worth tiles.
    """
    rows, columns = rows_columns(tuple(weight.shape))
    if weight.ndim < 2 or weight.numel() <= LARGE:
        return [slice(None)]
    tile = next((tile for tile in (tile_rows(columns), chunk_rows(columns)) if tile * columns <= _BLOCK), 1)
    height = max(1, _BLOCK // columns // tile) * tile
    starts = range(0, max(1, rows - height // 2), height)
    return [slice(start, rows if start == starts[-1] else start + height) for start in starts]


def encoded_blocks(weight: Tensor, shape: tuple[int, ...], *, by_rows: bool) -> list[slice]:
    """Return the parts of the rows in which a tensor is encoded: the matrices of a stack, and parts of large ones.

    Args:
        weight: the tensor; a stack as one matrix (`as_matrix`).
        by_rows: whether rows are encoded without regard to others, so that large tensors are cut; vectors likewise.
    """
    if weight.ndim == 1 and weight.numel() > LARGE and by_rows:  # as optimizers and sharded models keep them
        return [slice(start, start + _BLOCK) for start in range(0, weight.numel(), _BLOCK)]
    if weight.ndim == len(shape) or len(shape) < 2:
        return row_blocks(weight) if by_rows else [slice(None)]
    height = shape[1] * max(1, -(-_MATRICES // (shape[1] * shape[2])))
    parts = [slice(start, min(start + height, len(weight))) for start in range(0, len(weight), height)]
    if not by_rows:
        return parts
    cuts = ((part, cut) for part in parts for cut in row_blocks(weight[part]))
    return [part if cut == slice(None) else slice(part.start + cut.start, part.start + cut.stop) for part, cut in cuts]


def blocks(name: str, weight: Tensor) -> Iterator[NDArray[np.float32]]:
    """Yield the numbers of each block of rows, (rows, columns); its pages of a mapped file are released afterwards."""
    for rows in row_blocks(weight):
        block = weight[rows] if weight.ndim else weight
        yield finite_rows(name, block)
        release(block)


def every_nth_row(weight: Tensor, first: int, n: int) -> Tensor:
    """Return a copy of rows `first`, `first` + n, …, `first` below n; pages are released as by `blocks`."""
    parts = []
    for rows in row_blocks(weight):
        block = weight[rows]
        parts.append(block[(first - (rows.start or 0)) % n :: n].clone())
        release(block)
    return torch.cat(parts)


def deviation(parts: Iterable[NDArray[np.float32]]) -> float:
    """Return the standard deviation of all numbers of parts of a matrix, which is not empty, but for rows far above."""
    sums, squares, widths = (
        np.concatenate(values)
        for values in zip(*((*row_sums(part), np.full(len(part), part.shape[1])) for part in parts), strict=True)
    )
    typical = float(np.median(squares[squares > 0])) if squares.any() else 0.0
    near = squares <= _APART * typical
    count = int(widths[near].sum())
    return math.sqrt(max(float(squares[near].sum()) / count - (float(sums[near].sum()) / count) ** 2, 0.0))
