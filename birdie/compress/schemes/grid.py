"""Uniform grids, a step per row or per group of columns in a row: w ≈ symbol · step.

Three ways to choose the step:

- by the range: `bits` nominal bits over the row's clipped maximum, as the challenge's int8 export does (clip at the
  0.9999984 quantile of |row|, symbols ±127). `multiple=4` keeps only every fourth level, which the mixed int8/int6
  record called INT4_STEP; the symbols are stored divided by it, so the coder is not left to find the gaps. With `clip`
  None each row takes the quantile that leaves the least squared error (the clip search that parameter-golf's record of
  2026-03-22 calls GPTQ-lite).
- by the spread: step = `sigma` · standard deviation of the row, symbols unbounded. The entropy coder pays for what is
  used, so nominal bits lose their meaning.
- by both: clip at `deviations` standard deviations of the row, `bits` nominal bits over that (SDClip, parameter-golf PR
  1394). At the records' 12.85 next to nothing is clipped, and it is the spread with other words.

With `group` all this holds for every so many columns of a row instead. Groups pay where outliers sit in few columns and
the width is nominal; a coder that learns the scales of rows and columns by itself gains nothing from them.

A row of zeros needs no floor on the scale: its symbols are zeros under any step, so it borrows its neighbour's. Rows so
small that float32 has no step for them (weights around 1e-40) would all become zero: such a tensor is kept losslessly.
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
from birdie.compress.log_steps import indices_above, indices_near, indices_shared, steps
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import REAL_DTYPES, finite_rows
from birdie.errors import ConfigError, WeightsError

CLIP_QUANTILE = 0.9999984
CLIPS = (1.0, 0.99999, 0.9999, 0.9995, 0.999, 0.995, 0.99, 0.98, 0.95, 0.9, 0.8)  # a search's; the maximum is first
BLOCK = 1 << 22  # elements worked on at once: bounds the memory for temporaries
SMALLEST = float(np.finfo(np.float32).tiny)  # no step is below it
FINEST = 2.0**-20  # of the row's largest weight: keeps symbols exact in float32


def quantiles(rows: NDArray[np.float32], q: float) -> NDArray[np.float32]:
    """The `q` quantile of each row, linearly interpolated as torch.quantile does, in float32 and for any size.

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


@dataclass(frozen=True, slots=True)
class Grid:
    """A uniform grid per row, or per group.

    Attributes:
        bits: nominal width, 2 to 8; symbols span ±(2^(bits−1) − 1). Ignored when `sigma` is given.
        multiple: keep every `multiple`-th level only.
        sigma: step in standard deviations of the row; None takes the step from the range.
        clip: quantile of |row| that the outermost symbol stands for; None tries those of `CLIPS` and takes the one with
            the least squared error, columns weighed by the diagonal of the Hessian where that is known.
        group: columns that share a step; None is the whole row.
        deviations: standard deviations of the row that the outermost symbol stands for, instead of a quantile.
        whole: with `sigma`, one step for the whole tensor, of what its rows deviate by on average.
    """

    bits: int = 8
    multiple: int = 1
    sigma: float | None = None
    clip: float | None = CLIP_QUANTILE
    group: int | None = None
    deviations: float | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if not 2 <= self.bits <= 8:
            raise ConfigError(f"grid width {self.bits} is out of range; choose 2 to 8 bits")
        if not 1 <= self.multiple <= self.top:
            raise ConfigError(f"grid step={self.multiple} is out of range for int{self.bits}; choose 1 to {self.top}")
        if self.sigma is not None and not 2.0**-20 <= self.sigma <= 2.0**16:
            raise ConfigError(f"grid sigma {self.sigma} is out of range; choose a step of 2^-20 to 2^16 deviations")
        if self.clip is not None and not 0.5 <= self.clip <= 1:
            raise ConfigError(f"grid clip quantile {self.clip} is out of range; choose 0.5 to 1")
        if self.group is not None and self.group < 1:
            raise ConfigError(f"grid group={self.group} is out of range; choose 1 or more columns")
        if self.deviations is not None and not 2 <= self.deviations <= 1024:
            raise ConfigError(f"grid k={self.deviations} is out of range; choose a clip at 2 to 1024 deviations")
        if self.deviations is not None and self.sigma is not None:
            raise ConfigError("a grid takes its step from sigma or from a clip at k deviations; give one of the two")
        if self.whole and (self.sigma is None or self.group is not None):
            raise ConfigError("a grid of one step for the whole tensor takes it from sigma and has no groups")

    @property
    def top(self) -> int:
        """The outermost symbol before `multiple`."""
        return int(2 ** (self.bits - 1) - 1)

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,
        lam: float = 0.0,  # noqa: ARG002  the contract's; nothing here weighs bits
    ) -> Encoded:
        """Round each row to its grid; losslessly if a row that is not zero needs a finer step than there is.

        Args:
            sensitivity: its Hessian's diagonal weighs the errors of a clip search; all else looks at weights alone.

        Raises:
            ConfigError: the sensitivity is of another matrix.
            WeightsError: the tensor is not float16, bfloat16, float32 or float64, is empty, or is not finite.
        """
        rows = real_rows(name, weight)
        group = None if self.group is None or self.group >= rows.shape[1] else self.group
        height = max(1, BLOCK // rows.shape[1])
        blocks = [rows[start : start + height] for start in range(0, len(rows), height)]
        if self.clip is None and self.sigma is None and self.deviations is None:
            columns = importance(name, sensitivity, *rows.shape).columns
            wanted = np.concatenate([self._searched(block, group, columns) for block in blocks])
        else:
            wanted = np.concatenate([_by_groups(block, group, self._wanted) for block in blocks])
        used = np.concatenate([_by_groups(block, group, lambda part: part.any(axis=1)) for block in blocks])
        one = None
        if self.whole and used.any():
            one = max(float(np.sqrt(np.mean(wanted[used] ** 2))), float(np.abs(rows).max()) * FINEST)
            wanted = np.full_like(wanted, one)
        if vanishes(weight, rows) or bool((wanted[used] < SMALLEST).any()):
            return Lossless().encode(name, weight)
        wanted = np.maximum(wanted, SMALLEST)
        if one is not None and one >= SMALLEST:
            indices = indices_shared(one, len(rows))[:, None]
        else:
            indices = borrow(self._indices(wanted).reshape(-1), used.reshape(-1)).reshape(wanted.shape)
        width = np.int8 if self.sigma is None else np.int32
        symbols = np.empty(rows.shape, dtype=width)
        for start in range(0, len(rows), height):
            block = slice(start, start + height)
            symbols[block] = self._round(rows[block], _spread(steps(indices[block]), group, rows.shape[1]))
        params = () if group is None else (group,)
        return Encoded("grid", tuple(weight.shape), weight.dtype, params, (symbols, indices))

    def _wanted(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """The step each row asks for, whether or not there is one so small; 0 for rows of zeros."""
        if self.sigma is None and self.deviations is None:
            return self._ranged(rows, CLIP_QUANTILE if self.clip is None else self.clip)
        highest = np.abs(rows).max(axis=1).astype(np.float64)
        spread: NDArray[np.float64] = rows.std(axis=1, dtype=np.float64)
        if self.sigma is not None:
            return np.asarray(np.maximum(spread * self.sigma, highest * FINEST))
        clip = spread * float(self.deviations or 0)
        # Rows that are an offset and little else would be cut to nothing.
        size = np.sqrt(np.mean(rows.astype(np.float64) ** 2, axis=1))
        return np.asarray(np.where(clip >= size, clip, highest) * self.multiple / self.top)

    def _ranged(self, rows: NDArray[np.float32], clip: float) -> NDArray[np.float64]:
        """The step by which the `clip` quantile of each row is the outermost symbol."""
        magnitudes = np.abs(rows)
        most = quantiles(magnitudes, clip)
        # A row with nearly all zeros may have a zero quantile; its maximum is then what counts.
        most = np.where(most > 0, most, magnitudes.max(axis=1))
        ranged: NDArray[np.float64] = most.astype(np.float64) * self.multiple / self.top
        return ranged

    def _searched(
        self, rows: NDArray[np.float32], group: int | None, columns: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The step of each row or group by the clip that leaves the least error, `columns` weighed."""
        best = least = None
        for clip in CLIPS:
            wanted = _by_groups(rows, group, partial(self._ranged, clip=clip))
            step = _spread(steps(self._indices(np.maximum(wanted, SMALLEST))), group, rows.shape[1])
            away = rows - self._round(rows, step) * step.astype(np.float64)
            error = _by_groups(away * away * columns, group, lambda part: part.sum(axis=1))
            best = wanted if best is None else np.where(error < least, wanted, best)
            least = error if least is None else np.minimum(error, least)
        return np.asarray(best)

    def _indices(self, wanted: NDArray[np.float64]) -> NDArray[np.int32]:
        """Of the steps; a range is not to be cut short."""
        spread = self.sigma is not None or self.deviations is not None
        return indices_near(wanted) if spread else indices_above(wanted)

    def _round(self, rows: NDArray[np.float32], step: NDArray[np.float32]) -> NDArray[np.float32]:
        symbols: NDArray[np.float32] = np.rint(rows / step)
        if self.sigma is None:
            top = np.float32(np.rint(self.top / self.multiple))
            np.clip(symbols, -top, top, out=symbols)
        return symbols


def real_rows(name: str, weight: Tensor) -> NDArray[np.float32]:
    """The numbers of `weight` as float32, (rows, columns).

    Raises:
        WeightsError: the tensor is not float16, bfloat16, float32 or float64, is empty, or is not finite.
    """
    if weight.dtype not in REAL_DTYPES or weight.numel() == 0:
        raise WeightsError(f"tensor {name!r} ({weight.dtype}, {weight.numel()} elements) takes no grid; use lossless")
    return finite_rows(name, weight)


def vanishes(weight: Tensor, rows: NDArray[np.float32]) -> bool:
    """Whether a row of float64 that is not zero became zeros in the `rows` of float32."""
    if weight.dtype is not torch.float64:
        return False
    used = weight.detach().cpu().reshape(rows.shape).ne(0).any(dim=1).numpy()
    return bool((used & ~rows.any(axis=1)).any())


def _by_groups(rows: NDArray[Any], group: int | None, of: Callable[[Any], Any]) -> NDArray[Any]:
    """`of` (rows, columns) → (rows,) for every `group` columns and what is left of them, as (rows, groups)."""
    if group is None:
        return np.asarray(of(rows))[:, None]
    whole = rows.shape[1] // group * group
    found = [np.asarray(of(rows[:, :whole].reshape(-1, group))).reshape(len(rows), -1)]
    if whole < rows.shape[1]:
        found.append(np.asarray(of(rows[:, whole:]))[:, None])
    return np.concatenate(found, axis=1)


def _spread(step: NDArray[np.float32], group: int | None, columns: int) -> NDArray[np.float32]:
    """Steps (rows, groups) as they apply to `columns` columns, or (rows, 1) for all of them."""
    return step if group is None else np.repeat(step, group, axis=1)[:, :columns]


def borrow(indices: NDArray[np.int32], used: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Give each unused row (rows,) the index of the nearest used one above it, or of the first one: cheapest."""
    if not used.any():
        return np.zeros_like(indices)
    source = np.maximum.accumulate(np.where(used, np.arange(len(indices)), -1))
    return indices[np.where(source < 0, int(np.argmax(used)), source)]
