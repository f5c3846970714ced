"""Uniform grids, one step per row: w ≈ symbol · step(row).

Two ways to choose the step:

- by the range: `bits` nominal bits over the row's clipped maximum, as the challenge's int8 export does (clip at the
  0.9999984 quantile of |row|, symbols ±127). `multiple=4` keeps only every fourth level, which the mixed int8/int6
  record called INT4_STEP; the symbols are stored divided by it, so the coder is not left to find the gaps.
- by the spread: step = `sigma` · standard deviation of the row, symbols unbounded. The entropy coder pays for what is
  used, so nominal bits lose their meaning (SDClip, parameter-golf PR 1394).

A row of zeros needs no floor on the scale: its symbols are zeros under any step, so it borrows its neighbour's. Rows so
small that float32 has no step for them (weights around 1e-40) would all become zero: such a tensor is kept losslessly.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.lossless import Lossless
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.steps import indices_above, indices_near, steps
from birdie.compress.tensors import REAL_DTYPES, finite_rows
from birdie.errors import ConfigError, WeightsError

CLIP_QUANTILE = 0.9999984
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
    """A uniform grid per row.

    Attributes:
        bits: nominal width, 2 to 8; symbols span ±(2^(bits−1) − 1). Ignored when `sigma` is given.
        multiple: keep every `multiple`-th level only.
        sigma: step in standard deviations of the row; None takes the step from the range.
        clip: quantile of |row| that the outermost symbol stands for.
    """

    bits: int = 8
    multiple: int = 1
    sigma: float | None = None
    clip: float = CLIP_QUANTILE

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if not 2 <= self.bits <= 8:
            raise ConfigError(f"grid width {self.bits} is out of range; choose 2 to 8 bits")
        if not 1 <= self.multiple <= self.top:
            raise ConfigError(f"grid step={self.multiple} is out of range for int{self.bits}; choose 1 to {self.top}")
        if self.sigma is not None and not 2.0**-20 <= self.sigma <= 2.0**16:
            raise ConfigError(f"grid sigma {self.sigma} is out of range; choose a step of 2^-20 to 2^16 deviations")
        if not 0.5 <= self.clip <= 1:
            raise ConfigError(f"grid clip quantile {self.clip} is out of range; choose 0.5 to 1")

    @property
    def top(self) -> int:
        """The outermost symbol before `multiple`."""
        return int(2 ** (self.bits - 1) - 1)

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002  the contract's; this scheme looks at the weights alone
        lam: float = 0.0,  # noqa: ARG002
    ) -> Encoded:
        """Round each row to its grid; losslessly if a row that is not zero needs a finer step than there is.

        Raises:
            WeightsError: the tensor is not float16, bfloat16, float32 or float64, is empty, or is not finite.
        """
        if weight.dtype not in REAL_DTYPES or weight.numel() == 0:
            raise WeightsError(
                f"tensor {name!r} ({weight.dtype}, {weight.numel()} elements) takes no grid; use lossless"
            )
        rows = finite_rows(name, weight)
        height = max(1, BLOCK // rows.shape[1])
        blocks = [rows[start : start + height] for start in range(0, len(rows), height)]
        wanted = np.concatenate([self._wanted(block) for block in blocks])
        used = _used_rows(weight, rows)
        if bool((wanted[used] < SMALLEST).any()):
            return Lossless().encode(name, weight)
        wanted = np.maximum(wanted, SMALLEST)
        indices = _borrow(indices_near(wanted) if self.sigma is not None else indices_above(wanted), used)
        width = np.int8 if self.sigma is None else np.int32
        symbols = np.empty(rows.shape, dtype=width)
        for start in range(0, len(rows), height):
            block = slice(start, start + height)
            symbols[block] = self._round(rows[block], steps(indices[block]))
        return Encoded("grid", tuple(weight.shape), weight.dtype, (), (symbols, indices[:, None]))

    def _wanted(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """The step each row asks for, whether or not there is one so small; 0 for rows of zeros."""
        magnitudes = np.abs(rows)
        highest = magnitudes.max(axis=1)
        if self.sigma is None:
            clip = quantiles(magnitudes, self.clip)
            # A row with nearly all zeros may have a zero quantile; its maximum is then what counts.
            clip = np.where(clip > 0, clip, highest)
            ranged: NDArray[np.float64] = clip.astype(np.float64) * self.multiple / self.top
            return ranged
        spread: NDArray[np.float64] = rows.std(axis=1, dtype=np.float64) * self.sigma
        return np.asarray(np.maximum(spread, highest.astype(np.float64) * FINEST))

    def _round(self, rows: NDArray[np.float32], step: NDArray[np.float32]) -> NDArray[np.float32]:
        symbols: NDArray[np.float32] = np.rint(rows / step[:, None])
        if self.sigma is None:
            top = np.float32(np.rint(self.top / self.multiple))
            np.clip(symbols, -top, top, out=symbols)
        return symbols


def _used_rows(weight: Tensor, rows: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which rows hold anything but zeros, judged before float64 is narrowed to the `rows` of float32."""
    if weight.dtype is not torch.float64:
        return np.asarray(rows.any(axis=1))
    return np.asarray(weight.detach().cpu().reshape(rows.shape).ne(0).any(dim=1).numpy())


def _borrow(indices: NDArray[np.int32], used: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Give each unused row the index of the nearest used row above it, or of the first used one: cheapest to code."""
    if not used.any():
        return np.zeros_like(indices)
    source = np.maximum.accumulate(np.where(used, np.arange(len(indices)), -1))
    return indices[np.where(source < 0, int(np.argmax(used)), source)]
