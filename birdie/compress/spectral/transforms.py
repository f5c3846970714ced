"""Invertible transforms of weight tensors of any number of dimensions, differentiable, as few matrix products.

    weight ──forward──► coefficients, same shape ──inverse──► weight

`birdie.compress.spectral.inverse` describes the kinds of transforms, and inverts them with the exact arithmetic of the
decoder. Here every axis has a small matrix (a DCT basis, a wavelet written as a matrix), and the matrices of adjacent
axes that are one block each are combined by the Kronecker product: a 3×3 kernel takes one product with a 9×9 matrix,
and blocks of eight input channels with their kernels one with a 72×72 matrix. Axes too long for a wavelet's matrix are
transformed by lifting.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.schemes.rotation import signs
from birdie.compress.spectral.inverse import KINDS, LIFTING, MAX_EDGE, MAX_LEVELS, Axes, cosines, lift, octaves
from birdie.compress.tensors import rows_columns
from birdie.errors import ConfigError

_WIDEST = 256  # most rows of a matrix: beyond, several products cost less
_HADAMARD = 64  # most rows of a Hadamard matrix
_CACHE: dict[tuple[Any, ...], Tensor] = {}  # matrices by arguments, dtype and device
_Run = tuple[int, int, int]  # axes from, to (not included), length of a block along the first


@dataclass(frozen=True, slots=True)
class Transform:
    """Invertible transform of a tensor's axes."""

    kind: str = "dct"  # identity, dct, wavelet53, wavelet97 or hadamard (over columns, the first dimension being rows)
    # block length of the DCT along each axis, 2 to 64; a shorter axis, or the remainder of one, is a block
    edge: int = 8
    levels: int = 3  # octaves of a wavelet, 1 to 16; fewer if an axis is too short
    # "all", or "kernel": only those after the first two, the taps of a convolution
    axes: Literal["all", "kernel"] = "all"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"transform {self.kind!r} is unknown; choose {', '.join(KINDS)}")
        if not 2 <= self.edge <= MAX_EDGE:
            raise ConfigError(f"transform edge={self.edge} is out of range; choose 2 to {MAX_EDGE}")
        if not 1 <= self.levels <= MAX_LEVELS:
            raise ConfigError(f"transform levels={self.levels} is out of range; choose 1 to {MAX_LEVELS}")
        if self.axes not in ("all", "kernel"):
            raise ConfigError(f"transform axes={self.axes!r} is unknown; choose all or kernel")

    @property
    def plan(self) -> Axes:
        """Description of the transform for the decoder."""
        return Axes(self.kind, self.edge, self.levels, self.axes == "kernel")

    def forward(self, weight: Tensor) -> Tensor:
        """Return the coefficients of `weight` (any shape, floating), of its shape, dtype and device.

        float16 and bfloat16 are computed in float32.
        """
        return self._applied(weight, back=False)

    def inverse(self, coefficients: Tensor) -> Tensor:
        """Return the weight of `coefficients`: the inverse of `forward` up to rounding."""
        return self._applied(coefficients, back=True)

    def classes(self, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return the class of each index along each axis of `shape`, int64 (length,).

        The class is the frequency in a block (dct), the band (wavelets, 0 is the lowest), or 0.
        """
        return tuple(torch.from_numpy(classes) for classes in self.plan.classes(tuple(shape)))

    def _applied(self, x: Tensor, *, back: bool) -> Tensor:
        if self.kind == "identity" or x.numel() == 0:
            return x
        kind = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(kind)
            out = _rotated(wide, back=back) if self.kind == "hadamard" else self._separable(wide, back=back)
        return out.to(x.dtype)

    def _separable(self, x: Tensor, *, back: bool) -> Tensor:
        shape = tuple(x.shape)
        blocks = self.plan.blocks(shape)
        for first, last, block in runs(shape, blocks):
            lengths = (block, *shape[first + 1 : last])
            width, after = math.prod(lengths), math.prod(shape[last:])
            size = shape[first]
            if self.kind in LIFTING and block > _WIDEST:
                x = _lifted(x.reshape(-1, block, after), self.kind, self.levels, back=back)
                continue
            if width == 1:
                continue
            full = size // block * block
            if full == size:
                x = self._product(x.reshape(-1, width, after), lengths, back=back)
                continue
            lines = x.reshape(-1, size, width // block, after)
            main = self._product(lines[:, :full].reshape(-1, width, after), lengths, back=back)
            rest = (size - full, *lengths[1:])
            end = self._product(lines[:, full:].reshape(-1, math.prod(rest), after), rest, back=back)
            x = torch.cat([main.reshape(len(lines), -1), end.reshape(len(lines), -1)], dim=1)
        return x.reshape(shape)

    def _product(self, lines: Tensor, lengths: tuple[int, ...], *, back: bool) -> Tensor:
        """Return each column of `lines` (blocks, width, columns) times the matrix of axes of `lengths`."""
        if lines.shape[1] == 1:
            return lines
        # Both directions are cached at once: an inverse that is compiled after a forward must find its matrix.
        for direction in (not back, back):
            matrix = _tensor(("matrix", self.kind, lengths, self.levels, direction), lines.dtype, lines.device)
        return lines[:, :, 0] @ matrix.mT if lines.shape[2] == 1 else matrix @ lines


def runs(shape: tuple[int, ...], blocks: tuple[int, ...]) -> list[_Run]:
    """Return runs of axes that share one matrix, last first: all axes of a run but the first are one block each."""
    groups: list[_Run] = []
    last = len(shape)
    while last:
        first = last - 1
        width = blocks[first]
        while first and blocks[first] == shape[first] and width * blocks[first - 1] <= _WIDEST:
            first -= 1
            width *= blocks[first]
        groups.append((first, last, blocks[first]))
        last = first
    return groups


def _matrix(kind: str, lengths: tuple[int, ...], levels: int, back: bool) -> NDArray[np.float64]:
    """Return the matrix by which a flattened block of `lengths` is multiplied."""
    product: NDArray[np.float64] = np.ones((1, 1))
    for size in lengths:
        if kind == "dct":
            factor = cosines(size).T if back else cosines(size)
        else:
            factor = np.eye(size)
            lift(factor, kind, levels, back)
        product = np.asarray(np.kron(product, factor), np.float64)
    return product


@cache
def _hadamard(size: int) -> NDArray[np.float64]:
    """Return the orthonormal Hadamard matrix of a power of two."""
    matrix: NDArray[np.float64] = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.asarray(np.kron([[1.0, 1.0], [1.0, -1.0]], matrix), np.float64)
    return np.asarray(matrix / math.sqrt(size))


def _tensor(key: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix or signs in `dtype` on `device`, computed once."""
    cache_key = (key, dtype, device)
    if cache_key in _CACHE:
        return _CACHE[cache_key]
    with torch.inference_mode(False):  # a cached tensor must be usable in training too
        tensor = torch.from_numpy(np.ascontiguousarray(_computed(*key))).to(device, dtype)
    if type(tensor) is Tensor:  # not a fake tensor of tracing
        _CACHE[cache_key] = tensor
    return tensor


def _computed(what: str, *about: Any) -> NDArray[np.float64]:
    if what == "matrix":
        return _matrix(*about)
    return _hadamard(*about) if what == "hadamard" else signs(*about)


def _rotated(x: Tensor, *, back: bool) -> Tensor:
    """Return the rows of `x` rotated as `rotation.rotate` does with seed 0."""
    rows, columns = rows_columns(tuple(x.shape))
    flat, size = x.reshape(rows, columns), 1 << (columns.bit_length() - 1)
    low = [(0, 0), (columns - size, 1)][: 1 + (size < columns)]
    for start, seed in reversed(low) if back else low:
        sign = _tensor(("signs", size, seed), flat.dtype, flat.device)
        part = flat[:, start : start + size]
        part = _hadamard_product(part, size) * sign if back else _hadamard_product(part * sign, size)
        flat = torch.cat([flat[:, :start], part, flat[:, start + size :]], dim=1) if size < columns else part
    return flat.reshape(x.shape)


def _hadamard_product(rows: Tensor, size: int) -> Tensor:
    """Return `rows` (rows, size) times the Hadamard matrix, by products with small ones: H(ab) = H(a) ⊗ H(b)."""
    left = size
    while left > 1:
        width = min(left, _HADAMARD)
        lines = rows.reshape(-1, width, size // left)
        matrix = _tensor(("hadamard", width), rows.dtype, rows.device)
        lines = lines[:, :, 0] @ matrix if size == left else matrix @ lines
        rows, left = lines.reshape(-1, size), left // width
    return rows


def _lifted(x: Tensor, kind: str, levels: int, *, back: bool) -> Tensor:
    """Return `x` (lines, samples, columns) transformed by lifting along the middle axis, as `inverse.lift` does."""
    factors, scale = LIFTING[kind]
    sizes = octaves(x.shape[1], levels)
    for half, size in reversed(sizes) if back else sizes:
        part, beyond = x[:, :size], x[:, size:]
        even, odd = (part[:, :half] / scale, part[:, half:] * scale) if back else (part[:, ::2], part[:, 1::2])
        for index, factor in reversed([*enumerate(factors)]) if back else enumerate(factors):
            amount = -factor if back else factor
            if index % 2 == 0:
                following = torch.cat([even[:, 1:], even[:, -1:]], dim=1)[:, : size - half]
                odd = odd + amount * (even[:, : size - half] + following)
            else:
                edges = torch.cat([odd[:, :1], odd, odd[:, -1:]], dim=1)
                even = even + amount * (edges[:, :half] + edges[:, 1 : half + 1])
        if back:
            pairs = torch.stack([even[:, : size - half], odd], dim=2).flatten(1, 2)
            x = torch.cat([pairs, even[:, size - half :], beyond], dim=1)
        else:
            x = torch.cat([even * scale, odd / scale, beyond], dim=1)
    return x
