"""Tucker's decomposition: a tensor as a small core, with an orthonormal factor along every axis that is cut.

    weight ≈ core ×₀ U₀ ×₁ U₁ …                 a matrix: U · S · Vᵀ with S on the diagonal of the core

Truncated higher-order SVD, axis after axis, each of what the ones before left (De Lathauwer et al. 2000; in sequence:
Vannieuwenhoven et al. 2012). Factors are orthonormal, so the squared error is the energy that was cut, and rounding
errors of the core reach the weight as they are.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from birdie.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A tensor in its factors.

    Attributes:
        core: one length an axis: its rank.
        factors: per axis (length, rank) with orthonormal columns, or None where the axis is kept as it is.
    """

    core: Tensor
    factors: tuple[Tensor | None, ...]

    def inverse(self) -> Tensor:
        """The tensor; differentiable in the core and in the factors."""
        found = self.core
        for axis, factor in enumerate(self.factors):
            if factor is not None:
                found = _times(found, factor, axis)
        return found

    @property
    def numel(self) -> int:
        """Numbers in the core and in the factors."""
        return self.core.numel() + sum(factor.numel() for factor in self.factors if factor is not None)


def tucker(weight: Tensor, *, energy: float = 0.99, ranks: tuple[int, ...] | None = None) -> Decomposition:
    """Decompose `weight` (any shape, finite floats).

    Args:
        energy: share of the squares that is kept; every axis may lose the same part of the rest. A rank that would
            make an axis' factor and core larger than the axis itself leaves it as it is.
        ranks: one for each axis instead, at most its length; an axis at its full length is kept as it is.

    Returns:
        Core and factors in the dtype of `weight`, where it is; float16 and bfloat16 are computed in float32.

    Raises:
        ConfigError: the energy is not above 0 and at most 1, or ranks do not fit.
    """
    if not 0 < energy <= 1:
        raise ConfigError(f"tucker energy={energy} is out of range; choose above 0, at most 1")
    shape = tuple(weight.shape)
    if ranks is not None and (
        len(ranks) != len(shape) or not all(1 <= rank <= size for rank, size in zip(ranks, shape, strict=True))
    ):
        raise ConfigError(
            f"tucker ranks {ranks} do not fit a tensor of {shape}; choose one for each axis, 1 to its length"
        )
    core = weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
    factors: list[Tensor | None] = [None] * len(shape)
    if core.numel():
        lost = (1 - energy) * float(core.double().square().sum()) / max(1, len(shape))
        for axis, size in sorted(enumerate(shape), key=lambda pair: pair[1]):
            left, values = _singular(core, axis)
            rank = _rank(values, lost) if ranks is None else ranks[axis]
            others = core.numel() // size
            if rank < size and (ranks is not None or rank * (size + others) < size * others):
                factors[axis] = left[:, :rank].contiguous()
                core = _times(core, left[:, :rank].mT, axis)
    kept = (None if each is None else each.to(weight.dtype) for each in factors)
    return Decomposition(core.to(weight.dtype), tuple(kept))


def _singular(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Left singular vectors of `x` unfolded along `axis`, and the singular values, falling; one each for every place.

    From the smaller side: unfolded matrices are wide, and their Gram matrix is small.
    """
    unfolded = x.movedim(axis, 0).reshape(x.shape[axis], -1).double()
    if unfolded.shape[0] <= unfolded.shape[1]:
        squares, vectors = torch.linalg.eigh(unfolded @ unfolded.mT)
        return vectors.flip(1).to(x.dtype), squares.flip(0).clamp_min(0).sqrt()
    left, values, _ = torch.linalg.svd(unfolded, full_matrices=True)
    return left.to(x.dtype), torch.cat([values, values.new_zeros(len(left) - len(values))])


def _rank(values: Tensor, lost: float) -> int:
    """The fewest of `values` (falling) beyond which the squares sum to at most `lost`; at least 1."""
    tails = values.square().flip(0).cumsum(0).flip(0)
    return max(1, int((tails > lost * (1 + 1e-9) + 1e-24 * float(tails[0])).sum()))


def _times(x: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """Product along `axis`: its length becomes the rows of `matrix`."""
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    lines = matrix @ x.reshape(before, x.shape[axis], after)
    return lines.reshape(*x.shape[:axis], matrix.shape[0], *x.shape[axis + 1 :])
