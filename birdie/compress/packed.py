"""Modules that another method quantized: which floats beside their integers are scales, zeros and codebooks.

Such a module has no float weights of its own: its large matrix holds codes, integers or 8-bit floats, and what is float
in the module or below it tells what they stand for. An error of a scale is one of all weights of its group at once, so
these keep every bit, of any dtype and shape, finite or not. An integer tensor may as well be a mask, a table of
positions or a graph beside weights; neither names nor dtypes tell, but

- codes are noise: their order matters little to a compressor, that of a mask or a table much;
- codes use the bits of their dtype, or most values of a codebook; indices of rows, edges and nodes do not;
- of scales there are few: no more than half as many as the bytes of information in the codes;
- a codebook has as many entries as there are different codes;
- an ordinary layer below the module, a matrix with a bias, makes the module a network and the integers its table.

    q_proj.qweight   int32   ─► codes of q_proj      encoder.mask    uint8  ─► a table
    q_proj.scales    float16 ─► exact                encoder.weight  float  ─► a weight
    q_proj.lora_A.weight, q_proj.lora_B.weight       ─► weights: two matrices that share a small side
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from birdie.compress.tensors import REAL_DTYPES

_LEAST = 64  # elements below which integers are no matrix of codes
_SAMPLE = 1 << 12  # elements next to one another that are looked at, and about as many of all
_ORDERED = 0.7  # of the deflated bytes of the same elements in random order: below, their order tells something
_SCALES = 2  # information of the codes in bytes for each scale
# The same where the bits of the dtype are not used, of vectors and of matrices beside codes of more than eight bits.
_TABLE_SCALES, _TABLE_MATRICES = 8, 32
_FLAT = 4  # numbers of a codebook that is one row for each byte of information
_WIDEST, _WIDEST_OF_ALL = 16, 64  # numbers of an entry of a codebook, and of all codebooks of a matrix together
_SHAPES = 2  # different shapes that matrices of one module have at most
_SIDE = 8  # rows and columns from which floats are a matrix


@dataclass(frozen=True, slots=True)
class _Codes:
    """A matrix of codes."""

    information: float  # bytes that the codes can tell
    values: int  # different codes that there can be, about
    count: int  # of the codes
    fills: bool  # whether they use the bits of their dtype, as packed codes do, or are 8-bit floats


def packed_names(tensors: Mapping[str, Tensor], trained: Collection[str] = ()) -> frozenset[str]:
    """Return the names of floats that say what the codes of a quantized matrix stand for.

    Args:
        trained: names of parameters that require a gradient, which are weights whatever is beside them.
    """
    owners: dict[str, _Codes] = {}
    for name, tensor in tensors.items():
        codes = _codes(tensor)
        if codes is not None:
            for owner in (name, _parent(name)):  # bitsandbytes: "q_proj.weight.absmax"
                owners[owner] = max(owners.get(owner, codes), codes, key=lambda one: one.information)
    if not owners:
        return frozenset()
    inside: dict[str, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if _is_float(tensor):
            for owner in _near(name):
                if owner in owners:
                    inside[owner].append(name)
    return frozenset(
        name
        for owner, names in inside.items()
        for name in _unlayered(owner, names, tensors)
        if name not in trained and _explains(owners[owner], tensors[name])
    )


def _unlayered(owner: str, names: Collection[str], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the floats in a module and those below it that are no layers and no low-rank pairs."""
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parts[_parent(name)].append(name)
    below = {part: [tensors[name] for name in inner] for part, inner in parts.items() if part != owner}
    network = any(_is_layer(floats) for floats in below.values())
    matrices = [tensors[name] for name in names if _parent(name) != owner and _is_matrix(tensors[name])]
    several = len({tensors[name].shape for name in parts[owner] if _is_matrix(tensors[name])}) > _SHAPES
    for name in names:
        tensor = tensors[name]
        if _parent(name) == owner:
            if not (several and _is_matrix(tensor)):
                yield name
        elif not (network or (_is_matrix(tensor) and (not owner or _has_partner(tensor, matrices)))):
            yield name


def _explains(codes: _Codes, tensor: Tensor) -> bool:
    """Return whether floats are few enough to be scales of the codes, or have the entries of a codebook."""
    count = tensor.numel()
    wide = _is_matrix(tensor) and codes.values > 1 << 8
    for_each = _SCALES if codes.fills else _TABLE_MATRICES if wide else _TABLE_SCALES
    if for_each * count <= codes.information:
        return True
    entries = 1 << (codes.values - 1).bit_length()
    widest = _WIDEST_OF_ALL if codes.fills and tensor.ndim > 2 else _WIDEST  # a table of nodes or a layer is wider
    sides = [size for size in tensor.shape if size > 1 and count <= widest * size]
    if not codes.fills:  # as many rows as there are indices, each used several times
        return 2 * codes.values <= codes.count and any(codes.values <= size <= entries for size in sides)
    if len(sides) == 1 and not _is_matrix(tensor) and count <= _FLAT * codes.information:
        return True
    packed = codes.values > 1 << 16
    return any(size.bit_count() == 1 and (1 << 8 <= size <= 1 << 16 if packed else size == entries) for size in sides)


def _codes(tensor: Tensor) -> _Codes | None:
    """Return what a tensor can tell as codes; None if it holds none."""
    if tensor.numel() < _LEAST or tensor.is_complex() or tensor.dtype is torch.bool or tensor.dtype in REAL_DTYPES:
        return None
    if tensor.is_floating_point():
        return _Codes(float(tensor.nbytes), 256, tensor.numel(), fills=True) if tensor.ndim > 1 else None
    flat = tensor.detach().reshape(-1)
    start = max(0, (len(flat) - _SAMPLE) // 2)
    block = flat[start : start + _SAMPLE].cpu().numpy()
    spread = flat[:: max(1, len(flat) // _SAMPLE)].cpu().numpy()
    low, high = min(block.min(), spread.min()), max(block.max(), spread.max())
    values = int(high) - int(low) + 1
    if values < 2 or (int(low), values) == (0, 2) or _is_ordered(block):  # constant, a mask, a table
        return None
    bits = (values - 1).bit_length()
    fills = 2 * bits > 8 * tensor.itemsize or tensor.itemsize == 1
    if not fills and 2 in tensor.shape:  # the ends of edges
        return None
    return _Codes(len(flat) * bits / 8, values, len(flat), fills)


def _is_ordered(values: "np.ndarray[tuple[int, ...], np.dtype[np.integer]]") -> bool:
    """Return whether the order of integers tells something about them, as in tables, masks and ranges."""
    steps = np.diff(values.astype(np.float64))
    if bool((steps >= 0).all() or (steps <= 0).all()):
        return True
    shuffled = np.random.default_rng(0).permutation(values)
    return len(zlib.compress(values.tobytes(), 6)) < _ORDERED * len(zlib.compress(shuffled.tobytes(), 6))


def _is_float(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.dtype in REAL_DTYPES or tensor.is_complex())


def _is_matrix(tensor: Tensor) -> bool:
    return sum(size >= _SIDE for size in tensor.shape) > 1


def _is_layer(floats: Iterable[Tensor]) -> bool:
    """Return whether floats of a module are a matrix and a bias of as many elements as it has rows or columns."""
    floats = list(floats)
    biases = {tensor.numel() for tensor in floats if tensor.ndim == 1}
    return any(_is_matrix(tensor) and biases & {*tensor.shape[:2]} for tensor in floats)


def _has_partner(tensor: Tensor, matrices: Iterable[Tensor]) -> bool:
    """Return whether a matrix is one of two that share a side smaller than their others: a low-rank product."""
    for other in matrices:
        if other is not tensor and other.ndim == tensor.ndim and other.shape != tensor.shape:
            for first, second in ((tensor, other), (other, tensor)):
                rank = first.shape[0]
                if rank == second.shape[1] and rank <= min(math.prod(first.shape[1:]), second.shape[0]) // 2:
                    return True
    return False


def _parent(name: str) -> str:
    return name[: max(name.rfind("."), name.rfind("/"), 0)]


def _near(name: str) -> Iterator[str]:
    """Yield the names of the module that holds a tensor and of the one around it; numbers are no modules."""
    owner = _parent(name)
    yield owner
    while owner and owner[len(_parent(owner)) :].lstrip("./").isdigit():
        owner = _parent(owner)
    if owner:
        yield _parent(owner)
