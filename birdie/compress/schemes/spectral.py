"""Spectral scheme: coefficients of a transform on one grid per tensor, in a scan; both named or chosen by coded size.

    weight ─► transform ─► coefficients / scale of their class ─► round ─► scan ─► symbols

A transform pays only where weights are smooth, which for most models is in the taps of kernels; elsewhere the identity
wins. The automatic choice compares coded sizes of a sample, every transform at the scale at which it leaves the squared
error of the plain grid. Measurements are in docs/spectral.md. The decoding half is
`birdie.compress.spectral.decoding`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_scales import HIGHEST, LOWEST, SMALLEST, nearest_indices, scales_of
from birdie.compress.scheme import Encoded, Integers, Scheme, Sensitivity, Spec
from birdie.compress.schemes.grid import FINEST, MAX_SYMBOL
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.spectral.decoding import DECODER, params_of, per_coefficient
from birdie.compress.spectral.inverse import LIFTING, MAX_EDGE, Axes, lift
from birdie.compress.spectral.scan import Scan
from birdie.compress.spectral.transforms import Transform
from birdie.compress.tensors import kernel, real_rows, underflows
from birdie.entropy import coder
from birdie.entropy.hints import Hints
from birdie.errors import ConfigError

_ORDERS = ("raster", "morton")  # that are written; files may have zigzag, too
SCANS = ("none", "planes", "planes-morton", "blocks", "blocks-morton")
_SAMPLE = 1 << 16  # coefficients on which transforms and scans are compared
_GAIN = 0.995  # share of the identity's bytes that a transform must reach: smaller gains are noise
_HALVINGS = 14  # bisections of the range in which a scale is searched, ± two octaves
_LONGEST = 512  # most samples of an axis from which the gains of a wavelet are computed
_Array = NDArray[np.float64]


def _of_spec(
    transform: str = "auto",
    *,
    edge: int | None = None,
    levels: int | None = None,
    axes: str | None = None,
    sigma: float = 0.3,
    scan: str = "auto",
) -> "Spectral":
    if transform == "auto":
        if (edge, levels, axes) != (None, None, None):
            raise ConfigError(
                "edge, levels and axes are chosen by spectral:auto; name a transform: spectral:dct,edge=8"
            )
        return Spectral("auto", sigma, scan)
    edge, levels = 8 if edge is None else edge, 3 if levels is None else levels
    return Spectral(Transform(transform, edge, levels, axes or "all"), sigma, scan)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Spectral(Scheme):
    """A transform and a uniform grid for its coefficients.

    Attributes:
        transform: a transform, or "auto": the one whose sample is coded smallest at equal squared error.
            If there are rows of zeros, which stay zero, transforms of the first axis are restricted to the kernel.
        sigma: scale of the plain grid in standard deviations of the tensor; a transform takes the scale, one for the
            tensor, at which it leaves the same squared error.
        scan: one of `SCANS`, or "auto": the one whose sample is coded smallest.
    """

    decoder, by_axes = DECODER, True
    specs = (
        Spec(
            "spectral",
            "coefficients of a transform (dct, wavelet53, wavelet97, hadamard, identity) on one grid per tensor",
            _of_spec,
            "spectral:auto,sigma=0.3",
        ),
    )

    transform: Transform | str = "auto"
    sigma: float = 0.3
    scan: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.transform, str) and self.transform != "auto":
            raise ConfigError(f"transform {self.transform!r} is not one; give a Transform or 'auto'")
        if not 2.0**-20 <= self.sigma <= 2.0**16:
            raise ConfigError(
                f"spectral sigma={self.sigma} is out of range; choose a scale of 2^-20 to 2^16 deviations"
            )
        scan_named(self.scan)

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002 (one grid for the tensor)
    ) -> Encoded:
        """Transform and round; losslessly if no scale is small enough, or symbols would not be exact in float32.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
        """
        rows = real_rows(name, weight)
        plain = torch.from_numpy(rows).double().reshape(weight.shape)
        highest = float(plain.abs().max())
        scale = max(float(plain.std(correction=0)) * self.sigma, highest * FINEST)
        if underflows(weight, rows) or (highest and scale < SMALLEST):
            return Lossless().encode(name, weight)
        scale = scale or 1.0
        sample = plain[_slab(tuple(plain.shape))]
        error = _Trial.of(Transform("identity"), sample).error(scale)
        # A transform of the first axis would spread the error of a row over rows of zeros beside it.
        apart = weight.ndim > 1 and not rows.any(axis=1).all()
        if isinstance(self.transform, Transform):
            mixing = apart and self.transform.plan.blocks(tuple(weight.shape))[0] > 1
            transform = replace(self.transform, axes="kernel") if mixing else self.transform
        else:
            transform = _chosen(sample, scale, error, apart)
        scale = _Trial.of(transform, sample).matched(scale, error)
        indices, symbols = _quantized(transform, plain, scale)
        if not indices.size or np.abs(symbols).max() > MAX_SYMBOL:
            return Lossless().encode(name, weight)
        shape = tuple(weight.shape)
        return encode_symbols(shape, weight.dtype, symbols.astype(np.int32), indices, transform, self.scan)

    def encode_part(self, name: str, part: Tensor, deviation: float) -> Encoded | None:
        """Encode a part with the scale of the complete tensor: see `Scheme.encode_part`."""
        spread = float(part.double().std(correction=0))
        sigma = self.sigma * deviation / spread if spread > 0 else self.sigma
        return replace(self, sigma=min(max(sigma, 2.0**-20), 2.0**16)).encode(name, part)


def encode_symbols(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    symbols: Integers,
    scale_indices: Integers,
    transform: Transform,
    scan: str = "auto",
) -> Encoded:
    """Arrange quantized coefficients in streams as the decoder expects them.

    Args:
        shape: of the weight and of its coefficients.
        dtype: of the weight: float16, bfloat16, float32 or float64.
        symbols: coefficient / scale, rounded, of `shape`, within ± 2^23.
        scale_indices: log2 indices of `log_scales`, of the shape of the grid of classes: along each axis the number of
            distinct `transform.classes(shape)`; or of shape () or (1, …) if all coefficients share one scale.
        transform: the transform of the coefficients.
        scan: one of `SCANS`; "auto" takes the one that codes a sample smallest.
    """
    axes = transform.plan
    counts = axes.counts(shape)
    if symbols.shape != shape or (scale_indices.shape != counts and scale_indices.size != 1):
        raise ConfigError(
            f"symbols {symbols.shape} and scales {scale_indices.shape} do not fit a weight of {shape} with classes"
            f" {counts}; give one symbol for each weight and one scale for each combination of classes"
        )
    if max(int(symbols.max()), -int(symbols.min())) > MAX_SYMBOL:
        raise ConfigError(f"a spectral symbol is beyond {MAX_SYMBOL:,}; use larger scales")
    if int(scale_indices.min()) < LOWEST or int(scale_indices.max()) > HIGHEST:
        raise ConfigError(f"a spectral scale index is outside {LOWEST} … {HIGHEST}; clamp it")
    indices = np.broadcast_to(scale_indices.reshape(-1), (prod(counts),))[None].astype(np.int32)
    symbols = symbols.astype(np.int32)
    chosen = best_scan(symbols, axes) if scan == "auto" else scan_named(scan)
    if not chosen.fits(shape, axes):
        raise ConfigError(f"scan {scan!r} needs blocks that divide {shape} evenly; choose planes or none")
    streams = (np.ascontiguousarray(chosen.arrange(symbols, axes)), indices)
    return Encoded("spectral", shape, dtype, params_of(axes, chosen), streams)


def scan_named(name: str) -> Scan:
    """Return the scan called `name` in `SCANS`; for "auto", the scan "none"."""
    if name != "auto" and name not in SCANS:
        raise ConfigError(f"scan {name!r} is unknown; choose auto, {', '.join(SCANS)}")
    layout, _, order = name.partition("-")
    return Scan("none" if name == "auto" else layout, order or "raster")


def best_scan(symbols: Integers, axes: Axes) -> Scan:
    """Return the scan that codes a sample of `symbols` (any shape) smallest."""
    part = symbols[_slab(symbols.shape, strided=axes.kind in LIFTING)]
    scans = [scan for scan in _scans(symbols.shape, axes) if scan.fits(part.shape, axes)]
    return min(scans, key=lambda scan: _size(part, axes, scan))


def best_transform(weight: Tensor, gain: float) -> Transform:
    """Return the transform that codes a sample of `weight` (real floats, finite) smallest.

    Transforms are compared at the squared error of a plain grid with a scale of one deviation; the result is the
    identity unless another transform reaches the share `gain` of its bytes.
    """
    plain = weight.detach().cpu().double()
    scale = float(plain.std(correction=0)) if plain.numel() else 0.0
    if not scale:
        return Transform("identity")
    sample = plain[_slab(tuple(plain.shape))]
    apart = weight.ndim > 1 and not bool(weight.flatten(1).any(1).all())
    return _chosen(sample, scale, _Trial.of(Transform("identity"), sample).error(scale), apart, gain)


def candidates(shape: Iterable[int]) -> list[Transform]:
    """Return the transforms that an automatic choice tries, the identity first."""
    lengths = tuple(shape)
    transforms = [Transform("identity")]
    kernels = prod(lengths[2:]) > 1
    if kernels:
        transforms += [Transform("dct", axes="kernel"), Transform("wavelet53", levels=1, axes="kernel")]
    if max(lengths[2:], default=1) >= 2 * MAX_EDGE:  # of filters of sound, which are nearly sinusoids
        transforms += [Transform("dct", MAX_EDGE, axes="kernel")]
    if max(lengths, default=1) > 1:
        transforms += [Transform("dct", 4), Transform("dct", 8), Transform("wavelet97")]
        transforms += [] if kernels else [Transform("hadamard"), Transform("wavelet53"), Transform("dct", 32)]
    return transforms


def gains(axes: Axes, shape: tuple[int, ...]) -> _Array:
    """Return the root mean square gain from coefficient to weight for every combination of classes.

    The gain is 1 for orthonormal transforms. Wavelets are not orthonormal, so an error of one scale costs more in some
    bands than in others: their scales are divided by the gain.
    """
    grid: _Array = np.ones(())
    for block, count in zip(axes.blocks(shape), axes.counts(shape), strict=True):
        gain = np.ones(count)
        if axes.kind in LIFTING and block > 1:
            basis = np.eye(min(block, _LONGEST))
            lift(basis, axes.kind, axes.levels)
            classes = Axes(axes.kind, 0, axes.levels).classes((len(basis),))[0]
            norms = np.sqrt(np.bincount(classes, (basis**2).sum(axis=0)) / np.bincount(classes))
            gain = np.concatenate([norms[:1], np.full(count - len(norms), norms[1]), norms[1:]])
        grid = np.multiply.outer(grid, gain)
    return grid


@dataclass(frozen=True, slots=True)
class _Trial:
    """A sample under a transform, for its bytes and squared error at any scale."""

    transform: Transform
    weight: Tensor
    coefficients: _Array
    gains: _Array  # of every coefficient, or one for all

    @classmethod
    def of(cls, transform: Transform, weight: Tensor) -> "_Trial":
        shape, axes = tuple(weight.shape), transform.plan
        gain = per_coefficient(gains(axes, shape), shape, axes) if axes.kind in LIFTING else np.ones(())
        return cls(transform, weight, transform.forward(weight).numpy(), gain)

    def symbols(self, scale: float) -> _Array:
        rounded: _Array = np.rint(self.coefficients * (self.gains / scale))
        return rounded

    def error(self, scale: float) -> float:
        """Return the mean squared error of the weights."""
        decoded = self.symbols(scale) * (scale / self.gains)
        if self.transform.kind not in LIFTING:  # orthonormal: errors of coefficients are errors of weights
            return float(np.mean((decoded - self.coefficients) ** 2))
        return float((self.transform.inverse(torch.from_numpy(np.asarray(decoded))) - self.weight).square().mean())

    def matched(self, scale: float, error: float) -> float:
        """Return the scale near `scale` that leaves `error`, by bisection."""
        low, high = -2.0, 2.0
        if self.transform.kind == "identity" or not self.error(scale * 4) > error > self.error(scale / 4):
            return scale
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.error(scale * 2**middle) < error else (low, middle)
        return float(scale * 2 ** ((low + high) / 2))

    def cost(self, scale: float, error: float) -> float:
        """Return the coded bytes of the sample at the scale that leaves `error`."""
        symbols = np.clip(self.symbols(self.matched(scale, error)), -MAX_SYMBOL, MAX_SYMBOL).astype(np.int32)
        scans = [Scan(layout) for layout in ("none", "planes")]
        return min(_size(symbols, self.transform.plan, scan) for scan in scans)


def _chosen(weight: Tensor, scale: float, error: float, apart: bool = False, gain: float = _GAIN) -> Transform:
    """Return the candidate with the fewest bytes at equal error; the identity unless another reaches the share `gain`.

    If the rows must stay `apart`, transforms of the first axis are left out.
    """
    kinds = [kind for kind in candidates(weight.shape) if not (apart and kind.plan.blocks(tuple(weight.shape))[0] > 1)]
    identity, *others = ((_Trial.of(kind, weight).cost(scale, error), kind) for kind in kinds)
    cost, transform = min(others, key=lambda pair: pair[0], default=identity)
    return transform if cost < gain * identity[0] else identity[1]


def _quantized(transform: Transform, weight: Tensor, scale: float) -> tuple[NDArray[np.int32], _Array]:
    """Return scale indices of the classes and rounded coefficients; no indices if float32 has no such scale."""
    shape, axes = tuple(weight.shape), transform.plan
    scales = scale / gains(axes, shape)
    coefficients = transform.forward(weight).numpy()
    if float(scales.min()) < SMALLEST:
        return np.zeros(0, np.int32), coefficients
    indices = nearest_indices(scales)
    stored = scales_of(indices).astype(np.float64)
    same = int(indices.min()) == int(indices.max())
    return indices, np.rint(coefficients / (stored.ravel()[0] if same else per_coefficient(stored, shape, axes)))


def _slab(shape: tuple[int, ...], *, strided: bool = False) -> tuple[slice, ...]:
    """Return a part of a tensor of about `_SAMPLE` elements at most, in blocks of 32; `strided` samples all of it."""
    sizes = list(shape)
    while prod(sizes) > _SAMPLE and max(sizes) > 32:
        longest = sizes.index(max(sizes))
        sizes[longest] = max(32, sizes[longest] // 64 * 32)
    strides = [size // part for size, part in zip(shape, sizes, strict=True)]
    if strided:
        return tuple(slice(None, None, stride) for stride in strides)
    return tuple(slice(0, part) for part in sizes)


def _scans(shape: tuple[int, ...], axes: Axes) -> list[Scan]:
    """Return the scans that give different orders for a tensor of `shape`."""
    counts = axes.counts(shape)
    scans = [Scan()]
    if prod(shape[2:]) > 1 or prod(counts) > 1:
        orders = _ORDERS if sum(count > 1 for count in counts[2:]) > 1 else _ORDERS[:1]
        scans += [Scan("planes", order) for order in orders]
    if axes.kind == "dct" and prod(counts) > 1 and Scan("blocks").fits(shape, axes):
        scans += [Scan("blocks", order) for order in _ORDERS]
    return scans


def _size(symbols: Integers, axes: Axes, scan: Scan) -> int:
    """Return the coded bytes of the symbols in this scan."""
    matrix = np.ascontiguousarray(scan.arrange(symbols, axes))
    hints = Hints("symbols", kernel=kernel(symbols.shape, matrix.shape[1]))
    return len(coder.encode(matrix, hints, "max").payload)
