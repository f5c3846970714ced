"""Coders without a probability model: "constant", "bytes" and "packed". Here noise costs no more than its own bits."""

import numpy as np
from numpy.typing import NDArray

from birdie.errors import ArtifactError

Bytes = bytes | memoryview
_BLOCK = 1 << 20  # values per step: while they are unpacked, a bit costs a byte of memory


def encode_constant(value: int) -> bytes:
    """Return the value as the fewest two's-complement bytes, little-endian; 0 takes none."""
    return value.to_bytes((max(value, ~value).bit_length() + 8) // 8, "little", signed=True) if value else b""


def decode_constant(
    payload: Bytes,
    rows: int,
    columns: int,
    dtype: np.dtype[np.integer],
    threads: int,  # noqa: ARG001 (one of the interchangeable decoders)
) -> NDArray[np.integer]:
    """Undo `encode_constant`: (rows, columns), every value the same; read-only, as there is one value in memory."""
    value = int.from_bytes(payload[:4], "little", signed=True)
    if bytes(payload) != encode_constant(value):
        raise ArtifactError(f"a constant stream has {len(payload)} bytes and needs fewer; the file is damaged")
    return np.broadcast_to(np.array(check_range(value, value, dtype), dtype), (rows, columns))


def decode_bytes(
    payload: Bytes,
    rows: int,
    columns: int,
    dtype: np.dtype[np.integer],
    threads: int,  # noqa: ARG001 (one of the interchangeable decoders)
) -> NDArray[np.integer]:
    """Return the values (rows, columns) of one unsigned byte each, in row-major order."""
    if len(payload) != rows * columns:
        raise ArtifactError(f"a stream of bytes has {len(payload):,}, not {rows} × {columns}; the file is damaged")
    values = np.frombuffer(payload, np.uint8).reshape(rows, columns)
    highest = int(values.max())
    check_range(0, highest, dtype)
    return values.astype(narrowest(0, highest, dtype))


def encode_packed(values: NDArray[np.integer], low: int, high: int) -> bytes:
    """Return the width in bits (1 byte), the least value (4 bytes, signed), then values minus it, low bit first."""
    width = (high - low).bit_length()
    flat = values.ravel()
    parts = [bytes([width]), low.to_bytes(4, "little", signed=True)]
    for start in range(0, flat.size, _BLOCK):  # a block of 2**20 values ends at a byte boundary
        offsets = (flat[start : start + _BLOCK].astype(np.int64) - low).astype(np.uint32)
        bits = (offsets[:, None] >> np.arange(width, dtype=np.uint32) & 1).astype(np.uint8)
        parts.append(np.packbits(bits, bitorder="little").tobytes())
    return b"".join(parts)


def decode_packed(
    payload: Bytes,
    rows: int,
    columns: int,
    dtype: np.dtype[np.integer],
    threads: int,  # noqa: ARG001 (one of the interchangeable decoders)
) -> NDArray[np.integer]:
    """Undo `encode_packed`: (rows, columns) of `dtype`."""
    count = rows * columns
    width = payload[0] if len(payload) >= 5 else 0
    if not 1 <= width <= 32 or len(payload) != 5 + (count * width + 7) // 8:
        raise ArtifactError(f"a packed stream has {len(payload):,} bytes for {rows} × {columns}; the file is damaged")
    low = int.from_bytes(payload[1:5], "little", signed=True)
    data = np.frombuffer(payload, np.uint8, offset=5)
    out = np.empty(count, narrowest(low, low + (1 << width) - 1, dtype))
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        bits = np.unpackbits(data[start // 8 * width :], count=size * width, bitorder="little").reshape(size, width)
        offsets = np.zeros(size, np.int64)
        for index in range(width):
            offsets |= bits[:, index].astype(np.int64) << index
        check_range(low + int(offsets.min()), low + int(offsets.max()), dtype)
        out[start : start + size] = offsets + low
    return out.reshape(rows, columns)


def narrowest(low: int, high: int, dtype: np.dtype[np.integer]) -> np.dtype[np.integer]:
    """Return `dtype`; instead of int32 the narrowest signed one that holds all values from `low` to `high`."""
    narrow = (kind for kind in (np.int8, np.int16) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return np.dtype(next(narrow, np.int32)) if dtype == np.int32 else dtype


def check_range(low: int, high: int, dtype: np.dtype[np.integer]) -> int:
    """Return `low` if every value from `low` to `high` fits `dtype`; raise ArtifactError otherwise."""
    info = np.iinfo(dtype)
    if low < info.min or high > info.max:
        raise ArtifactError(f"a stream holds values {low}…{high}, beyond {dtype}; the file is damaged")
    return low
