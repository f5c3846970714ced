"""Weights that are quantized already and kept as floats: integers or levels of a table, and the scales behind them.

    w = round(scale of its block · level), to the last bit

A block is a row, a column, a group of columns or a tile. No scale is stored in such a tensor, so it is searched for:

- Integers: the largest magnitude of a block is an integer m times the scale. For m = 1, 2, … every other element must
  be an integer times largest / m as well. Each narrows the interval in which the scale lies, by its own rounding.
- Floats of few bits (FP8, FP4): the same, but the magnitudes of a block divided by its largest, times a small integer,
  have short mantissas.
- Levels of a table (NF4): the largest magnitude is the scale. Quotients of all blocks form few clusters, and each
  narrows the interval of one level.

Of an interval the float with the shortest mantissa is taken: scales are often float16. Each element is then checked. A
scale is negative where all zeros of a block are −0.0, as GGUF's are.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.tensors import rows_columns, tensor_of_blocks
from birdie.entropy.planes import Block
from birdie.system.kernels import inner, njit

MAX_LEVELS = 512
LARGEST = 1 << 23  # integer level
# dtype → bits of its mantissa with the implicit one, and exponent of its smallest subnormal
PRECISION = {torch.float32: (24, -149), torch.float16: (11, -24), torch.bfloat16: (8, -133)}
_GROUPS = (256, 128, 64, 32, 16)  # columns of a block, or rows, that are tried beside complete ones
_TILE = 128  # rows and columns of a tile
_LEAST = 2048  # elements of a tensor that is searched
_SAMPLED = 4  # blocks that are tried before all are
_MANY = 256  # blocks whose levels are collected
_CHUNK, _LINE = 32, 256  # elements whose different magnitudes are counted
_FEW_IN_CHUNK, _FEW_IN_LINE = 0.9, 0.55  # share of them that may be different
_MOST_INTEGER = 255  # of a block
_MOST_CLUSTERS = 64  # levels of a table
_MOST_FLOATS = 256  # magnitudes of floats of few bits
_MANTISSA = 4  # bits of theirs, with the implicit one
_MOST_FACTOR = 127  # largest one, as an odd integer times a power of two


@dataclass(frozen=True, slots=True)
class Scaled:
    """A tensor as levels and scales."""

    # height, width: of a block, rows and columns
    height: int
    width: int
    symbols: NDArray[np.integer[Any]]  # (rows, columns), index of the level of each element
    levels: NDArray[np.float32]  # (k,) float32, rising; −0.0 is below 0.0
    scales: NDArray[np.float32]  # one of each block, (rows of blocks, columns of blocks) float32

    @property
    def has_integers(self) -> bool:
        """Return whether all levels are integers."""
        return bool((self.levels == np.rint(self.levels)).all())


def multiply(scaled: Scaled, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return scale · level of each element, rounded to float32 and then to `dtype`."""
    levels, scales = scaled.levels.astype(np.float64), scaled.scales.astype(np.float64)
    rows, columns = rows_columns(shape)
    row_of = np.arange(rows) // scaled.height
    column_of = np.arange(columns) // scaled.width if scales.shape[1] > 1 else None

    def values(block: Block) -> NDArray[np.float64]:
        factors = scales[row_of[block[0]]]
        if column_of is not None:
            factors = factors[:, column_of[block[1]]]
        return np.asarray(levels[scaled.symbols[block]] * factors)

    return tensor_of_blocks(shape, dtype, values)


def search(weight: Tensor) -> Scaled | None:
    """Return levels and scales that give a tensor bit for bit; None if it is not seen to have any."""
    if weight.dtype not in PRECISION or weight.numel() < _LEAST:
        return None
    rows = weight.detach().reshape(rows_columns(tuple(weight.shape)))
    lines = [rows[len(rows) // 2, :_LINE], rows[0, :_LINE]]
    if len(rows) >= _CHUNK:
        lines.append(rows[:_LINE, rows.shape[1] // 2])
    if not any(map(_has_few_values, lines)):
        return None
    values = rows.float().numpy()
    if not np.isfinite(values).all():
        return None
    for kind in (_integers, _short_floats, _from_table):
        for height, width in _shapes(*values.shape):
            result = kind(_ScaledBlocks(values, height, width, *PRECISION[weight.dtype]))
            if result is not None and _is_exact(result, weight):
                return result
    return None


def _has_few_values(line: Tensor) -> bool:
    """Return whether magnitudes repeat, in all of a line or in most chunks of it."""
    magnitudes = line.float().abs().numpy()
    if np.unique(magnitudes).size <= _FEW_IN_LINE * magnitudes.size:
        return True
    chunks = np.sort(magnitudes[: magnitudes.size // _CHUNK * _CHUNK].reshape(-1, _CHUNK), axis=1)
    return bool(chunks.size and (np.diff(chunks, axis=1) > 0).mean() <= _FEW_IN_CHUNK)


def _shapes(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield the shapes of blocks, large ones first: fewer scales."""
    yield 1, columns
    if rows > 1:
        yield rows, 1
    if rows > _TILE and columns > _TILE:
        yield _TILE, _TILE
    for size in _GROUPS:
        if size < columns:
            yield 1, size
        if size < rows:
            yield size, 1


def _is_exact(scaled: Scaled, weight: Tensor) -> bool:
    word = {2: torch.int16, 4: torch.int32}[weight.itemsize]
    back = multiply(scaled, tuple(weight.shape), weight.dtype)
    return torch.equal(back.view(word), weight.detach().contiguous().view(word))


@dataclass(frozen=True, slots=True)
class _ScaledBlocks:
    """Values in blocks, and the format that they were rounded to."""

    values: NDArray[np.float32]
    height: int
    width: int
    bits: int
    lowest: int

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.values.shape[0] // self.height), -(-self.values.shape[1] // self.width)

    @property
    def count(self) -> int:
        return self.shape[0] * self.shape[1]

    def some(self, most: int) -> NDArray[np.int64]:
        """Return numbers of at most so many blocks, evenly spaced."""
        return np.unique(np.linspace(0, self.count - 1, min(most, self.count)).astype(np.int64))

    def quotients(self, most: int) -> NDArray[np.float64]:
        """Return the elements of so many blocks, each divided by the largest magnitude of its block."""
        parts = []
        for block in self.some(most):
            row, column = block // self.shape[1] * self.height, block % self.shape[1] * self.width
            part = self.values[row : row + self.height, column : column + self.width].astype(np.float64)
            parts.append(part.reshape(-1) / (np.abs(part).max() or 1.0))
        return np.concatenate(parts)


def _integers(blocks: _ScaledBlocks) -> Scaled | None:
    """Return integers and scales of blocks; None if a block has none."""
    return _on_levels(blocks, np.arange(_MOST_INTEGER + 1, dtype=np.float32), True)


def _short_floats(blocks: _ScaledBlocks) -> Scaled | None:
    """Return floats of few bits and scales of blocks; None if a block has none."""
    for most in (_SAMPLED, _MANY):
        centers = _clusters(np.abs(blocks.quotients(most)), blocks.bits)
        if centers.size > _MOST_FLOATS:
            return None
    for factor in range(1, _MOST_FACTOR + 1, 2):
        mantissas, _ = np.frexp(centers * factor)
        short = np.rint(mantissas * (1 << _MANTISSA)) / (1 << _MANTISSA)
        if (np.abs(mantissas - short) <= 2.0 ** (2 - blocks.bits)).all():
            # Rare levels may be missing among the blocks that were looked at, so all below the largest are allowed.
            numbers = np.arange(1 << _MANTISSA - 1, 1 << _MANTISSA)
            every = np.ldexp(numbers, np.arange(-40, 1)[:, None] + math.frexp(factor)[1] - _MANTISSA).reshape(-1)
            levels = np.concatenate([[0.0], every[every <= factor][-_MOST_INTEGER:]])
            return _on_levels(blocks, levels.astype(np.float32), False)
    return None


def _on_levels(blocks: _ScaledBlocks, magnitudes: NDArray[np.float32], integers: bool) -> Scaled | None:
    """Return the levels, of these magnitudes, and the scales of blocks; None if a block has none."""
    values = blocks.values
    numbers = np.empty(values.shape, np.uint8)
    scales = np.zeros(blocks.count, np.float32)
    for some in (blocks.some(_SAMPLED), np.arange(blocks.count)):
        if not _fit(
            values, some, blocks.height, blocks.width, blocks.bits, blocks.lowest, magnitudes, integers, numbers, scales
        ):
            return None
    negative = np.signbit(values)
    flipped = _has_negative_zeros_alone(values, blocks.height, blocks.width)
    if flipped.any():
        scales[flipped] *= -1
        grid = flipped.reshape(blocks.shape).repeat(blocks.height, 0)[: len(values)]
        negative ^= grid.repeat(blocks.width, 1)[:, : values.shape[1]]
    codes = 2 * numbers.astype(np.int16) + 1 - negative  # in pairs: −0.0, 0.0, −1, 1, …
    present = np.flatnonzero(np.bincount(codes.reshape(-1)))
    levels = magnitudes[present // 2] * np.where(present % 2, 1, -1).astype(np.float32)
    return _with_symbols(blocks, codes, present, levels, scales)


def _with_symbols(
    blocks: _ScaledBlocks,
    codes: NDArray[np.integer[Any]],
    present: NDArray[np.int64],
    levels: NDArray[np.float32],
    scales: NDArray[np.float32],
) -> Scaled | None:
    """Return codes, each of which stands for a level, as indices of the levels in rising order."""
    if present.size > MAX_LEVELS:
        return None
    order = np.lexsort((~np.signbit(levels), levels))
    table = np.zeros(int(present[-1]) + 1, np.uint8 if present.size <= 256 else np.int16)
    table[present[order]] = np.arange(present.size)
    blanks = scales == 0  # of zeros alone: the scale before costs nothing
    if blanks.any():
        last = np.abs(scales[np.maximum.accumulate(np.where(blanks, 0, np.arange(scales.size)))])
        scales = np.where(blanks, np.copysign(np.where(last > 0, last, np.float32(1)), scales), scales)
    return Scaled(blocks.height, blocks.width, table[codes], levels[order], scales.reshape(blocks.shape))


def _from_table(blocks: _ScaledBlocks) -> Scaled | None:
    """Return levels of a table, times the largest magnitude of each block; None if there are too many levels."""
    for most in (_SAMPLED, _MANY):
        centers = _clusters(blocks.quotients(most), blocks.bits)
        if centers.size > _MOST_CLUSTERS:
            return None
    values, scales = blocks.values, np.zeros(blocks.count, np.float32)
    codes = np.empty(values.shape, np.uint8)
    bounds = np.empty((2, centers.size))
    bounds[0], bounds[1] = -np.inf, np.inf
    if not _narrow(values, blocks.height, blocks.width, blocks.bits, blocks.lowest, centers, bounds, codes, scales):
        return None
    # The shortest mantissa would be as good, but the middle is nearest to the table that others have.
    levels = ((bounds[0] + bounds[1]) / 2).astype(np.float32)
    negative = np.signbit(values) & (values == 0)
    if negative.any():
        zero = np.flatnonzero(centers == 0)
        codes[negative] = centers.size
        levels = np.append(levels, np.float32(-0.0))
        levels[zero] = 0.0
    present = np.flatnonzero(np.bincount(codes.reshape(-1)))
    return _with_symbols(blocks, codes, present, levels[present], scales)


def _clusters(quotients: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    """Return the centers of quotients that rounding may have parted, rising."""
    ordered = np.unique(quotients)
    gaps = np.diff(ordered) > np.abs(ordered[1:]) * 2.0 ** (2 - bits) + 2.0**-40
    starts = np.concatenate([[0], np.flatnonzero(gaps) + 1, [ordered.size]])
    return np.asarray((ordered[starts[:-1]] + ordered[starts[1:] - 1]) / 2)


@inner
def _half_step(value, bits, lowest):  # type: ignore[no-untyped-def]
    """Return half of the distance between floats near a positive value."""
    exponent = math.frexp(value)[1]
    return math.ldexp(0.5, max(exponent - bits, lowest))


@inner
def _rounded(value, bits, lowest):  # type: ignore[no-untyped-def]
    """Return a float32 value ≥ 0 in a format of so many bits, to the nearest, ties to even."""
    step = math.ldexp(1.0, max(math.frexp(value)[1] - bits, lowest))
    return np.rint(value / step) * step


@njit(nogil=True, cache=True)
def _nearest(levels, integral, value):  # type: ignore[no-untyped-def]
    """Return the number of the level nearest to a value, one beyond the last where it is far above that."""
    if integral:
        return np.int64(np.rint(min(value, np.float64(levels.size))))
    index = np.searchsorted(levels, value)
    if index == levels.size or (index > 0 and value - levels[index - 1] < levels[index] - value):
        index -= 1
    return index


@njit(nogil=True, cache=True)
def _has_negative_zeros_alone(values, height, width):  # type: ignore[no-untyped-def]
    """Return of each block whether it has zeros, and all of them are −0.0."""
    across = -(-values.shape[1] // width)
    seen = np.zeros((2, -(-values.shape[0] // height) * across), np.bool_)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            if values[row, column] == 0:
                sign = np.int64(np.signbit(values[row, column]))
                seen[sign, row // height * across + column // width] = True
    return seen[1] & ~seen[0]


@njit(nogil=True, cache=True)
def _fit(values, blocks, height, width, bits, lowest, levels, integral, numbers, scales):  # type: ignore[no-untyped-def]
    """Write the numbers of levels, and the scale, of each of `blocks`; return False where there are none.

    Levels are all integers from 0 on, or any: then the largest magnitude of each block is the last level.
    """
    across = -(-values.shape[1] // width)
    slack = 2.0**-24 if bits < 24 else 0.0  # of the product in float32
    for block in blocks:
        top, left = block // across * height, block % across * width
        bottom, right = min(top + height, values.shape[0]), min(left + width, values.shape[1])
        largest = 0.0
        for row in range(top, bottom):
            for column in range(left, right):
                largest = max(largest, abs(np.float64(values[row, column])))
        if largest == 0.0:
            numbers[top:bottom, left:right] = 0
            scales[block] = 0.0
            continue
        fits = False
        for most in range(1 if integral else levels.size - 1, levels.size):
            half = _half_step(largest, bits, lowest) + slack * largest
            level = np.float64(levels[most])
            low, high = (largest - half) / level, (largest + half) / level
            fits = True
            for row in range(top, bottom):
                for column in range(left, right):
                    value = abs(np.float64(values[row, column]))
                    if value == 0.0:
                        continue
                    number = _nearest(levels, integral, 2 * value / (low + high))
                    half = _half_step(value, bits, lowest) + slack * value
                    if number == 0 or number > most:
                        fits = False
                        break
                    level = np.float64(levels[number])
                    low, high = max(low, (value - half) / level), min(high, (value + half) / level)
                    if low > high:
                        fits = False
                        break
                if not fits:
                    break
            if fits:
                break
        if not fits:
            return False
        center = (low + high) / 2
        for row in range(top, bottom):
            for column in range(left, right):
                value = abs(np.float64(values[row, column]))
                numbers[row, column] = 0 if value == 0.0 else _nearest(levels, integral, value / center)
        part, indices = values[top:bottom, left:right], numbers[top:bottom, left:right]
        scale = _shortest(part, levels, indices, low, high, bits, lowest)
        if scale == 0.0:
            return False
        scales[block] = scale
    return True


@inner
def _shortest(values, levels, numbers, low, high, bits, lowest):  # type: ignore[no-untyped-def]
    """Return the float32 with the shortest mantissa that gives all values; 0 if none near the interval does."""
    exponent = math.frexp(high)[1]
    for length in range(1, 25):
        step = math.ldexp(1.0, max(exponent - length, -149))
        first = np.ceil(low / step)
        around = 2 if length == 24 else 0  # the ends of the interval are rounded themselves
        for extra in range(-around, 3 + around):
            number = first + extra
            if number * step > high and not around:
                break
            if number >= 1 and _gives(values, levels, numbers, np.float32(number * step), bits, lowest):
                return number * step
    return 0.0


@inner
def _gives(values, levels, numbers, scale, bits, lowest):  # type: ignore[no-untyped-def]
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            product = np.float32(levels[numbers[row, column]] * scale)
            value = abs(np.float64(values[row, column]))
            if (product if bits == 24 else _rounded(np.float64(product), bits, lowest)) != value:
                return False
    return True


@njit(nogil=True, cache=True)
def _narrow(values, height, width, bits, lowest, centers, bounds, codes, scales):  # type: ignore[no-untyped-def]
    """Narrow the bounds of each level by all elements, and write their numbers; return False where one has none."""
    across = -(-values.shape[1] // width)
    slack = 2.0**-24 if bits < 24 else 0.0
    for block in range(scales.size):
        top, left = block // across * height, block % across * width
        bottom, right = min(top + height, values.shape[0]), min(left + width, values.shape[1])
        largest = 0.0
        for row in range(top, bottom):
            for column in range(left, right):
                largest = max(largest, abs(np.float64(values[row, column])))
        scales[block] = largest
        for row in range(top, bottom):
            for column in range(left, right):
                value = np.float64(values[row, column])
                quotient = value / largest if largest > 0 else 0.0
                index = np.searchsorted(centers, quotient)
                if index == centers.size or (index > 0 and quotient - centers[index - 1] < centers[index] - quotient):
                    index -= 1
                codes[row, column] = index
                if value == 0.0:
                    if centers[index] != 0.0:
                        return False
                    bounds[0, index] = bounds[1, index] = 0.0
                    continue
                half = _half_step(abs(value), bits, lowest) + slack * abs(value)
                bounds[0, index] = max(bounds[0, index], (value - half) / largest)
                bounds[1, index] = min(bounds[1, index], (value + half) / largest)
                if bounds[0, index] > bounds[1, index]:
                    return False
    return True
