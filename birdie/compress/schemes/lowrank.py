"""Low-rank scheme: a base scheme and a low-rank correction of its error: W ≈ base(W) + A·B (LQER, arXiv 2402.02446).

    lowrank   params (rank, then the base as an inner tensor)
    streams: those of the base, then A (rows, rank), B (rank, columns), scale indices (rank, 1)

The sum base + Σ scale(k) · A(·, k) · B(k, ·) runs over k from 0 in float64, every product but the last being of
integers.

Components are computed one at a time, each fitted to the error that the earlier ones left, including their rounding.
With the error weighted by rows G and by the Hessian H, ‖G^½ (E − a·bᵀ) H^½‖², the best b for fixed a is Eᵀ G a /
(aᵀ G a) and the best a for fixed b is E H b / (bᵀ H b): alternating the two is the power method for the largest
singular pair, and needs no root of H. Both are rounded to integers, b after a, and their common scale is fitted last,
so no component makes the weighted error larger.

*Experimental.* It pays only with calibration data and a coarse base: 0.90–0.91 of a plain grid's bytes at equal KL,
where a trellis has 0.79; without data 1.00–1.07 (docs/schemes.md).
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.importance import importance
from birdie.compress.inner_tensors import inner_decoder, inner_names, part_params
from birdie.compress.log_scales import SMALLEST, nearest_indices, scales_of
from birdie.compress.scheme import (
    INT16,
    SCALES,
    SYMBOLS,
    Cost,
    Decoder,
    Encoded,
    Scheme,
    Sensitivity,
    Spec,
    StreamLayout,
    in_blocks,
)
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.rotation import decode_parts, parts_of, parts_operations
from birdie.compress.schemes.ternary import INT8
from birdie.compress.tensors import real_matrix, real_rows, rows_columns, tensor_of_blocks, underflows
from birdie.entropy.planes import Block
from birdie.errors import ArtifactError, ConfigError

_BLOCK = 1 << 18  # elements computed at a time: the base is decoded anew for each block
_ROUNDS = 16  # iterations of the power method
_Array = NDArray[np.float64]


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of the base and of the factors."""
    rows, columns = real_matrix(shape, dtype)
    parts = parts_of(shape, params[1:])
    if len(parts) != 1 or not 1 <= params[0] <= min(rows, columns):
        raise ArtifactError(f"scheme lowrank has parameters {params}; the file is corrupt or newer")
    left, right = StreamLayout(rows, params[0], SYMBOLS, INT8), StreamLayout(params[0], columns, SYMBOLS, INT8)
    return *parts[0].layout, left, right, StreamLayout(params[0], 1, SCALES, INT16)


def decode(encoded: Encoded) -> Tensor:
    """Return the base plus its correction."""
    *inner, left, right, indices = encoded.streams
    parts = parts_of(encoded.shape, encoded.params[1:])
    scales = scales_of(indices).astype(np.float64)

    def corrected(block: Block) -> NDArray[np.float64]:
        total = decode_parts(parts, tuple(inner), block)[0].astype(np.float64)
        for k in range(len(scales)):
            total += left[block[0], k : k + 1] * (right[k] * scales[k])  # 38 bits at most: exact in any order
        return total

    return tensor_of_blocks(encoded.shape, encoded.dtype, corrected, max(_BLOCK, right.shape[1]))


def _cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    cost = in_blocks(shape, dtype, 28 + 6 * params[0], max(_BLOCK, rows_columns(shape)[1]))
    return Cost(cost.operations + parts_operations(parts_of(shape, params[1:])), cost.bytes)


DECODER = Decoder("lowrank", 8, layout, decode, _cost)


@dataclass(frozen=True, slots=True)
class LowRank(Scheme):
    """A base scheme and at most `rank` components of its error.

    Attributes:
        rank: most components, 1 or more; those that gain nothing are dropped.
        base: the scheme whose error is corrected; its rows decode apart: a uniform grid, ternary, a codebook.
        left_bits: width of the factor A (rows × rank), 2 to 8.
        right_bits: width of the factor B (rank × columns), 2 to 8.
    """

    decoder = DECODER
    specs = (
        Spec("lowrank", "another scheme and a low-rank correction of its error", example="lowrank:rank=4,base=int6"),
    )

    rank: int = 4
    base: Scheme = field(default_factory=lambda: Grid(bits=6))
    left_bits: int = 4
    right_bits: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lowrank rank={self.rank} is out of range; choose 1 or more")
        if not (2 <= self.left_bits <= 8 and 2 <= self.right_bits <= 8):
            raise ConfigError(
                f"lowrank left_bits={self.left_bits}, right_bits={self.right_bits} are out of range; choose 2 to 8"
            )

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None) -> Encoded:
        """Encode by the base, then correct its error; by the base alone if no component gains, or if it is lossless.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
            ConfigError: the base is a scheme that cannot be corrected, or the sensitivity belongs to another matrix.
        """
        rows = real_rows(name, weight)
        inner = torch.from_numpy(rows).reshape(weight.shape)
        base = self.base.encode(name, inner, sensitivity=sensitivity)
        if base.scheme == "lossless" or underflows(weight, rows):
            return Lossless().encode(name, weight)
        inner_scheme = inner_decoder(base.scheme, by_rows=True)
        if inner_scheme is None:
            raise ConfigError(f"lowrank cannot correct {base.scheme}; choose {inner_names(by_rows=True)}")
        decoded = inner_scheme.decode(base)
        error = rows.astype(np.float64) - decoded.double().numpy().reshape(rows.shape)
        weights = importance(name, sensitivity, *rows.shape)
        hessian = None
        if sensitivity is not None and sensitivity.hessian is not None:
            hessian = sensitivity.hessian.detach().cpu().double().numpy()
            hessian = hessian / max(float(np.diagonal(hessian).mean()), SMALLEST)
        components: list[tuple[_Array, _Array, int]] = []
        for _ in range(min(self.rank, *rows.shape)):
            component = _component(error, weights.rows, hessian, self.left_bits, self.right_bits)
            if component is None:
                break
            left, right, index = component
            error -= np.outer(left, right * float(scales_of(np.array([index]))[0]))
            components.append((left, right, index))
        if not components:
            return replace(base, dtype=weight.dtype)
        lefts = np.stack([left for left, _, _ in components], axis=1)
        rights = np.stack([right for _, right, _ in components])
        indices = np.array([[index] for _, _, index in components], np.int32)
        params = (len(components), *part_params(base))
        streams = (*base.streams, lefts.astype(np.int8), rights.astype(np.int8), indices)
        return Encoded("lowrank", tuple(weight.shape), weight.dtype, params, streams)


def _weighted(matrix: _Array, hessian: _Array | None) -> _Array:
    return matrix if hessian is None else matrix @ hessian


def _component(
    error: _Array, rows: _Array, hessian: _Array | None, left_bits: int, right_bits: int
) -> tuple[_Array, _Array, int] | None:
    """Return the largest component of `error`: two integer vectors and the index of their scale."""
    b: _Array = error[int(np.argmax(rows * (error * error).sum(axis=1)))].copy()
    for _ in range(_ROUNDS):
        a = _unit(error @ _weighted(b, hessian))
        b = _unit(error.T @ (rows * a))
    left = _rounded(a, left_bits)
    if not left.any():
        return None
    right = _rounded(error.T @ (rows * left), right_bits)
    weighted = _weighted(right, hessian)
    mass = float((rows * left * left).sum()) * float(right @ weighted)
    fit = float((rows * left) @ error @ weighted)
    if not (mass > 0 and fit / mass >= SMALLEST):
        return None
    return left, right, int(nearest_indices(np.array([fit / mass]))[0])


def _unit(vector: _Array) -> _Array:
    largest = float(np.abs(vector).max())
    return vector / largest if largest > 0 else vector


def _rounded(vector: _Array, bits: int) -> _Array:
    """Return `vector` as integers of `bits` bits, the largest ± (2^(bits − 1) − 1)."""
    integers: _Array = np.rint(_unit(vector) * (2 ** (bits - 1) - 1))
    return integers
