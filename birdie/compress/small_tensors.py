"""Policy for small tensors: which tensors are worth quantizing, and how the others are stored, for every scheme.

Matrices of a few thousand weights and up gain from a quantizer. Smaller tensors (norms, biases, gains) cost few bytes
and affect the loss strongly, so they are kept in 16 bits, or losslessly where 16 bits are not precise enough, and where
that costs next to nothing: a bias may as well be the phase of a recurrent unit, which grows with every step. Tensors
that are no weights never come here: birdie.compress.exact.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from birdie.compress.scheme import Scheme
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import REAL_DTYPES, has_nonfinite, parts, planes

SMALL = 4096  # elements below which a tensor is not worth quantizing by a scheme of any precision
SMALL_DEFAULT = 1024  # elements below which a matrix is not worth the default's eight bits
SHORT_ROW = 2  # columns below which a quantized row and its scale are no smaller than 16 bits per weight
FAR = 32.0  # magnitude from which 16 bits are too coarse for a vector: float16 has steps of 1/32 there
LEAST_SIDE = 8  # rows and columns below which a matrix rather is some vectors
LEAST_SEARCHED = 256  # elements below which a matrix in 16 bits costs less than its scales and name, about


# Bytes of a file for each that vectors may take beyond 16 bits, and bytes that they may take in any case: parameters of
# layers, and vectors that may be none. Up to a fraction of a small file (1/8).
_NOTHING, _LITTLE, _OF_SMALL = (1000, 256), (200, 1024), 8
_WINDOW, _WINDOWS = 64, 1 << 10  # elements of a part of a vector, and parts, by which it is smooth or not
_SMOOTH = 0.5  # mean square of steps in variances up to which neighbors are alike; of unrelated numbers it is 2


def flat_vectors(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of vectors that hold weights of layers one after the other, as sharded training keeps them.

    Biases and norms are as long as a side of a matrix; windows, tables and signals are smooth.
    """
    floats = [planes(tensor) for tensor in tensors.values() if tensor.ndim > 1]
    sides = {size for tensor in floats if tensor.dtype in REAL_DTYPES for size in tensor.shape[:2]}
    return frozenset(
        name
        for name, tensor in tensors.items()
        if tensor.ndim == 1
        and len(tensor) not in sides
        and can_quantize(flat := planes(tensor))
        and not _is_smooth(flat)
    )


def _is_smooth(vector: Tensor) -> bool:
    """Return whether neighbors in a vector are alike, or all the same."""
    windows = vector.detach()[: len(vector) // _WINDOW * _WINDOW].view(-1, _WINDOW)
    some = windows[:: max(1, len(windows) // _WINDOWS)].double()
    spread, steps = some.var(dim=1, correction=0), some.diff(dim=1).square().mean(dim=1)
    varied = spread > 0
    return not bool(varied.any()) or bool((steps[varied] / spread[varied]).median() < _SMOOTH)


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


def kept_precisely(
    vectors: Mapping[str, Tensor], file_bytes: int, *, doubtful: bool = False, taken: int = 0
) -> frozenset[str]:
    """Return the names of vectors to keep losslessly in place of 16 bits, those that these change most first.

    Args:
        vectors: name → tensor.
        file_bytes: size of the file, about.
        doubtful: whether the vectors may be frequencies or phases as well as parameters of layers.
        taken: bytes beyond 16 bits that others took.
    """
    part, least = _LITTLE if doubtful else _NOTHING
    room = max(file_bytes // part, min(least, file_bytes // _OF_SMALL)) - taken
    changes = {name: _change(planes(tensor)) for name, tensor in vectors.items() if _is_wide(tensor)}
    kept = set()
    for name in sorted(changes, key=lambda name: (-changes[name], name)):
        extra = beyond_16_bits(vectors[name])
        if changes[name] > 0 and extra <= room:
            kept.add(name)
            room -= extra
    return frozenset(kept)


def beyond_16_bits(weight: Tensor) -> int:
    """Return the bytes that a tensor takes beyond 16 bits an element."""
    return weight.numel() * (weight.itemsize - 2)


def _change(vector: Tensor) -> float:
    return float((vector.detach() - vector.detach().half()).abs().max())


def _is_wide(weight: Tensor) -> bool:
    """Return whether a tensor is a vector of more than 16 bits, of any number of dimensions of one element."""
    return planes(weight[:0]).itemsize > 2 and weight.numel() > 0 and sum(size > 1 for size in weight.shape) < 2


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
