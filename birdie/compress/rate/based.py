"""Jobs whose tensor is stored as its difference to one of another checkpoint, the base.

exact ──► every bit of the difference, or the tensor by itself (birdie.compress.difference)
else ───► the difference encoded as a weight is, or as a product (birdie.compress.near)
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from birdie.compress import difference
from birdie.compress.coding import estimate
from birdie.compress.near import Components, Weights, cheaper
from birdie.compress.nested import inner_decoder
from birdie.compress.row_blocks import row_blocks
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import finite_rows, rows_columns
from birdie.system.mapped import release

if TYPE_CHECKING:
    from birdie.compress.rate.jobs import Job

_SAMPLE = 1 << 13  # elements of a tensor whose difference is tried
_LEAST_SAMPLED = 1 << 18  # elements of a tensor of which a sample is tried first
_WORTH = 0.98  # bytes of a difference over those of the tensor, up to which it is worth its time
_FAR_SMALLER = 8  # times that all of a difference must be smaller than a small tensor to take eight bits


def with_base(job: "Job", base: Callable[[slice], Tensor]) -> "Job":
    """Return the job with a base, if the difference is smaller than the tensor.

    What 16 bits would hold takes eight bits of a difference that is far smaller.
    """
    based = replace(job, base=base)
    if not based.is_near:
        return based
    fits = job.scheme is None or (inner_decoder(job.scheme.decoder.name) and not job.scheme.by_axes)
    if not (fits and job.tensor.is_floating_point()):
        return job
    largest = square = power = 0.0
    for rows in row_blocks(job.weight):
        weight, numbers = job.rows(rows), based.values(rows)
        largest = max(largest, float(numbers.abs().max()))
        square += float(numbers.square().sum(dtype=torch.float64))
        power += float(weight.detach().float().square().sum(dtype=torch.float64))
        release(weight)
    if not square < power:  # nor if a number is not finite
        return job
    if isinstance(job.scheme, Cast):
        small = largest * _FAR_SMALLER <= math.sqrt(power / job.weight.numel())
        return replace(based, scheme=Grid(bits=8)) if small else job
    return based


def with_components(job: "Job") -> "Job":
    """Return the job with the components of its difference, if it is searched and encoded in one block."""
    if job.scheme is not None or job.weight.ndim < 2 or job.blocks != [slice(None)]:
        return job

    @cache
    def compute() -> Components:
        assert job.factors is not None
        weights = Weights.of(job.sensitivity, job.factors.row_weight)
        return Components.of(finite_rows(job.name, job.values()), weights)

    return replace(job, components=compute)


def encode(job: "Job", rows: slice, exponent: float, *, draft: bool) -> Encoded:
    """Encode some rows given those of the base; arguments as of `Job.encode`."""
    weight, base = job.rows(rows), job.base_of(rows)
    numbers = job.values(rows)
    if not job.is_near or not bool(numbers.any()):
        return _exact(job.name, weight, base)
    if job.components is None:
        return difference.near(weight, base, job.alone(numbers, rows, exponent, draft=draft))

    def direct() -> Encoded:
        return job.alone(numbers, rows, exponent, draft=False)

    scale = 2.0 ** (exponent + job.unit)
    return cheaper(job.name, weight, base, numbers, direct, job.components(), job.own_trellis, scale)


def pays(weight: Tensor, base: Tensor) -> bool:
    """Return whether a difference is likely to take fewer bytes than the tensor, from a sample of a large one.

    The moments of an optimizer change by as much as they are large: of 12 million numbers of AdamW, 20 steps apart, the
    sample saves a quarter of the time to encode, and the bytes are the same.

    Args:
        weight: the tensor.
        base: of the checkpoint before.
    """
    if weight.numel() != base.numel() or weight.dtype != base.dtype:
        return False
    if weight.numel() < _LEAST_SAMPLED:
        return True
    columns = min(rows_columns(tuple(weight.shape))[1], _SAMPLE)
    first = weight.numel() // 2 // columns * columns
    sample = slice(first, first + _SAMPLE // columns * columns)
    some, other = (tensor.reshape(-1)[sample].reshape(-1, columns) for tensor in (weight, base))
    encoded = difference.encode(some, other)
    return not encoded.streams or encoded.streams[0].size < _WORTH * sum(estimate(Lossless().encode("", some)))


def _exact(name: str, weight: Tensor, base: Tensor) -> Encoded:
    """Return the difference to a base, or the tensor by itself where that takes fewer bytes."""
    encoded = difference.encode(weight, base)
    release(base)
    if not encoded.streams:
        return encoded
    alone = Lossless().encode(name, weight)
    return alone if sum(estimate(alone)) <= encoded.streams[0].size else encoded
