"""Quantization of keys and values: rotate a head's vector, then round each coordinate to the nearest of 2^bits levels.

    x (…, d) ──► y = R x / |x| ──► nearest levels ──► codes, packed, bits · d / 8 bytes ──┐
         └─────────────────────► scale, float16, 2 bytes ────────────────────────────────┴──► scale · Rᵀ levels

R flips signs at random and then mixes all coordinates with equal weights. Whatever x was, each coordinate of y is then
distributed nearly as that of a random point on the sphere: close to a Gaussian of variance 1/d. The levels are the
Lloyd–Max quantizer of that distribution, so no data is needed, and each vector is coded on its own, as soon as a
token's keys and values are computed.

This is TurboQuant (Zandieh et al. 2025, arXiv 2504.19874) in its form for the mean squared error, without the one-bit
sketch of the residual that it adds for inner products. The bias of its norm is removed in another way, which costs no
bits: the scale is not the norm of x, but the factor that gives the decoded vector the norm of x.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import ConfigError

BITS = (2, 3, 4, 8)
_GROUP = 8  # codes that are packed together: `bits` whole bytes
_CELLS = 1 << 16  # cells of the grid on which the density is integrated
_GRID_SIGMAS = 9.0  # half-width of the grid in standard deviations
_LARGEST = 65_504.0  # of float16
_ROUNDS = 300  # of Lloyd's iteration, from a start near the optimum


class PackedCache(NamedTuple):
    """Quantized vectors with their scales.

    Attributes:
        codes: (…, bytes) uint8.
        scales: (…, 1) float16.
    """

    codes: Tensor
    scales: Tensor


class Quantizer:
    """Packs vectors of `dims` coordinates into `bits` per coordinate and a 16-bit scale.

    Attributes:
        dims, bits: the arguments.
        vector_bytes: of one packed vector.
    """

    def __init__(self, dims: int, bits: int, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        """Compute rotation and levels.

        Args:
            dims: coordinates of a vector, at least 4.
            bits: one of BITS.
        """
        if bits not in BITS:
            raise ConfigError(f"keys and values cannot be quantized to {bits} bits; choose {', '.join(map(str, BITS))}")
        if dims < 4:
            raise ConfigError(f"keys and values of {dims} coordinates cannot be quantized; heads need at least 4")
        self.dims, self.bits = dims, bits
        values = levels(dims, bits)
        self._rotation = torch.from_numpy(rotation(dims, seed)).float().to(device)
        self._levels = torch.from_numpy(values).float().to(device)
        self._edges = torch.from_numpy((values[1:] + values[:-1]) / 2).float().to(device)
        self._code_shifts = bits * torch.arange(_GROUP, device=device)
        self._byte_shifts = 8 * torch.arange(bits, device=device)
        self._code_bytes = dims if bits == _GROUP else -(-dims // _GROUP) * bits
        self.vector_bytes = self._code_bytes + 2

    def zeros(self, shape: Sequence[int]) -> PackedCache:
        """Return packed zero vectors of shape (*shape, dims)."""
        codes = torch.zeros((*shape, self._code_bytes), dtype=torch.uint8, device=self._levels.device)
        return PackedCache(codes, torch.zeros((*shape, 1), dtype=torch.float16, device=self._levels.device))

    def quantize(self, x: Tensor) -> PackedCache:
        """Pack x (…, dims) of any floating dtype; zero vectors stay zero."""
        y = x.float() @ self._rotation
        norm = y.norm(dim=-1, keepdim=True)
        codes = torch.bucketize(y / norm.clamp_min(1e-30), self._edges)
        scales = norm / self._levels[codes].norm(dim=-1, keepdim=True)
        return PackedCache(self._pack(codes), scales.clamp_max(_LARGEST).to(torch.float16))

    def dequantize(self, packed: PackedCache, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the approximate vectors, (…, dims)."""
        y = self._levels[self._unpack(packed.codes)] * packed.scales.float()
        return (y @ self._rotation.T).to(dtype)

    def _pack(self, codes: Tensor) -> Tensor:
        """(…, dims) int64 → (…, bytes) uint8: each group of 8 codes, the first in the lowest bits, as `bits` bytes."""
        if self.bits == _GROUP:
            return codes.to(torch.uint8)
        groups = F.pad(codes, (0, -self.dims % _GROUP)).reshape(*codes.shape[:-1], -1, _GROUP)
        words: Tensor = (groups << self._code_shifts).sum(-1, keepdim=True)
        return (words >> self._byte_shifts & 255).to(torch.uint8).flatten(-2)

    def _unpack(self, packed: Tensor) -> Tensor:
        """(…, bytes) uint8 → (…, dims) int64."""
        if self.bits == _GROUP:
            return packed.long()
        groups = packed.long().reshape(*packed.shape[:-1], -1, self.bits)
        words: Tensor = (groups << self._byte_shifts).sum(-1, keepdim=True)
        return (words >> self._code_shifts & (1 << self.bits) - 1).flatten(-2)[..., : self.dims]


def rotation(dims: int, seed: int) -> NDArray[np.float64]:
    """Return an orthogonal matrix (dims, dims) that spreads each coordinate over all; its columns transform vectors.

    Random signs, then the Kronecker product of a Hadamard matrix, of the largest power of two that divides `dims`, and
    a cosine transform of the other factor (a head of 48 = 16 · 3). No entry is larger than √2 times 1/√dims.
    """
    power = dims & -dims
    hadamard = np.ones((1, 1))
    while len(hadamard) < power:
        hadamard = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    size = dims // power
    index = np.arange(size)
    cosine = np.cos(np.pi / size * (index[:, None] + 0.5) * index) * np.sqrt(np.where(index == 0, 1, 2))
    signs = np.random.Generator(np.random.PCG64(seed)).choice((-1.0, 1.0), dims)
    matrix: NDArray[np.float64] = signs[:, None] * np.kron(hadamard, cosine) / math.sqrt(dims)
    return matrix


@lru_cache(maxsize=16)
def levels(dims: int, bits: int) -> NDArray[np.float64]:
    """Return the 2^bits levels, ascending, with the least mean squared error for a coordinate of a random unit vector.

    Such a coordinate has density (1 − x²)^((dims − 3) / 2) up to a factor. The iteration starts with a density of
    levels proportional to the cube root of that density, optimal for many bits (Panter and Dite 1951); Lloyd's
    iteration takes it to the optimum.
    """
    limit = min(1.0, _GRID_SIGMAS / math.sqrt(dims))
    x = np.linspace(-limit, limit, _CELLS + 1)
    x = (x[1:] + x[:-1]) / 2
    density = (1 - x * x) ** ((dims - 3) / 2)
    mass, moment = (np.concatenate(([0.0], np.cumsum(values))) for values in (density, density * x))
    ends = np.linspace(-limit, limit, _CELLS + 1)
    spread = np.concatenate(([0.0], np.cumsum(np.cbrt(density))))
    count = 1 << bits
    centers: NDArray[np.float64] = np.interp((np.arange(count) + 0.5) / count * spread[-1], spread, ends)
    for _ in range(_ROUNDS):
        edges = np.concatenate(([-limit], (centers[1:] + centers[:-1]) / 2, [limit]))
        masses, moments = (np.diff(np.interp(edges, ends, integral)) for integral in (mass, moment))
        centers = moments / masses
    return (centers - centers[::-1]) / 2
