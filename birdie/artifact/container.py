"""The .birdie container: named entries of opaque streams in one checksummed file.

    magic 8 | version 2 | packed length 4 | header length 4 | CRC-32 4 | header | payloads in header order

The header lists every entry (sorted by name) in columns and is deflated, so a thousand tensors cost a few bytes each.
Each entry has a kind:

    tensor    coded by a scheme, whose number the entry has as well; so is a block of a tensor
    alias     a second name of another tensor
    blocks    a tensor that is cut into blocks of rows or the matrices of a stack, each an entry of its own
    member    one of the tensors that another entry, a group, holds together
    delta     coded relative to a tensor of a base (birdie.compress.delta)
    files     contents of files beside the tensors (birdie.artifact.kept_files)

`Reader.names` leaves out blocks, groups and files. The container does not interpret the numbers of schemes, dtypes and
coders. Every length is checked against a limit and against the size of the file before anything is allocated, and the
payloads must fill the file exactly. `docs/format.md` is the byte-exact spec.
"""

import functools
import math
import os
import re
import struct
import threading
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import accumulate, count, pairwise, takewhile
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from birdie.artifact import metadata as file_metadata
from birdie.checkpoints import limits
from birdie.checkpoints.limits import MAX_DIMS, MAX_NAME_BYTES, name_bytes, require_names
from birdie.checkpoints.order import extra_in, in_order
from birdie.entropy.hints import Stream as Stream
from birdie.entropy.varint import Cursor, varint
from birdie.errors import ArtifactError, ConfigError
from birdie.system import files, outputs
from birdie.system.platform import read_at
from birdie.system.regular import regular_file

# A text-mode transfer changes at least one of: the high bit, CR LF, Ctrl-Z, LF (the idea of PNG, RFC 2083 §12.11).
MAGIC = b"\x89BRD\r\n\x1a\n"
KIND = outputs.Kind("a .birdie file", re.escape(MAGIC))
VERSION = 1, 0
KINDS = ("tensor", "alias", "blocks", "member", "delta", "files")
"""Kinds of entries; the index is the number in the file."""
TENSOR, ALIAS, BLOCKS, MEMBER, DELTA, FILES = range(len(KINDS))
_CODED = (TENSOR, DELTA, FILES)  # kinds with parameters and streams of their own
_LINKED = (ALIAS, MEMBER)  # kinds that refer to another entry

MAX_HEADER_BYTES = 1 << 26
HEADER_RATIO = 64  # a header above 1 MiB is at most so many times the whole file
MAX_FIELDS = 1 << 20  # dimensions, parameters and streams of all entries together
MAX_PARAMS = 1 << 12
MAX_STREAMS = 64
MAX_ELEMENTS = 1 << 48
DTYPES = 64  # numbers that a dtype may have; kind · 64 + dtype is one number of the header
MAX_SCHEME = (1 << 16) - 1
MAX_KIND = 1 << 16
MAX_CODER = 255
_SMALL = 1 << 16  # bytes of an entry that are read at once

_HEAD = struct.Struct("<HII")
_PREFIX_BYTES = len(MAGIC) + _HEAD.size + 4
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the file, still coded.

    Attributes:
        name: unique in the file, at most 4,096 bytes of UTF-8.
        scheme: number of the scheme of a tensor; 0 for all other kinds.
        dtype: number below 64 of the layer above.
        shape: of the decoded tensor; the number of elements stays below 2**48.
        params: signed 64-bit integers of a tensor's scheme, or of a delta.
        streams: coded streams, in the scheme's order.
        target: for an alias, the name of the entry it repeats, for a member that of its group; None otherwise.
        crc: CRC-32 of the payloads, one after the other, if the writer knows it.
        kind: index in `KINDS`.
    """

    name: str
    scheme: int
    dtype: int
    shape: tuple[int, ...]
    params: tuple[int, ...] = ()
    streams: tuple[Stream, ...] = ()
    target: str | None = None
    crc: int | None = None
    kind: int = TENSOR


_EMPTY = [Stream(code, b"") for code in range(MAX_CODER + 1)]


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """The header's description of an entry: everything but its payload."""

    entry: Entry  # the entry, every stream with an empty payload
    lengths: tuple[int, ...]  # payload bytes of each stream
    offset: int  # position of the first payload byte in the file
    crc: int  # CRC-32 of the payloads, one after the other

    @property
    def length(self) -> int:
        """Payload bytes of the entry."""
        return sum(self.lengths)


def block_name(name: str, index: int) -> str:
    """Return the name of the entry of a block; no tensor has a name with NUL."""
    return f"{name}\0{index}"


def to_bytes(entries: Iterable[Entry], metadata: bytes = b"") -> bytes:
    """Return the bytes of the file that holds `entries`; their order does not matter."""
    head, streams = _head(entries, metadata)
    return b"".join([head, *(piece for stream in streams for piece in stream.pieces())])


def file_bytes(entries: Iterable[Entry], metadata: bytes = b"") -> int:
    """Return the number of bytes of that file."""
    head, streams = _head(entries, metadata)
    return len(head) + sum(stream.length for stream in streams)


def write(
    target: str | os.PathLike[str] | BytesIO,
    entries: Iterable[Entry],
    metadata: bytes = b"",
    check: Callable[[Path], None] | None = None,
) -> int:
    """Write that file to `target`, completely or not at all, and return the number of bytes written.

    Args:
        target: a path, or memory.
        entries: of the file.
        metadata: of the file.
        check: called with the path of the complete file before it has its name; its error keeps it from that.
    """
    head, streams = _head(entries, metadata)
    with _opened(target, check) as file:
        file.write(head)
        for stream in streams:
            file.writelines(stream.pieces())
    return len(head) + sum(stream.length for stream in streams)


@contextmanager
def _opened(
    target: str | os.PathLike[str] | BytesIO, check: Callable[[Path], None] | None = None
) -> Iterator[BinaryIO]:
    if isinstance(target, BytesIO):
        yield target
    else:
        with files.atomic_path(target) as path:
            with path.open("wb") as file:
                yield file
            if check is not None:
                check(path)


def _head(entries: Iterable[Entry], metadata: bytes) -> tuple[bytes, list[Stream]]:
    """Return what stands before the payloads, and the streams in the order of the file."""
    ordered = sorted(entries, key=lambda entry: name_bytes(entry.name))
    _require_sound(ordered)
    header = _encode_header(ordered, metadata)
    streams = [stream for entry in ordered for stream in entry.streams]
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9)
    packed = packer.compress(header) + packer.flush()
    if len(packed) >= len(header) or len(header) > _longest_header(len(packed) + sum(one.length for one in streams)):
        packed = header
    return with_prefix(packed, len(header)), streams


def with_prefix(packed: bytes, length: int) -> bytes:
    """Return what a file begins with, up to its payloads, from its packed header and the length of that unpacked."""
    head = _HEAD.pack(VERSION[0] << 8 | VERSION[1], len(packed), length)
    return b"".join([MAGIC, head, struct.pack("<I", zlib.crc32(packed, zlib.crc32(head))), packed])


class Reader:
    """A .birdie file opened for reading. The constructor reads and checks the header; `read` reads payloads.

    Threads and forked processes may share a reader. It is a context manager: a file opened by path stays open until
    `close`.

    Attributes:
        where: the file, for messages.
        metadata: bytes that the writer passed.
        header_bytes: position of the first payload byte.
        kinds: the kind of every entry, in name order.
        groups: name of an entry that tensors share → their names, in order.
    """

    def __init__(self, source: str | os.PathLike[str] | bytes | memoryview) -> None:
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._data = memoryview(b"")
        if isinstance(source, bytes | memoryview):
            self._data = memoryview(source).cast("B") if source else memoryview(b"")
            self._size = len(self._data)
            self.where = "the data"
        else:
            self.where = str(source)
            try:
                self._file = regular_file(source).open("rb")
                self._size = os.fstat(self._file.fileno()).st_size
            except OSError as error:
                self.close()
                reason = error.strerror or error
                raise ArtifactError(f"cannot open {self.where}: {reason}; give a .birdie file") from error
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        header, self.header_bytes = self._read_header()
        self.metadata, names, self.kinds, self._offsets, self.groups, self._header_at = _decode_header(
            header, self.where, self.header_bytes
        )
        self._index = {name: index for index, name in enumerate(names)}
        self._names = tuple(name for name in names if "\0" not in name)
        for name, kind in zip(names, self.kinds, strict=True):
            if kind == BLOCKS and ("\0" not in name or name in self.groups):
                self._require_blocks(name)
        if (end := self._offsets[-1]) != self._size:
            raise ArtifactError(
                f"{self.where} has {self._size:,} bytes, its header describes {end:,}; it is cut or has bytes added"
            )

    def _read_header(self) -> tuple[bytes, int]:
        prefix = bytes(self._at(0, min(_PREFIX_BYTES, self._size)))
        if prefix[: len(MAGIC)] != MAGIC:
            if prefix[1:4] == MAGIC[1:4]:
                raise ArtifactError(f"{self.where} was changed by a text-mode transfer; copy it again as binary")
            raise ArtifactError(f"{self.where} is not a .birdie file: its first bytes differ")
        if len(prefix) < _PREFIX_BYTES:
            raise ArtifactError(f"{self.where} is cut inside its first {_PREFIX_BYTES} bytes; copy it again")
        head = prefix[len(MAGIC) : len(MAGIC) + _HEAD.size]
        number, packed_length, length = _HEAD.unpack(head)
        if (version := divmod(number, 256)) != VERSION:
            written, known = (".".join(map(str, parts)) for parts in (version, VERSION))
            raise ArtifactError(f"{self.where} has format version {written}, {known} is read here; update birdie")
        if length > _longest_header(self._size) or packed_length > length:
            raise ArtifactError(f"{self.where} declares an impossible header ({packed_length:,} → {length:,} bytes)")
        if packed_length > self._size - _PREFIX_BYTES:
            raise ArtifactError(f"{self.where} is cut inside its header; copy it again")
        packed = bytes(self._at(_PREFIX_BYTES, packed_length))
        (crc,) = struct.unpack("<I", prefix[-4:])
        if zlib.crc32(packed, zlib.crc32(head)) != crc:
            raise ArtifactError(f"the header of {self.where} fails its checksum; the file is damaged")
        return _unpack_header(packed, length, self.where), _PREFIX_BYTES + packed_length

    def _at(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes at `offset`; the caller has checked both against the size."""
        if self._file is None:
            return self._data[offset : offset + length]
        return memoryview(self._bytes_at(offset, length))

    def _bytes_at(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`."""
        if self._file is None:
            return bytes(self._data[offset : offset + length])
        try:
            data = read_at(self._file, self._lock, length, offset)
        except (OSError, ValueError) as error:
            raise ArtifactError(f"cannot read {self.where} at byte {offset:,}: {error}; open it again") from error
        if len(data) != length:
            raise ArtifactError(f"{self.where} ended at byte {offset + len(data):,} while being read; copy it again")
        return data

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """The metadata, parsed and checked (birdie.artifact.metadata)."""
        aliases = sum(kind == ALIAS and "\0" not in name for name, kind in zip(self._index, self.kinds, strict=True))
        return file_metadata.parse(bytes(self.metadata), self.where, aliases)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted by their UTF-8 bytes."""
        return self._names

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """Names of tensors and extra states in the order of the saved state dict; sorted if the file has no order."""
        names = [*self._names, *(name for name in extra_in(self.fields) if name not in self._index)]
        order = self.fields.get("order")
        return tuple(names if order is None else in_order(names, order, f"the metadata of {self.where}"))

    @functools.cached_property
    def ordered(self) -> tuple[str, ...]:
        """Names of all tensors in the order of the saved state dict."""
        return tuple(name for name in self.keys if name in self._index)

    @property
    def size(self) -> int:
        """Size of the complete file in bytes."""
        return self._size

    def header(self, name: str) -> EntryHeader:
        """Return the header's description of entry `name`; reads nothing from the file."""
        if name not in self._index:
            raise ArtifactError(f"{self.where} holds no tensor {name!r}; `birdie inspect` lists its names")
        return self._header_at(self._index[name])

    def entry(self, name: str) -> Entry:
        """Return the entry with empty payloads; reads nothing from the file. Raises as `header`."""
        return self.header(name).entry

    @property
    def entries(self) -> Iterable[str]:
        """Names of all entries: tensors, their blocks, groups, and the files beside them."""
        return self._index.keys()

    def holder(self, name: str) -> str:
        """Return the name of the entry that holds the elements of a tensor: that of its group, or its own."""
        entry = self.entry(name)
        return name if entry.kind != MEMBER or entry.target is None else entry.target

    def stored(self, name: str) -> str:
        """Return `name`, or the name that it is an alias of."""
        entry = self.entry(name)
        return name if entry.kind != ALIAS or entry.target is None else entry.target

    def position(self, name: str) -> int:
        """Return the position of a tensor in its group."""
        members = self.groups[self.holder(name)]
        return bisect_left(members, name)

    def blocks(self, name: str) -> tuple[str, ...]:
        """Return the names of the entries that hold the blocks of a tensor, in order; else the name itself."""
        if self.entry(name).kind != BLOCKS:
            return (name,)
        names = (block_name(name, index) for index in count())
        return tuple(takewhile(self._index.__contains__, names))

    def _require_blocks(self, name: str) -> None:
        """Check that the blocks of a tensor that is cut make it up."""
        entry = self.entry(name)
        blocks = [self.entry(block) for block in self.blocks(name)]
        last, shape = blocks[0].shape[1:] if blocks else (), entry.shape
        dtype = blocks[0].dtype if blocks else entry.dtype
        if dtype != entry.dtype:  # planes of complex numbers, which have as many bytes; decoders check the dtypes
            shape = (2, *shape[:1], math.prod(shape[1:]))
        cut = len(shape) - len(last)
        sizes = [math.prod(block.shape) for block in blocks]
        alike = {(size > 0, one.dtype, one.kind in (TENSOR, DELTA)) for size, one in zip(sizes, blocks, strict=True)}
        # blocks of a vector are rows and what is left over; others are rows of the tensor
        of_rows = cut >= 1 and shape[cut:] == last and {block.shape[1:] for block in blocks} == {last}
        if not (of_rows or len(entry.shape) == 1) or alike != {(True, dtype, True)} or sum(sizes) != math.prod(shape):
            raise ArtifactError(f"the blocks of tensor {name!r} of {self.where} do not make it up; the file is damaged")

    def read(self, name: str) -> Entry:
        """Return the entry with its payloads; reads only the bytes of this entry and checks their CRC-32."""
        header = self.header(name)
        payloads, crc = self._payloads(header), 0
        for payload in payloads:
            crc = zlib.crc32(payload, crc)
        if header.length and crc != header.crc:
            raise ArtifactError(f"tensor {name!r} of {self.where} fails its checksum; the file is damaged")
        cuts = zip(header.entry.streams, payloads, strict=True)
        return replace(header.entry, streams=tuple(Stream(stream.coder, payload) for stream, payload in cuts))

    def _payloads(self, header: EntryHeader) -> list[bytes]:
        """Return the payload of each stream, read at once if they are small, else one by one, which copies nothing."""
        ends = list(accumulate(header.lengths))
        if header.length < _SMALL:
            data = self._at(header.offset, header.length)
            return [bytes(data[end - length : end]) for length, end in zip(header.lengths, ends, strict=True)]
        return [
            self._bytes_at(header.offset + end - length, length)
            for length, end in zip(header.lengths, ends, strict=True)
        ]

    def table(self) -> dict[str, int]:
        """Return the payload bytes of every tensor, in name order. With `header_bytes` they add up to `size`."""
        table = dict.fromkeys(self._names, 0)
        shared = dict.fromkeys(self.groups, 0)
        for name, (start, end) in zip(self._index, pairwise(self._offsets), strict=True):
            if (group := "\0".join(name.split("\0")[:2])) in shared:
                shared[group] += end - start
                continue
            owner = name.partition("\0")[0]
            table[owner] = table.get(owner, 0) + end - start
        for group, size in shared.items():
            share, rest = divmod(size, len(self.groups[group]))
            table |= {name: share + (index < rest) for index, name in enumerate(self.groups[group])}
        return table

    def close(self) -> None:
        """Close the file; reading from it afterwards is an error."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_sound(ordered: list[Entry]) -> None:
    """Check entries against the limits, and those that refer to others."""
    index = {entry.name: position for position, entry in enumerate(ordered)}
    if len(index) != len(ordered):
        twice = next(a.name for a, b in pairwise(ordered) if a.name == b.name)
        raise ConfigError(f"two tensors are named {twice!r}; names must differ")
    require_names([entry.name for entry in ordered])
    for entry in ordered:
        if entry.kind in _LINKED:
            target = None if entry.target is None else index.get(entry.target)
            if (
                target is None
                or ordered[target].kind in ((ALIAS,) if entry.kind == ALIAS else (ALIAS, MEMBER))
                or ("\0" in ordered[target].name) != (entry.kind == MEMBER)
            ):
                raise ConfigError(f"alias {entry.name!r} points to {entry.target!r}, which is not a stored tensor")
        if problem := _over_limit(entry):
            raise ConfigError(f"tensor {entry.name!r} cannot be stored: {problem}")
    if sum(len(entry.shape) + len(entry.params) + len(entry.streams) for entry in ordered) > MAX_FIELDS:
        raise ConfigError(f"the tensors have more than {MAX_FIELDS:,} dimensions and streams; split the model")


def _over_limit(entry: Entry) -> str | None:
    """Return the property of `entry` that the format cannot hold, or None."""
    if not 0 <= entry.dtype < DTYPES:
        return f"the number of its dtype, {entry.dtype}, is outside 0…{DTYPES - 1}"
    if not all(0 <= stream.coder <= MAX_CODER for stream in entry.streams):
        return f"the number of a coder is outside 0…{MAX_CODER}"
    if not 0 <= entry.scheme <= (MAX_SCHEME if entry.kind == TENSOR else 0):
        return f"the number of its scheme, {entry.scheme}, is outside 0…{MAX_SCHEME}, or it has none"
    if len(entry.name.encode()) > MAX_NAME_BYTES:
        return f"its name is longer than {MAX_NAME_BYTES:,} bytes"
    if len(entry.shape) > MAX_DIMS or any(size < 0 for size in entry.shape):
        return f"its shape {entry.shape} has more than {MAX_DIMS} dimensions or a negative one"
    if _elements(entry.shape) > MAX_ELEMENTS:
        return f"its shape {entry.shape} has more than {MAX_ELEMENTS:,} elements"
    if len(entry.params) > MAX_PARAMS or not all(-_INT64 <= value < _INT64 for value in entry.params):
        return f"it has more than {MAX_PARAMS:,} parameters or one beyond 64 bits"
    if (entry.params or entry.streams) and entry.kind not in _CODED:
        return f"it is of kind {KINDS[entry.kind]!r} and has parameters or streams"
    if len(entry.streams) > MAX_STREAMS:
        return f"it has more than {MAX_STREAMS} streams"
    return None


def _elements(shape: Sequence[int]) -> int:
    """Return the product of the non-zero sizes: an empty dimension must not hide an absurd one."""
    return math.prod(filter(None, shape))


def _encode_header(ordered: list[Entry], metadata: bytes) -> bytes:
    out = bytearray(varint(len(metadata)) + metadata + varint(len(ordered)))
    previous = b""
    for entry in ordered:
        name = entry.name.encode()
        shared = next((i for i, (a, b) in enumerate(zip(previous, name, strict=False)) if a != b), len(previous))
        out += varint(shared) + varint(len(name) - shared) + name[shared:]
        previous = name
    out += b"".join(varint(entry.scheme) for entry in ordered)
    out += b"".join(varint(entry.kind * DTYPES + entry.dtype) for entry in ordered)
    index = {entry.name: position for position, entry in enumerate(ordered)}
    out += b"".join(varint(index[entry.target or ""]) for entry in ordered if entry.kind in _LINKED)
    out += b"".join(varint(len(entry.shape)) + b"".join(map(varint, entry.shape)) for entry in ordered)
    ordered = [entry for entry in ordered if entry.kind in _CODED]
    for entry in ordered:
        out += varint(len(entry.params)) + b"".join(varint(v << 1 if v >= 0 else ~(v << 1)) for v in entry.params)
    for entry in ordered:
        out += varint(len(entry.streams)) + bytes(stream.coder for stream in entry.streams)
    out += b"".join(varint(stream.length) for entry in ordered for stream in entry.streams)
    for entry in ordered:
        crc = entry.crc
        if crc is None:
            payloads = (piece for stream in entry.streams for piece in stream.pieces())
            crc = functools.reduce(lambda crc, piece: zlib.crc32(piece, crc), payloads, 0)
        out += struct.pack("<I", crc) if any(stream.length for stream in entry.streams) else b""
    if len(out) > MAX_HEADER_BYTES:
        raise ConfigError(
            f"the header has {len(out):,} bytes, more than the {MAX_HEADER_BYTES:,} allowed; shorten the metadata"
        )
    return bytes(out)


def _longest_header(size: int) -> int:
    """Return how many bytes the header of a file of `size` bytes may unpack to: opening a small file must be cheap."""
    return min(MAX_HEADER_BYTES, max(1 << 20, HEADER_RATIO * size))


def _unpack_header(packed: bytes, length: int, where: str) -> bytes:
    if len(packed) == length:
        header, complete = packed, True
    else:
        inflater = zlib.decompressobj(-15)
        try:
            header = inflater.decompress(packed, length + 1)
        except zlib.error as error:
            raise ArtifactError(f"the header of {where} cannot be unpacked; the file is damaged") from error
        complete = inflater.eof and not inflater.unused_data
    if len(header) != length or not complete:
        raise ArtifactError(f"the header of {where} does not unpack to the {length:,} bytes it declares")
    return header


def _decode_names(cursor: Cursor, count: int) -> list[str]:
    names: list[str] = []
    previous, total = b"", 0
    for position in range(count):
        shared = cursor.varint(len(previous), "length of a shared prefix")
        raw = previous[:shared] + cursor.take(cursor.count(MAX_NAME_BYTES - shared, "length of a name"))
        total += len(raw)
        if total > limits.MAX_NAMES_BYTES:
            raise cursor.fail(f"all names together have more than {limits.MAX_NAMES_BYTES:,} bytes")
        if position and raw <= previous:
            raise cursor.fail("names are not in strictly rising order")
        try:
            names.append(raw.decode())
        except UnicodeDecodeError:
            raise cursor.fail("a name is not UTF-8") from None
        previous = raw
    return names


def _decode_columns(
    cursor: Cursor, count: int, most: int, limit: int, what: str, sizes: list[int] | None = None
) -> list[tuple[int, ...]]:
    """Return `count` fields of numbers up to `limit`, of so many each, or with their number, at most `most`, before.

    All numbers are read at once: those of a large header one by one would take seconds.
    """
    longest = count + cursor.fields_left if sizes is None else sum(sizes)
    data = np.frombuffer(cursor.data, np.uint8)[cursor.position :][: 10 * longest]
    last = np.flatnonzero(data < 0x80)[:longest]
    first = np.append(0, last + 1)[:-1]
    more = last - first
    values = np.zeros(len(last), np.uint64)
    for k in range(min(10, int(more.max(initial=-1)) + 1)):
        longer = np.flatnonzero(more >= k)
        values[longer] |= (data[first[longer] + k] & np.uint64(0x7F)) << np.uint64(7 * k)
    numbers, fields, position = values.tolist(), [], 0
    for i in range(count):
        if sizes is None:
            size = numbers[position] if position < len(numbers) else 0
            position += 1
            if size > most:
                raise cursor.fail(f"{size:,} times a {what} is more than {most:,}")
        else:
            size = sizes[i]
        fields.append(tuple(numbers[position : position + size]))
        position += size
    if sizes is None:
        cursor.announce(position - count)
    if position > len(last):
        raise cursor.fail("it ends too early")
    top = data[last]
    wrong = (values > np.uint64(limit)) | (more > 9) | (more == 9) & (top > 1) | (more > 0) & (top == 0)
    if wrong[:position].any():
        raise cursor.fail(f"a {what} is above {limit:,} or has needless bytes")
    cursor.position += int(last[position - 1]) + 1 if position else 0
    return fields


def _decode_header(
    header: bytes, where: str, offset: int
) -> tuple[bytes, list[str], list[int], list[int], dict[str, list[str]], Callable[[int], EntryHeader]]:
    """Check a header; return the metadata, names, kinds, where payloads begin and the last one ends, and groups.

    The last value makes the description of an entry: making all takes longer than reading the header.
    """
    cursor = Cursor(header, where, MAX_FIELDS)
    metadata = cursor.take(cursor.count(MAX_HEADER_BYTES, "length of the metadata"))
    count = cursor.count(limits.MAX_ENTRIES, "number of entries")
    names = _decode_names(cursor, count)
    column = functools.partial(_decode_columns, cursor, count, 0)
    schemes = [number for (number,) in column(MAX_SCHEME, "number of a scheme", [1] * count)]
    codes = [code for (code,) in column(MAX_KIND * DTYPES, "kind of an entry", [1] * count)]
    kinds, dtypes = [code // DTYPES for code in codes], [code % DTYPES for code in codes]
    for name, kind, scheme in zip(names, kinds, schemes, strict=True):
        if kind >= len(KINDS):
            raise ArtifactError(
                f"{name!r} of {where} is an entry of kind {kind}, unknown to this version; update birdie"
            )
        if kind != TENSOR and scheme:
            raise cursor.fail(f"{name!r} is of kind {KINDS[kind]!r} and has a scheme")
    targets = column(max(count - 1, 0), "index of an entry", [int(kind in _LINKED) for kind in kinds])
    shapes = _decode_columns(cursor, count, MAX_DIMS, MAX_ELEMENTS, "size of a dimension")
    if any(_elements(shape) > MAX_ELEMENTS for shape in {*shapes}):
        raise cursor.fail(f"a shape has more than {MAX_ELEMENTS:,} elements")
    is_coded = [kind in _CODED for kind in kinds]
    zigzag = iter(_decode_columns(cursor, sum(is_coded), MAX_PARAMS, 2 * _INT64 - 1, "parameter"))
    params = [tuple([v >> 1 ^ -(v & 1) for v in next(zigzag)]) if coded else () for coded in is_coded]
    coders = [cursor.take(cursor.part(MAX_STREAMS, "number of streams")) if coded else b"" for coded in is_coded]
    lengths = _decode_columns(cursor, count, 0, _INT64, "length of a stream", [*map(len, coders)])
    offsets = [*accumulate(map(sum, lengths), initial=offset)]
    crcs = [int.from_bytes(cursor.take(4), "little") if end > start else 0 for start, end in pairwise(offsets)]
    if cursor.position != len(header):
        raise cursor.fail("bytes follow the last field")
    for i, name in enumerate(names):
        if kinds[i] != ALIAS:
            continue
        (target,) = targets[i]
        if (
            kinds[target] == ALIAS
            or "\0" in names[target]  # a block, or the files beside the tensors
            or (shapes[i], dtypes[i]) != (shapes[target], dtypes[target])
        ):
            raise cursor.fail(f"alias {name!r} points to no stored tensor of its shape and dtype")
    members: dict[int, list[int]] = {}
    for i in [i for i in range(count) if kinds[i] == MEMBER] if MEMBER in kinds else []:
        members.setdefault(targets[i][0], []).append(i)
    for target, indices in members.items():
        forms = {(shapes[i], dtypes[i]) for i in indices}
        if (
            kinds[target] in (ALIAS, FILES, MEMBER)
            or not names[target].startswith("\0")
            or "\0" in names[target][1:]  # a block
            or any("\0" in names[i] for i in indices)
            or forms != {(shapes[indices[0]], dtypes[target])}
            or len(indices) * math.prod(shapes[indices[0]]) != math.prod(shapes[target])
        ):
            raise cursor.fail(f"the tensors of group {names[target][1:]!r} do not make it up")
    groups = {names[target]: [names[i] for i in indices] for target, indices in members.items()}

    @functools.cache
    def header_at(i: int) -> EntryHeader:
        streams = tuple([_EMPTY[code] for code in coders[i]])
        target = next((names[index] for index in targets[i]), None)
        entry = Entry(names[i], schemes[i], dtypes[i], shapes[i], params[i], streams, target, kind=kinds[i])
        return EntryHeader(entry, lengths[i], offsets[i], crcs[i])

    return metadata, names, kinds, offsets, groups, header_at
