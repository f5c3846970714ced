"""Grid scheme: uniform grids with one scale per row, per group of columns, or per tensor: w ≈ symbol · scale.

    grid   params ()             a scale per row
           params (group_size,)  a scale for every `group_size` columns of a row
    streams: symbols (rows, columns), scale indices (rows, groups)

Three ways to choose the scale:

- From the range: `bits` nominal bits over the row's clipped maximum, as the challenge's int8 export does (clip at the
  0.9999984 quantile of |row|, symbols ±127). `level_stride=4` keeps only every fourth level, which the mixed int8/int6
  record called INT4_STEP; symbols are stored divided by it, so the coder need not learn the gaps. With
  `clip_quantile=None` each row takes the quantile that leaves the least squared error (the clip search that the record
  of 2026-03-22, openai/parameter-golf, calls GPTQ-lite).
- From the deviation: scale = `sigma` · standard deviation of the row, symbols unbounded. The entropy coder charges only
  for the levels that occur, so a nominal width has no meaning here.
- From both: clip at `clip_sigmas` standard deviations of the row, `bits` nominal bits over that (SDClip,
  openai/parameter-golf PR 1394). At the records' 12.85 almost nothing is clipped, and the result equals that from the
  deviation.

With `group_size` the same holds for every group of so many columns of a row. Groups help if outliers are in few columns
and the width is nominal; an entropy coder that models the scales of rows and columns gains nothing from them.

A tensor of nothing but weights so small that float32 has no scale for them (around 1e-40) is kept losslessly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.importance import importance
from birdie.compress.log_scales import (
    SMALLEST,
    covering_indices,
    nearest_indices,
    scales_of,
    shared_indices,
    stored_indices,
)
from birdie.compress.scheme import (
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
)
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import real_matrix, real_rows, rows_columns, underflows
from birdie.entropy.factors import Factors
from birdie.errors import ArtifactError, ConfigError
from birdie.system.kernels import njit

CLIP_QUANTILE = 0.9999984
CLIP_SIGMAS = 12.85  # the records' constant for matrices
CLIPS = (1.0, 0.99999, 0.9999, 0.9995, 0.999, 0.995, 0.99, 0.98, 0.95, 0.9, 0.8)  # quantiles of a clip search
BLOCK = 1 << 22  # elements worked on at once: limits the memory for temporaries
FINEST = 2.0**-20  # smallest scale over the row's largest weight: keeps symbols exact in float32
MAX_SYMBOL = 1 << 23  # exact in float32
_CACHED = 1 << 12  # elements decoded at a time: they stay in the nearest cache
_SCALES = 1 << 18  # scales looked up at a time


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of symbols and scale indices."""
    if len(params) > 1:
        raise ArtifactError(f"scheme grid takes at most one parameter but the file gives {len(params)}")
    return grouped_layout(shape, dtype, params[0] if params else real_matrix(shape, dtype)[1], np.dtype(np.int32))


def grouped_layout(
    shape: tuple[int, ...], dtype: torch.dtype, group_size: int, symbols: np.dtype[np.integer]
) -> tuple[StreamLayout, ...]:
    """Return the layout of symbols of this integer type and of one scale index per group."""
    rows, columns = real_matrix(shape, dtype)
    if not 1 <= group_size <= columns:
        raise ArtifactError(f"a group of {group_size} columns does not fit rows of {columns}; the file is corrupt")
    return StreamLayout(rows, columns, SYMBOLS, symbols), StreamLayout(rows, -(-columns // group_size), SCALES, INT16)


def decode(encoded: Encoded) -> Tensor:
    """Return symbol · scale, computed in float32 and cast once."""
    symbols, indices = encoded.streams
    # Scales are rounded up, so the largest symbol may stand for a little more than the dtype's largest number.
    limit = np.float32(min(torch.finfo(encoded.dtype).max, torch.finfo(torch.float32).max))
    out = torch.from_numpy(np.empty(symbols.shape, f"u{encoded.dtype.itemsize}")).view(encoded.dtype)
    group_size = encoded.params[0] if encoded.params else symbols.shape[1]
    # Symbols in another order, or one for all, are copied block by block.
    height = max(1, _SCALES // (indices.shape[1] if symbols.flags.c_contiguous else symbols.shape[1]))
    for start in range(0, len(out), height):
        rows = slice(start, start + height)
        _dequantize_rows(np.ascontiguousarray(symbols[rows]), scales_of(indices[rows]), group_size, limit, out[rows])
    return out.reshape(encoded.shape)


def factors(encoded: Encoded) -> Factors:
    """Return the scales of groups."""
    symbols, indices = encoded.streams
    limit = min(torch.finfo(encoded.dtype).max, torch.finfo(torch.float32).max)
    group_size = encoded.params[0] if encoded.params else symbols.shape[1]
    return Factors(scales_of(indices), np.empty(0, np.float32), group_size, False, limit)


def cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    """Return the cost of decoding a grid with a scale for each group."""
    rows, columns = rows_columns(shape)
    groups, count = -(-columns // params[0]) if params else 1, rows * columns
    temporaries = 8 * min(count, max(_SCALES, columns)) + 24 * min(rows * groups, max(_SCALES, groups))
    return Cost(2 * count + 20 * rows * groups, count * dtype.itemsize + temporaries)


def _dequantize_rows(
    symbols: Integers, scales: NDArray[np.float32], group_size: int, limit: np.float32, out: Tensor
) -> None:
    """Compute out = symbol · scale of its group in float32, clipped to ± limit and cast once."""
    if out.dtype is torch.float32:
        _dequantize(symbols, scales, group_size, limit, out.numpy())
    elif out.dtype is torch.bfloat16:
        _dequantize(symbols, scales, group_size, limit, out.view(torch.uint16).numpy())
    else:
        height = max(1, _CACHED // symbols.shape[1])
        exact = np.empty((min(height, len(scales)), symbols.shape[1]), np.float32)
        for row in range(0, len(scales), height):
            rows = slice(row, row + height)
            block = exact[: len(scales[rows])]
            _dequantize(symbols[rows], scales[rows], group_size, limit, block)
            out[rows] = torch.from_numpy(block).to(out.dtype)


@njit(nogil=True, cache=True)
def _dequantize(symbols, scales, group_size, limit, out):  # type: ignore[no-untyped-def]
    """Compute out = symbol · scale of its group, clipped to ± limit; 16-bit words are bfloat16, rounded to even."""
    width = min(group_size, _CACHED)
    values = np.empty(width, np.float32)
    bits = values.view(np.uint32)
    limits = np.empty(1, np.float32)
    limits[0] = limit
    most = limits.view(np.uint32)[0]
    for row in range(symbols.shape[0]):
        for group in range(scales.shape[1]):
            end = min((group + 1) * group_size, symbols.shape[1])
            for start in range(group * group_size, end, width):
                codes, target = symbols[row, start : min(start + width, end)], out[row, start:end]
                for i in range(codes.size):
                    values[i] = np.float32(codes[i]) * scales[row, group]
                    # No product is NaN, so magnitudes compare as bit patterns without the sign, which is cheaper.
                    size = bits[i] & np.uint32(0x7FFFFFFF)
                    bits[i] = (size if size < most else most) | (bits[i] & np.uint32(0x80000000))
                if out.itemsize == 4:
                    for i in range(codes.size):
                        target[i] = values[i]
                else:
                    for i in range(codes.size):
                        odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
                        target[i] = np.uint16((bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))


DECODER = Decoder("grid", 2, layout, decode, cost, factors, inner="rows")


def _by_width(bits: int) -> Callable[..., "Grid"]:
    def make(*, clip: str = str(CLIP_QUANTILE), level_stride: int = 1, group_size: int | None = None) -> "Grid":
        return Grid(bits, level_stride, clip_quantile=_quantile(clip), group_size=group_size)

    return make


def _by_spread(sigma: float, *, group_size: int | None = None, per_tensor: bool = False) -> "Grid":
    return Grid(sigma=sigma, group_size=group_size, per_tensor=per_tensor)


def _by_clip(*, bits: int = 6, clip_sigmas: float = CLIP_SIGMAS, group_size: int | None = None) -> "Grid":
    return Grid(bits, clip_sigmas=clip_sigmas, group_size=group_size)


def _quantile(text: str) -> float | None:
    if text == "search":
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"clip={text!r} is not a quantile; write for example clip=0.9995 or clip=search") from None


@dataclass(frozen=True, slots=True)
class Grid(Scheme):
    """Uniform grid with a scale per row, per group of columns, or per tensor.

    Attributes:
        bits: nominal width, 2 to 8; symbols span ±(2^(bits−1) − 1). Ignored if `sigma` is set.
        level_stride: keep only every `level_stride`-th level.
        sigma: scale in standard deviations of the row; None takes the scale from the range.
        clip_quantile: quantile of |row| that the outermost symbol represents; None tries those of `CLIPS` and takes the
            one with the least squared error, columns weighted by the diagonal of the Hessian if that is known.
        group_size: columns that share a scale; None: all columns of a row.
        clip_sigmas: standard deviations of the row that the outermost symbol represents, instead of a quantile.
        per_tensor: with `sigma`, one scale for the tensor, from the root mean square of its rows' deviations.
    """

    decoder = DECODER
    specs = (
        Spec("int2", "uniform grid of 2 bits over the row's range", _by_width(2)),
        Spec(
            "int8",
            "uniform grid of 8 bits over the row's range",
            _by_width(8),
        ),
        Spec(
            "sigma",
            "uniform grid, scale in standard deviations of the row",
            _by_spread,
            "sigma:0.3",
        ),
        Spec("sdclip", "uniform grid clipped at so many standard deviations (SDClip)", _by_clip),
        *(
            Spec(f"int{bits}", f"uniform grid of {bits} bits over the row's range", _by_width(bits), listed=False)
            for bits in range(3, 8)
        ),
    )

    bits: int = 8
    level_stride: int = 1
    sigma: float | None = None
    clip_quantile: float | None = CLIP_QUANTILE
    group_size: int | None = None
    clip_sigmas: float | None = None
    per_tensor: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ConfigError(f"grid width {self.bits} is out of range; choose 2 to 8 bits")
        if not 1 <= self.level_stride <= self.top:
            raise ConfigError(
                f"level_stride={self.level_stride} is out of range for int{self.bits}; choose 1 to {self.top}"
            )
        if self.sigma is not None and not 2.0**-20 <= self.sigma <= 2.0**16:
            raise ConfigError(f"grid sigma {self.sigma} is out of range; choose a scale of 2^-20 to 2^16 deviations")
        if self.clip_quantile is not None and not 0.5 <= self.clip_quantile <= 1:
            raise ConfigError(f"grid clip quantile {self.clip_quantile} is out of range; choose 0.5 to 1")
        if self.group_size is not None and self.group_size < 1:
            raise ConfigError(f"grid group_size={self.group_size} is out of range; choose 1 or more columns")
        if self.clip_sigmas is not None and not 2 <= self.clip_sigmas <= 1024:
            raise ConfigError(f"grid clip_sigmas={self.clip_sigmas} is out of range; choose 2 to 1024 deviations")
        if self.clip_sigmas is not None and self.sigma is not None:
            raise ConfigError("a grid takes its scale from sigma or from clip_sigmas; give one of the two")
        if self.per_tensor and (self.sigma is None or self.group_size is not None):
            raise ConfigError("a grid with one scale per tensor takes it from sigma and has no groups")

    @property
    def top(self) -> int:
        """Outermost symbol before `level_stride`."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def by_rows(self) -> bool:
        """Return whether each row has scales of its own."""
        return not self.per_tensor

    def at_scale(self, sigma: float) -> "Grid | None":
        """Return a grid with a scale of `sigma` standard deviations and the same groups; None if its width is fixed."""
        return None if self.sigma is None else Grid(sigma=sigma, group_size=self.group_size, per_tensor=self.per_tensor)

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None) -> Encoded:
        """Round each row to its grid; losslessly if a non-zero row needs a smaller scale than float32 has.

        Args:
            name: for error messages.
            weight: any shape.
            sensitivity: its Hessian's diagonal weights the errors of a clip search.

        Raises:
            ConfigError: the sensitivity is of another matrix.
            WeightsError: the tensor is not float16, bfloat16, float32 or float64, is empty, or is not finite.
        """
        rows = real_rows(name, weight)
        group_size = None if self.group_size is None or self.group_size >= rows.shape[1] else self.group_size
        height = max(1, BLOCK // rows.shape[1])
        blocks = [rows[start : start + height] for start in range(0, len(rows), height)]
        if self.clip_quantile is None and self.sigma is None and self.clip_sigmas is None:
            columns = importance(name, sensitivity, *rows.shape).columns
            scales = np.concatenate([self._searched_scales(block, group_size, columns) for block in blocks])
        else:
            scales = np.concatenate([_by_groups(block, group_size, self._scales) for block in blocks])
        used = np.concatenate([_by_groups(block, group_size, lambda part: part.any(axis=1)) for block in blocks])
        shared = None
        if self.per_tensor and used.any():
            shared = max(float(np.sqrt(np.mean(scales[used] ** 2))), float(np.abs(rows).max()) * FINEST)
            scales = np.full_like(scales, shared)
        indices = stored_indices(scales, used, self._indices)
        if indices is None or underflows(weight, rows):
            return Lossless().encode(name, weight)
        if shared is not None and shared >= SMALLEST:
            indices = shared_indices(shared, len(rows))[:, None]
        symbols = np.empty(rows.shape, dtype=np.int8 if self.sigma is None else np.int32)
        for start in range(0, len(rows), height):
            block = slice(start, start + height)
            symbols[block] = self._round(rows[block], _per_column(scales_of(indices[block]), group_size, rows.shape[1]))
        params = () if group_size is None else (group_size,)
        return Encoded("grid", tuple(weight.shape), weight.dtype, params, (symbols, indices))

    def encode_part(self, name: str, part: Tensor, deviation: float) -> Encoded | None:
        """Encode a part with the scale of the complete tensor: see `Scheme.encode_part`."""
        if self.sigma is None or self.group_size is not None:
            return self.encode(name, part)
        return encode_with_one_scale(part, self.sigma * deviation)

    def _scales(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the ideal scale of each row, even if float32 has none so small; 0 for rows of zeros."""
        if self.sigma is None and self.clip_sigmas is None:
            return self._scales_by_range(rows, CLIP_QUANTILE if self.clip_quantile is None else self.clip_quantile)
        highest = np.abs(rows).max(axis=1).astype(np.float64)
        spread: NDArray[np.float64] = rows.std(axis=1, dtype=np.float64)
        if self.sigma is not None:
            return np.asarray(np.maximum(spread * self.sigma, highest * FINEST))
        clip = spread * float(self.clip_sigmas or 0)
        # A row with a large mean and a small deviation would be clipped to almost nothing: it takes its maximum.
        size = np.sqrt(np.mean(rows.astype(np.float64) ** 2, axis=1))
        return np.asarray(np.where(clip >= size, clip, highest) * self.level_stride / self.top)

    def _scales_by_range(self, rows: NDArray[np.float32], clip_quantile: float) -> NDArray[np.float64]:
        """Return the scale at which the quantile of each |row| is the outermost symbol."""
        magnitudes = np.abs(rows)
        clip = quantiles(magnitudes, clip_quantile)
        # A row of nearly all zeros may have a zero quantile; then its maximum is taken.
        clip = np.where(clip > 0, clip, magnitudes.max(axis=1))
        scales: NDArray[np.float64] = clip.astype(np.float64) * self.level_stride / self.top
        return scales

    def _searched_scales(
        self, rows: NDArray[np.float32], group_size: int | None, columns: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the scale of each row or group by the clip with the least squared error, weighted by `columns`."""
        best = least = None
        for clip in CLIPS:
            scales = _by_groups(rows, group_size, partial(self._scales_by_range, clip_quantile=clip))
            stored = scales_of(self._indices(np.maximum(scales, SMALLEST)))
            per_column = _per_column(stored, group_size, rows.shape[1])
            residual = rows - self._round(rows, per_column) * per_column.astype(np.float64)
            error = _by_groups(residual * residual * columns, group_size, lambda part: part.sum(axis=1))
            best = scales if best is None else np.where(error < least, scales, best)
            least = error if least is None else np.minimum(error, least)
        return np.asarray(best)

    def _indices(self, scales: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return scale indices; those of a range are rounded up, so that the outermost symbol still covers it."""
        by_spread = self.sigma is not None or self.clip_sigmas is not None
        return nearest_indices(scales) if by_spread else covering_indices(scales)

    def _round(self, rows: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
        symbols: NDArray[np.float32] = np.rint(rows / scales)
        if self.sigma is None:
            top = np.float32(np.rint(self.top / self.level_stride))
            np.clip(symbols, -top, top, out=symbols)
        return symbols


def encode_with_one_scale(weight: Tensor, scale: float) -> Encoded | None:
    """Encode `weight` (float32, finite) on one grid for all rows; None if float32 has no such scale."""
    shape = tuple(weight.shape)
    rows = weight.numpy().reshape(rows_columns(shape))
    scale = max(scale, float(np.abs(rows).max()) / MAX_SYMBOL)
    if scale < SMALLEST:
        return None
    indices = np.full((len(rows), 1), nearest_indices(np.array(scale)), np.int32)
    symbols = np.rint(rows / scales_of(indices)).astype(np.int32)
    return Encoded("grid", shape, torch.float32, (), (symbols, indices))


def quantiles(rows: NDArray[np.float32], q: float) -> NDArray[np.float32]:
    """Return the `q` quantile of each row, linearly interpolated as torch.quantile does, in float32 and for any size.

    Args:
        rows: (rows, columns), columns ≥ 1.
        q: in [0, 1].

    Returns:
        (rows,)
    """
    rank = np.float32(q) * np.float32(rows.shape[1] - 1)
    low, high = int(np.floor(rank)), int(np.ceil(rank))
    weight = np.float32(rank - np.float32(low))
    ordered = np.partition(rows, (low, high), axis=1)
    below, above = ordered[:, low], ordered[:, high]
    inner: NDArray[np.float32] = below + weight * (above - below)
    return inner if weight < 0.5 else above - (above - below) * (np.float32(1) - weight)


def _by_groups(rows: NDArray[Any], group_size: int | None, function: Callable[[Any], Any]) -> NDArray[Any]:
    """Apply `function` (rows, columns) → (rows,) to every group of columns and the rest: (rows, groups)."""
    if group_size is None:
        return np.asarray(function(rows))[:, None]
    full = rows.shape[1] // group_size * group_size
    parts = [np.asarray(function(rows[:, :full].reshape(-1, group_size))).reshape(len(rows), -1)]
    if full < rows.shape[1]:
        parts.append(np.asarray(function(rows[:, full:]))[:, None])
    return np.concatenate(parts, axis=1)


def _per_column(scales: NDArray[np.float32], group_size: int | None, columns: int) -> NDArray[np.float32]:
    """Return scales (rows, groups) repeated for `columns` columns, or (rows, 1) where a row has one scale."""
    return scales if group_size is None else np.repeat(scales, group_size, axis=1)[:, :columns]
