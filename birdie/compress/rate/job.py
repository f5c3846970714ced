"""A job: one tensor of a file, with all that its encoding depends on but one exponent, which all jobs share.

    Numbers ──┬─► Fixed         by its scheme, whatever the exponent
              ├─► Searched      by a trellis    ┐
              ├─► Steered       by a scheme     ├ whose scale the exponent sets
              ├─► Transformed   by a transform  ┘
    Delta ────┴─► one of these ──► DeltaJob     relative to another tensor (birdie.delta)

    job.encode(rows, exponent) ──► integers

The exponent is log2 of the typical scale in standard deviations.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.row_blocks import as_matrix, encoded_blocks, every_nth_row, folded, row_blocks, with_rows
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.small_tensors import SMALL, small_scheme
from birdie.compress.tensors import count_reals, finite_rows, planes, to_bits
from birdie.compress.trellis.feedback import Feedback
from birdie.system.mapped import release

if TYPE_CHECKING:
    from birdie.compress.spectral.transforms import Transform

# Without calibration no matrix takes scales of more deviations: beyond, it is practically zero, which is no useful fit.
WIDEST = 3.0
_NO_ROWS = np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a tensor that are encoded."""

    # name, tensor: of the file
    name: str
    tensor: Tensor
    # as the scheme encodes it: a stack as one matrix, a long vector as rows without its tail, complex numbers as real
    # ones
    weight: Tensor

    @property
    def is_delta(self) -> bool:
        """True if the numbers are relative to another tensor."""
        return False

    def job(self, job: "Alone") -> "Job":
        """Return the job of a file, from the one that encodes these numbers."""
        return job

    @property
    def tail(self) -> Tensor | None:
        """Numbers of a vector behind its rows, which are kept in 16 bits or losslessly."""
        if self.tensor.ndim != 1 or self.weight.ndim != 2:
            return None
        return planes(self.tensor)[self.weight.numel() :] if self.weight.numel() < count_reals(self.tensor) else None

    def is_tail(self, rows: slice) -> bool:
        """Return whether these rows, one of `blocks`, are the tail."""
        return rows.start is not None and self.weight.ndim > 1 and rows.start >= len(self.weight)

    def blocks(self, *, by_rows: bool) -> list[slice]:
        """Return rows that are encoded, and coded, alone; last, behind all rows, the tail of a vector."""
        weight = self.weight
        shape = (weight if self.tensor.dtype != weight.dtype else self.tensor).shape
        blocks = encoded_blocks(weight, tuple(shape), by_rows=by_rows)
        return blocks if self.tail is None else [*blocks, slice(len(weight), len(weight) + 1)]

    def rows(self, rows: slice) -> Tensor:
        """Return some rows of the weight, or the tail."""
        if self.is_tail(rows):
            assert self.tail is not None
            return self.tail
        return self.weight[rows] if self.weight.ndim else self.weight

    def values(self, rows: slice = slice(None)) -> Tensor:
        """Return the numbers of some rows that are encoded."""
        return self.rows(rows)

    def every_nth_row(self, first: int, n: int) -> Tensor:
        """Return a copy of the values of rows `first`, `first` + n, …"""
        return every_nth_row(self.weight.detach(), first, n)

    def matrices(self) -> Iterator[NDArray[np.float32]]:
        """Yield the values in blocks of rows, (rows, columns); their pages of a mapped file are released."""
        for rows in row_blocks(self.weight):
            yield finite_rows(self.name, self.values(rows))
            release(self.rows(rows))


Relative = Callable[[Numbers, Scheme | None], tuple[Numbers, Scheme | None]]
"""Numbers of a tensor and their scheme → those relative to another tensor, if that is smaller, else the same."""


class Job(ABC):
    """One tensor of a file."""

    __slots__ = ()
    numbers: Numbers

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.numbers.name

    @property
    def tensor(self) -> Tensor:
        """Tensor of the file that is encoded."""
        return self.numbers.tensor

    @property
    def weight(self) -> Tensor:
        """The tensor as its scheme encodes it."""
        return self.numbers.weight

    @property
    def blocks(self) -> list[slice]:
        """Rows of the weight that are encoded, and coded, alone."""
        return self.numbers.blocks(by_rows=self.by_rows)

    def rows(self, rows: slice) -> Tensor:
        """Return some rows of the weight."""
        return self.numbers.rows(rows)

    @property
    @abstractmethod
    def alone(self) -> "Alone":
        """The job without regard to a base."""

    @property
    @abstractmethod
    def by_rows(self) -> bool:
        """True if rows are encoded without regard to others."""

    @abstractmethod
    def encode(self, rows: slice, exponent: float, *, draft: bool = False) -> Encoded:
        """Encode some rows.

        Args:
            rows: one of `blocks`.
            exponent: log2 of the typical scale in standard deviations.
            draft: for the size alone, in a fraction of the time: plain rounding in place of trellises.
        """

    @abstractmethod
    def key(self, rows: slice, exponent: float) -> str:
        """Return a digest of the rows and of all settings that their encoding depends on."""

    @abstractmethod
    def with_tensor(self, tensor: Tensor) -> "Job":
        """Return the job of other values; exponents mean the same."""

    @abstractmethod
    def lossless(self) -> "Job":
        """Return the job that keeps every bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone(Job):
    """A tensor that is encoded without regard to a base."""

    numbers: Numbers  # that are encoded
    # name → sensitivity by calibration; may read files, so it is asked when it is needed
    sensitivities: Mapping[str, Sensitivity] = field(default_factory=dict)

    @property
    def alone(self) -> "Alone":
        """Job that encodes the tensor without a base."""
        return self

    @property
    def sensitivity(self) -> Sensitivity | None:
        """Sensitivity by calibration, if there is one."""
        return self.sensitivities.get(self.name)

    def encode(self, rows: slice, exponent: float, *, draft: bool = False) -> Encoded:
        """Encode some rows."""
        return self.encode_values(self.numbers.rows(rows), rows, exponent, draft=draft)

    def encode_values(self, values: Tensor, rows: slice, exponent: float, *, draft: bool) -> Encoded:
        """Encode the values of some rows."""
        if self.numbers.is_tail(rows):
            return small_scheme(values).encode(self.name, values)
        return self._encode(values, rows, exponent, draft)

    def key(self, rows: slice, exponent: float) -> str:
        """Return a digest of the rows and of all settings that their encoding depends on."""
        return digest(self._settings(rows, exponent), self.rows(rows))

    def with_tensor(self, tensor: Tensor) -> Self:
        """Return the job of other values; exponents mean the same."""
        weight = as_encoded(tensor, self.scheme, self.sensitivity)
        return replace(self, numbers=replace(self.numbers, tensor=tensor, weight=weight))

    def lossless(self) -> "Fixed":
        """Return the job that keeps every bit."""
        weight = as_encoded(self.tensor, Lossless(), self.sensitivity)
        numbers = replace(self.numbers, weight=weight)
        return Fixed(numbers=numbers, sensitivities=self.sensitivities, scheme=Lossless())

    def cut(self, parts: Sequence[slice]) -> Self:
        """Return the job of some rows, one below the other: it can be measured."""
        some = torch.cat([self.numbers.values(rows).detach() for rows in parts])
        return replace(self, numbers=Numbers(self.name, some, some))

    @property
    def scheme(self) -> Scheme | None:
        """Scheme that was chosen for the tensor; None if the search takes what suits it."""
        return None

    @abstractmethod
    def _encode(self, values: Tensor, rows: slice, exponent: float, draft: bool) -> Encoded: ...

    @abstractmethod
    def _settings(self, rows: slice, exponent: float) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Alone):
    """A tensor whose encoding does not depend on the exponent.

    Attributes:
        scheme: that encodes it.
        by_size: whether the scheme is that of small tensors, and follows their values.
    """

    scheme: Scheme = field()  # or its default would be the property of the base class
    by_size: bool = False

    @property
    def by_rows(self) -> bool:
        """True if rows are encoded without regard to others; a vector is one row."""
        by_rows = self.scheme.by_rows and (self.weight.ndim > 1 or not self.scheme.quantizes)
        return by_rows and ((known := self.sensitivity) is None or known.output is None)

    def with_tensor(self, tensor: Tensor) -> "Fixed":
        """Return the job of other values."""
        job = replace(self, scheme=small_scheme(tensor)) if self.by_size else self
        return super(Fixed, job).with_tensor(tensor)

    def _encode(self, values: Tensor, rows: slice, _exponent: float, _draft: bool) -> Encoded:
        known = self.sensitivity
        return self.scheme.encode(self.name, values, sensitivity=None if known is None else known.of_rows(rows))

    def _settings(self, _rows: slice, _exponent: float) -> str:
        return repr(self.scheme)


@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Alone):
    """A tensor whose scale the exponent sets."""

    factors: Feedback  # of error feedback
    log_deviation: float  # log2 of the deviation and of the root of the sensitivity
    mean_log_deviation: float  # of all matrices

    def normalized(self, share: float) -> NDArray[np.float32]:
        """Return a share of the rows, divided by their scales at exponent 0, flat."""
        step = max(1, round(1 / share)) if self.weight.ndim > 1 else 1
        some = self.numbers.every_nth_row(0, step) if self.weight.ndim > 1 else self.numbers.values()
        row_weight = self.factors.row_weight[::step]
        factor = np.outer(row_weight**0.5, self.factors.column_weight**0.5) * 2.0**-self.mean_log_deviation
        return np.asarray(finite_rows(self.name, some) * factor, dtype=np.float32).reshape(-1)

    def sample(self, every: int, least: int) -> "Free":
        """Return the job of every n-th row, of at least so many rows: it can be measured, not decoded."""
        weight, step = self.weight, max(1, min(every, len(self.weight) // least)) if self._has_rows else 1
        first = min(step // 2, len(weight) - 1)
        some = self.numbers.every_nth_row(first, step) if step > 1 else self.numbers.values()
        return self._with_rows(some, self.factors.row_weight[first::step] if step > 1 else self.factors.row_weight)

    def cut(self, parts: Sequence[slice]) -> Self:
        """Return the job of some rows, one below the other: it can be measured."""
        some = torch.cat([self.numbers.values(rows).detach() for rows in parts])
        return self._with_rows(some, np.concatenate([self.factors.row_weight[rows] for rows in parts]))

    @property
    def _has_rows(self) -> bool:
        return self.weight.ndim > 1

    def _with_rows(self, some: Tensor, row_weight: NDArray[np.float64]) -> Self:
        factors = replace(self.factors, rows=_NO_ROWS, row_weight=row_weight)
        if factors.along:
            factors = replace(factors, order=np.arange(len(factors.column_weight)), columns=None, along=False)
        return replace(self, numbers=Numbers(self.name, some, some), factors=factors)

    def _sigma(self, exponent: float) -> float:
        """Return the scale in deviations of this tensor."""
        return float(min(2.0 ** (exponent + self.mean_log_deviation - self.log_deviation), WIDEST))

    def _settings(self, rows: slice, exponent: float) -> str:
        factors = self.factors.of_rows(rows)
        chosen = self._chosen, exponent + self.mean_log_deviation - self.log_deviation
        return f"{chosen} {digest(factors.row_weight, factors.column_weight)}"

    @property
    @abstractmethod
    def _chosen(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched(Free):
    """A tensor that a trellis encodes."""

    trellis: Trellis  # of the file
    # whether paths of a trellis run down the columns only where errors are not fed to columns, which decodes faster
    down_columns: bool = True

    @property
    def by_rows(self) -> bool:
        """True if rows are encoded without regard to others."""
        return self.factors.rows.size == 0 and not self.factors.along

    @property
    def own_trellis(self) -> Trellis:
        """Trellis of this tensor."""
        is_measured = self.name in self.sensitivities and not self.factors.along
        return self.trellis if is_measured else replace(self.trellis, along=not self.down_columns)

    def _with_rows(self, some: Tensor, row_weight: NDArray[np.float64]) -> Self:
        # paths down columns that are cut short would look costly
        return replace(super(Searched, self)._with_rows(some, row_weight), down_columns=False)

    def _encode(self, values: Tensor, rows: slice, exponent: float, draft: bool) -> Encoded:
        exponent += self.mean_log_deviation
        if self.name not in self.sensitivities and not self.numbers.is_delta:
            exponent = min(exponent, self.log_deviation + math.log2(WIDEST))
        factors = self.factors.of_rows(rows)
        return self.own_trellis.encode_with(self.name, values, factors, 2.0**exponent, draft=draft)

    @property
    def _chosen(self) -> object:
        return self.trellis, self.down_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Steered(Free):
    """A tensor that a scheme encodes whose scale is in standard deviations."""

    scheme: Scheme = field()

    @property
    def by_rows(self) -> bool:
        """True if rows are encoded without regard to others."""
        return self.scheme.by_rows

    def _encode(self, values: Tensor, rows: slice, exponent: float, _draft: bool) -> Encoded:
        scheme, known = self.scheme.at_scale(self._sigma(exponent)), self.sensitivity
        assert scheme is not None
        return scheme.encode(self.name, values, sensitivity=None if known is None else known.of_rows(rows))

    @property
    def _chosen(self) -> object:
        return self.scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformed(Free):
    """A long kernel that a transform encodes, in place of a trellis."""

    transform: "Transform"

    @property
    def by_rows(self) -> bool:
        """False: coefficients are of the complete kernel."""
        return False

    @property
    def _has_rows(self) -> bool:
        return False

    def _encode(self, values: Tensor, _rows: slice, exponent: float, draft: bool) -> Encoded:
        from birdie.compress.schemes.spectral import Spectral

        return Spectral(self.transform, self._sigma(exponent), "none" if draft else "auto").encode(self.name, values)

    @property
    def _chosen(self) -> object:
        return self.transform


def as_encoded(tensor: Tensor, scheme: Scheme | None, sensitivity: Sensitivity | None) -> Tensor:
    """Return a tensor as `scheme` encodes it: a stack of matrices as one matrix, unless its dimensions count.

    Long vectors that are quantized are rows. Complex numbers are real ones, unless they are kept as they are.
    """
    weight = tensor if isinstance(scheme, Lossless) else planes(tensor)
    if scheme is not None and scheme.by_axes:
        return weight
    if weight.ndim == 1:
        return folded(weight) if (scheme is None or scheme.quantizes) and len(weight) >= SMALL else weight
    return as_matrix(weight) if sensitivity is None else with_rows(weight, sensitivity)


def digest(*parts: str | Tensor | NDArray[np.float64]) -> str:
    """Return a digest of texts and of the bytes of arrays."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(part.encode())
        elif isinstance(part, Tensor):
            total.update(f"{part.dtype} {tuple(part.shape)}".encode())
            total.update(np.ascontiguousarray(to_bits(part)).data)
        else:
            total.update(np.ascontiguousarray(part).data)
    return total.hexdigest()
