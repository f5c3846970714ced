"""Any file of a checkpoint as tensors and the bytes around them, so that it comes back bit for bit.

    model.safetensors ──► tensors, where its header says they lie ─────┐
    optimizer.pt ───────► tensors, where the zip file stores them ─────┼──► tensors by name, gaps, the other bytes
    any other file ─────► none; of a large file all its bytes as one ──┘

    other bytes │ tensor │ other bytes │ tensor │ …      gaps: the number of other bytes before each tensor

Tensors are mapped. A file that is not understood is no error: its bytes are kept as they are.
"""

import hashlib
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from birdie.artifact.safetensors_export import DTYPES, bytes_of
from birdie.checkpoints.checkpoints import format_of, read_object
from birdie.checkpoints.limits import MAX_DIMS, MAX_NAME_BYTES
from birdie.compress.state import is_text
from birdie.compress.tensors import FORMATS
from birdie.errors import ChangedError, WeightsError
from birdie.system.mapped import require_unchanged
from birdie.system.parsing import parse_object
from birdie.system.regular import open_regular

_MOST_OTHER = 1 << 24  # bytes around the tensors of a file; of more, all of the file is one tensor
_CONTENT = "content"  # the name of that tensor
_LONGEST = MAX_NAME_BYTES // 2  # bytes of the name of a tensor; the name of its file precedes it
_LOCAL_HEADER = 30  # bytes before the name of an entry in a zip file
_KINDS = {name: kind for kind, name in DTYPES.items()} | {"BOOL": torch.uint8}  # a file may have other bytes than 0, 1


class _FilePiece(NamedTuple):
    """A tensor in a file."""

    start: int
    bytes: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    others: tuple[str, ...] = ()  # names of tensors that share its memory


@dataclass(frozen=True, slots=True)
class FileParts:
    """A file in parts."""

    size: int  # in bytes
    sha256: str  # digest of the file, hexadecimal
    tensors: dict[str, Tensor]  # name → tensor, in the order in which they lie in the file
    ties: dict[str, str]  # second name of a tensor → its name
    gaps: tuple[int, ...]  # the number of other bytes before each tensor
    other: bytes  # all bytes that are in no tensor, in their order
    status: os.stat_result  # of the file when it was read


def split(path: Path) -> FileParts:
    """Return the parts of a regular file; its tensors are mapped.

    Raises:
        WeightsError: the file cannot be read.
        ChangedError: another process replaces it, or writes to it.
        DataError: it is no regular file.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            digest, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
        data = torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
        _require_same(path, status, size)
    except (OSError, RuntimeError) as error:  # torch raises the latter where it cannot map a file
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise WeightsError(f"cannot read {path}: {reason}; check the file") from error
    if not size:
        return FileParts(0, digest, {}, {}, (), b"", status)
    pieces = _pieces(path, data)
    if size - sum(piece.bytes for piece in pieces) > _MOST_OTHER:
        pieces = [_FilePiece(0, size, _CONTENT, (size,), torch.uint8)]
    ends = [0, *(piece.start + piece.bytes for piece in pieces)]
    gaps = [piece.start - end for piece, end in zip(pieces, ends, strict=False)]
    others = [data[end : end + gap] for end, gap in zip(ends, [*gaps, size - ends[-1]], strict=True)]
    return FileParts(
        size,
        digest,
        {piece.name: _mapped(data, piece) for piece in pieces},
        {name: piece.name for piece in pieces for name in piece.others},
        tuple(gaps),
        b"".join(bytes_of(part) for part in others),
        status,
    )


def join(out: BinaryIO | None, tensors: Sequence[Tensor], gaps: Sequence[int], other: bytes) -> str:
    """Write a file from its parts and return its SHA-256, hexadecimal; the inverse of `split`.

    Args:
        out: open for writing; None: the digest alone.
        tensors: in their order.
        gaps: as many, which add up to at most the length of `other`.
        other: the bytes around them.
    """
    digest, position = hashlib.sha256(), 0
    rest = memoryview(other)
    for tensor, gap in zip(tensors, gaps, strict=True):
        for part in (rest[position : position + gap], bytes_of(tensor)):
            digest.update(part)
            if out is not None:
                out.write(part)
        position += gap
    digest.update(rest[position:])
    if out is not None:
        out.write(rest[position:])
    return digest.hexdigest()


def _require_same(path: Path, status: os.stat_result, size: int) -> None:
    """Check that what was mapped is what was read before: the same file, as it was."""
    require_unchanged(path, status)
    now = path.stat()
    if (now.st_dev, now.st_ino, now.st_size) != (status.st_dev, status.st_ino, size):
        raise ChangedError(f"another process replaced {path} while it was read; run this again when it is done")


def _mapped(data: Tensor, piece: _FilePiece) -> Tensor:
    part = data[piece.start : piece.start + piece.bytes]
    if piece.start % piece.dtype.itemsize:  # torch reads aligned words only
        part = part.clone()
    return part.view(piece.dtype).reshape(piece.shape)


def _pieces(path: Path, data: Tensor) -> list[_FilePiece]:
    """Return the tensors in a file, in their order; none if it is not understood, or they overlap."""
    pieces: list[_FilePiece] = []
    with suppress(WeightsError, OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile):
        form = format_of(path)
        if form == "safetensors":
            pieces = _of_safetensors(data)
        elif form == "torch" and zipfile.is_zipfile(path):
            pieces = _of_torch(path, data)
    pieces.sort()
    names = [name for piece in pieces for name in (piece.name, *piece.others)]
    ends = [0, *(piece.start + piece.bytes for piece in pieces)]
    starts = [*(piece.start for piece in pieces), len(data)]
    is_sound = len({*names}) == len(names) and all(start >= end for start, end in zip(starts, ends, strict=True))
    return pieces if is_sound else []


def _of_safetensors(data: Tensor) -> list[_FilePiece]:
    length = int.from_bytes(bytes_of(data[:8]), "little")
    header = parse_object(bytes(bytes_of(data[8 : 8 + length])))
    pieces = []
    for name, about in header.items():
        if name == "__metadata__":
            continue
        start, end = about["data_offsets"]
        shape, dtype = tuple(about["shape"]), _KINDS.get(about["dtype"], torch.uint8)
        if not all(type(number) is int and number >= 0 for number in (start, end, *shape)) or end < start:
            raise ValueError(name)
        if len(shape) > MAX_DIMS or prod(shape) * dtype.itemsize != end - start:  # of a kind that is not known
            shape, dtype = (end - start,), torch.uint8
        pieces.append(_FilePiece(8 + length + start, end - start, name, shape, dtype))
    if not all(_is_short_text(piece.name) for piece in pieces):
        raise ValueError("a name is too long")
    return pieces


def _of_torch(path: Path, data: Tensor) -> list[_FilePiece]:
    """Return the memory blocks that a zip file of torch.save stores; each is named as a tensor that is all of it."""
    stored = {start: (size, name) for start, size, name in _blocks(path, data)}
    first: dict[int, tuple[int, Tensor]] = {}  # address of a block → its bytes, and a tensor in it
    covering: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(read_object(path, skip_objects=True)):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or not tensor.numel():
            continue
        memory = tensor.untyped_storage()
        address, size = memory.data_ptr(), memory.nbytes()
        first.setdefault(address, (size, tensor))
        is_plain = tensor.dtype in FORMATS and tensor.ndim <= MAX_DIMS and _is_short_text(name)
        if is_plain and tensor.is_contiguous() and tensor.nbytes == size:
            covering.setdefault(address, []).append((name, tensor))
    origin = _origin({address: size for address, (size, _) in first.items()}, stored)
    pieces = []
    for start, (size, name) in stored.items():
        all_of_it = covering.get(origin + start, []) if origin is not None else []
        if all_of_it:
            (name, tensor), *others = all_of_it
            shape, dtype = tuple(tensor.shape), tensor.dtype
            names = tuple(dict.fromkeys(other for other, one in others if one.shape == shape and one.dtype == dtype))
        else:
            tensor = first[origin + start][1] if origin is not None and origin + start in first else data
            dtype = tensor.dtype if tensor.dtype in FORMATS and not size % tensor.dtype.itemsize else torch.uint8
            shape, names = (size // dtype.itemsize,), ()
        kind = torch.uint8 if dtype is torch.bool else dtype  # a file may have other bytes than 0 and 1
        pieces.append(_FilePiece(start, size, name, shape, kind, tuple(other for other in names if other != name)))
    return pieces


def _blocks(path: Path, data: Tensor) -> Iterator[tuple[int, int, str]]:
    """Yield (position, bytes, name) of the memory blocks in a zip file of torch.save."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            top, _, name = entry.filename.partition("/")
            if not top or not name.startswith("data/") or not entry.file_size:
                continue
            if entry.compress_type != zipfile.ZIP_STORED or not _is_short_text(name):
                raise ValueError(name)
            head = bytes(bytes_of(data[entry.header_offset : entry.header_offset + _LOCAL_HEADER]))
            lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            yield entry.header_offset + _LOCAL_HEADER + lengths, entry.file_size, name


def _tensors(content: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of all tensors in dicts, lists and tuples at any depth."""
    waiting, seen = [("", content)], set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Tensor):
            yield path or _CONTENT, value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{path}/{key}" if path else f"{key}", item) for key, item in reversed([*items])]


def _origin(memory: dict[int, int], stored: dict[int, tuple[int, str]]) -> int | None:
    """Return the address to which the file is mapped, from address → bytes and position → (bytes, name) of blocks.

    That is the one by which every block in memory lies where the file stores one of its size.
    """
    if not memory:
        return None
    address, size = next(iter(memory.items()))
    candidates = [address - start for start, (bytes_, _) in stored.items() if bytes_ == size]
    for origin in candidates:
        if all(stored.get(one - origin, (-1, ""))[0] == bytes_ for one, bytes_ in memory.items()):
            return origin
    return None


def _is_short_text(name: str) -> bool:
    return bool(name) and is_text(name) and len(name.encode()) <= _LONGEST
