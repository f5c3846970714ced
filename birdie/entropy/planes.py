"""Float and integer tensors as small integer planes, losslessly: bit fields of the words, coded separately.

The exponent of a trained float has 2.5 to 3 bits of entropy and its mantissa is close to noise (ZipNN, arXiv
2411.05239; DFloat11, arXiv 2504.11651), so each is coded by what suits it. Planes run from the most to the least
significant bits:

    float64   exponent 11 | sign, mantissa 4 | six bytes of mantissa
    float32   exponent 8  | sign, mantissa 7 | two bytes of mantissa
    bfloat16  exponent 8  | sign, mantissa 7
    float16   exponent 5, mantissa 3 | sign, mantissa 7
    float8_*  the byte          int8, int16, uint8, uint16, bool  the value          wider integers  their bytes

Nothing is interpreted: NaN payloads, infinities, subnormals and -0.0 come back bit for bit. Formats are
named as torch names its dtypes. Callers view complex numbers as pairs of floats.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.hints import Hints, Role
from birdie.errors import ArtifactError, ConfigError
from birdie.system.kernels import njit

Bits = NDArray[np.unsignedinteger]
Plane = NDArray[np.integer]
Block = tuple[slice, slice]
_BLOCK = 1 << 20  # elements
_CACHED = 1 << 14  # elements that are joined at a time


@dataclass(frozen=True, slots=True)
class _Field:
    """One plane: bits `shift` … `shift + width - 1` of the word, as two's complement if `signed`."""

    shift: int
    width: int
    role: Role
    signed: bool = False

    @property
    def dtype(self) -> np.dtype[np.integer]:
        return np.dtype(f"{'i' if self.signed else 'u'}{1 if self.width <= 8 else 2}")


@dataclass(frozen=True, slots=True)
class _Format:
    """Planes of a dtype."""

    word: int  # bits of an element
    fields: tuple[_Field, ...]  # the planes, the most significant one first
    # bits (the exponent, or more) above which the sign lies, and below which it is moved first; a sign is noise, and so
    # belongs to the mantissa. 0 leaves the word as it is
    exponent: int = 0


def _bytes(count: int, role: Role) -> tuple[_Field, ...]:
    return tuple(_Field(8 * index, 8, role) for index in reversed(range(count)))


_BYTE = _Format(8, (_Field(0, 8, "bytes"),))
_FLOAT8 = _Format(8, (_Field(0, 8, "exponent"),))
FORMATS: dict[str, _Format] = {
    "float64": _Format(64, (_Field(53, 11, "exponent"), _Field(48, 5, "mantissa"), *_bytes(6, "mantissa")), 11),
    "float32": _Format(32, (_Field(24, 8, "exponent"), *_bytes(3, "mantissa")), 8),
    "bfloat16": _Format(16, (_Field(8, 8, "exponent"), _Field(0, 8, "mantissa")), 8),
    "float16": _Format(16, (_Field(8, 8, "exponent"), _Field(0, 8, "mantissa")), 8),
    "float8_e4m3fn": _FLOAT8,
    "float8_e4m3fnuz": _FLOAT8,
    "float8_e5m2": _FLOAT8,
    "float8_e5m2fnuz": _FLOAT8,
    "float8_e8m0fnu": _FLOAT8,
    "float4_e2m1fn_x2": _BYTE,
    "bool": _Format(8, (_Field(0, 1, "bytes"),)),
    "uint8": _BYTE,
    "int8": _Format(8, (_Field(0, 8, "symbols", signed=True),)),
    "uint16": _Format(16, (_Field(0, 16, "symbols"),)),
    "int16": _Format(16, (_Field(0, 16, "symbols", signed=True),)),
    "uint32": _Format(32, _bytes(4, "bytes")),
    "int32": _Format(32, _bytes(4, "bytes")),
    "uint64": _Format(64, _bytes(8, "bytes")),
    "int64": _Format(64, _bytes(8, "bytes")),
}


def _format(fmt: str) -> _Format:
    try:
        return FORMATS[fmt]
    except KeyError:
        raise ConfigError(f"no planes for dtype {fmt!r}; convert the tensor to one of {', '.join(FORMATS)}") from None


def word_dtype(fmt: str) -> np.dtype[np.unsignedinteger]:
    """Return the unsigned numpy dtype as which a tensor of dtype `fmt` is viewed."""
    return np.dtype(f"u{_format(fmt).word // 8}")


@cache
def plane_dtypes(fmt: str) -> tuple[np.dtype[np.integer], ...]:
    """Return the numpy dtype of each plane, in the order of `split`: those to decode the planes to."""
    return tuple(field.dtype for field in _format(fmt).fields)


@cache
def plane_hints(fmt: str) -> tuple[Hints, ...]:
    """Return the hints of each plane, in the order of `split`."""
    return tuple(Hints(field.role) for field in _format(fmt).fields)


def split(bits: Bits, fmt: str) -> tuple[Plane, ...]:
    """Split the words `bits` (rows, columns) into planes of the same shape; `bits` is not changed."""
    form = _format(fmt)
    if bits.dtype != word_dtype(fmt):
        raise ConfigError(f"planes of {fmt} need {word_dtype(fmt)} words, not {bits.dtype}; view the tensor as that")
    words = np.ascontiguousarray(bits).ravel()
    planes = []
    for field in form.fields:
        plane = np.empty(bits.shape, f"u{field.dtype.itemsize}")
        _extract(words, form.exponent, form.word - 1, field.shift, (1 << field.width) - 1, plane.ravel())
        planes.append(plane.view(field.dtype))
    return tuple(planes)


def join(planes: tuple[Plane, ...], fmt: str) -> Bits:
    """Undo `split`: return the words (rows, columns)."""
    form = _format(fmt)
    if len(planes) != len(form.fields):
        raise ArtifactError(f"{fmt} needs {len(form.fields)} planes and has {len(planes)}; the file is damaged")
    dtype, shape = word_dtype(fmt), planes[0].shape
    for index, (plane, field) in enumerate(zip(planes, form.fields, strict=True)):
        if plane.shape != shape:
            raise ArtifactError(f"plane {index} of {fmt} is {plane.shape}, not {shape}; the file is damaged")
        if plane.dtype != field.dtype or field.width != 8 * field.dtype.itemsize:
            _check_range(plane, field, index, fmt)
    if planes[0].size > 1 and not any(any(plane.strides) for plane in planes):  # constants have one word in memory
        return np.full(shape, join(tuple(plane[:1, :1].copy() for plane in planes), fmt))
    out = np.zeros(shape, dtype)
    for block in blocks(shape[0], shape[1], _CACHED):
        words = out[block].reshape(-1) if out[block].flags.c_contiguous else np.zeros(out[block].size, dtype)
        for plane, field in zip(planes, form.fields, strict=True):
            part = np.array(plane[block], field.dtype, order="C").view(
                f"u{field.dtype.itemsize}"
            )  # read-only arrays have other kernels
            _insert(part.reshape(-1), field.shift, words)
        if form.exponent:
            _raise_sign(form.word - 1 - form.exponent, form.word - 1, words)
        if not np.may_share_memory(words, out):
            out[block] = words.reshape(out[block].shape)
    return out


def blocks(rows: int, columns: int, size: int = _BLOCK) -> Iterator[Block]:
    """Yield the parts of an array, of at most `size` elements each, so that temporaries stay small beside it."""
    width = min(max(columns, 1), size)
    height = size // width
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, row + height), slice(column, column + width)


def _check_range(plane: Plane, field: _Field, index: int, fmt: str) -> None:
    low, high = (-(1 << field.width - 1), (1 << field.width - 1) - 1) if field.signed else (0, (1 << field.width) - 1)
    if plane.size and (int(plane.min()) < low or int(plane.max()) > high):
        raise ArtifactError(f"plane {index} of {fmt} holds values outside {low}…{high}; the file is damaged")


@njit(nogil=True, cache=True, _nrt=False)
def _insert(plane, shift, words):  # type: ignore[no-untyped-def]
    """Add a bit field to words that have zeros there."""
    for index in range(words.size):
        words[index] |= np.uint64(plane[index]) << np.uint64(shift)


@njit(nogil=True, cache=True, _nrt=False)
def _raise_sign(mantissa, top, words):  # type: ignore[no-untyped-def]
    """Reorder exponent, sign, mantissa to sign, exponent, mantissa; the sign becomes bit `top`."""
    below = (np.uint64(1) << np.uint64(mantissa)) - np.uint64(1)
    for index in range(words.size):
        word = np.uint64(words[index])
        sign, exponent = word >> np.uint64(mantissa) & np.uint64(1), word >> np.uint64(mantissa + 1)
        words[index] = sign << np.uint64(top) | exponent << np.uint64(mantissa) | word & below


@njit(nogil=True, cache=True, _nrt=False)
def _extract(words, exponent, top, shift, mask, out):  # type: ignore[no-untyped-def]
    """Fill `out` with a bit field of words whose sign, bit `top`, is moved below the exponent, if that has any bits."""
    low = top - exponent
    for index in range(words.size):
        word = np.uint64(words[index])
        if exponent:
            rest = word & ((np.uint64(1) << np.uint64(low)) - np.uint64(1)) | word >> np.uint64(top) << np.uint64(low)
            word = word >> np.uint64(low) << np.uint64(low + 1) | rest
        out[index] = word >> np.uint64(shift) & np.uint64(mask)
