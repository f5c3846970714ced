"""Rotated rows on the grid that is best for a Gaussian, whatever the weights were (TurboQuant, arXiv 2504.19874).

    row ─► seeded signs, Hadamard transform ─► root mean square ─► Lloyd–Max levels [─► sign of what is left]

A random rotation makes the entries of a row close to Gaussian and outliers vanish, so a fixed number of bits does
well without looking at the data. That is also what it takes from an entropy coder: columns of different scale, heavy
tails and symbols that are alike become one noise. docs/schemes.md measures what that costs.

TurboQuant sketches the residual by signs of a second projection, to make inner products unbiased. The sign of the
residual itself, as here, has the same bit and leaves less error.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.importance import Importance
from birdie.compress.kmeans import kmeans
from birdie.compress.log_steps import indices_near, steps
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.codebook import root_mean_squares, scaled, with_levels
from birdie.compress.schemes.decode_nested import NAMES
from birdie.compress.schemes.decode_rotation import SEEDS, turn
from birdie.compress.schemes.decoders import decode
from birdie.compress.schemes.grid import SMALLEST, borrow, real_rows, vanishes
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.ternary import Ternary
from birdie.errors import ConfigError

_BLOCK = 1 << 16
_REACH = 6.5  # deviations that the Gaussian's levels are found over


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotate the rows, then quantize them.

    Attributes:
        bits: width of the Lloyd–Max grid, 1 to 8; without meaning when there is a base.
        residual: store the sign of what is left, too: one more bit a weight, and a step per row.
        base: a scheme that takes the place of the grid: uniform grids, ternary, codebooks.
        seed: of the signs, 0 to 65,535.
    """

    bits: int = 4
    residual: bool = False
    base: Scheme | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if not 1 <= self.bits <= 8:
            raise ConfigError(f"rotation bits={self.bits} is out of range; choose 1 to 8")
        if not 0 <= self.seed < SEEDS:
            raise ConfigError(f"rotation seed={self.seed} is out of range; choose 0 to {SEEDS - 1}")

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None, lam: float = 0.0) -> Encoded:
        """Rotate and quantize; losslessly where the base scheme finds no step small enough.

        Only a base scheme looks at the sensitivity, whose Hessian is rotated along, and at `lam`.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
            ConfigError: the base is none that can be rotated.
        """
        rows = real_rows(name, weight)
        turned = rotated(rows, self.seed)
        if vanishes(weight, rows) or not bool(np.isfinite(turned).all()):
            return Lossless().encode(name, weight)
        inside = torch.from_numpy(turned).reshape(weight.shape)
        if self.base is None:
            first = _gaussian(inside, turned, self.bits)
        else:
            first = self.base.encode(name, inside, sensitivity=_rotated(sensitivity, self.seed), lam=lam)
        if first is None or first.scheme == "lossless":
            return Lossless().encode(name, weight)
        parts = [first]
        if self.residual:
            left = inside - decode(first)
            parts.append(Ternary(group=turned.shape[1], binary=True).encode(name, left))
        for part in parts:
            if part.scheme not in NAMES:
                if part.scheme == "lossless":
                    return replace(self, residual=False).encode(name, weight, sensitivity=sensitivity, lam=lam)
                raise ConfigError(f"rotation cannot hold {part.scheme}; choose {', '.join(NAMES)}")
        params = [number for part in parts for number in (NAMES[part.scheme], len(part.params), *part.params)]
        streams = tuple(stream for part in parts for stream in part.streams)
        return Encoded("rotation", tuple(weight.shape), weight.dtype, (self.seed, *params), streams)


def rotated(rows: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Each row of (rows, columns) rotated by what `seed` stands for; infinite where float32 ends."""
    out = np.empty_like(rows)
    height = max(1, _BLOCK // rows.shape[1])
    for start in range(0, len(rows), height):
        block = np.array(rows[start : start + height].T, np.float64, order="C")
        turn(block, seed, back=False)
        with np.errstate(over="ignore"):
            out[start : start + height] = block.T
    return out


def _rotated(sensitivity: Sensitivity | None, seed: int) -> Sensitivity | None:
    """The sensitivity of the rotated matrix: Q H Qᵀ."""
    if sensitivity is None or sensitivity.hessian is None:
        return sensitivity
    half = rotated(sensitivity.hessian.detach().cpu().float().numpy(), seed)
    return replace(sensitivity, hessian=torch.from_numpy(rotated(np.ascontiguousarray(half.T), seed)))


def _gaussian(weight: Tensor, rows: NDArray[np.float32], bits: int) -> Encoded | None:
    """`weight`, whose rows are `rows`, on the Gaussian's levels times the root mean square of each row."""
    used, scale = np.asarray(rows.any(axis=1)), root_mean_squares(rows)
    if bool((scale[used] < SMALLEST).any()):
        return None
    indices = borrow(indices_near(np.maximum(scale, SMALLEST)), used)
    levels, plain = np.array(lloyd_max(bits)), scaled(rows, steps(indices).astype(np.float64))
    ones = Importance(np.ones(rows.shape[0]), np.ones(rows.shape[1]), told=False)
    return with_levels(weight, plain, levels, indices, np.zeros(len(levels)), ones)


@cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2^bits levels that leave the least squared error of a standard Gaussian (Max 1960), rising."""
    values = np.linspace(-_REACH, _REACH, 1 << 12)
    return tuple(kmeans(values, np.exp(-0.5 * values**2), 1 << bits).tolist())
