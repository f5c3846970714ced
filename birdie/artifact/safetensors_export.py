"""Conversion of a .birdie file to .safetensors, block by block: the model is never in memory as a whole.

    header of the .birdie file ──► names, dtypes, shapes ──► header of the .safetensors file
    entry ──► decoded tensor ──► its position in the file, several at a time

The format is that of the safetensors library (8 bytes of length, JSON, tensors one after the other), whose writer takes
all tensors at once. Every tensor is aligned: in the order of the state dict if that allows it, else wide dtypes first.
"""

import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from birdie.artifact.file import File, decoded_bytes, dtype_of
from birdie.artifact.links import opened
from birdie.artifact.options import DEFAULT_LIMITS, Limits
from birdie.checkpoints.checkpoints import safetensors_header
from birdie.checkpoints.rebuild import has_views, with_views
from birdie.compress import registry
from birdie.errors import ArtifactError, WeightsError
from birdie.system.platform import write_at
from birdie.system.threads import Room

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
}  # fmt: skip
_IN_FLIGHT = 1 << 28  # bytes that are decoded at a time; coded streams and tables take about as many again


def to_safetensors(file: Path, target: Path, limits: Limits = DEFAULT_LIMITS) -> None:
    """Decode `file` into the file `target`. Tied tensors are written under each of their names.

    Args:
        file: a .birdie file.
        target: the .safetensors file; the caller sees to it that it appears complete or not at all.
        limits: as in `birdie.load`.
    """
    registry.import_schemes(limits.schemes)
    with opened(file, limits) as reference, File(file, registry.decoder, reference) as reader:
        reader.require(limits.max_bytes, limits.max_operations, shared=False)
        header = headers_in(reader.fields, reader.where).get("", {})
        if has_views(tree := reader.fields.get("tree")):  # they have no entries that could be decoded one by one
            tensors = with_views(tree, reader.decode_all(workers=limits.workers))
            apart = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
            save_file(apart, target, {**header, "format": "pt"})
            return
        write_tensors(reader, target, {name: name for name in reader.ordered}, header, limits.workers)


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
    file: File,
    target: Path,
    keys: Mapping[str, str],
    header: Mapping[str, str],
    workers: int | None = None,
    *,
    form: str = "pt",
) -> None:
    """Decode tensors into one .safetensors file; the caller has checked what that takes.

    Args:
        keys: name of each tensor → its name there.
        header: metadata for the header of the file.
        workers: threads; None uses every core.
        form: "format" in the header, without which transformers refuses a file; "" for none.
    """
    room, lock = Room(_IN_FLIGHT), threading.Lock()
    start_of_file, positions = _layout(file, keys, header, form)

    def convert(block: tuple[str, list[int]]) -> None:
        name, starts = block
        with room.taken(decoded_bytes(file.entry(name))):
            data = bytes_of(file.decode(name, threads))
            for start in starts:
                write_at(out, lock, data, len(start_of_file) + start)

    blocks = list(_blocks(file, positions))
    count = workers or os.cpu_count() or 1
    threads = max(1, count // max(len(blocks), 1))
    with target.open("wb", buffering=0) as out, ThreadPoolExecutor(count) as pool:
        write_at(out, lock, memoryview(start_of_file), 0)
        list(pool.map(convert, blocks))


def is_written(file: File, target: Path, keys: Mapping[str, str], header: Mapping[str, str], form: str) -> bool:
    """Return whether a file is, to the byte, what `write_tensors` writes with these arguments."""
    start, positions = _layout(file, keys, header, form)
    end = max((at + decoded_bytes(file.entry(name)) for name, starts in positions.items() for at in starts), default=0)
    with target.open("rb") as opened:
        if target.stat().st_size != len(start) + end or opened.read(len(start)) != start:
            return False
        for name, starts in positions.items():
            data = bytes_of(file.decode(name))
            for at in starts:
                opened.seek(len(start) + at)
                if opened.read(len(data)) != data:
                    return False
    return True


def _blocks(file: File, positions: Mapping[str, list[int]]) -> Iterator[tuple[str, list[int]]]:
    """Yield the entries of the tensors at these positions, and where the bytes of each go."""
    for name, starts in positions.items():
        if file.is_planes(name):  # its numbers are pairs there
            yield name, starts
            continue
        offset = 0
        for block, _ in file.parts(name):
            yield block, [start + offset for start in starts]
            offset += decoded_bytes(file.entry(block))


def _layout(
    file: File, keys: Mapping[str, str], header: Mapping[str, str], form: str
) -> tuple[bytes, dict[str, list[int]]]:
    """Return the header, and where the bytes of each stored tensor go: positions after the header."""
    fields: dict[str, object] = {}
    positions: dict[str, list[int]] = {}
    end = 0
    for name in _aligned(file, keys):
        entry = file.entry(name)
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
        positions.setdefault(file.stored(name), []).append(start)
    return safetensors_header(fields, header, form), positions


def _aligned(file: File, names: Collection[str]) -> list[str]:
    """Return names in the file's order if it has one that aligns every tensor, else wide dtypes first."""
    widths = {name: dtype_of(file.entry(name)).itemsize for name in names}
    ends = accumulate(decoded_bytes(file.entry(name)) for name in names)
    is_aligned = all(end % width == 0 for end, width in zip(ends, [*widths.values()][1:], strict=False))
    if is_aligned and "order" in file.fields:
        return [*names]
    return sorted(names, key=lambda name: -widths[name])


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, in row-major order; without a copy if it is contiguous."""
    if not tensor.numel():
        return memoryview(b"")
    data: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data.data
