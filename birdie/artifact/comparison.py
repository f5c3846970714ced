"""Comparison of two checkpoints, tensor by tensor.

a, b ──► tensors by name, one at a time ──► equal to the bit, or how far apart, in decibels
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from birdie.artifact.base import Base, BaseOption
from birdie.compress.distortion import decibels
from birdie.system.callbacks import Progress

Relation = Literal["equal", "differs", "shape", "only in a", "only in b"]
_TOGETHER = 1 << 22  # elements that are compared in float64 at a time


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """A tensor of two checkpoints.

    Attributes:
        name: of it in both.
        relation: equal: the same dtype and bits; differs: in values or dtype; shape: of another one.
        decibels: 10 log₁₀(‖a‖² / ‖a − b‖²), infinite where all values are equal; None if it is not in both, is not of
            numbers, or has another shape.
        dtypes: in a and in b; "" where it is missing.
        shapes: the same.
    """

    name: str
    relation: Relation
    decibels: float | None
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


def compare(a: BaseOption, b: BaseOption, progress: Progress | None = None) -> list[TensorComparison]:
    """Compare two checkpoints; memory holds a tensor of each at a time.

    Args:
        a, b: a checkpoint, a folder, a .birdie file, a module or a dict of tensors.
        progress: called with (done, total) in tensors.

    Returns:
        A row for each tensor of either, those of `a` first, in its order.

    Raises:
        ConfigError: one is none of these, is not there, or is a file of deltas to another.
        WeightsError, ArtifactError: it cannot be read.
    """
    with ExitStack() as stack:
        first, second = Base.open(a), Base.open(b)
        for one in (first, second):
            stack.enter_context(one.mapped())
        names = [*dict.fromkeys([*first.shapes, *second.shapes])]
        rows = []
        for done, name in enumerate(names, 1):
            rows.append(_compared(name, first, second))
            if progress is not None:
                progress(done, len(names))
        return rows


def _compared(name: str, first: Base, second: Base) -> TensorComparison:
    a, b = first(name), second(name)
    dtypes = "" if a is None else _name(a), "" if b is None else _name(b)
    shapes = () if a is None else tuple(a.shape), () if b is None else tuple(b.shape)
    if a is None or b is None:
        return TensorComparison(name, "only in b" if a is None else "only in a", None, dtypes, shapes)
    if a.shape != b.shape:
        return TensorComparison(name, "shape", None, dtypes, shapes)
    if a.dtype == b.dtype and _same_bits(a, b):
        return TensorComparison(name, "equal", math.inf, dtypes, shapes)
    return TensorComparison(name, "differs", _decibels(a, b), dtypes, shapes)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in _parts(a, b))


def _decibels(a: Tensor, b: Tensor) -> float | None:
    """Return the ratio of signal to error; None for values that are no numbers."""
    kind = torch.complex128 if a.dtype.is_complex or b.dtype.is_complex else torch.float64
    signal = error = 0.0
    for x, y in _parts(a, b):
        exact, other = x.to(kind), y.to(kind)
        signal += float(exact.abs().square().sum())
        error += float((exact - other).abs().square().sum())
    if not (math.isfinite(signal) and math.isfinite(error)):
        return None
    return decibels(signal, error)


def _parts(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the elements of both, some at a time."""
    for start in range(0, a.numel(), _TOGETHER):
        yield _flat(a)[start : start + _TOGETHER], _flat(b)[start : start + _TOGETHER]


def _flat(tensor: Tensor) -> Tensor:
    plain = tensor.dequantize() if tensor.is_quantized else tensor.to_dense() if tensor.is_sparse else tensor
    return plain.detach().cpu().contiguous().view(-1)
