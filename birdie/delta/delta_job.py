"""Jobs of tensors that are stored relative to a tensor of a base.

exact ──► every bit of the delta, or the tensor by itself    coding.py
else ───► the delta encoded as a weight is, or as a product  product.py
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from birdie.compress.coding import estimate
from birdie.compress.inner_tensors import inner_decoder
from birdie.compress.rate.job import Alone, Job, Numbers, Relative, Searched, digest
from birdie.compress.row_blocks import row_blocks
from birdie.compress.scheme import Encoded, Scheme
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import finite_rows, rows_columns
from birdie.delta import delta_coding as coding
from birdie.delta.product import Components, Weights, cheaper
from birdie.system.mapped import release

_SAMPLE = 1 << 13  # elements of a tensor whose difference is tried
_LEAST_SAMPLED = 1 << 18  # elements of a tensor of which a sample is tried first
_WORTH = 0.98  # bytes of a difference over those of the tensor, up to which it is worth its time
_FAR_SMALLER = 8  # times that all of a difference must be smaller than a small tensor to take eight bits


@dataclass(frozen=True, slots=True)
class Delta(Numbers):
    """The differences of a tensor to another, its base; to the last bit with a lossless scheme."""

    base: Callable[[slice], Tensor]  # elements → these of the base

    @property
    def is_delta(self) -> bool:
        """True if the numbers are relative to another tensor."""
        return True

    def job(self, job: Alone) -> "DeltaJob":
        """Return the job of a file, from the one that encodes the differences."""
        return DeltaJob.of(job)

    def base_of(self, rows: slice) -> Tensor:
        """Return some rows of the base."""
        some, width = self.rows(rows), self.weight[:1].numel() if self.weight.ndim else 1
        start = (rows.start or 0) * width
        return self.base(slice(start, start + some.numel())).reshape(some.shape)

    def values(self, rows: slice = slice(None)) -> Tensor:
        """Return the differences of some rows, float32."""
        base = self.base_of(rows)
        difference = self.rows(rows).detach().float() - base.float()
        release(base)
        return difference

    def every_nth_row(self, first: int, n: int) -> Tensor:
        """Return the differences of rows `first`, `first` + n, …"""
        blocks = row_blocks(self.weight)
        return torch.cat([self.values(rows)[(first - (rows.start or 0)) % n :: n] for rows in blocks])


@dataclass(frozen=True, slots=True)
class DeltaJob(Job):
    """A tensor that is encoded as its difference to another."""

    numbers: Delta  # the differences
    job: Alone  # that encodes them as if they were the tensor
    components: Callable[[], Components] | None = None  # of the differences, if they may be stored as a product

    @classmethod
    def of(cls, job: Alone) -> "DeltaJob":
        """Return the job with a base; with components, if it is searched and encoded in one block."""
        delta = job.numbers
        assert isinstance(delta, Delta)
        if not isinstance(job, Searched) or job.weight.ndim < 2 or job.blocks != [slice(None)]:
            return cls(delta, job)

        @cache
        def compute() -> Components:
            weights = Weights.of(job.sensitivity, job.factors.row_weight)
            return Components.of(finite_rows(job.name, delta.values()), weights)

        return cls(delta, job, compute)

    @property
    def alone(self) -> Alone:
        """The job without regard to a base."""
        return self.job

    @property
    def by_rows(self) -> bool:
        """True if rows are encoded without regard to others."""
        return self.job.by_rows

    def encode(self, rows: slice, exponent: float, *, draft: bool = False) -> Encoded:
        """Encode some rows given those of the base."""
        weight, base, job = self.numbers.rows(rows), self.numbers.base_of(rows), self.job
        if isinstance(job.scheme, Lossless):
            return _exact(self.name, weight, base)
        values = self.numbers.values(rows)
        if not bool(values.any()):
            return _exact(self.name, weight, base)
        if self.components is None or not isinstance(job, Searched):
            return coding.near(weight, base, job.encode_values(values, rows, exponent, draft=draft))

        def direct() -> Encoded:
            return job.encode_values(values, rows, exponent, draft=False)

        scale = 2.0 ** (exponent + job.mean_log_deviation)
        return cheaper(self.name, weight, base, values, direct, self.components(), job.own_trellis, scale)

    def key(self, rows: slice, exponent: float) -> str:
        """Return a digest of the rows, of those of the base, and of all settings that their encoding depends on."""
        return digest(self.job.key(rows, exponent), self.numbers.base_of(rows))

    def with_tensor(self, tensor: Tensor) -> "DeltaJob":
        """Return the job of other values and the same base; exponents mean the same."""
        return DeltaJob.of(self.job.with_tensor(tensor))

    def lossless(self) -> "DeltaJob":
        """Return the job that keeps every bit."""
        return DeltaJob.of(self.job.lossless())


def against(numbers: Numbers, scheme: Scheme | None, base: Callable[[slice], Tensor]) -> tuple[Numbers, Scheme | None]:
    """Return the differences of a tensor to a base and their scheme, if they are smaller than the tensor, else these.

    What 16 bits would hold takes eight bits of a difference that is far smaller.
    """
    delta = Delta(numbers.name, numbers.tensor, numbers.weight, base)
    if isinstance(scheme, Lossless):
        return delta, scheme
    fits = scheme is None or (inner_decoder(scheme.decoder.name) and not scheme.by_axes)
    if not (fits and numbers.tensor.is_floating_point()):
        return numbers, scheme
    largest = square = power = 0.0
    for rows in row_blocks(numbers.weight):
        weight, values = numbers.rows(rows), delta.values(rows)
        largest = max(largest, float(values.abs().max()))
        square += float(values.square().sum(dtype=torch.float64))
        power += float(weight.detach().float().square().sum(dtype=torch.float64))
        release(weight)
    if not square < power:  # nor if a number is not finite
        return numbers, scheme
    if isinstance(scheme, Cast):
        small = largest * _FAR_SMALLER <= math.sqrt(power / numbers.weight.numel())
        return (delta, Grid(bits=8)) if small else (numbers, scheme)
    return delta, scheme


def relative(bases: Mapping[str, Callable[[slice], Tensor]]) -> dict[str, Relative]:
    """Return what an assignment needs of tensors that may be stored relative to others.

    Args:
        bases: name → elements in row-major order → these of the tensor to subtract.
    """
    return {name: partial(against, base=base) for name, base in bases.items()}


def pays(weight: Tensor, base: Tensor) -> bool:
    """Return whether a difference is likely to take fewer bytes than the tensor, from a sample of a large one.

    The moments of an optimizer change by as much as they are large: of 12 million numbers of AdamW, 20 steps apart, the
    sample saves a quarter of the time to encode, and the bytes are the same.
    """
    if weight.numel() != base.numel() or weight.dtype != base.dtype:
        return False
    if weight.numel() < _LEAST_SAMPLED:
        return True
    columns = min(rows_columns(tuple(weight.shape))[1], _SAMPLE)
    first = weight.numel() // 2 // columns * columns
    sample = slice(first, first + _SAMPLE // columns * columns)
    some, other = (tensor.reshape(-1)[sample].reshape(-1, columns) for tensor in (weight, base))
    encoded = coding.encode(some, other)
    return not encoded.streams or encoded.streams[0].size < _WORTH * sum(estimate(Lossless().encode("", some)))


def _exact(name: str, weight: Tensor, base: Tensor) -> Encoded:
    """Return the difference to a base, or the tensor by itself where that takes fewer bytes."""
    encoded = coding.encode(weight, base)
    release(base)
    if not encoded.streams:
        return encoded
    alone = Lossless().encode(name, weight)
    return alone if sum(estimate(alone)) <= encoded.streams[0].size else encoded
