"""Tucker's core and factors back to a tensor: along every axis that is cut, out(i) = Σ factor(k, i) · core(k).

    tucker   params (rank of each axis, then the core and each factor as inner tensors as in decode_nested)

Streams: those of the core, then for each cut axis, from the first, those of its factor (rank × length) and the step
index of each of its rows (rank × 1). An axis at its full length is not cut and has none. Axes are undone from the last
to the first, sums run over k from 0, in float64, held to the range of float32 after each axis.
"""

from dataclasses import replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_steps import steps
from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.schemes import decode_nested
from birdie.compress.schemes.decode_spectral import SPECTRAL
from birdie.compress.schemes.decode_trellis import TRELLIS
from birdie.compress.schemes.dequantize import SCALES, by_rows, real_matrix
from birdie.compress.tensors import kernel, rows_columns
from birdie.errors import ArtifactError
from birdie.runtime.kernels import njit

INNER: dict[int, Decoder] = {
    **decode_nested.INNER,
    4: TRELLIS,
    9: SPECTRAL,
}  # by their codes in birdie.artifact.writer.SCHEMES
NAMES = {**decode_nested.NAMES, "trellis": 4, "spectral": 9}
MOST_AXES = 8
_LIMIT = float(np.finfo(np.float32).max)
_PART = 1 << 16  # elements that are worked on at a time
_Array = NDArray[np.float64]
_Part = tuple[Encoded, int]  # an inner tensor without its streams, and how many it has


def cut(shape: tuple[int, ...], ranks: tuple[int, ...]) -> list[int]:
    """The axes that have a factor."""
    return [axis for axis, (size, rank) in enumerate(zip(shape, ranks, strict=True)) if rank < size]


def numbers(shape: tuple[int, ...], ranks: tuple[int, ...]) -> int:
    """How many the core and the factors hold."""
    return prod(ranks) + sum(ranks[axis] * shape[axis] for axis in cut(shape, ranks))


def fits(shape: tuple[int, ...], ranks: tuple[int, ...]) -> bool:
    """Whether a file holds a tensor of `shape` so: two to eight axes, one of them cut, in no more numbers than it."""
    return (
        2 <= len(shape) <= MOST_AXES
        and len(ranks) == len(shape)
        and all(1 <= rank <= size for rank, size in zip(ranks, shape, strict=True))
        and ranks != shape
        and numbers(shape, ranks) <= prod(shape)
    )


def _parts(shape: tuple[int, ...], params: tuple[int, ...]) -> tuple[tuple[int, ...], list[_Part], list[StreamLayout]]:
    """(ranks, the core and the factors, layout of all streams).

    Raises:
        ArtifactError: nothing that there is.
    """
    ranks, rest = params[: len(shape)], params[len(shape) :]
    if not fits(shape, ranks):
        raise ArtifactError(f"scheme tucker has ranks {ranks} for a tensor of {shape}; the file is corrupt or newer")
    found: list[_Part] = []
    layouts: list[StreamLayout] = []
    for inner in (ranks, *((ranks[axis], shape[axis]) for axis in cut(shape, ranks))):
        code, count = (*rest, -1, -1)[:2]
        own, rest = tuple(rest[2 : 2 + max(count, 0)]), rest[2 + max(count, 0) :]
        if code not in INNER or len(own) != count:
            raise ArtifactError(
                f"a tensor inside another has scheme {code}, unknown here; the file is corrupt or newer"
            )
        layout = INNER[code].layout(inner, torch.float32, own)
        symbols = replace(layout[0], hints=replace(layout[0].hints, kernel=kernel(inner, layout[0].columns)))
        layouts += [symbols, *layout[1:], *([StreamLayout(inner[0], 1, SCALES)] if found else [])]
        found.append((Encoded(str(code), inner, torch.float32, own, ()), len(layout)))
    if rest:
        raise ArtifactError(f"scheme tucker has {len(rest)} parameters too many; the file is corrupt or newer")
    return ranks, found, layouts


def _layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    real_matrix(shape, dtype)
    return tuple(_parts(shape, params)[2])


def _decode(encoded: Encoded) -> Tensor:
    ranks, found, _ = _parts(encoded.shape, encoded.params)
    streams = list(encoded.streams)
    values: list[_Array] = []
    for part, count in found:
        inner = Encoded("", part.shape, part.dtype, part.params, tuple(streams[:count]))
        del streams[:count]
        value = INNER[int(part.scheme)].decode(inner).numpy().astype(np.float64)
        values.append(value if not values else value * steps(streams.pop(0)))
    core, *factors = values
    for axis, factor in reversed([*zip(cut(encoded.shape, ranks), factors, strict=True)]):
        core = times(core, factor, axis)
    matrix = core.reshape(rows_columns(encoded.shape))
    return by_rows(encoded, lambda rows: matrix[rows])


def times(x: _Array, factor: _Array, axis: int) -> _Array:
    """Each line of `x` along `axis`, as long as `factor` (rank, length) has rows, becomes Σ factor(k) · line(k)."""
    shape, (rank, length) = x.shape, factor.shape
    lines = x.reshape(prod(shape[:axis]), rank, -1)
    out = np.empty((len(lines), length, lines.shape[2]))
    factor = np.ascontiguousarray(factor)
    width = max(8, _PART // max(rank, length))
    for start in range(0, lines.shape[2], width):
        across = slice(start, start + width)
        height = max(1, width // lines[0, 0, across].size)
        for first in range(0, len(lines), height):
            some = lines[first : first + height, :, across]
            signals = some.transpose(1, 0, 2).reshape(rank, -1).copy()
            total = np.empty((length, signals.shape[1]))
            _sums(factor, signals, total)
            out[first : first + height, :, across] = total.reshape(length, len(some), -1).transpose(1, 0, 2)
    return out.reshape(*shape[:axis], length, *shape[axis + 1 :])


@njit(nogil=True, cache=True)
def _sums(factor, signals, out):  # type: ignore[no-untyped-def]
    """out(i) = Σ factor(k, i) · signals(k), products and sums rounded one by one, held to float32's range."""
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


TUCKER = Decoder(_layout, _decode)
