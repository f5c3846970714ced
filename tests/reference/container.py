"""Reference reader of the container in plain Python, written from docs/format.md ("File"): the oracle of birdie's.

It shares no code with birdie, and does not look for damage: its input is valid files.
"""

import zlib
from dataclasses import dataclass, field

KINDS = ("tensor", "alias", "blocks", "member", "delta", "files")


@dataclass
class Entry:
    """An entry with its payloads."""

    name: str
    kind: str = ""
    dtype: int = 0
    scheme: int = 0
    target: str | None = None
    shape: tuple[int, ...] = ()
    params: tuple[int, ...] = ()
    streams: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass
class File:
    """A file: its metadata, and its entries in their order."""

    metadata: bytes
    entries: list[Entry]


class Header:
    """The bytes of an unpacked header, read from the front."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def signed(self) -> int:
        value = self.varint()
        return -(value + 1) // 2 if value % 2 else value // 2


def read(data: bytes) -> File:
    """Return what a file holds."""
    assert data[:10] == b"\x89BRD\r\n\x1a\n" + b"\x00\x01"
    packed, length, crc = (int.from_bytes(data[at : at + 4], "little") for at in (10, 14, 18))
    content = data[22 : 22 + packed]
    assert zlib.crc32(data[8:18] + content) == crc
    header = Header(content if packed == length else zlib.decompress(content, -15))
    assert len(header.data) == length
    metadata = header.take(header.varint())
    entries = names(header)
    for entry in entries:
        entry.scheme = header.varint()
    for entry in entries:
        kind, entry.dtype = divmod(header.varint(), 64)
        entry.kind = KINDS[kind]
    for entry in entries:
        entry.target = entries[header.varint()].name if entry.kind in ("alias", "member") else None
    for entry in entries:
        entry.shape = tuple([header.varint() for _ in range(header.varint())])
    coded = [entry for entry in entries if entry.kind in ("tensor", "delta", "files")]
    for entry in coded:
        entry.params = tuple([header.signed() for _ in range(header.varint())])
    coders = [header.take(header.varint()) for _ in coded]
    lengths = [[header.varint() for _ in some] for some in coders]
    sums = [header.take(4) if any(some) else bytes(4) for some in lengths]
    assert header.at == length
    at = 22 + packed
    for entry, some, sizes, total in zip(coded, coders, lengths, sums, strict=True):
        begin = at
        for coder, size in zip(some, sizes, strict=True):
            entry.streams.append((coder, data[at : at + size]))
            at += size
        assert zlib.crc32(data[begin:at]) == int.from_bytes(total, "little")
    assert at == len(data)
    return File(metadata, entries)


def names(header: Header) -> list[Entry]:
    entries, name = [], b""
    for _ in range(header.varint()):
        shared = header.varint()
        name = name[:shared] + header.take(header.varint())
        entries.append(Entry(name.decode()))
    return entries
