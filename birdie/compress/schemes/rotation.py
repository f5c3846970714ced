"""Rotation scheme: rows rotated at random, then quantized to the best levels for a Gaussian (TurboQuant, 2504.19874).

    rotation   params (seed, then an inner tensor), which is the rotated matrix
    streams: those of the inner tensor

    row ─► seeded signs, Hadamard transform ─► root mean square ─► Lloyd–Max levels

Of n columns the first p, the largest power of two ≤ n, are multiplied by signs and by the orthonormal Hadamard matrix;
then, if n > p, the last p. That is a rotation for any n. Sums and differences only, in float64 and in a fixed order,
and one product at the end: the same bits on every machine.

*Experimental.* A random rotation makes the entries of a row close to Gaussian and removes outliers, so a fixed number
of bits does well for any weights. But it also removes what an entropy coder uses: columns of different scale, heavy
tails and similar neighboring symbols become uniform noise. Measured: 1.08–1.10 times the bytes of a plain grid at equal
error (docs/schemes.md).

TurboQuant (arXiv 2504.19874) sketches the residual by signs of a second projection, to make inner products unbiased.
Those are worth less than a bit of the grid.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.importance import Importance
from birdie.compress.inner_tensors import InnerTensor, inner_decoder, inner_names, part_params, take_part
from birdie.compress.log_scales import scales_of, stored_indices
from birdie.compress.scheme import (
    BLOCK,
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
from birdie.compress.schemes import codebook
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import real_matrix, real_rows, rows_columns, tensor_of_blocks, underflows
from birdie.entropy.planes import Block
from birdie.errors import ArtifactError, ConfigError

SEEDS = 1 << 16
_BLOCK = 1 << 16  # elements rotated at a time
_REACH = 6.5  # deviations over which the Gaussian's levels are computed
_HALF_ROOT = 0.7071067811865476  # 1 / √2


def parts_of(shape: tuple[int, ...], params: tuple[int, ...]) -> list[InnerTensor]:
    """Return the inner tensors that `params` describe, all of the outer shape."""
    parts: list[InnerTensor] = []
    while params:
        part, params = take_part(shape, params, by_rows=True)
        parts.append(part)
    return parts


def decode_parts(parts: list[InnerTensor], streams: tuple[Integers, ...], block: Block) -> list[NDArray[np.float32]]:
    """Return the rows of a block of each part, (rows, columns); `streams` holds their streams one after another."""
    matrices: list[NDArray[np.float32]] = []
    for part in parts:
        first, count = part.layout[0], len(part.layout)
        # Inner schemes decode row by row, and what is not of a row is of all rows.
        taken = [s[block[0]] if s.shape[0] == first.rows else s for s in streams[:count]]
        matrices.append(replace(part, shape=(len(taken[0]), first.columns)).decode(taken).numpy())
        streams = streams[count:]
    return matrices


def parts_operations(parts: list[InnerTensor]) -> int:
    """Return the operations that decoding the parts takes."""
    return sum(part.decoder.cost(part.shape, torch.float32, part.params).operations for part in parts)


def signs(count: int, seed: int) -> NDArray[np.float64]:
    """Return `count` signs of a seed: top bits of a 32-bit integer hash, two rounds of multiply and xor-shift."""
    word = (np.arange(count, dtype=np.uint64) + np.uint64((seed << 24) + 1)) * np.uint64(0x9E3779B1)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        word = word & np.uint64(0xFFFFFFFF)
        word = (word ^ (word >> np.uint64(15))) * np.uint64(factor)
    return 1.0 - 2.0 * ((word >> np.uint64(31)) & np.uint64(1)).astype(np.float64)


def rotate(columns: NDArray[np.float64], seed: int, back: bool = True) -> None:
    """Rotate the columns of a matrix (columns, rows) in place; `back` undoes it."""
    count = len(columns)
    size = 1 << (count.bit_length() - 1)
    halves = [(columns[:size], 2 * seed), (columns[count - size :], 2 * seed + 1)][: 1 + (size < count)]
    for part, part_seed in reversed(halves) if back else halves:
        sign = signs(size, part_seed)[:, None]
        part *= 1.0 if back else sign
        # Fast Walsh–Hadamard transform: sums and differences of elements 1, 2, 4, … apart, each pass a factor √2 too
        # large. The Hadamard matrix is its own inverse, so both directions differ only in when the signs are applied.
        half = 1
        while half < size:
            pairs = part.reshape(-1, 2, half, part.shape[1])
            total = pairs[:, 0] + pairs[:, 1]
            np.subtract(pairs[:, 0], pairs[:, 1], out=pairs[:, 1])
            pairs[:, 0] = total
            half *= 2
        doublings = size.bit_length() - 1
        part *= 2.0 ** -(doublings // 2) * (_HALF_ROOT if doublings % 2 else 1.0) * (sign if back else 1.0)


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layouts of the inner tensor."""
    real_matrix(shape, dtype)
    parts = parts_of(shape, params[1:])
    if len(parts) != 1 or not 0 <= params[0] < SEEDS:
        raise ArtifactError(f"scheme rotation has parameters {params}; the file is corrupt or newer")
    return tuple(stream for part in parts for stream in part.layout)


def decode(encoded: Encoded) -> Tensor:
    """Return the inner tensor, rotated back."""
    parts = parts_of(encoded.shape, encoded.params[1:])

    def rotated_back(block: Block) -> NDArray[np.float64]:
        (inner,) = decode_parts(parts, encoded.streams, block)
        total = np.array(inner.T, np.float64, order="C")
        rotate(total, encoded.params[0])
        return total.T

    return tensor_of_blocks(encoded.shape, encoded.dtype, rotated_back, max(BLOCK, rows_columns(encoded.shape)[1]))


def rotation_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Return the cost of rotating rows."""
    columns = rows_columns(shape)[1]
    return in_blocks(shape, dtype, 16 + 8 * columns.bit_length(), columns)


def _cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    cost = rotation_cost(shape, dtype)
    return Cost(cost.operations + parts_operations(parts_of(shape, params[1:])), cost.bytes)


DECODER = Decoder("rotation", 7, layout, decode, _cost)


@dataclass(frozen=True, slots=True)
class Rotation(Scheme):
    """Rotates the rows, then quantizes them.

    Attributes:
        bits: width of the Lloyd–Max quantizer, 1 to 8; no effect with a base.
        base: a scheme instead of the Lloyd–Max levels, whose rows decode apart: a uniform grid, ternary, a codebook.
        seed: of the signs, 0 to 65,535.
    """

    decoder = DECODER
    specs = (Spec("rotation", "rows rotated at random, then Lloyd–Max levels", example="rotation:bits=4"),)

    bits: int = 4
    base: Scheme | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ConfigError(f"rotation bits={self.bits} is out of range; choose 1 to 8")
        if not 0 <= self.seed < SEEDS:
            raise ConfigError(f"rotation seed={self.seed} is out of range; choose 0 to {SEEDS - 1}")

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None) -> Encoded:
        """Rotate and quantize; losslessly if no scale is small enough.

        Only a base scheme uses the sensitivity, whose Hessian is rotated too.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
            ConfigError: the base is a scheme that cannot be rotated.
        """
        rows = real_rows(name, weight)
        rotated = rotate_rows(rows, self.seed)
        if underflows(weight, rows) or not bool(np.isfinite(rotated).all()):
            return Lossless().encode(name, weight)
        inner = torch.from_numpy(rotated).reshape(weight.shape)
        if self.base is None:
            first = _on_gaussian_levels(inner, rotated, self.bits)
        else:
            first = self.base.encode(name, inner, sensitivity=_rotate_sensitivity(sensitivity, self.seed))
        if first is None or first.scheme == "lossless":
            return Lossless().encode(name, weight)
        if not inner_decoder(first.scheme, by_rows=True):
            raise ConfigError(f"rotation cannot hold {first.scheme}; choose {inner_names(by_rows=True)}")
        params = (self.seed, *part_params(first))
        return Encoded("rotation", tuple(weight.shape), weight.dtype, params, first.streams)


def rotate_rows(rows: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Return the rows of (rows, columns) rotated by the rotation of a seed; infinite where float32 overflows."""
    out = np.empty_like(rows)
    height = max(1, _BLOCK // rows.shape[1])
    for start in range(0, len(rows), height):
        block = np.array(rows[start : start + height].T, np.float64, order="C")
        rotate(block, seed, back=False)
        with np.errstate(over="ignore"):
            out[start : start + height] = block.T
    return out


def _rotate_sensitivity(sensitivity: Sensitivity | None, seed: int) -> Sensitivity | None:
    """Return the sensitivity of the rotated matrix: Q H Qᵀ."""
    if sensitivity is None or sensitivity.hessian is None:
        return None if sensitivity is None else replace(sensitivity, blocks=None)
    half = rotate_rows(sensitivity.hessian.detach().cpu().float().numpy(), seed)
    return replace(sensitivity, hessian=torch.from_numpy(rotate_rows(np.ascontiguousarray(half.T), seed)))


def _on_gaussian_levels(weight: Tensor, rows: NDArray[np.float32], bits: int) -> Encoded | None:
    """Encode `weight`, whose rows are `rows`, on the levels for a Gaussian times the root mean square of each row."""
    indices = stored_indices(codebook.root_mean_squares(rows), np.asarray(rows.any(axis=1)))
    if indices is None:
        return None
    levels = np.array(lloyd_max(bits))
    scaled = codebook.scale_rows(rows, scales_of(indices).astype(np.float64))
    ones = Importance(np.ones(rows.shape[0]), np.ones(rows.shape[1]))
    return codebook.encode_levels(weight, scaled, levels, indices, np.zeros(len(levels)), ones)


@cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels with the least squared error for a standard Gaussian (Max 1960), rising."""
    values = np.linspace(-_REACH, _REACH, 1 << 12)
    return tuple(codebook.kmeans(values, np.exp(-0.5 * values**2), 1 << bits).tolist())
