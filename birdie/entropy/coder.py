"""Encode an integer array to bytes, decode it again: the entry to all coders.

    constant   every value the same                 bytes     one byte per value, as it is
    packed     a fixed number of bits per value     numbers   adaptive models, nothing to describe first: small arrays
    static     interleaved rANS with tables per class of rows, and for odd states of a trellis: decodes fast
    tiles      the same tables, words of 32 columns apart, for larger arrays: decodes fastest, and on a GPU
    mixed      context mixing: the fewest bytes, and the slowest

`encode` tries the coders that suit the array and the effort, and keeps the smallest result. Decoding is integer
arithmetic throughout: the same values on every machine and for any number of threads. README.md in this folder says
which coder is for what, and how to add one.
"""

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike, NDArray

from birdie.entropy import coding_plan as plan
from birdie.entropy import mixed, numbers, raw, static, tiles
from birdie.entropy.hints import Effort, Hints, Stream
from birdie.entropy.raw import Bytes
from birdie.errors import ArtifactError, ConfigError

CONSTANT, BYTES, PACKED, NUMBERS, STATIC, MIXED, TILES = range(7)
NAMES = dict(enumerate(("constant", "bytes", "packed", "numbers", "static", "mixed", "tiles")))
DTYPES: tuple[np.dtype[np.integer], ...] = tuple(  # what `decode` can write
    np.dtype(kind) for kind in (np.uint8, np.int8, np.uint16, np.int16, np.int32)
)

# Most operations that a value takes in each coder, and most bytes besides the value itself until the stream is decoded.
_COSTS = {
    CONSTANT: (0, 0),
    BYTES: (1, 0),
    PACKED: (64, 0),
    NUMBERS: (128, 0),
    STATIC: (64, 2),
    MIXED: (800, 4),
    TILES: (64, 2),
}
_TRY_NUMBERS = {"fast": 1 << 12, "max": 1 << 15}  # values up to which the coder "numbers" is tried
_TRY_STATIC = 1 << 16  # values up to which "static" is tried beside another coder; above, where a sample suggests it
_STATIC_SAMPLE, _STATIC_SHARE = 1 << 17, 0.97  # values of the sample, and the share of the bits
# A mantissa whose entropy is above this share of its bits is stored as it is.
_NOISE = {"fast": 0.99, "max": 0.9995}
_NOISE_SAMPLE = 1 << 18  # of its values tell the entropy to a thirtieth of what is missing from that share

_Decode = Callable[..., NDArray[np.integer]]
_DECODERS: dict[int, _Decode] = {
    CONSTANT: raw.decode_constant,
    BYTES: raw.decode_bytes,
    PACKED: raw.decode_packed,
    NUMBERS: numbers.decode,
    STATIC: static.decode,
    MIXED: mixed.decode,
    TILES: tiles.decode,
}


def encode(values: NDArray[np.integer], hints: Hints | None = None, effort: Effort = "max") -> Stream:
    """Code an array in the coder that takes the fewest bytes.

    Neither the shape nor the hints are stored: pass them to `decode` again.

    Args:
        values: (rows, columns), any integer dtype, every value within int32; not changed.
        hints: facts that a probability model can use.
        effort: "max" tries all coders, "fast" all but context mixing.

    Raises:
        ConfigError: the array is not 2-D or not of integers, a value is beyond int32, or the effort is unknown.
    """
    if effort not in _TRY_NUMBERS:
        raise ConfigError(f"effort is {effort!r}; choose 'max' or 'fast'")
    if values.ndim != 2 or values.dtype.kind not in "iu":
        raise ConfigError(
            f"cannot code a {values.ndim}-D array of {values.dtype}; reshape it to 2-D, convert it to integers"
        )
    if values.size == 0:
        return Stream(CONSTANT, b"")
    low, high = int(values.min()), int(values.max())
    if low < -(1 << 31) or high >= 1 << 31:
        raise ConfigError(f"values {low}…{high} are beyond 32 bits; split them into planes first")
    if low == high:
        return Stream(CONSTANT, raw.encode_constant(low))
    if _is_noise(values, low, high, hints, effort):
        return _uncompressed(values, low, high)
    values = np.ascontiguousarray(values)
    tried = []
    if values.size <= _TRY_NUMBERS[effort] or (
        hints is not None and hints.role == "scales" and values.size <= numbers.MAX_VALUES
    ):
        tried.append(Stream(NUMBERS, numbers.encode(values)))
    kernel, states = (hints.kernel, hints.states) if hints is not None else ((1, 1), 1)
    if effort == "max" and (hints is None or hints.role != "mantissa"):
        payload = mixed.encode(values, kernel, states)
        if payload is not None:
            tried.append(Stream(MIXED, payload))
    if values.size >= 256 and (not tried or values.size <= _TRY_STATIC or _static_suits(values, states, tried[-1])):
        classes = plan.CLASS_COUNTS if effort == "max" else plan.FEW_CLASSES
        described = plan.search(values, kernel, states, classes)
        tiled = tiles.encode(described, states) if effort == "fast" and tiles.pay(described) else None
        tried.append(Stream(STATIC, static.write(values, described)) if tiled is None else Stream(TILES, tiled))
    best = min(tried, key=_size, default=None)
    if best is not None and 8 * len(best.payload) < values.size * (high - low).bit_length():
        return best  # smaller than packed bits, which need not be written
    return min([_uncompressed(values, low, high), *tried], key=_size)


def estimate(values: NDArray[np.integer], hints: Hints | None = None) -> tuple[float, float]:
    """Return about the bytes that effort "fast" takes: of the values, in proportion to the array, and of tables.

    For `values` as `encode` takes them.
    """
    if values.size == 0 or values.min() == values.max():
        return 0.0, 0.0
    most = values.size * (int(values.max()) - int(values.min())).bit_length()
    data, tables = plan.estimate(np.ascontiguousarray(values), 1 if hints is None else hints.states)
    return (data / 8, tables / 8) if data + tables < most else (most / 8, 0.0)


def decode(
    coder: int,
    payload: Bytes,
    rows: int,
    columns: int,
    hints: Hints | None = None,
    dtype: DTypeLike = np.int32,
    threads: int | None = None,
) -> NDArray[np.integer]:
    """Decode an array (rows, columns). That much is allocated, so bound the shape before.

    Args:
        coder, payload: as `encode` returned them.
        rows, columns, hints: as `encode` had them.
        dtype: uint8, int8, uint16, int16 or int32. For int32 the result may be int8 or int16 if that holds all values.
        threads: at most so many; None for as many as there are processors. The values never depend on it.

    Raises:
        ArtifactError: the coder is unknown, or the payload is not that of such an array or holds values beyond `dtype`.
        ConfigError: the dtype is another one.
    """
    known = next((known for known in DTYPES if known == np.dtype(dtype)), None)
    if known is None:
        raise ConfigError(f"streams decode to {', '.join(map(str, DTYPES))}, not {np.dtype(dtype)}; convert afterwards")
    if coder not in _DECODERS:
        raise ArtifactError(f"coder {coder} is unknown to this birdie; update birdie, or copy the file again")
    if coder != CONSTANT and rows * columns == 0:
        raise ArtifactError(f"an empty stream has coder {coder} and {len(payload):,} bytes; the file is damaged")
    states = (hints.states,) if coder in (STATIC, MIXED, TILES) and hints is not None else ()
    return _DECODERS[coder](payload, rows, columns, known, threads or os.cpu_count() or 1, *states)


def cost(coder: int, count: int, dtype: DTypeLike) -> tuple[int, int, int]:
    """Return the operations that decoding `count` values takes at most, the bytes of the values, and those of the rest.

    A constant takes neither: it is one value in memory. An unknown coder takes nothing, because `decode` refuses it.
    Tables of a few MiB do not count.
    """
    operations, extra = _COSTS.get(coder, (0, 0))
    return operations * count, np.dtype(dtype).itemsize * count if operations else 0, extra * count


def _static_suits(values: NDArray[np.integer], states: int, other: Stream) -> bool:
    """Return whether the coder "static" takes fewer bytes than another stream of the values, by a sample of rows.

    Weights that were quantized before lie on a grid of their own in each row, which tables of classes describe and
    context mixing does not learn.
    """
    some = np.ascontiguousarray(values[:: max(1, values.size // _STATIC_SAMPLE)])
    if some.min() == some.max():
        return False
    bits = plan.estimate(some, states)[0] / some.size
    return bits * values.size < _STATIC_SHARE * 8 * other.length


def _uncompressed(values: NDArray[np.integer], low: int, high: int) -> Stream:
    """Return plain bytes or packed bits, whichever is smaller."""
    if low >= 0 and high <= 255 and ((high - low).bit_length() == 8 or values.size < 40):
        return Stream(BYTES, values.astype(np.uint8).tobytes())
    return Stream(PACKED, raw.encode_packed(values, low, high))


def _is_noise(values: NDArray[np.integer], low: int, high: int, hints: Hints | None, effort: Effort) -> bool:
    """Return whether the histogram of a mantissa is so flat that modeling it would cost time and gain nothing."""
    width = (high - low).bit_length()
    if hints is None or hints.role != "mantissa" or values.size < 4096 or width > 12:
        return False
    some = values.ravel()[:: max(1, values.size // _NOISE_SAMPLE)]
    counts = np.bincount(some.astype(np.int64) - low)
    present = counts[counts > 0]
    # The plug-in estimate of entropy is too low by (symbols - 1) / 2n nats (Miller 1955).
    entropy = float((present * np.log2(some.size / present)).sum()) / some.size
    entropy += 0.7213 * present.size / some.size
    return entropy > _NOISE[effort] * width


def _size(coded: Stream) -> int:
    return len(coded.payload)
