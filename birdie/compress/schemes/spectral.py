"""Spectral coefficients on one grid: any transform, any scan, or whichever costs least.

    weight ─► transform ─► coefficients / step of their class ─► round ─► scan ─► symbols

Most weights have no smooth structure but in the taps of a kernel, and there a transform pays; elsewhere the identity
wins, and an automatic choice takes it: every transform gets the step at which it leaves the squared error of the plain
grid, and the coded size of a sample decides. docs/schemes.md has figures.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_steps import HIGHEST, LOWEST, indices_near, steps
from birdie.compress.scheme import Encoded, Integers, Sensitivity
from birdie.compress.schemes.decode_spectral import parameters, spread
from birdie.compress.schemes.decode_transform import LIFTING, Axes, lift
from birdie.compress.schemes.grid import FINEST, SMALLEST, real_rows, vanishes
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.spectral.scan import LAYOUTS, ORDERS, Scan
from birdie.compress.spectral.transforms import Transform
from birdie.compress.tensors import kernel
from birdie.entropy import coder
from birdie.entropy.hints import Hints
from birdie.errors import ConfigError

SCANS = ("none", *(layout if order == "raster" else f"{layout}-{order}" for layout in LAYOUTS[1:] for order in ORDERS))
MOST = 1 << 23  # the largest symbol: exact in float32
_SAMPLE = 1 << 16  # coefficients that a choice is made by
_WORTH = 0.995  # of the identity's bytes: less is luck
_HALVINGS = 14  # of the range in which a step is searched, ± two octaves
_LONGEST = 512  # places of an axis that the gains of a wavelet are taken from
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spectral:
    """A transform and a uniform grid.

    Attributes:
        transform: a transform, or "auto": the one whose sample is coded smallest at equal squared error, or a core
            and factors (`birdie.compress.schemes.tucker`) where the tensor has few components.
        sigma: step of the plain grid in standard deviations of the tensor; a transform takes the step, of one grid for
            the whole tensor, at which it leaves the same squared error.
        scan: one of `SCANS`, or "auto": the one whose sample is coded smallest.
    """

    transform: Transform | str = "auto"
    sigma: float = 0.3
    scan: str = "auto"

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if isinstance(self.transform, str) and self.transform != "auto":
            raise ConfigError(f"transform {self.transform!r} is not one; give a Transform or 'auto'")
        if not 2.0**-20 <= self.sigma <= 2.0**16:
            raise ConfigError(f"spectral sigma={self.sigma} is out of range; choose a step of 2^-20 to 2^16 deviations")
        scan_named(self.scan)

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002  the contract's; one grid for all
        lam: float = 0.0,  # noqa: ARG002  nothing here weighs bits
    ) -> Encoded:
        """Transform and round; losslessly where there is no step so small, or symbols would leave float32.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
        """
        rows = real_rows(name, weight)
        plain = torch.from_numpy(rows).double().reshape(weight.shape)
        highest = float(plain.abs().max())
        step = max(float(plain.std(correction=0)) * self.sigma, highest * FINEST)
        if vanishes(weight, rows) or (highest and step < SMALLEST):
            return Lossless().encode(name, weight)
        step = step or 1.0
        part = plain[_slab(tuple(plain.shape))]
        error = _Trial.of(Transform("identity"), part).error(step)
        transform = self.transform if isinstance(self.transform, Transform) else _chosen(part, step, error)
        step = _Trial.of(transform, part).matched(step, error)
        indices, symbols = _quantized(transform, plain, step)
        if not indices.size or np.abs(symbols).max() > MOST:
            return Lossless().encode(name, weight)
        found = encoded(tuple(weight.shape), weight.dtype, symbols.astype(np.int32), indices, transform, self.scan)
        if self.transform != "auto" or self.scan != "auto":
            return found
        from birdie.compress.schemes.tucker import cheaper  # it is built on this module

        return cheaper(name, weight, found, self.sigma)


def encoded(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    symbols: Integers,
    step_indices: Integers,
    transform: Transform,
    scan: str = "auto",
) -> Encoded:
    """Coefficients as the decoder wants them: the one place that lays streams out.

    Args:
        shape: of the weight and of its coefficients.
        dtype: of the weight: float16, bfloat16, float32 or float64.
        symbols: coefficient / step, rounded, of `shape`, within ± 2^23.
        step_indices: log2 indices of `log_steps`, of the shape of the grid of classes: along each axis the
            number of distinct `transform.classes(shape)`; or of shape () or (1, …) where all share one step.
        transform: what undoes them.
        scan: one of `SCANS`; "auto" takes the one by which a sample is coded smallest.

    Raises:
        ConfigError: shapes do not fit, a symbol or an index is out of range, or the scan cannot hold the shape.
    """
    axes = transform.plan
    counts = axes.counts(shape)
    if symbols.shape != shape or (step_indices.shape != counts and step_indices.size != 1):
        raise ConfigError(
            f"symbols {symbols.shape} and steps {step_indices.shape} do not fit a weight of {shape} with classes"
            f" {counts}; give one symbol for each weight and one step for each combination of classes"
        )
    if max(int(symbols.max()), -int(symbols.min())) > MOST:
        raise ConfigError(f"a spectral symbol is beyond {MOST:,}; take larger steps")
    if int(step_indices.min()) < LOWEST or int(step_indices.max()) > HIGHEST:
        raise ConfigError(f"a spectral step index is outside {LOWEST} … {HIGHEST}; clamp it")
    indices = np.broadcast_to(step_indices.reshape(-1), (prod(counts),))[None].astype(np.int32)
    symbols = symbols.astype(np.int32)
    chosen = best_scan(symbols, axes) if scan == "auto" else scan_named(scan)
    if not chosen.fits(shape, axes):
        raise ConfigError(f"scan {scan!r} needs blocks that divide {shape} evenly; choose planes or none")
    streams = (np.ascontiguousarray(chosen.arrange(symbols, axes)), indices)
    return Encoded("spectral", shape, dtype, parameters(axes, chosen), streams)


def scan_named(name: str) -> Scan:
    """The scan that `name` of `SCANS` stands for ("auto": none yet).

    Raises:
        ConfigError: there is none.
    """
    if name != "auto" and name not in SCANS:
        raise ConfigError(f"scan {name!r} is unknown; choose auto, {', '.join(SCANS)}")
    layout, _, order = name.partition("-")
    return Scan("none" if name == "auto" else layout, order or "raster")


def best_scan(symbols: Integers, axes: Axes) -> Scan:
    """The scan by which a sample of `symbols` (any shape) is coded smallest."""
    part = symbols[_slab(symbols.shape, strided=axes.kind in LIFTING)]
    scans = [each for each in _scans(symbols.shape, axes) if each.fits(part.shape, axes)]
    return min(scans, key=lambda each: _size(part, axes, each))


def best_transform(weight: Tensor, sigma: float = 1.0) -> Transform:
    """The transform by which a sample of `weight` (real floats, finite) is coded smallest, at the squared error of a
    plain grid with a step of `sigma` deviations; the identity unless half a per cent is gained."""
    plain = weight.detach().cpu().double()
    step = float(plain.std(correction=0)) * sigma if plain.numel() else 0.0
    part = plain[_slab(tuple(plain.shape))]
    return _chosen(part, step, _Trial.of(Transform("identity"), part).error(step)) if step else Transform("identity")


def candidates(shape: Iterable[int]) -> list[Transform]:
    """The transforms that an automatic choice tries, the identity first."""
    lengths = tuple(shape)
    found = [Transform("identity")]
    kernels = prod(lengths[2:]) > 1
    if kernels:
        found += [Transform("dct", axes="kernel"), Transform("wavelet53", levels=1, axes="kernel")]
    if max(lengths, default=1) > 1:
        found += [Transform("dct", 4), Transform("dct", 8), Transform("wavelet97")]
        found += [] if kernels else [Transform("hadamard"), Transform("wavelet53"), Transform("dct", 32)]
    return found


def gains(axes: Axes, shape: tuple[int, ...]) -> _Array:
    """How much longer than itself a coefficient makes the weight, root mean square, for every combination of classes:
    1 but for wavelets, whose steps are divided by it."""
    grid: _Array = np.ones(())
    for block, count in zip(axes.blocks(shape), axes.counts(shape), strict=True):
        own = np.ones(count)
        if axes.kind in LIFTING and block > 1:
            basis = np.eye(min(block, _LONGEST))
            lift(basis, axes.kind, axes.levels)
            classes = Axes(axes.kind, 0, axes.levels).classes((len(basis),))[0]
            norms = np.sqrt(np.bincount(classes, (basis**2).sum(axis=0)) / np.bincount(classes))
            own = np.concatenate([norms[:1], np.full(count - len(norms), norms[1]), norms[1:]])
        grid = np.multiply.outer(grid, own)
    return grid


@dataclass(frozen=True, slots=True)
class _Trial:
    """A sample under a transform: what a step costs, and leaves."""

    transform: Transform
    weight: Tensor
    coefficients: _Array
    gains: _Array  # of every coefficient, or of all

    @classmethod
    def of(cls, transform: Transform, weight: Tensor) -> "_Trial":
        shape, axes = tuple(weight.shape), transform.plan
        found = gains(axes, shape) if axes.kind in LIFTING else np.ones(())
        wide = spread(found, shape, axes) if axes.kind in LIFTING else found
        return cls(transform, weight, transform.forward(weight).numpy(), wide)

    def symbols(self, step: float) -> _Array:
        rounded: _Array = np.rint(self.coefficients * (self.gains / step))
        return rounded

    def error(self, step: float) -> float:
        """Mean squared error of the weights."""
        back = self.symbols(step) * (step / self.gains)
        if self.transform.kind not in LIFTING:  # lengths are kept
            return float(np.mean((back - self.coefficients) ** 2))
        return float((self.transform.inverse(torch.from_numpy(back)) - self.weight).square().mean())

    def matched(self, step: float, error: float) -> float:
        """The step near `step` that leaves `error`."""
        low, high = -2.0, 2.0
        if self.transform.kind == "identity" or not self.error(step * 4) > error > self.error(step / 4):
            return step
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.error(step * 2**middle) < error else (low, middle)
        return float(step * 2 ** ((low + high) / 2))

    def cost(self, step: float, error: float) -> float:
        """Bytes for a weight at the step that leaves `error`."""
        symbols = np.clip(self.symbols(self.matched(step, error)), -MOST, MOST).astype(np.int32)
        scans = [Scan(layout) for layout in ("none", "planes")]
        return min(_size(symbols, self.transform.plan, scan) for scan in scans)


def _chosen(weight: Tensor, step: float, error: float) -> Transform:
    plain, *others = ((_Trial.of(each, weight).cost(step, error), each) for each in candidates(weight.shape))
    cost, found = min(others, key=lambda pair: pair[0], default=plain)
    return found if cost < _WORTH * plain[0] else plain[1]


def _quantized(transform: Transform, weight: Tensor, step: float) -> tuple[NDArray[np.int32], _Array]:
    """Step indices for the classes and rounded coefficients; no indices where float32 has no such step."""
    shape, axes = tuple(weight.shape), transform.plan
    wanted = step / gains(axes, shape)
    coefficients = transform.forward(weight).numpy()
    if float(wanted.min()) < SMALLEST:
        return np.zeros(0, np.int32), coefficients
    indices = indices_near(wanted)
    taken = steps(indices).astype(np.float64)
    same = int(indices.min()) == int(indices.max())
    return indices, np.rint(coefficients / (taken.ravel()[0] if same else spread(taken, shape, axes)))


def _slab(shape: tuple[int, ...], *, strided: bool = False) -> tuple[slice, ...]:
    """A part of a tensor of at most about `_SAMPLE` places, whole blocks of 32; `strided` takes it from everywhere."""
    sizes = list(shape)
    while prod(sizes) > _SAMPLE and max(sizes) > 32:
        longest = sizes.index(max(sizes))
        sizes[longest] = max(32, sizes[longest] // 64 * 32)
    strides = [size // taken for size, taken in zip(shape, sizes, strict=True)]
    if strided:
        return tuple(slice(None, None, stride) for stride in strides)
    return tuple(slice(0, taken) for taken in sizes)


def _scans(shape: tuple[int, ...], axes: Axes) -> list[Scan]:
    """What differs for a tensor of `shape`."""
    counts = axes.counts(shape)
    found = [Scan()]
    if prod(shape[2:]) > 1 or prod(counts) > 1:
        orders = ORDERS if sum(count > 1 for count in counts[2:]) > 1 else ORDERS[:1]
        found += [Scan("planes", order) for order in orders]
    if axes.kind == "dct" and prod(counts) > 1 and Scan("blocks").fits(shape, axes):
        found += [Scan("blocks", order) for order in ORDERS]
    return found


def _size(symbols: Integers, axes: Axes, scan: Scan) -> int:
    """Bytes of the symbols as the coder gets them."""
    matrix = np.ascontiguousarray(scan.arrange(symbols, axes))
    hints = Hints("symbols", kernel=kernel(symbols.shape, matrix.shape[1]))
    return len(coder.encode(matrix, hints, "max").payload)
