"""Conversion of a .birdie file to .safetensors, block by block: the model is never in memory as a whole.

    header of the .birdie file ──► names, dtypes, shapes ──► header of the .safetensors file
    entry ──► decoded tensor ──► its position in the file, several at a time

The format is that of the safetensors library (8 bytes of length, JSON, tensors one after the other), whose writer takes
all tensors at once. Wide dtypes come first, so that every tensor is aligned.
"""

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.artifact import metadata as file_metadata
from birdie.artifact.container import Reader
from birdie.artifact.decoding import (
    blocks_of,
    decode_entry,
    decoded_bytes,
    dtype_of,
    is_planes,
    require_limits,
    stored_name,
)
from birdie.artifact.load import decoders_of
from birdie.compress.registry import import_schemes
from birdie.errors import ArtifactError, WeightsError
from birdie.runtime.room import Room

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
}  # fmt: skip
_IN_FLIGHT = 1 << 28  # bytes that are decoded at a time; coded streams and tables take about as many again


def to_safetensors(
    file: Path,
    target: Path,
    *,
    max_bytes: int | None = None,
    max_operations: int | None = None,
    schemes: Collection[str] = (),
    workers: int | None = None,
) -> None:
    """Decode `file` into the file `target`. Tied tensors are written under each of their names.

    Args:
        file: a .birdie file.
        target: the .safetensors file; the caller sees to it that it appears complete or not at all.
        max_bytes, max_operations, schemes, workers: as in `birdie.load`.
    """
    import_schemes(schemes)
    with Reader(file) as reader:
        require_limits(reader, decoders_of(reader), max_bytes, max_operations)
        fields = file_metadata.parse(bytes(reader.metadata), reader.where)
        header = headers_in(fields, reader.where).get("", {})
        write_tensors(reader, target, {name: name for name in reader.names}, header, workers)


def headers_in(fields: Mapping[str, Any], where: str) -> dict[str, dict[str, str]]:
    """Return component → metadata for the headers of its .safetensors files, from the metadata of a .birdie file."""
    headers = fields.get("metadata", {}).get("headers", {})
    if not isinstance(headers, dict) or not all(
        isinstance(header, dict) and all(isinstance(value, str) for value in header.values())
        for header in headers.values()
    ):
        raise ArtifactError(f"the headers in the metadata of {where} are no texts; the file is damaged")
    return headers


def write_tensors(
    reader: Reader, target: Path, keys: Mapping[str, str], header: Mapping[str, str], workers: int | None = None
) -> None:
    """Decode tensors into one .safetensors file; the caller has checked what that takes.

    Args:
        reader: of the .birdie file.
        target: the .safetensors file.
        keys: name of each tensor → its name there.
        header: metadata for the header of the file.
        workers: threads; None uses every core.
    """
    decoder_of, room = decoders_of(reader), Room(_IN_FLIGHT)
    start_of_file, positions = _layout(reader, keys, header)

    def convert(block: tuple[str, list[int]]) -> None:
        name, starts = block
        with room.taken(decoded_bytes(reader.entry(name))):
            data = _bytes_of(decode_entry(reader, name, decoder_of, threads))
            for start in starts:
                _write(out.fileno(), data, len(start_of_file) + start)

    blocks = list(_blocks(reader, positions))
    count = workers or os.cpu_count() or 1
    threads = max(1, count // max(len(blocks), 1))
    with target.open("wb") as out, ThreadPoolExecutor(count) as pool:
        out.write(start_of_file)
        out.flush()
        list(pool.map(convert, blocks))


def _blocks(reader: Reader, positions: Mapping[str, list[int]]) -> Iterator[tuple[str, list[int]]]:
    """Yield the entries of the tensors at these positions, and where the bytes of each go."""
    for name, starts in positions.items():
        if is_planes(reader, reader.entry(name)):  # its numbers are pairs there
            yield name, starts
            continue
        offset = 0
        for block, _ in blocks_of(reader, name):
            yield block, [start + offset for start in starts]
            offset += decoded_bytes(reader.entry(block))


def _layout(reader: Reader, keys: Mapping[str, str], header: Mapping[str, str]) -> tuple[bytes, dict[str, list[int]]]:
    """Return the header, and where the bytes of each stored tensor go: positions after the header."""
    fields: dict[str, object] = {"__metadata__": {**header, "format": "pt"}}  # transformers refuses files without it
    positions: dict[str, list[int]] = {}
    end = 0
    for name in sorted(keys, key=lambda name: (-dtype_of(reader.entry(name)).itemsize, keys[name])):
        entry = reader.entry(name)
        dtype = dtype_of(entry)
        if keys[name] == "__metadata__":
            raise WeightsError("safetensors cannot hold a tensor named __metadata__; write a .pt file instead")
        if dtype not in DTYPES:
            raise WeightsError(f"safetensors cannot hold {dtype} (tensor {name!r}); write a .pt file instead")
        start, end = end, end + math.prod(entry.shape) * dtype.itemsize
        shape = [*entry.shape]
        if dtype is torch.float4_e2m1fn_x2:  # torch counts pairs, safetensors the numbers in them
            if not shape:
                raise WeightsError(f"safetensors cannot hold {dtype} without a dimension (tensor {name!r}); reshape it")
            shape[-1] *= 2
        fields[keys[name]] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
        positions.setdefault(stored_name(reader, name), []).append(start)
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, positions


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    data: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data.data


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
