"""Spectral scheme: coefficients of a transform on one grid per tensor, in a scan; both named or chosen by coded size.

    spectral   params (kind of transform, edge, levels, 1: kernels only, layout, order)
    streams: symbols as the layout orders them; scale indices for every combination of the axes' classes, one row

    weight ─► transform ─► coefficients / scale of their class ─► round ─► scan ─► symbols

A scan is the order in which coefficients are coded, as a matrix whose rows and columns have similar scales. Frequencies
are the classes of `Axes`.

    none      memory order: the first axis against the rest
    planes    a matrix (first axis, second axis) for every index of the other axes, one below the other; the
              frequencies of the other axes in raster, zig-zag or Morton order, and within each axis by frequency
    blocks    a row for every block, its coefficients in one of those orders; only if blocks divide the tensor evenly

Products and transform are computed in float64 and rounded once to float32.

A transform pays only where weights are smooth, which for most models is in the taps of kernels; elsewhere the identity
wins. The automatic choice compares coded sizes of a sample, every transform at the scale at which it leaves the squared
error of the plain grid. Measurements are in docs/train-small.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_scales import HIGHEST, LOWEST, SMALLEST, nearest_indices, scales_of
from birdie.compress.scheme import (
    BLOCK,
    INT16,
    SCALES,
    SYMBOLS,
    Cost,
    Decoder,
    Encoded,
    Integers,
    Scheme,
    Sensitivity,
    Spec,
    StreamLayout,
    in_blocks,
)
from birdie.compress.schemes.grid import FINEST, MAX_SYMBOL, Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.rotation import rotation_cost
from birdie.compress.spectral.inverse import KINDS, LIFTING, MAX_EDGE, MAX_LEVELS, Axes, invert, lift
from birdie.compress.spectral.transforms import Transform
from birdie.compress.tensors import (
    kernel,
    real_matrix,
    real_rows,
    rows_are_apart,
    rows_columns,
    tensor_of_blocks,
    underflows,
)
from birdie.entropy import coder
from birdie.entropy.hints import Hints
from birdie.entropy.planes import Block
from birdie.errors import ArtifactError, ConfigError

LAYOUTS = ("none", "planes", "blocks")  # by their numbers in the file
ORDERS = ("raster", "morton")
SCANS = ("none", "planes", "planes-morton", "blocks", "blocks-morton")
_TOGETHER = 1 << 20  # elements of several rows transformed at a time: fewer take longer between transforms than in them
_SAMPLE = 1 << 16  # coefficients on which transforms and scans are compared
_GAIN = 0.995  # share of the identity's bytes that a transform must reach: smaller gains are noise
_HALVINGS = 14  # bisections of the range in which a scale is searched, ± two octaves
_LONGEST = 512  # most samples of an axis from which the gains of a wavelet are computed
_Array = NDArray[np.float64]
_Indices = NDArray[np.int64]


def morton(points: _Indices) -> _Indices:
    """Return the order of `points` (points, axes; not negative) along Morton's curve, as (points,) indices.

    Bits of the first axis lead. Points are sorted by one bit at a time, so any number of axes and points will do.
    """
    depth = int(points.max(initial=0)).bit_length()
    keys = [points[:, axis] >> bit & 1 for bit in range(depth) for axis in reversed(range(points.shape[1]))]
    return np.lexsort(keys) if keys else np.arange(len(points))


def raster(points: _Indices) -> _Indices:
    """Return the order of `points` (points, axes) with the last axis fastest, as (points,) indices."""
    return np.lexsort([*reversed(points.T)]) if points.shape[1] else np.arange(len(points))


def points_of(axes: tuple[_Indices, ...]) -> _Indices:
    """Return every combination of the coordinates of `axes`, the last fastest, as (points, axes)."""
    if not axes:
        return np.zeros((1, 0), np.int64)
    return np.stack([coordinates.ravel() for coordinates in np.meshgrid(*axes, indexing="ij")], axis=1)


@dataclass(frozen=True, slots=True)
class Scan:
    """Layout and order of the coefficients of one tensor for the coder.

    Attributes:
        layout: one of `LAYOUTS`.
        order: one of `ORDERS`; no effect where the layout is "none".
    """

    layout: str = "none"
    order: str = "raster"

    def fits(self, shape: tuple[int, ...], axes: Axes) -> bool:
        """Return whether a tensor of `shape` has this layout."""
        blocks = axes.blocks(shape)
        return self.layout != "blocks" or not any(size % block for size, block in zip(shape, blocks, strict=True))

    def matrix(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, int]:
        """Return rows and columns of the matrix that `arrange` returns."""
        if self.layout == "blocks":
            width = prod(axes.blocks(shape))
            return prod(shape) // width, width
        if self.layout == "planes":
            first, second, rest = _planes(shape)
            return rest * first, second
        return rows_columns(shape)

    def arrange(self, coefficients: Integers, axes: Axes) -> Integers:
        """Return coefficients (any shape) as the matrix (rows, columns) that is coded."""
        shape = coefficients.shape
        if self.layout == "none":
            return coefficients.reshape(rows_columns(shape))
        if self.layout == "blocks":
            split, transposed, order = self._blocks(shape, axes)
            blocks = coefficients.reshape(split).transpose(transposed)
            return blocks.reshape(self.matrix(shape, axes))[:, order]
        lines, across, order = self._orders(shape, axes)
        planes = coefficients.reshape(_planes(shape)).transpose(2, 0, 1)
        return planes[np.ix_(order, lines, across)].reshape(self.matrix(shape, axes))

    def restore(self, matrix: Integers, shape: tuple[int, ...], axes: Axes) -> Integers:
        """Return the coefficients of a coded matrix: the inverse of `arrange`."""
        if self.layout == "none":
            return matrix.reshape(shape)
        if self.layout == "blocks":
            split, transposed, order = self._blocks(shape, axes)
            blocks = matrix[:, np.argsort(order)].reshape([split[axis] for axis in transposed])
            return blocks.transpose(np.argsort(transposed)).reshape(shape)
        lines, across, order = (np.argsort(order) for order in self._orders(shape, axes))
        first, second, rest = _planes(shape)
        planes = matrix.reshape(rest, first, second)[np.ix_(order, lines, across)]
        return planes.transpose(1, 2, 0).reshape(shape)

    def _ordered(self, points: _Indices) -> _Indices:
        return {"raster": raster, "morton": morton}[self.order](points)

    def _blocks(self, shape: tuple[int, ...], axes: Axes) -> tuple[list[int], list[int], _Indices]:
        """Return every axis as blocks and offsets in a block, the transposition to blocks first, the offsets' order."""
        lengths = axes.blocks(shape)
        split = [part for size, block in zip(shape, lengths, strict=True) for part in (size // block, block)]
        transposed = [*range(0, len(split), 2), *range(1, len(split), 2)]
        return split, transposed, self._ordered(points_of(tuple(np.arange(block) for block in lengths)))

    def _orders(self, shape: tuple[int, ...], axes: Axes) -> tuple[_Indices, _Indices, _Indices]:
        """Return the orders of the first and the second axis by frequency, and of the indices of all others."""
        classes = [np.zeros(1, np.int64)] * max(0, 2 - len(shape)) + [*axes.classes(shape)]
        lines, across = (np.argsort(axis, kind="stable") for axis in classes[:2])
        frequencies = points_of(tuple(classes[2:]))
        distinct, number = np.unique(frequencies, axis=0, return_inverse=True)
        rank = np.empty(len(distinct), np.int64)
        rank[self._ordered(distinct)] = np.arange(len(distinct))
        return lines, across, np.argsort(rank[number.ravel()], kind="stable")


def _planes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the sizes of the first axis, the second axis and all others together; a vector is one row."""
    first, second, *rest = (1,) * max(0, 2 - len(shape)) + shape
    return first, second, prod(rest)


def transform_of(params: tuple[int, ...]) -> tuple[Axes, Scan]:
    """Return the transform and the scan that `params` describe."""
    kind, edge, levels, kernel, layout, order = params if len(params) == 6 else (-1,) * 6
    if (
        not 0 <= kind < len(KINDS)
        or not (2 <= edge <= MAX_EDGE if KINDS[kind] == "dct" else edge == 0)
        or not (1 <= levels <= MAX_LEVELS if KINDS[kind] in LIFTING else levels == 0)
        or not 0 <= kernel <= 1
        or not 0 <= layout < len(LAYOUTS)
        or not 0 <= order < len(ORDERS)
    ):
        raise ArtifactError(f"scheme spectral has parameters {params}; the file is corrupt or newer")
    return Axes(KINDS[kind], edge, levels, bool(kernel)), Scan(LAYOUTS[layout], ORDERS[order])


def params_of(axes: Axes, scan: Scan) -> tuple[int, ...]:
    """Return the parameters that `transform_of` reads."""
    edge, levels = (axes.edge if axes.kind == "dct" else 0), (axes.levels if axes.kind in LIFTING else 0)
    return (
        KINDS.index(axes.kind),
        edge,
        levels,
        int(axes.kernel),
        LAYOUTS.index(scan.layout),
        ORDERS.index(scan.order),
    )


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of symbols and scale indices."""
    real_matrix(shape, dtype)
    axes, scan = transform_of(params)
    if not scan.fits(shape, axes):
        raise ArtifactError(f"a tensor of shape {shape} has no blocks of {axes.blocks(shape)}; the file is corrupt")
    rows, columns = scan.matrix(shape, axes)
    return StreamLayout(rows, columns, SYMBOLS), StreamLayout(1, prod(axes.counts(shape)), SCALES, INT16)


def decode(encoded: Encoded) -> Tensor:
    """Return the weights of an encoded tensor."""
    symbols, indices = encoded.streams
    axes, scan = transform_of(encoded.params)
    shape = encoded.shape or (1,)
    coefficients = scan.restore(symbols, shape, axes)
    scales = scales_of(indices).astype(np.float64)

    def inverted(block: Block) -> NDArray[np.float64]:
        first = slice(None) if len(shape) < 2 else block[0]
        values = np.array(coefficients[first], np.float64, order="C")
        values *= scales[0, 0] if scales.size == 1 else per_coefficient(scales, shape, axes, first)
        invert(axes, values)
        return values.reshape(-1, rows_columns(shape)[1])

    return tensor_of_blocks(encoded.shape, encoded.dtype, inverted, _together(shape, axes))


def per_coefficient(
    of_classes: NDArray[np.float64], shape: tuple[int, ...], axes: Axes, first: slice = slice(None)
) -> NDArray[np.float64]:
    """Return an array with one value per coefficient from values per combination of classes.

    Only for the indices `first` of the first axis.
    """
    grid = of_classes.reshape(axes.counts(shape))
    for axis, classes in enumerate(axes.classes(shape)):
        grid = np.take(grid, classes if axis else classes[first], axis=axis)
    return grid


def _together(shape: tuple[int, ...], axes: Axes) -> int:
    """Return how many elements are transformed at a time: complete blocks of the first axis, and complete rows."""
    rows, columns = rows_columns(shape)
    unit = columns * (axes.blocks(shape)[0] if len(shape) > 1 else 1)
    size = BLOCK if unit == columns else _TOGETHER
    return min(max(1, size // unit) * unit, rows * columns)


def _cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    axes, scan = transform_of(params)
    shape, count = shape or (1,), prod(shape)
    operations = {
        "dct": 3 * sum(length for length in axes.blocks(shape) if length > 1),
        "hadamard": rotation_cost(shape, dtype).operations // count,
    }.get(axes.kind, 32 * len(shape) if axes.kind in LIFTING else 0)
    # A scan sorts the points of the axes after the second, or those of a block.
    points = {"none": 0, "planes": prod(shape[2:]) + sum(shape[:2]), "blocks": prod(axes.blocks(shape))}[scan.layout]
    cost = in_blocks(shape, dtype, 20 + operations, _together(shape, axes))
    classes = prod(axes.counts(shape))
    scanned = 0 if scan.layout == "none" else 4 * count
    return Cost(cost.operations + 400 * points + 8 * classes, cost.bytes + scanned + 24 * classes + 100 * points)


DECODER = Decoder("spectral", 9, layout, decode, _cost, inner="tensor")


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

        Rows that one scale would lose beside a far larger one take a plain grid with a scale for each.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
        """
        rows = real_rows(name, weight)
        if rows_are_apart(rows):
            return Grid(sigma=self.sigma).encode(name, weight)
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
        orders = ORDERS if sum(count > 1 for count in counts[2:]) > 1 else ORDERS[:1]
        scans += [Scan("planes", order) for order in orders]
    if axes.kind == "dct" and prod(counts) > 1 and Scan("blocks").fits(shape, axes):
        scans += [Scan("blocks", order) for order in ORDERS]
    return scans


def _size(symbols: Integers, axes: Axes, scan: Scan) -> int:
    """Return the coded bytes of the symbols in this scan."""
    matrix = np.ascontiguousarray(scan.arrange(symbols, axes))
    hints = Hints("symbols", kernel=kernel(symbols.shape, matrix.shape[1]))
    return len(coder.encode(matrix, hints, "max").payload)
