"""A scheme and a low-rank correction of its error, in a few bits: W ≈ base(W) + A·B (LQER, arXiv 2402.02446).

Components are found one at a time, each fitted to what the ones before left, their rounding included. With the error
weighted by rows G and by the Hessian H, ‖G^½ (E − a·bᵀ) H^½‖², the best b for a given a is Eᵀ G a / (aᵀ G a) and the
best a for a given b is E H b / (bᵀ H b): alternating the two is the power method for the largest singular pair, and
needs no root of H. Both are rounded to integers, b after a, and their one step is fitted last, so no component makes
the weighted error larger.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.importance import importance
from birdie.compress.log_steps import indices_near, steps
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.decode_nested import NAMES
from birdie.compress.schemes.decoders import decode
from birdie.compress.schemes.grid import SMALLEST, Grid, real_rows, vanishes
from birdie.compress.schemes.lossless import Lossless
from birdie.errors import ConfigError

_ROUNDS = 16  # of the power method
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LowRank:
    """A base scheme and `rank` components of its error.

    Attributes:
        rank: at most so many components, 1 or more; ones that gain nothing are left out.
        base: the scheme whose error is corrected: uniform grids, ternary, codebooks.
        left: bits of the factor A (rows × rank), 2 to 8.
        right: bits of the factor B (rank × columns), 2 to 8.
    """

    rank: int = 4
    base: Scheme = field(default_factory=lambda: Grid(bits=6))
    left: int = 4
    right: int = 4

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if self.rank < 1:
            raise ConfigError(f"lowrank rank={self.rank} is out of range; choose 1 or more")
        if not (2 <= self.left <= 8 and 2 <= self.right <= 8):
            raise ConfigError(f"lowrank left={self.left}, right={self.right} is out of range; choose 2 to 8 bits")

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None, lam: float = 0.0) -> Encoded:
        """Encode by the base, then correct; as the base alone where nothing is gained, or the base is lossless.

        A component that is worth less than `lam` times its nominal bits is left out, too; the unit is the base's.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
            ConfigError: the base is none that can be corrected, or the sensitivity is of another matrix.
        """
        rows = real_rows(name, weight)
        inside = torch.from_numpy(rows).reshape(weight.shape)
        base = self.base.encode(name, inside, sensitivity=sensitivity, lam=lam)
        if base.scheme == "lossless" or vanishes(weight, rows):
            return Lossless().encode(name, weight)
        if base.scheme not in NAMES:
            raise ConfigError(f"lowrank cannot correct {base.scheme}; choose {', '.join(NAMES)}")
        error = rows.astype(np.float64) - decode(base).double().numpy().reshape(rows.shape)
        told = importance(name, sensitivity, *rows.shape)
        hessian = None
        if sensitivity is not None and sensitivity.hessian is not None:
            hessian = sensitivity.hessian.detach().cpu().double().numpy()
            hessian = hessian / max(float(np.diagonal(hessian).mean()), SMALLEST)
        bits = rows.shape[0] * self.left + rows.shape[1] * self.right
        found: list[tuple[_Array, _Array, int]] = []
        for _ in range(min(self.rank, *rows.shape)):
            pair = _component(error, told.rows, hessian, self.left, self.right)
            if pair is None:
                break
            left, right, index, gained = pair
            if gained <= lam * bits:
                break
            error -= np.outer(left, right * float(steps(np.array([index]))[0]))
            found.append((left, right, index))
        if not found:
            return replace(base, dtype=weight.dtype)
        lefts, rights = np.stack([each[0] for each in found], axis=1), np.stack([each[1] for each in found])
        scales = np.array([[each[2]] for each in found], np.int32)
        params = (len(found), NAMES[base.scheme], len(base.params), *base.params)
        streams = (*base.streams, lefts.astype(np.int8), rights.astype(np.int8), scales)
        return Encoded("lowrank", tuple(weight.shape), weight.dtype, params, streams)


def _weighted(matrix: _Array, hessian: _Array | None) -> _Array:
    return matrix if hessian is None else matrix @ hessian


def _component(
    error: _Array, rows: _Array, hessian: _Array | None, left: int, right: int
) -> tuple[_Array, _Array, int, float] | None:
    """The largest component of `error`: two vectors of integers, the index of their step, the weighted error gone."""
    b: _Array = error[int(np.argmax(rows * (error * error).sum(axis=1)))].copy()
    for _ in range(_ROUNDS):
        a = _unit(error @ _weighted(b, hessian))
        b = _unit(error.T @ (rows * a))
    whole = _rounded(a, left)
    if not whole.any():
        return None
    across = _rounded(error.T @ (rows * whole), right)
    down = _weighted(across, hessian)
    mass = float((rows * whole * whole).sum()) * float(across @ down)
    fit = float((rows * whole) @ error @ down)
    if not (mass > 0 and fit / mass >= SMALLEST):
        return None
    index = indices_near(np.array([fit / mass]))
    step = float(steps(index)[0])
    return whole, across, int(index[0]), step * (2 * fit - step * mass)


def _unit(vector: _Array) -> _Array:
    largest = float(np.abs(vector).max())
    return vector / largest if largest > 0 else vector


def _rounded(vector: _Array, bits: int) -> _Array:
    """`vector` in integers of `bits` bits, the largest ± (2^(bits − 1) − 1)."""
    whole: _Array = np.rint(_unit(vector) * (2 ** (bits - 1) - 1))
    return whole
