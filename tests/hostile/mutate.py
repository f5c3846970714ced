"""Ways to damage a sound file: its bytes, the fields of its header, its payloads, single numbers of side information.

All but `data` make lengths and checksums agree again, so that the decoders behind them are really reached.
"""

import dataclasses
import json
import random
import struct
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np

from birdie.artifact import container
from birdie.artifact.codes import SCHEMES
from birdie.artifact.container import Entry, Stream
from birdie.entropy.varint import varint
from tests.hostile.seeds import Seed, Side

_NUMBERS = (0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 383, 384, 511, 512, 4095, 4096, 1 << 16)
_LARGE = ((1 << 20) - 1, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 34) - 1, 1 << 34)
_HUGE = ((1 << 48) - 1, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_PREFIX = 22


def edit(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: a flipped bit, a changed byte, a cut, a repeated or removed or random run."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, kind, size = rng.randrange(len(out) or 1), rng.randrange(6), rng.randint(1, 8)
        if not out:
            out += b"\0"
        elif kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        elif kind == 2:
            del out[max(at, 1) :]
        elif kind == 3:
            out[at:at] = out[at : at + size]
        elif kind == 4 and len(out) > size + 1:
            del out[at : at + size]
        elif kind == 5:
            out[at : at + size] = rng.randbytes(size)
    return bytes(out)


def data(seed: Seed, rng: random.Random) -> bytes:
    """Bytes anywhere in the file; checksums stay as they were."""
    return edit(seed.data, rng)


def payload(seed: Seed, rng: random.Random) -> bytes:
    """Bytes of one payload, and sometimes its coder."""
    entries = list(seed.entries)
    streams = [(i, j) for i, entry in enumerate(entries) for j in range(len(entry.streams))]
    at, index = rng.choice(streams)
    stream = entries[at].streams[index]
    code = rng.choice([stream.coder] * 6 + [rng.randrange(8)])
    return _with(seed, entries, at, index, Stream(code, edit(stream.payload, rng)))


def numbers(seed: Seed, rng: random.Random) -> bytes:
    """One to three numbers of side information, changed, removed or repeated; without any, as `payload`."""
    if not seed.sides:
        return payload(seed, rng)
    (at, index), side = rng.choice(list(seed.sides.items()))
    contexts, values = side.contexts, side.numbers
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not values.size:
            break
        # Each context is as likely as any other, however many numbers it has.
        position = int(rng.choice(np.flatnonzero(contexts == rng.choice(np.unique(contexts)))))
        kind = rng.randrange(8)
        if kind == 0:
            contexts, values = np.delete(contexts, position), np.delete(values, position)
        elif kind == 1:
            contexts, values = (
                np.insert(contexts, position, contexts[position]),
                np.insert(values, position, values[position]),
            )
        else:
            values = values.copy()
            values[position] = _changed(int(values[position]), (*_NUMBERS, *_LARGE), rng)
    entries = list(seed.entries)
    code = entries[at].streams[index].coder
    return _with(seed, entries, at, index, Stream(code, Side(contexts, values, side.rest).payload(code)))


def _changed(value: int, others: tuple[int, ...], rng: random.Random) -> int:
    near = (value + 1, value - 1, value ^ 1, 2 * value, value // 2)
    return max(0, rng.choice(near) if rng.random() < 0.5 else rng.choice(others))


def header(seed: Seed, rng: random.Random) -> bytes:
    """One or two fields of the header, or a few of its bytes."""
    packed = seed.data[_PREFIX : seed.reader.header_bytes]
    is_packed = len(packed) < int.from_bytes(seed.data[14:18], "little")
    unpacked = zlib.decompress(packed, -15) if is_packed else packed
    if rng.random() < 0.2:
        return _headed(seed, edit(unpacked, rng))
    fields = _fields(seed)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(fields))
        field = fields[at]
        if isinstance(field, int):
            fields[at] = _changed(field, (*_NUMBERS, *_LARGE, *_HUGE), rng)
        elif len(field) == 1:
            fields[at] = bytes([rng.choice([rng.randrange(32), rng.randrange(256)])])
        else:
            fields[at] = edit(field, rng)
    return _headed(seed, b"".join(varint(field) if isinstance(field, int) else field for field in fields))


def shapes(seed: Seed, rng: random.Random) -> bytes:
    """A scheme, dtype, shape, parameter or the order of streams of one entry, all within the format's limits."""
    entries = list(seed.entries)
    at = rng.choice([i for i, entry in enumerate(entries) if entry.target is None])
    entry = entries[at]
    shape, streams = list(entry.shape), list(entry.streams)
    kind = rng.randrange(6)
    if kind == 0 and entry.kind == container.TENSOR:
        entry = dataclasses.replace(entry, scheme=rng.randrange(1, len(SCHEMES) + 2))
    elif kind == 1:
        entry = dataclasses.replace(entry, dtype=rng.randrange(24))
    elif kind == 2 and shape:
        side = rng.randrange(len(shape))
        shape[side] = _changed(shape[side], _NUMBERS, rng)
    elif kind == 3:
        rng.shuffle(shape)
    elif kind == 4 and entry.kind != container.BLOCKS:
        entry = dataclasses.replace(entry, params=tuple(rng.randrange(-1, 5) for _ in range(rng.randrange(3))))
    else:
        rng.shuffle(streams)
    entries[at] = dataclasses.replace(entry, shape=tuple(shape), streams=tuple(streams))
    return container.to_bytes(entries, seed.reader.metadata)


def links(seed: Seed, rng: random.Random) -> bytes:
    """Change what one entry says of others: its kind, the target of an alias, its name; or leave it out."""
    entries = list(seed.entries)
    at, other = rng.randrange(len(entries)), rng.choice(entries)
    entry, kind = entries[at], rng.randrange(5)
    if kind == 0:
        entries[at] = dataclasses.replace(other, name=entry.name)
    elif kind == 1:
        target = rng.choice(entries).name
        entries[at] = Entry(entry.name, 0, other.dtype, other.shape, target=target, kind=container.ALIAS)
    elif kind == 2:
        entries[at] = dataclasses.replace(entry, scheme=0, kind=rng.randrange(len(container.KINDS) + 1))
    elif kind == 3:
        hidden = rng.choice(["files", "0", "1", "2", "00", "-1", "0\0" + "0"])
        name = rng.choice([other.name, container.block_name(other.name, 0)[:-1] + hidden, "\0" + hidden])
        if all(one.name != name for one in entries):
            entries[at] = dataclasses.replace(entry, name=name)
    else:
        del entries[at]
    names = [one.name for one in entries]
    linked = container.ALIAS, container.MEMBER
    entries = [
        dataclasses.replace(one, target=one.target if one.target in names else rng.choice(names))
        if one.kind in linked
        else dataclasses.replace(one, target=None)
        for one in entries
    ]
    with mock.patch.object(container, "_require_sound"):  # aliases point to where they did, checked or not
        return container.to_bytes(entries, seed.reader.metadata)


def tree(seed: Seed, rng: random.Random) -> bytes:
    """One node of the metadata, or the name of an entry; without metadata, as `header`."""
    metadata = seed.reader.metadata
    if len(metadata) < 3:
        return header(seed, rng)
    about = json.loads(metadata)
    inside = list(slots(about))
    holder, key = rng.choice(inside)
    other, source = rng.choice(inside)
    values: list[Any] = [
        None,
        True,
        0,
        1,
        -1,
        3,
        1 << 70,
        0.5,
        "",
        "tensor",
        "tensors",
        "dict",
        "~",
        "0",
        [],
        ["tensor"],
        {},
        [[]],
    ]
    kind = rng.randrange(4)
    if kind == 0:
        holder[key] = rng.choice(values)
    elif kind == 1:
        holder[key] = json.loads(json.dumps(other[source]))
    elif kind == 2:
        holder[key], other[source] = json.loads(json.dumps([other[source], holder[key]]))
    elif isinstance(holder, list):
        del holder[key]
    entries = list(seed.entries)
    if rng.random() < 0.2:
        at = rng.randrange(len(entries))
        name = rng.choice([entry.name for entry in entries]) + rng.choice(["", "/0", "~", "/"])
        if all(entry.name != name and entry.target is None for entry in entries):
            entries[at] = dataclasses.replace(entries[at], name=name)
    return container.to_bytes(entries, json.dumps(about).encode())


def slots(node: Any) -> list[tuple[Any, Any]]:
    """Return (list or dict, key) of everything inside."""
    keys = range(len(node)) if isinstance(node, list) else list(node) if isinstance(node, dict) else []
    return [slot for key in keys for slot in ((node, key), *slots(node[key]))]


def _with(seed: Seed, entries: list[Entry], at: int, index: int, stream: Stream) -> bytes:
    streams = list(entries[at].streams)
    streams[index] = stream
    entries[at] = dataclasses.replace(entries[at], streams=tuple(streams))
    return container.to_bytes(entries, seed.reader.metadata)


def _fields(seed: Seed) -> list[int | bytes]:
    """The header as varints and bytes, one after another (docs/format.md)."""
    entries = list(seed.entries)
    names = [b"", *(entry.name.encode() for entry in entries)]
    out: list[int | bytes] = [len(seed.reader.metadata), seed.reader.metadata, len(entries)]
    for previous, name in pairwise(names):
        shared = next((i for i, (a, b) in enumerate(zip(previous, name, strict=False)) if a != b), len(previous))
        out += [shared, len(name) - shared, name[shared:]]
    out += [entry.scheme for entry in entries] + [64 * entry.kind + entry.dtype for entry in entries]
    index = {entry.name: position for position, entry in enumerate(entries)}
    out += [index[entry.target] for entry in entries if entry.target is not None]
    for entry in entries:
        out += [len(entry.shape), *entry.shape]
    entries = [entry for entry in entries if entry.target is None and entry.kind != container.BLOCKS]
    for entry in entries:
        out += [len(entry.params), *(value << 1 if value >= 0 else ~(value << 1) for value in entry.params)]
    for entry in entries:
        out += [len(entry.streams), *(bytes([stream.coder]) for stream in entry.streams)]
    out += [len(stream.payload) for entry in entries for stream in entry.streams]
    for entry in entries:
        joined = b"".join(stream.payload for stream in entry.streams)
        out += [struct.pack("<I", zlib.crc32(joined))] if joined else []
    return out


def _headed(seed: Seed, unpacked: bytes) -> bytes:
    """The file with another header, stored as it is, and the payloads as they were."""
    return container.with_prefix(unpacked, len(unpacked)) + seed.data[seed.reader.header_bytes :]


REPAIRED: dict[str, Callable[[Seed, random.Random], bytes]] = {
    "payload": payload,
    "numbers": numbers,
    "header": header,
    "shapes": shapes,
    "links": links,
}
