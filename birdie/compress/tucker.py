"""Tucker's core and factors of a tensor in its place, each part by a scheme of its own.

    weight ─► truncated HOSVD ─► factors ─► quantized ─► core fitted to what these became ─► quantized

With one step for all: row k of a factor is stored times the norm σ(k) of what the core has for it, so that an error of
any number in any part is about as large in the weight, and a component that no step can see becomes zeros.

It pays where a tensor has few components: a sum of few outer products, layers far wider than their task. Trained
layers rarely are: docs/spectral.md has figures.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.decode_tucker import MOST_AXES, NAMES, cut, fits, times
from birdie.compress.decoders import decode
from birdie.compress.feedback import feedback
from birdie.compress.grid import SMALLEST, Grid, real_rows, vanishes
from birdie.compress.lossless import Lossless
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.spectral.scheme import MOST, Spectral
from birdie.compress.spectral.tucker import tucker
from birdie.compress.steps import indices_near, steps
from birdie.compress.tensors import rows_columns
from birdie.compress.trellis import DEFAULT_SIGMA, Trellis
from birdie.errors import ConfigError

_FINEST = 2.0**-16  # deviation of the tensor, of its largest weight: below, it is a constant
_LARGEST = 1e37  # norm that rows of factors may have
_ALIKE = 0.05  # singular values of quantized factors, of the largest: what is below is one component twice
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tucker:
    """A core and a factor along every axis that is cut.

    Attributes:
        energy: share of the squares that is kept, above 0, at most 1.
        ranks: one for each axis instead.
        base: how the parts are stored: `sigma:C`, `trellis:sigma=C` and `spectral:…,sigma=C`, whose step is then C
            deviations of the whole tensor for all parts; or ternary, codebooks and grids of fixed width.
    """

    energy: float = 0.99
    ranks: tuple[int, ...] | None = None
    base: Scheme = field(default_factory=lambda: Grid(sigma=0.3))

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if not 0 < self.energy <= 1:
            raise ConfigError(f"tucker energy={self.energy} is out of range; choose above 0, at most 1")
        if self.ranks is not None and (not self.ranks or min(self.ranks) < 1):
            raise ConfigError(f"tucker ranks={self.ranks} are out of range; give 1 or more for each axis")

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002  the contract's; it is of the whole, not of parts
        lam: float = 0.0,
    ) -> Encoded:
        """Decompose, and store the parts; as the base alone what has one axis or more than eight, or where nothing is
        cut, or core and factors are more numbers; losslessly what has parts that the base stores so.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
            ConfigError: the base is none that can hold a part, or ranks do not fit the tensor.
        """
        rows, shape = real_rows(name, weight), tuple(weight.shape)
        if vanishes(weight, rows):
            return Lossless().encode(name, weight)
        plain = torch.from_numpy(rows).double().reshape(shape)
        if not 2 <= len(shape) <= MOST_AXES:
            return self.base.encode(name, weight, lam=lam)
        found = tucker(plain, energy=self.energy, ranks=self.ranks)
        ranks = tuple(found.core.shape)
        if not fits(shape, ranks) or float(torch.linalg.vector_norm(found.core)) > _LARGEST:
            return self.base.encode(name, weight, lam=lam)
        deviation = max(float(plain.std(correction=0)), float(plain.abs().max()) * _FINEST) or 1.0
        core, factors = plain.numpy(), []
        for axis in cut(shape, ranks):
            factor = found.factors[axis]
            assert factor is not None
            norms = torch.linalg.vector_norm(found.core.movedim(axis, 0).flatten(1), dim=1)
            indices = indices_near(1 / norms.clamp(1 / _LARGEST, _LARGEST).numpy())[:, None]
            step = steps(indices).astype(np.float64)
            part = self._stored(name, factor.mT.numpy() / step, deviation, lam)
            if part is None:
                return Lossless().encode(name, weight)
            factors.append((part, indices))
            inverse = np.linalg.pinv(decode(part).double().numpy() * step, rcond=_ALIKE)
            core = times(core, np.ascontiguousarray(inverse), axis)
        first = self._stored(name, core, deviation, lam)
        if first is None:
            return Lossless().encode(name, weight)
        params, streams = [*ranks, *_described(first)], [*first.streams]
        for part, indices in factors:
            params += _described(part)
            streams += [*part.streams, indices]
        return Encoded("tucker", shape, weight.dtype, tuple(params), tuple(streams))

    def _stored(self, name: str, values: _Array, deviation: float, lam: float) -> Encoded | None:
        """A part (any shape) by the base; None where float32 or its steps end."""
        with np.errstate(over="ignore"):
            part = torch.from_numpy(values.astype(np.float32))
        if not bool(part.isfinite().all()):
            return None
        found = _at(self.base, name, part, deviation, lam)
        if found is None or found.scheme == "lossless":
            return None
        if found.scheme not in NAMES:
            raise ConfigError(f"tucker cannot hold {found.scheme}; choose {', '.join(NAMES)}")
        return found


def _described(part: Encoded) -> tuple[int, ...]:
    return NAMES[part.scheme], len(part.params), *part.params


def _at(base: Scheme, name: str, part: Tensor, deviation: float, lam: float) -> Encoded | None:
    """`part` by `base`, its step (if it has one in deviations) in those of the whole tensor, the same for all rows."""
    if isinstance(base, Grid) and base.sigma is not None and base.group is None:
        return _grid(part, base.sigma * deviation)
    if isinstance(base, Spectral):
        own = float(part.double().std(correction=0))
        sigma = base.sigma * deviation / own if own > 0 else base.sigma
        return replace(base, sigma=min(max(sigma, 2.0**-20), 2.0**16)).encode(name, part)
    if isinstance(base, Trellis):
        rows, columns = rows_columns(tuple(part.shape))
        # As much error as a plain grid of that step has.
        wider = deviation / math.sqrt(12 * base.distortion)
        step = (DEFAULT_SIGMA if base.sigma is None else base.sigma) * wider
        found = base.coded(name, part, feedback(None, rows, columns), step)
        return found if found.scheme != "lossless" or bool(part.any()) else _grid(part, deviation)
    return base.encode(name, part, lam=lam)


def _grid(part: Tensor, step: float) -> Encoded | None:
    """`part` on one grid for all its rows."""
    shape = tuple(part.shape)
    rows = part.numpy().reshape(rows_columns(shape))
    wanted = max(step, float(np.abs(rows).max()) / MOST)
    if wanted < SMALLEST:
        return None
    indices = np.full((len(rows), 1), indices_near(np.array(wanted)), np.int32)
    symbols = np.rint(rows / steps(indices)).astype(np.int32)
    return Encoded("grid", shape, torch.float32, (), (symbols, indices))
