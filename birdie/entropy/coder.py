"""The verbs of entropy coding: `encode` an integer array, `decode` it again.

    constant   every value the same              bytes    one byte a value, as it is
    packed     a fixed number of bits a value     numbers  small arrays: adaptive models, nothing to describe first
    static     interleaved rANS with tables per row class, and for odd states of a trellis
    mixed      context mixing: the smallest, and the slowest

A coder is a number in the file; another one is another row of `_DECODERS`. `encode` tries those that suit the array and
the effort and keeps the smallest. Decoding is integer arithmetic throughout: the same values on every machine and any
number of threads.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from birdie.entropy import mixed, raw, small, static
from birdie.entropy.raw import Bytes
from birdie.entropy.stream import Effort, Hints
from birdie.errors import ArtifactError, ConfigError

CONSTANT, BYTES, PACKED, NUMBERS, STATIC, MIXED = range(6)
NAMES = {CONSTANT: "constant", BYTES: "bytes", PACKED: "packed", NUMBERS: "numbers", STATIC: "static", MIXED: "mixed"}
DTYPES: tuple[np.dtype[np.integer], ...] = tuple(  # what `decode` can write
    np.dtype(kind) for kind in (np.uint8, np.int8, np.uint16, np.int16, np.int32)
)

_SMALL = {"fast": 1 << 12, "max": 1 << 15}  # values up to which the adaptive coder is tried
_NOISE = 0.9995  # a stream whose entropy is above this share of its bits is stored as it is

_Decode = Callable[..., NDArray[np.integer]]
_DECODERS: dict[int, _Decode] = {
    CONSTANT: raw.decode_constant,
    BYTES: raw.decode_bytes,
    PACKED: raw.decode_packed,
    NUMBERS: small.decode,
    STATIC: static.decode,
    MIXED: mixed.decode,
}


@dataclass(frozen=True, slots=True)
class Coded:
    """An array as coded: the code of the coder (a key of `NAMES`) and what it wrote."""

    coder: int
    payload: bytes


def encode(values: NDArray[np.integer], hints: Hints | None = None, effort: Effort = "max") -> Coded:
    """Code `values` (rows, columns), any integer dtype, every value within int32. `values` is not changed.

    The shape, the hints and the dtype wanted are not stored: the decoder is told them again.

    Raises:
        ConfigError: the array is not 2-D or not of integers, a value is beyond int32, or the effort is unknown.
    """
    if effort not in _SMALL:
        raise ConfigError(f"effort is {effort!r}; choose 'max' or 'fast'")
    if values.ndim != 2 or values.dtype.kind not in "iu":
        raise ConfigError(
            f"only 2-D integer arrays are coded, not {values.ndim}-D {values.dtype}; reshape or convert it"
        )
    if values.size == 0:
        return Coded(CONSTANT, b"")
    low, high = int(values.min()), int(values.max())
    if low < -(1 << 31) or high >= 1 << 31:
        raise ConfigError(f"values reach {low}…{high}, beyond 32 bits; split them into planes first")
    if low == high:
        return Coded(CONSTANT, raw.encode_constant(low))
    best = _stored(values, low, high)
    if _is_noise(values, low, high, hints):
        return best
    values = np.ascontiguousarray(values)
    if values.size <= _SMALL[effort] or (
        hints is not None and hints.role == "scales" and values.size <= small.MAX_VALUES
    ):
        best = min(best, Coded(NUMBERS, small.encode(values)), key=_size)
    kernel, states = (hints.kernel, hints.states) if hints is not None else ((1, 1), 1)
    if effort == "max" and (hints is None or hints.role != "mantissa"):
        payload = mixed.encode(values, kernel, states)
        if payload is not None:
            best = min(best, Coded(MIXED, payload), key=_size)
    if values.size >= 256:
        best = min(best, Coded(STATIC, static.encode(values, kernel, states)), key=_size)
    return best


def decode(
    coder: int,
    payload: Bytes,
    rows: int,
    columns: int,
    hints: Hints | None = None,
    dtype: DTypeLike = np.int32,
    threads: int | None = None,
) -> NDArray[np.integer]:
    """Undo `encode`: (rows, columns) of `dtype`, which the caller has bounded: that much is allocated.

    Args:
        dtype: uint8, int8, uint16, int16 or int32.
        threads: at most so many; None asks for as many as there are processors. The values never depend on it.

    Raises:
        ArtifactError: the coder is unknown, or the payload is not that of such an array or holds values `dtype` cannot.
        ConfigError: another dtype is asked for.
    """
    kind = next((known for known in DTYPES if known == np.dtype(dtype)), None)
    if kind is None:
        raise ConfigError(f"streams decode to {', '.join(map(str, DTYPES))}, not {np.dtype(dtype)}; convert afterwards")
    if coder not in _DECODERS:
        raise ArtifactError(f"coder {coder} is not known to this birdie; update birdie, or copy the file again")
    if coder != CONSTANT and rows * columns == 0:
        raise ArtifactError(f"an empty stream has coder {coder} and {len(payload):,} bytes; the file is damaged")
    states = (hints.states,) if coder > NUMBERS and hints is not None else ()
    return _DECODERS[coder](payload, rows, columns, kind, threads or os.cpu_count() or 1, *states)


def _stored(values: NDArray[np.integer], low: int, high: int) -> Coded:
    """The smaller of plain bytes and packed bits."""
    if low >= 0 and high <= 255 and ((high - low).bit_length() == 8 or values.size < 40):
        return Coded(BYTES, values.astype(np.uint8).tobytes())
    return Coded(PACKED, raw.encode_packed(values, low, high))


def _is_noise(values: NDArray[np.integer], low: int, high: int, hints: Hints | None) -> bool:
    """Whether a mantissa's histogram is so flat that modelling it would cost time for nothing."""
    width = (high - low).bit_length()
    if hints is None or hints.role != "mantissa" or values.size < 4096 or width > 12:
        return False
    counts = np.bincount(values.ravel().astype(np.int64) - low)
    seen = counts[counts > 0]
    # The plug-in estimate of entropy is low by (symbols - 1) / 2n nats.
    entropy = float((seen * np.log2(values.size / seen)).sum()) / values.size + 0.7213 * seen.size / values.size
    return entropy > _NOISE * width


def _size(coded: Coded) -> int:
    return len(coded.payload)
