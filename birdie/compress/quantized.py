"""Policy for weights that are quantized already and kept as floats: exact wherever that takes no more bytes.

Rounding such weights to another grid would lose what they have, at the same size. The control is the size itself.
"""

from torch import Tensor

from birdie.compress.coding import code
from birdie.compress.row_blocks import as_matrix, row_blocks
from birdie.compress.scheme import Encoded, Scheme
from birdie.compress.schemes.lossless import in_levels
from birdie.compress.tensors import count_reals, has_nonfinite


def is_smaller_exact(weight: Tensor, scheme: Scheme) -> bool:
    """Return whether a tensor is seen to be quantized, and its levels take no more bytes than `scheme` takes."""
    part = _first_block(weight)
    levels = _levels(part)
    return levels is not None and _size(levels) <= _size(scheme.encode("", part))


def fits_exact(weight: Tensor, bits: float) -> bool:
    """Return whether a tensor is seen to be quantized, and its levels take at most so many bits a weight."""
    part = _first_block(weight)
    levels = _levels(part)
    return levels is not None and 8 * _size(levels) <= bits * count_reals(part)


def _levels(weight: Tensor) -> Encoded | None:
    levels = in_levels(weight)
    return None if levels is None or has_nonfinite(weight) else levels  # weights that are not finite are refused


def _first_block(weight: Tensor) -> Tensor:
    """Return the first of the blocks of rows that are encoded: it stands for all."""
    matrix = as_matrix(weight)
    return matrix[row_blocks(matrix)[0]] if matrix.ndim else matrix


def _size(encoded: Encoded) -> int:
    return code(encoded, "fast").bytes
