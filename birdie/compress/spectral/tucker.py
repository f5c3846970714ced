"""Tucker decomposition: a tensor as a small core with an orthonormal factor along every truncated axis.

    weight ≈ core ×₀ U₀ ×₁ U₁ …                 a matrix: U · S · Vᵀ with S on the diagonal of the core

Sequentially truncated higher-order SVD: every axis is truncated in the core that the earlier axes left (De Lathauwer et
al. 2000; sequential: Vannieuwenhoven et al. 2012). Factors are orthonormal, so the squared error is the energy that was
removed, and rounding errors of the core appear in the weight with the same norm.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from birdie.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Tucker decomposition of a tensor.

    Attributes:
        core: the core tensor, whose sizes are the ranks of the axes.
        factors: per axis (length, rank) with orthonormal columns, or None if the axis is not truncated.
    """

    core: Tensor
    factors: tuple[Tensor | None, ...]

    def inverse(self) -> Tensor:
        """Return the tensor; differentiable in the core and in the factors."""
        tensor = self.core
        for axis, factor in enumerate(self.factors):
            if factor is not None:
                tensor = _times(tensor, factor, axis)
        return tensor

    @property
    def numel(self) -> int:
        """Number of elements of the core and the factors."""
        return self.core.numel() + sum(factor.numel() for factor in self.factors if factor is not None)


def tucker(weight: Tensor, *, energy: float = 0.99, ranks: tuple[int, ...] | None = None) -> Decomposition:
    """Decompose `weight` (any shape, finite floats).

    Args:
        weight: the tensor.
        energy: share of the sum of squares to keep; every axis may lose the same part of the rest. An axis is not
            truncated if its factor and the new core would have more numbers than the old core.
        ranks: one rank for each axis instead, at most its length; an axis at its full length is not truncated.

    Returns:
        Core and factors in the dtype and on the device of `weight`; float16 and bfloat16 are computed in float32.
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
        allowed_loss = (1 - energy) * float(core.double().square().sum()) / max(1, len(shape))
        for axis, size in sorted(enumerate(shape), key=lambda pair: pair[1]):
            left, values = _singular(core, axis)
            rank = _rank(values, allowed_loss) if ranks is None else ranks[axis]
            others = core.numel() // size
            if rank < size and (ranks is not None or rank * (size + others) < size * others):
                factors[axis] = left[:, :rank].contiguous()
                core = _times(core, left[:, :rank].mT, axis)
    cast = (None if factor is None else factor.to(weight.dtype) for factor in factors)
    return Decomposition(core.to(weight.dtype), tuple(cast))


def _singular(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return left singular vectors of `x` unfolded along `axis`, and the singular values, falling, zeros included.

    Unfolded matrices are usually wide, so the eigenvectors of their small Gram matrix are computed instead of an SVD.
    """
    unfolded = x.movedim(axis, 0).reshape(x.shape[axis], -1).double()
    if unfolded.shape[0] <= unfolded.shape[1]:
        squares, vectors = torch.linalg.eigh(unfolded @ unfolded.mT)
        return vectors.flip(1).to(x.dtype), squares.flip(0).clamp_min(0).sqrt()
    left, values, _ = torch.linalg.svd(unfolded, full_matrices=True)
    return left.to(x.dtype), torch.cat([values, values.new_zeros(len(left) - len(values))])


def _rank(values: Tensor, allowed_loss: float) -> int:
    """Return the smallest rank at which the squares of the other `values` (falling) sum to at most `allowed_loss`."""
    tails = values.square().flip(0).cumsum(0).flip(0)
    return max(1, int((tails > allowed_loss * (1 + 1e-9) + 1e-24 * float(tails[0])).sum()))


def _times(x: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """Return the product with `matrix` along `axis`, whose length becomes the number of rows of `matrix`."""
    leading, trailing = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    lines = matrix @ x.reshape(leading, x.shape[axis], trailing)
    return lines.reshape(*x.shape[:axis], matrix.shape[0], *x.shape[axis + 1 :])
