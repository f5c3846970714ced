"""Tucker scheme: a core tensor and a factor for every truncated axis, each part encoded by a base scheme.

    tucker   params (rank of each axis, then the core and each factor as inner tensors)
    streams: those of the core, then for each truncated axis, from the first, those of its factor (rank, length) and the
             scale index of each of its rows (rank, 1); an axis at its full length is not truncated and has none

    weight ─► truncated HOSVD ─► factors ─► quantized ─► core fitted to the quantized factors ─► quantized

Decoding expands the axes from the last to the first, out(i) = Σ factor(k, i) · core(k) with k from 0, in float64,
clipped to the range of float32 after each axis.

All parts share one scale: row k of a factor is stored times the norm σ(k) of the core's slice for it, so that an error
of one number in any part is about as large in the weight, and a component too small for the scale becomes zeros.

*Experimental.* It pays only for tensors of few components: sums of few outer products, or, at coarse scales, layers far
wider than their task (0.62 of a plain grid's bytes for an MLP on MNIST). On kernels of trained networks and matrices of
language models it costs 1.13–1.53 times the bytes of a plain grid at equal error (docs/schemes.md).
"""

from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.inner_tensors import InnerTensor, inner_decoder, inner_names, part_params, take_part, with_kernel
from birdie.compress.log_scales import nearest_indices, scales_of
from birdie.compress.scheme import (
    BLOCK,
    INT16,
    SCALES,
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
from birdie.compress.tensors import real_matrix, real_rows, rows_are_apart, rows_columns, tensor_of_blocks, underflows
from birdie.entropy.planes import Block
from birdie.errors import ArtifactError, ConfigError
from birdie.system.kernels import njit

MAX_AXES = 8
_LIMIT = float(np.finfo(np.float32).max)
_ROWS = 64  # multiplied at a time at least, as each block reads the other factor again
_FINEST = 2.0**-16  # smallest deviation over the largest weight: below it, the tensor counts as constant
_LARGEST = 1e37  # largest norm of a row of a factor
_SAME = 0.05  # share of the largest singular value of quantized factors below which two rows are the same component
_Array = NDArray[np.float64]


def cut_axes(shape: tuple[int, ...], ranks: tuple[int, ...]) -> list[int]:
    """Return the truncated axes: those that have a factor."""
    return [axis for axis, (size, rank) in enumerate(zip(shape, ranks, strict=True)) if rank < size]


def count_numbers(shape: tuple[int, ...], ranks: tuple[int, ...]) -> int:
    """Return how many numbers the core and the factors have."""
    return prod(ranks) + sum(ranks[axis] * shape[axis] for axis in cut_axes(shape, ranks))


def fits(shape: tuple[int, ...], ranks: tuple[int, ...]) -> bool:
    """Return whether `ranks` are valid: two to eight axes, at least one truncated, and not more numbers than before."""
    return (
        2 <= len(shape) <= MAX_AXES
        and len(ranks) == len(shape)
        and all(1 <= rank <= size for rank, size in zip(ranks, shape, strict=True))
        and ranks != shape
        and count_numbers(shape, ranks) <= prod(shape)
    )


def _parts(shape: tuple[int, ...], params: tuple[int, ...]) -> tuple[tuple[int, ...], list[InnerTensor]]:
    """Return the ranks, and the core and the factors."""
    ranks, rest = params[: len(shape)], params[len(shape) :]
    if not fits(shape, ranks):
        raise ArtifactError(f"scheme tucker has ranks {ranks} for a tensor of {shape}; the file is corrupt or newer")
    parts: list[InnerTensor] = []
    for inner in (ranks, *((ranks[axis], shape[axis]) for axis in cut_axes(shape, ranks))):
        part, rest = take_part(inner, rest)
        parts.append(part)
    if rest:
        raise ArtifactError(f"scheme tucker has {len(rest)} parameters too many; the file is corrupt or newer")
    return ranks, parts


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of all parts."""
    real_matrix(shape, dtype)
    core, *factors = _parts(shape, params)[1]
    streams = [*with_kernel(core)]
    for factor in factors:
        streams += [*with_kernel(factor), StreamLayout(factor.shape[0], 1, SCALES, INT16)]
    return tuple(streams)


def decode(encoded: Encoded) -> Tensor:
    """Return the product of core and factors."""
    ranks, parts = _parts(encoded.shape, encoded.params)
    streams = list(encoded.streams)
    values: list[_Array] = []
    for part in parts:
        count = len(part.layout)
        value = part.decode(streams[:count]).numpy().astype(np.float64)
        del streams[:count]
        values.append(value if not values else value * scales_of(streams.pop(0)))
    core, *factors = values
    (last, expand), *others = zip(cut_axes(encoded.shape, ranks), factors, strict=True)
    for axis, factor in reversed(others):
        core = multiply(core, factor, axis)

    def product(block: Block) -> _Array:
        rows = block[0]
        part = multiply(core[rows], expand, last) if last else multiply(core, expand[:, rows], 0)
        return part.reshape(len(part), -1)

    columns = rows_columns(encoded.shape)[1]
    return tensor_of_blocks(encoded.shape, encoded.dtype, product, max(BLOCK, _ROWS * columns))


def multiply(x: _Array, factor: _Array, axis: int) -> _Array:
    """Replace each line of `x` along `axis`, as long as `factor` (rank, length) has rows, by Σ factor(k) · line(k)."""
    shape, (rank, length) = x.shape, factor.shape
    lines = x.reshape(prod(shape[:axis]), rank, -1)
    out = np.empty((len(lines), length, lines.shape[2]))
    factor = np.ascontiguousarray(factor)
    width = max(8, BLOCK // max(rank, length))
    for start in range(0, lines.shape[2], width):
        across = slice(start, start + width)
        height = max(1, width // lines[0, 0, across].size)
        for first in range(0, len(lines), height):
            block = lines[first : first + height, :, across]
            signals = block.transpose(1, 0, 2).reshape(rank, -1).copy()
            total = np.empty((length, signals.shape[1]))
            _sum_products(factor, signals, total)
            out[first : first + height, :, across] = total.reshape(length, len(block), -1).transpose(1, 0, 2)
    return out.reshape(*shape[:axis], length, *shape[axis + 1 :])


@njit(nogil=True, cache=True, _nrt=False)
def _sum_products(factor, signals, out):  # type: ignore[no-untyped-def]
    """Compute out(i) = Σ factor(k, i) · signals(k), every product and sum rounded, clipped to the range of float32."""
    width = signals.shape[1]
    for i in range(factor.shape[1]):
        line = out[i]
        for j in range(width):
            line[j] = factor[0, i] * signals[0, j]
        for k in range(1, factor.shape[0]):
            weight, signal = factor[k, i], signals[k]
            for j in range(width):
                line[j] += weight * signal[j]
        for j in range(width):
            line[j] = min(max(line[j], -_LIMIT), _LIMIT)


def _cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    (ranks, parts), operations, sizes = _parts(shape, params), 0, list(params[: len(shape)])
    held = 16 * sum(prod(part.shape) for part in parts)
    for axis in reversed(cut_axes(shape, ranks)):
        input_size = prod(sizes)
        sizes[axis] = shape[axis]
        operations += 2 * ranks[axis] * prod(sizes)
    inner = [part.decoder.cost(part.shape, torch.float32, part.params) for part in parts]
    held += 24 * input_size + max(
        cost.bytes for cost in inner
    )  # in float64: the last product's input, and that before it
    output = in_blocks(shape, dtype, 12, _ROWS * rows_columns(shape)[1])
    return Cost(output.operations + operations + sum(cost.operations for cost in inner), output.bytes + held)


DECODER = Decoder("tucker", 10, layout, decode, _cost)


def _of_spec(
    *, energy: float | None = None, ranks: tuple[int, ...] | None = None, base: Scheme | None = None
) -> "Tucker":
    base = Grid(sigma=0.3) if base is None else base
    if energy is not None and ranks is not None:
        raise ConfigError("tucker takes energy=0.99 or one rank for each axis, ranks=16x16x3x3; give one of the two")
    return Tucker(0.99 if energy is None else energy, ranks, base)


@dataclass(frozen=True, slots=True)
class Tucker(Scheme):
    """A core and a factor along every truncated axis.

    Attributes:
        energy: share of the sum of squares to keep, above 0, at most 1.
        ranks: one rank for each axis, instead of `energy`.
        base: scheme of the parts: `sigma:C`, `trellis:sigma=C` and `spectral:…,sigma=C`, whose scale is then C
            deviations of the complete tensor for all parts; or ternary, codebooks and grids of fixed width.
    """

    decoder, by_axes = DECODER, True
    specs = (
        Spec(
            "tucker",
            "a core and a factor for each axis that is cut, by schemes of their own",
            _of_spec,
            "tucker:energy=0.99",
        ),
    )

    energy: float = 0.99
    ranks: tuple[int, ...] | None = None
    base: Scheme = field(default_factory=lambda: Grid(sigma=0.3))

    def __post_init__(self) -> None:
        if not 0 < self.energy <= 1:
            raise ConfigError(f"tucker energy={self.energy} is out of range; choose above 0, at most 1")
        if self.ranks is not None and (not self.ranks or min(self.ranks) < 1):
            raise ConfigError(f"tucker ranks={self.ranks} are out of range; give 1 or more for each axis")

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002 (it is of the whole matrix, not of parts)
    ) -> Encoded:
        """Decompose the tensor and encode the parts.

        A tensor is encoded by the base alone if it has one axis or more than eight, if no axis is truncated, if core
        and factors have more numbers than it, or if one row is so large that a product would lose the others;
        losslessly if the base stores a part losslessly.

        Raises:
            WeightsError: the tensor is not of real floats, is empty, or is not finite.
            ConfigError: the base cannot hold a part, or ranks do not fit the tensor.
        """
        rows, shape = real_rows(name, weight), tuple(weight.shape)
        if underflows(weight, rows):
            return Lossless().encode(name, weight)
        plain = torch.from_numpy(rows).double().reshape(shape)
        if not 2 <= len(shape) <= MAX_AXES or rows_are_apart(rows):
            return self.base.encode(name, weight)
        exact, cut = decompose(plain, self.energy, self.ranks)
        ranks = tuple(exact.shape)
        if not fits(shape, ranks) or float(torch.linalg.vector_norm(exact)) > _LARGEST:
            return self.base.encode(name, weight)
        deviation = max(float(plain.std(correction=0)), float(plain.abs().max()) * _FINEST) or 1.0
        core, factors = plain.numpy(), []
        for axis in cut_axes(shape, ranks):
            norms = torch.linalg.vector_norm(exact.movedim(axis, 0).flatten(1), dim=1)
            indices = nearest_indices(1 / norms.clamp(1 / _LARGEST, _LARGEST).numpy())[:, None]
            scales = scales_of(indices).astype(np.float64)
            encoded = self._encode_part(name, cut[axis].mT.numpy() / scales, deviation)
            if encoded is None:
                return Lossless().encode(name, weight)
            part, decoder = encoded
            factors.append((part, indices))
            # The core is fitted to the factor as it is decoded, so it makes up for the factor's error.
            decoded = decoder.decode(part).double().numpy() * scales
            core = multiply(core, np.ascontiguousarray(np.linalg.pinv(decoded, rcond=_SAME)), axis)
        encoded = self._encode_part(name, core, deviation)
        if encoded is None:
            return Lossless().encode(name, weight)
        first, _ = encoded
        params, streams = [*ranks, *part_params(first)], [*first.streams]
        for part, indices in factors:
            params += part_params(part)
            streams += [*part.streams, indices]
        return Encoded("tucker", shape, weight.dtype, tuple(params), tuple(streams))

    def _encode_part(self, name: str, values: _Array, deviation: float) -> tuple[Encoded, Decoder] | None:
        """Encode a part (any shape) by the base, with its decoder; None beyond the range of float32 or its scales."""
        with np.errstate(over="ignore"):
            part = torch.from_numpy(values.astype(np.float32))
        if not bool(part.isfinite().all()):
            return None
        encoded = self.base.encode_part(name, part, deviation)
        if encoded is None or encoded.scheme == "lossless":
            return None
        decoder = inner_decoder(encoded.scheme)
        if decoder is None:
            raise ConfigError(f"tucker cannot hold {encoded.scheme}; choose {inner_names()}")
        return encoded, decoder


def decompose(weight: Tensor, energy: float, ranks: tuple[int, ...] | None) -> tuple[Tensor, dict[int, Tensor]]:
    """Return a core and, for each axis that is truncated, a factor (length, rank) with orthonormal columns.

    Sequentially truncated higher-order SVD: every axis is truncated in the core that the earlier axes left (De
    Lathauwer et al. 2000; sequential: Vannieuwenhoven et al. 2012). The squared error is the energy that was removed.

    Args:
        weight: of at least one element, float64, finite.
        energy: share of the sum of squares to keep; every axis may lose the same part of the rest. An axis is not
            truncated if its factor and the new core would have more numbers than the old core.
        ranks: one rank for each axis instead, at most its length; an axis at its full length is not truncated.
    """
    shape = tuple(weight.shape)
    if ranks is not None and (
        len(ranks) != len(shape) or not all(1 <= rank <= size for rank, size in zip(ranks, shape, strict=True))
    ):
        raise ConfigError(
            f"tucker ranks {ranks} do not fit a tensor of {shape}; choose one for each axis, 1 to its length"
        )
    core, factors = weight, {}
    allowed_loss = (1 - energy) * float(weight.square().sum()) / len(shape)
    for axis, size in sorted(enumerate(shape), key=lambda pair: pair[1]):
        left, values = _singular(core, axis)
        rank = _rank(values, allowed_loss) if ranks is None else ranks[axis]
        others = core.numel() // size
        if rank < size and (ranks is not None or rank * (size + others) < size * others):
            factors[axis] = left[:, :rank].contiguous()
            lines = core.reshape(prod(core.shape[:axis]), size, prod(core.shape[axis + 1 :]))
            core = (left[:, :rank].mT @ lines).reshape(*core.shape[:axis], rank, *core.shape[axis + 1 :])
    return core, factors


def _singular(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return left singular vectors of `x` unfolded along `axis`, and the singular values, falling, zeros included.

    Unfolded matrices are usually wide, so the eigenvectors of their small Gram matrix are computed instead of an SVD.
    """
    unfolded = x.movedim(axis, 0).reshape(x.shape[axis], -1)
    if unfolded.shape[0] <= unfolded.shape[1]:
        squares, vectors = torch.linalg.eigh(unfolded @ unfolded.mT)
        return vectors.flip(1), squares.flip(0).clamp_min(0).sqrt()
    left, values, _ = torch.linalg.svd(unfolded, full_matrices=True)
    return left, torch.cat([values, values.new_zeros(len(left) - len(values))])


def _rank(values: Tensor, allowed_loss: float) -> int:
    """Return the smallest rank at which the squares of the other `values` (falling) sum to at most `allowed_loss`."""
    tails = values.square().flip(0).cumsum(0).flip(0)
    return max(1, int((tails > allowed_loss * (1 + 1e-9) + 1e-24 * float(tails[0])).sum()))
