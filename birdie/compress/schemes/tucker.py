"""Tucker's core and factors of a tensor in its place, each part by a scheme of its own.

    weight ─► truncated HOSVD ─► factors ─► quantized ─► core fitted to what these became ─► quantized

With one step for all: row k of a factor is stored times the norm σ(k) of what the core has for it, so that an error of
any number in any part is about as large in the weight, and a component that no step can see becomes zeros.

It pays where a tensor has few components: a sum of few outer products, or, at coarse steps, layers far wider than
their task. Elsewhere it does not: docs/spectral.md has figures.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.feedback import feedback
from birdie.compress.log_steps import indices_near, steps
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.decode_tucker import MOST_AXES, NAMES, cut, fits, numbers, times
from birdie.compress.schemes.decoders import DECODERS, decode
from birdie.compress.schemes.grid import SMALLEST, Grid, real_rows, vanishes
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.spectral import MOST, Spectral
from birdie.compress.schemes.trellis import DEFAULT_SIGMA, Trellis
from birdie.compress.spectral.tucker import Decomposition, tucker
from birdie.compress.tensors import kernel, rows_columns
from birdie.entropy import coder
from birdie.errors import ConfigError

_FINEST = 2.0**-16  # deviation of the tensor, of its largest weight: below, it is a constant
_LARGEST = 1e37  # norm that rows of factors may have
_ALIKE = 0.05  # singular values of quantized factors, of the largest: what is below is one component twice
# What is tried in the place of a transform: cuts that lose these shares of its error and leave so few of the numbers,
# of tensors from so many numbers on whose singular values are quickly found.
_SHARES, _FEW, _LEAST, _WIDEST = (0.4, 0.8), 0.6, 4096, 1024
_HALVINGS = 6
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
        if not fits(shape, tuple(found.core.shape)) or float(torch.linalg.vector_norm(found.core)) > _LARGEST:
            return self.base.encode(name, weight, lam=lam)
        return self._of(name, weight, plain, found, lam)

    def _of(self, name: str, weight: Tensor, plain: Tensor, found: Decomposition, lam: float) -> Encoded:
        """`weight`, which is `plain` in float64, by its decomposition."""
        shape, ranks = tuple(plain.shape), tuple(found.core.shape)
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


def cheaper(name: str, weight: Tensor, found: Encoded, sigma: float) -> Encoded:
    """`found`, or core and factors if these are coded smaller and leave no larger squared error.

    Tried only where the cut leaves less than six tenths of the numbers: with more it has never paid.

    Args:
        weight: any shape, finite floats.
        found: what a transform made of it.
        sigma: the step in standard deviations around which one is searched.
    """
    shape = tuple(weight.shape)
    narrow = all(min(size, weight.numel() // max(1, size)) <= _WIDEST for size in shape)
    if not (2 <= len(shape) <= MOST_AXES and weight.numel() >= _LEAST and narrow) or found.scheme == "lossless":
        return found
    plain = weight.detach().cpu().float().double()
    allowed, whole = float((decode(found).double() - plain).square().sum()), float(plain.square().sum())
    best, least = found, -1
    for share in _SHARES:
        energy = 1 - share * allowed / max(whole, SMALLEST)
        if not 0 < energy < 1:
            continue
        parts = tucker(plain, energy=energy)
        ranks = tuple(parts.core.shape)
        if not fits(shape, ranks) or numbers(shape, ranks) > _FEW * weight.numel() or whole > _LARGEST:
            continue
        trial, low, high = None, math.log2(sigma) - 3, math.log2(sigma) + 1
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            step = min(max(2.0**middle, 2.0**-20), 2.0**16)
            made = Tucker(base=Grid(sigma=step))._of(name, weight, plain, parts, 0.0)
            fine = float((decode(made).double() - plain).square().sum()) <= allowed
            trial, low, high = (made, middle, high) if fine else (trial, low, middle)
        if trial is not None:
            least = coded_size(best) if least < 0 else least
            size = coded_size(trial)
            best, least = (trial, size) if size < least else (best, least)
    return best


def coded_size(found: Encoded) -> int:
    """Bytes of all streams as the coder "max" writes them."""
    layout, total = DECODERS[found.scheme].layout(found.shape, found.dtype, found.params), 0
    for stream, each in zip(found.streams, layout, strict=True):
        taps = kernel(found.shape, each.columns)
        hints = each.hints if taps == (1, 1) else replace(each.hints, kernel=taps)
        total += len(coder.encode(np.ascontiguousarray(stream), hints, "max").payload)
    return total
