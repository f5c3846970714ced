"""Invertible transforms of weight tensors of any number of dimensions, differentiable, as few matrix products.

    weight ──forward──► coefficients, same shape ──inverse──► weight

What each kind does is said in `birdie.compress.spectral.inverse`, which undoes it in a file's arithmetic. Here every
axis has a small matrix (a DCT basis, a wavelet written as a matrix), and the matrices of neighbouring axes that are one
block each are multiplied into one by Kronecker's product: a 3×3 kernel takes one product with a 9×9 matrix, and
blocks of eight input channels with their kernels one with 72×72. Axes too long for a wavelet's matrix are lifted.
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

_WIDEST = 256  # rows of a matrix, at most: beyond, products of several cost less
_HADAMARD = 64  # the same of a Hadamard matrix
_KEPT: dict[tuple[Any, ...], Tensor] = {}  # matrices by what they are, dtype and device
_Run = tuple[int, int, int]  # axes from, to (not included), length of a block along the first


@dataclass(frozen=True, slots=True)
class Transform:
    """One transform of a tensor's axes.

    Attributes:
        kind: identity, dct, wavelet53, wavelet97 or hadamard (over columns, the first dimension being rows).
        edge: block length of the DCT along each axis, 2 to 64; a shorter axis, or the rest of one, is its own block.
        levels: octaves of a wavelet, 1 to 16; fewer where an axis has no more.
        axes: "all", or "kernel": only those after the first two, the taps of a convolution.
    """

    kind: str = "dct"
    edge: int = 8
    levels: int = 3
    axes: Literal["all", "kernel"] = "all"

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
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
        """What the decoder is told."""
        return Axes(self.kind, self.edge, self.levels, self.axes == "kernel")

    def forward(self, weight: Tensor) -> Tensor:
        """Coefficients of `weight` (any shape, floating), of its shape, dtype and device; float16 and bfloat16 are
        computed in float32."""
        return self._applied(weight, back=False)

    def inverse(self, coefficients: Tensor) -> Tensor:
        """The weight of `coefficients`: undoes `forward` to rounding."""
        return self._applied(coefficients, back=True)

    def classes(self, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Per axis of `shape` the class of each place, int64 (length,): the frequency in its block (dct), the band (a
        wavelet's, 0 is the lowest), or 0."""
        return tuple(torch.from_numpy(places) for places in self.plan.classes(tuple(shape)))

    def _applied(self, x: Tensor, *, back: bool) -> Tensor:
        if self.kind == "identity" or x.numel() == 0:
            return x
        kind = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(kind)
            found = _turned(wide, back=back) if self.kind == "hadamard" else self._separable(wide, back=back)
        return found.to(x.dtype)

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
        """Each column of `lines` (blocks, width, columns) by the matrix of axes of `lengths`."""
        if lines.shape[1] == 1:
            return lines
        for way in (not back, back):  # both at once: who compiles the inverse after a forward finds it made
            matrix = _tensor(("matrix", self.kind, lengths, self.levels, way), lines.dtype, lines.device)
        return lines[:, :, 0] @ matrix.mT if lines.shape[2] == 1 else matrix @ lines


def runs(shape: tuple[int, ...], blocks: tuple[int, ...]) -> list[_Run]:
    """Axes that one matrix serves, last first: of each run all axes but the first are one block each."""
    found: list[_Run] = []
    last = len(shape)
    while last:
        first = last - 1
        width = blocks[first]
        while first and blocks[first] == shape[first] and width * blocks[first - 1] <= _WIDEST:
            first -= 1
            width *= blocks[first]
        found.append((first, last, blocks[first]))
        last = first
    return found


def _matrix(kind: str, lengths: tuple[int, ...], levels: int, back: bool) -> NDArray[np.float64]:
    """What a column of a block of `lengths`, flattened, is multiplied by."""
    found: NDArray[np.float64] = np.ones((1, 1))
    for size in lengths:
        if kind == "dct":
            one = cosines(size).T if back else cosines(size)
        else:
            one = np.eye(size)
            lift(one, kind, levels, back)
        found = np.asarray(np.kron(found, one), np.float64)
    return found


@cache
def _hadamard(size: int) -> NDArray[np.float64]:
    """The orthonormal Hadamard matrix of a power of two."""
    found: NDArray[np.float64] = np.ones((1, 1))
    while len(found) < size:
        found = np.asarray(np.kron([[1.0, 1.0], [1.0, -1.0]], found), np.float64)
    return np.asarray(found / math.sqrt(size))


def _tensor(key: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A matrix or signs in `dtype` on `device`; made once."""
    place = (key, dtype, device)
    if place in _KEPT:
        return _KEPT[place]
    with torch.inference_mode(False):  # what is kept must serve training, too
        made = torch.from_numpy(np.ascontiguousarray(_made(*key))).to(device, dtype)
    if type(made) is Tensor:  # not what tracing puts in its place
        _KEPT[place] = made
    return made


def _made(what: str, *about: Any) -> NDArray[np.float64]:
    if what == "matrix":
        return _matrix(*about)
    return _hadamard(*about) if what == "hadamard" else signs(*about)


def _turned(x: Tensor, *, back: bool) -> Tensor:
    """The rows of `x` rotated as `rotation.rotate` does with seed 0."""
    rows, columns = rows_columns(tuple(x.shape))
    flat, size = x.reshape(rows, columns), 1 << (columns.bit_length() - 1)
    low = [(0, 0), (columns - size, 1)][: 1 + (size < columns)]
    for start, seed in reversed(low) if back else low:
        sign = _tensor(("signs", size, seed), flat.dtype, flat.device)
        part = flat[:, start : start + size]
        part = _spread(part, size) * sign if back else _spread(part * sign, size)
        flat = torch.cat([flat[:, :start], part, flat[:, start + size :]], dim=1) if size < columns else part
    return flat.reshape(x.shape)


def _spread(rows: Tensor, size: int) -> Tensor:
    """`rows` (rows, size) by the Hadamard matrix, as products with small ones: H(ab) = H(a) ⊗ H(b)."""
    left = size
    while left > 1:
        width = min(left, _HADAMARD)
        lines = rows.reshape(-1, width, size // left)
        matrix = _tensor(("hadamard", width), rows.dtype, rows.device)
        lines = lines[:, :, 0] @ matrix if size == left else matrix @ lines
        rows, left = lines.reshape(-1, size), left // width
    return rows


def _lifted(x: Tensor, kind: str, levels: int, *, back: bool) -> Tensor:
    """`lift` along the middle axis of `x` (lines, places, columns)."""
    factors, scale = LIFTING[kind]
    sizes = octaves(x.shape[1], levels)
    for half, size in reversed(sizes) if back else sizes:
        part, beyond = x[:, :size], x[:, size:]
        even, odd = (part[:, :half] / scale, part[:, half:] * scale) if back else (part[:, ::2], part[:, 1::2])
        for index, factor in reversed([*enumerate(factors)]) if back else enumerate(factors):
            amount = -factor if back else factor
            if index % 2 == 0:
                after = torch.cat([even[:, 1:], even[:, -1:]], dim=1)[:, : size - half]
                odd = odd + amount * (even[:, : size - half] + after)
            else:
                edges = torch.cat([odd[:, :1], odd, odd[:, -1:]], dim=1)
                even = even + amount * (edges[:, :half] + edges[:, 1 : half + 1])
        if back:
            pairs = torch.stack([even[:, : size - half], odd], dim=2).flatten(1, 2)
            x = torch.cat([pairs, even[:, size - half :], beyond], dim=1)
        else:
            x = torch.cat([even * scale, odd / scale, beyond], dim=1)
    return x
