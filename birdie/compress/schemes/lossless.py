"""Schemes that keep bits: every bit of any tensor, or every bit of a float rounded to 16 bits first.

Integers are weights, several weights packed in a word (GPTQ, AWQ, HQQ), indices or counters, and nothing says which:
planes, half bytes, values and differences are coded on a sample, and the smallest is taken. Floats of few magnitudes
(rounded to a grid, cosines) are numbers in a list.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.scheme import Encoded, Integers, Sensitivity
from birdie.compress.schemes.decoders import CAST_DTYPES
from birdie.compress.schemes.integers import DIFFERENCES, DTYPES, HALVES, LISTED, VALUES
from birdie.compress.tensors import FORMATS, finite_rows, to_bits
from birdie.entropy import coder
from birdie.entropy.planes import split
from birdie.errors import ConfigError, WeightsError

SAMPLE_BYTES = 1 << 17  # of an integer tensor, on which its forms are compared
_STREAM_BYTES = 2  # what a stream costs in the header, about
_PACKED = 1.02  # entropy of half bytes one by one over that of bytes, up to which two integers may share a byte
_REPEATED = 1 << 14  # floats in which, spread over a tensor, magnitudes must repeat
_FRESH = 0.75  # the share of those that may be different
_LISTED = 0.98  # entropy of the numbers in a list over that of the planes, up to which the list is taken
SIXTEEN_BIT: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _planes(name: str, scheme: str, weight: Tensor, stored: Tensor, params: tuple[int, ...]) -> Encoded:
    """`Encoded` of `weight` by the bit planes of `stored`, the same numbers in the dtype that is written."""
    if stored.dtype not in FORMATS:
        raise WeightsError(f"tensor {name!r} has dtype {stored.dtype}, which birdie cannot store; convert it first")
    streams = split(to_bits(stored), FORMATS[stored.dtype][0]) if stored.numel() else ()
    return Encoded(scheme, tuple(weight.shape), weight.dtype, params, tuple(streams))


def _halves(weight: Tensor) -> Integers:
    """The half bytes of each row of words in rows of their own, the lowest first: (rows · halves, columns)."""
    bits = to_bits(weight)
    count = 2 * bits.itemsize
    parts = np.empty((bits.shape[0], count, bits.shape[1]), np.uint8)
    for index in range(count):
        parts[:, index] = (bits >> bits.dtype.type(4 * index)) & bits.dtype.type(15)
    return parts.reshape(-1, bits.shape[1])


def _values(weight: Tensor) -> Integers:
    """The integers themselves, (rows, columns) int64; those of uint64 beyond int64 wrap."""
    bits = to_bits(weight)
    return bits.view(f"i{bits.itemsize}") if weight.dtype.is_signed else bits.astype(np.int64)


def _differences(weight: Tensor) -> Integers:
    """Each integer minus the one before in row-major order."""
    values = _values(weight).astype(np.int64)  # a copy
    flat = values.reshape(-1)
    flat[1:] -= flat[:-1].copy()
    return values


_INTEGERS = {HALVES: _halves, VALUES: _values, DIFFERENCES: _differences}


def _integer_form(weight: Tensor) -> int | None:
    """The form of integers that costs least on the first rows of `weight`; None stands for planes."""
    forms = [form for form in _INTEGERS if weight.dtype in DTYPES[form] and weight.numel()]
    if not forms:
        return None
    fitting = [form for form in forms if form == HALVES or _fits(weight, form)]
    rows = max(1, SAMPLE_BYTES // max(1, weight[:1].nbytes)) if weight.ndim > 1 else SAMPLE_BYTES // weight.itemsize
    sample = weight[:rows] if weight.ndim else weight
    planes = split(to_bits(sample), FORMATS[weight.dtype][0])
    best, least = None, sum(_coded(plane) for plane in planes)
    for form in fitting:
        if form == HALVES and not _halves_apart(sample):
            continue
        cost = _coded(_INTEGERS[form](sample))
        if cost < least:
            best, least = form, cost
    return best


def _listed(weight: Tensor) -> tuple[Integers, Integers] | None:
    """Number of each magnitude in the list of those that occur, −1 − number with the sign; gaps of the list.

    None unless entropy says that this costs less than planes.
    """
    if weight.dtype not in DTYPES[LISTED] or weight.numel() < 2:
        return None
    bits = to_bits(weight)
    kind = bits.dtype.type
    mask, top = kind((1 << (8 * bits.itemsize - 1)) - 1), kind(8 * bits.itemsize - 1)
    sample = bits.reshape(-1)[:: -(-bits.size // _REPEATED)] & mask
    if np.unique(sample).size > _FRESH * sample.size:
        return None
    sizes, ranks = np.unique(bits & mask, return_inverse=True)
    numbers = ranks.reshape(bits.shape).astype(np.int32)
    np.invert(numbers, out=numbers, where=(bits >> top).astype(bool))
    gaps = np.diff(sizes.astype(np.int64), prepend=0)
    if int(gaps.max()) >= 1 << 31:
        return None
    counts = np.bincount(numbers.reshape(-1) + sizes.size, minlength=2 * sizes.size)
    words = np.concatenate([sizes[::-1] | (kind(1) << top), sizes])
    least = sum(
        _entropy(np.bincount(plane[0].astype(np.int64), counts))
        for plane in split(words[None], FORMATS[weight.dtype][0])
    )
    cost = _entropy(counts) + float((np.log2(gaps + 1) + 2).sum())
    return (numbers, gaps[None]) if cost < _LISTED * least else None


def _coded(stream: Integers) -> int:
    """Bytes of `stream`, its place in the header included."""
    return _STREAM_BYTES + len(coder.encode(stream, effort="fast").payload)


def _fits(weight: Tensor, form: int) -> bool:
    """Whether the stream of `form` stays within the 32 bits of a stream, and `weight` within what it can stand for."""
    values = _values(weight)
    if weight.dtype is torch.uint64 and int(values.min()) < 0:
        return False
    low, high = int(values.min()), int(values.max())
    reach = max(high, high - low) if form == DIFFERENCES else max(high, -low - 1)
    return reach < 1 << 31 and low >= -(1 << 31)


def _halves_apart(sample: Tensor) -> bool:
    """Whether half bytes tell nothing of one another, as where two integers are packed in one byte."""
    data = to_bits(sample).view(np.uint8)
    joint = np.bincount(data.reshape(-1), minlength=256).reshape(16, 16)
    apart = _entropy(joint.sum(0)) + _entropy(joint.sum(1))
    return apart <= _PACKED * _entropy(joint.reshape(-1))


def _entropy(counts: NDArray[np.number]) -> float:
    seen = counts[counts > 0]
    return float((seen * np.log2(seen.sum() / seen)).sum())


@dataclass(frozen=True, slots=True)
class Lossless:
    """Every bit of a tensor of any dtype: NaN payloads, signed zeros and infinities included."""

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002  the contract's; nothing to weigh here
        lam: float = 0.0,  # noqa: ARG002
    ) -> Encoded:
        """Split `weight` into bit planes, integers into what costs least on a sample, or list floats of few magnitudes.

        Raises:
            WeightsError: the dtype is not one of `FORMATS`.
        """
        if (found := _listed(weight)) is not None:
            return Encoded("lossless", tuple(weight.shape), weight.dtype, (LISTED, found[1].size), found)
        form = _integer_form(weight)
        if form is None:
            return _planes(name, "lossless", weight, weight, ())
        stream = _INTEGERS[form](weight)
        return Encoded("lossless", tuple(weight.shape), weight.dtype, (form,), (stream,))


@dataclass(frozen=True, slots=True)
class Cast:
    """float32 and float64 rounded to a 16-bit float, then lossless; narrower tensors are lossless as they are."""

    to: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        """Refuse unknown targets."""
        if self.to not in SIXTEEN_BIT:
            raise ConfigError(f"cast to {self.to!r} is unknown; choose fp16 or bf16")

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,
        lam: float = 0.0,
    ) -> Encoded:
        """Round `weight` to the nearest 16-bit float, ties to even, and split the result into bit planes.

        Raises:
            WeightsError: values are NaN or infinite, or become so when rounded.
        """
        if weight.dtype not in (torch.float32, torch.float64):
            return Lossless().encode(name, weight, sensitivity=sensitivity, lam=lam)
        finite_rows(name, weight)
        target = SIXTEEN_BIT[self.to]
        rounded = weight.detach().cpu().to(target)
        if not bool(torch.isfinite(rounded).all()):
            raise WeightsError(f"tensor {name!r} holds values beyond {self.to}; use bf16 or lossless for it")
        return _planes(name, "cast", weight, rounded, (CAST_DTYPES.index(target),))
