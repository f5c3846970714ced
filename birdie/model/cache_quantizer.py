"""Keys and values in few bits: a vector of a head is rotated, then each coordinate gets the nearest of 2^bits levels.

    x (…, d) ──► y = R x / |x| ──► nearest levels ──► codes, packed, bits · d / 8 bytes ──┐
         └─────────────────────► scale, float16, 2 bytes ────────────────────────────────┴──► scale · Rᵀ levels

R flips signs at random and then mixes all coordinates with equal weights, so that whatever was in x, each coordinate
of y is distributed nearly as that of a random point on the sphere is: close to a Gaussian of variance 1/d. Levels are
the Lloyd–Max quantizer of that distribution; no data is looked at, and a vector is coded by itself, so a token's keys
and values can be put away as soon as they are there.

This is TurboQuant (Zandieh et al. 2025, arXiv 2504.19874) in its form for the mean square, without the one-bit sketch
of what is left over that it adds for inner products. Its bias is removed in another way, which costs no bits: the
scale is not the norm, but what makes the decoded vector as long as x.
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
_GROUP = 8  # codes packed together: so many bits of each make whole bytes
_CELLS = 1 << 16  # of the grid that the distribution is summed on
_REACH = 9.0  # standard deviations of it that the grid covers
_LARGEST = 65_504.0  # of float16
_ROUNDS = 300  # of Lloyd's iteration, from a start that is nearly there


class Packed(NamedTuple):
    """Vectors as they are kept.

    Attributes:
        codes: (…, bytes) uint8.
        scales: (…, 1) float16.
    """

    codes: Tensor
    scales: Tensor


class Quantizer:
    """Packs vectors of `dims` coordinates into `bits` a coordinate and 16 more each.

    Attributes:
        vector_bytes: what one vector takes.
    """

    def __init__(self, dims: int, bits: int, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        """Make rotation and levels.

        Args:
            dims: coordinates of a vector, at least 4.
            bits: one of BITS.
            seed: of the signs.
            device: where vectors will be.

        Raises:
            ConfigError: there is no quantizer of so many bits or dimensions.
        """
        if bits not in BITS:
            raise ConfigError(f"keys and values cannot be kept in {bits} bits; choose {', '.join(map(str, BITS))}")
        if dims < 4:
            raise ConfigError(f"vectors of {dims} coordinates have no distribution to quantize by; at least 4 do")
        self.dims, self.bits = dims, bits
        found = levels(dims, bits)
        self._rotation = torch.from_numpy(rotation(dims, seed)).float().to(device)
        self._levels = torch.from_numpy(found).float().to(device)
        self._edges = torch.from_numpy((found[1:] + found[:-1]) / 2).float().to(device)
        self._code_at = bits * torch.arange(_GROUP, device=device)
        self._byte_at = 8 * torch.arange(bits, device=device)
        self._code_bytes = dims if bits == _GROUP else -(-dims // _GROUP) * bits
        self.vector_bytes = self._code_bytes + 2

    def zeros(self, shape: Sequence[int]) -> Packed:
        """Vectors of zeros, of any number."""
        codes = torch.zeros((*shape, self._code_bytes), dtype=torch.uint8, device=self._levels.device)
        return Packed(codes, torch.zeros((*shape, 1), dtype=torch.float16, device=self._levels.device))

    def quantize(self, x: Tensor) -> Packed:
        """x (…, dims) of any floating dtype → packed; a vector of zeros stays one."""
        y = x.float() @ self._rotation
        norm = y.norm(dim=-1, keepdim=True)
        codes = torch.bucketize(y / norm.clamp_min(1e-30), self._edges)
        scales = norm / self._levels[codes].norm(dim=-1, keepdim=True)
        return Packed(self._pack(codes), scales.clamp_max(_LARGEST).to(torch.float16))

    def dequantize(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vectors, (…, dims), near those that were packed."""
        y = self._levels[self._unpack(packed.codes)] * packed.scales.float()
        return (y @ self._rotation.T).to(dtype)

    def _pack(self, codes: Tensor) -> Tensor:
        """(…, dims) int64 → (…, bytes) uint8: each group of 8 codes, the first lowest, as `bits` bytes."""
        if self.bits == _GROUP:
            return codes.to(torch.uint8)
        groups = F.pad(codes, (0, -self.dims % _GROUP)).reshape(*codes.shape[:-1], -1, _GROUP)
        words: Tensor = (groups << self._code_at).sum(-1, keepdim=True)
        return (words >> self._byte_at & 255).to(torch.uint8).flatten(-2)

    def _unpack(self, packed: Tensor) -> Tensor:
        """(…, bytes) uint8 → (…, dims) int64."""
        if self.bits == _GROUP:
            return packed.long()
        groups = packed.long().reshape(*packed.shape[:-1], -1, self.bits)
        words: Tensor = (groups << self._byte_at).sum(-1, keepdim=True)
        return (words >> self._code_at & (1 << self.bits) - 1).flatten(-2)[..., : self.dims]


def rotation(dims: int, seed: int) -> NDArray[np.float64]:
    """An orthogonal matrix (dims, dims) that spreads each coordinate over all: columns are what a unit vector becomes.

    Random signs before a Hadamard matrix of the largest power of two in `dims`, crossed with the cosine transform of
    what is left, for a head of 48 = 16 · 3: no entry is larger than √2 times 1/√dims.
    """
    power = dims & -dims
    hadamard = np.ones((1, 1))
    while len(hadamard) < power:
        hadamard = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    rest = dims // power
    place = np.arange(rest)
    cosine = np.cos(np.pi / rest * (place[:, None] + 0.5) * place) * np.sqrt(np.where(place == 0, 1, 2))
    signs = np.random.Generator(np.random.PCG64(seed)).choice((-1.0, 1.0), dims)
    turned: NDArray[np.float64] = signs[:, None] * np.kron(hadamard, cosine) / math.sqrt(dims)
    return turned


@lru_cache(maxsize=16)
def levels(dims: int, bits: int) -> NDArray[np.float64]:
    """The 2^bits levels, ascending, that a coordinate of a random unit vector is nearest to in mean square.

    That coordinate has density (1 − x²)^((dims − 3) / 2) up to a factor. The start has as many levels everywhere as
    the cube root of the density asks for (Panter and Dite 1951), from where Lloyd's iteration takes it to the optimum.
    """
    reach = min(1.0, _REACH / math.sqrt(dims))
    x = np.linspace(-reach, reach, _CELLS + 1)
    x = (x[1:] + x[:-1]) / 2
    density = (1 - x * x) ** ((dims - 3) / 2)
    mass, moment = (np.concatenate(([0.0], np.cumsum(each))) for each in (density, density * x))
    ends = np.linspace(-reach, reach, _CELLS + 1)
    spread = np.concatenate(([0.0], np.cumsum(np.cbrt(density))))
    count = 1 << bits
    found: NDArray[np.float64] = np.interp((np.arange(count) + 0.5) / count * spread[-1], spread, ends)
    for _ in range(_ROUNDS):
        edges = np.concatenate(([-reach], (found[1:] + found[:-1]) / 2, [reach]))
        share, sum_ = (np.diff(np.interp(edges, ends, each)) for each in (mass, moment))
        found = sum_ / share
    return (found - found[::-1]) / 2
