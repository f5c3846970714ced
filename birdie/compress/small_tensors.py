"""Policy for small tensors: which tensors are worth quantizing, and how the others are stored, for every scheme.

Matrices of a few thousand weights and up gain from a quantizer. Smaller tensors (norms, biases, gains) cost few bytes
and affect the loss strongly, so they are kept in 16 bits, or losslessly where 16 bits are not precise enough. Tensors
that are no weights never come here: birdie.compress.exact.
"""

import torch
from torch import Tensor

from birdie.compress.scheme import Scheme
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import REAL_DTYPES, has_nonfinite, parts

SMALL = 4096  # elements below which a tensor is not worth quantizing by a scheme of any precision
SMALL_DEFAULT = 1024  # elements below which a matrix is not worth the default's eight bits
SHORT_ROW = 2  # columns below which a quantized row and its scale are no smaller than 16 bits per weight
FAR = 32.0  # magnitude from which 16 bits are too coarse for a vector: float16 has steps of 1/32 there
LEAST_SIDE = 8  # rows and columns below which a matrix rather is some vectors
LEAST_SEARCHED = 256  # elements below which a matrix in 16 bits costs less than its scales and name, about


def is_matrix(weight: Tensor) -> bool:
    """Return whether `weight` is a real floating tensor of two or more dimensions and at least `SMALL` elements."""
    return weight.dtype in REAL_DTYPES and weight.ndim >= 2 and weight.numel() >= SMALL


def can_quantize(weight: Tensor) -> bool:
    """Return whether a quantizer can gain: True for matrices of real floats, and vectors of at least `SMALL`."""
    return weight.dtype in REAL_DTYPES and (weight.numel() > 0 if weight.ndim >= 2 else weight.numel() >= SMALL)


def small_scheme(weight: Tensor) -> Scheme:
    """Return the scheme of a small tensor: float16 where that keeps about ten bits of every value, else lossless.

    Integers stay as they are, and so does a tensor with a value that float16 cannot reach or would make zero or
    subnormal: a variance of 1e-9 counts, however large its neighbors are. Nor do values of `FAR` and more, such as
    energies, whose absolute error counts.
    """
    if weight.dtype not in REAL_DTYPES:
        return Lossless()
    if weight.dtype.itemsize == 2 or all(map(_fits_float16, parts(weight))):
        return Cast()
    return Cast() if has_nonfinite(weight) else Lossless()  # a cast refuses what is not finite


def _fits_float16(weight: Tensor) -> bool:
    rounded = weight.to(torch.float16).abs()
    normal = (rounded >= torch.finfo(torch.float16).tiny) & (rounded < FAR)
    return bool((normal | (weight == 0)).all())


def applicable(scheme: Scheme, weight: Tensor) -> Scheme:
    """Return `scheme` if it can store `weight`, else the most similar scheme that can."""
    if not scheme.quantizes:
        return scheme if weight.dtype in REAL_DTYPES else Lossless()
    return scheme if can_quantize(weight) else small_scheme(weight)


def default_scheme(scheme: Scheme, weight: Tensor) -> Scheme:
    """Return the scheme of a tensor without a rule where `scheme` is the default: small tensors stay precise."""
    if scheme.quantizes and not is_matrix(weight):
        return small_scheme(weight)
    return applicable(scheme, weight)


def in_eight_bits(scheme: Scheme, weight: Tensor) -> Scheme:
    """Return `scheme`, of eight bits, for matrices that are not tiny, and else the scheme of small tensors."""
    worth = weight.ndim >= 2 and weight.numel() >= SMALL_DEFAULT and shrinks(weight)
    return scheme if worth else small_scheme(weight)


def is_worth_coarsening(weight: Tensor) -> bool:
    """Return whether a search may coarsen `weight`: matrices, but for tiny ones and gates."""
    if is_gate(weight):
        return False
    return is_matrix(weight) or (weight.ndim >= 2 and weight.numel() >= LEAST_SEARCHED and shrinks(weight))


def is_gate(weight: Tensor) -> bool:
    """Return whether a matrix has few rows or columns: such matrices mix or gate streams, element by element.

    An error of theirs is one of every channel that they scale, at every layer that follows. Dimensions of one element
    do not count.
    """
    sides = [side for side in weight.shape if side != 1]
    return weight.ndim > 1 and (len(sides) < 2 or (len(sides) == 2 and min(sides) < LEAST_SIDE))


def shrinks(weight: Tensor) -> bool:
    """Return whether a grid stores `weight` in less than 16 bits: not if rows are so short that scales dominate."""
    rows = weight.shape[0] if weight.ndim >= 2 else 1
    return can_quantize(weight) and weight.numel() // rows >= SHORT_ROW
