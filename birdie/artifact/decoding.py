"""Decoding of file entries to tensors, without saving, filling modules or looking up schemes.

    entry ──decoder's layout──► streams ──entropy decoding──► integers ──decoder──► tensor

The caller passes the look-up of decoders (`decoder_of`): the one-file decoder has a table of its own.
"""

import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
from torch import Tensor

from birdie.artifact.container import ALIAS, BLOCKS, MEMBER, Entry, Reader
from birdie.artifact.inspect import DTYPES as DTYPE_NAMES
from birdie.artifact.inspect import dtype_name
from birdie.compress.scheme import Cost, Decoder, Encoded, StreamLayout
from birdie.compress.tensors import from_planes
from birdie.entropy import coder as entropy
from birdie.errors import ArtifactError

DecoderOf = Callable[[Entry], Decoder]
"""The decoder of an entry; raises ArtifactError where there is none."""
DecodeOne = Callable[[Reader, str, DecoderOf, int], Tensor]
"""Reads and decodes one entry, on so many threads."""

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in DTYPE_NAMES)
# Bytes that a file may decode to without the caller's word: so many, or so many for each of its own.
MIN_DECODED_LIMIT = 1 << 30
DECODED_PER_BYTE = 64
# Peak memory of decoding: a multiple of the decoded bytes, tables and blocks, and so many bytes for each of payload.
PEAK_PER_DECODED = 2.5
PEAK_ROOM = 1 << 26
PEAK_PER_BYTE = 1024
# Operations of decoding, about a nanosecond each: so many for each byte that may be decoded, and for each of payload,
# which is more than context mixing takes at 0.1 bits per weight. The reading of a tensor counts as some, too, so that
# a tensor without payload, or with a byte or two, is not free.
MIN_OPERATIONS = 1 << 31
OPERATIONS_PER_DECODED = 2
OPERATIONS_PER_BYTE = 1 << 16
OPERATIONS_PER_TENSOR = 150_000
_GROUPS = 8  # groups of tiny tensors of a file that stay decoded, when tensors are read one by one

_recent: weakref.WeakKeyDictionary[Reader, dict[str, tuple[Tensor, ...]]] = weakref.WeakKeyDictionary()
_deciding = threading.Lock()


def dtype_of(entry: Entry) -> torch.dtype:
    """Return the dtype of an entry's tensor."""
    kind: torch.dtype = getattr(torch, dtype_name(entry))
    return kind


def stored_name(reader: Reader, name: str) -> str:
    """Return `name`, or the name it is an alias of."""
    entry = reader.entry(name)
    return entry.target or name if entry.scheme == ALIAS else name


def decoded_bytes(entry: Entry) -> int:
    """Return the bytes of an entry's tensor."""
    return math.prod(entry.shape) * dtype_of(entry).itemsize


def default_limit(reader: Reader) -> int:
    """Return the bytes that a file may decode to if the caller says nothing: the larger of 1 GiB and 64 × the file."""
    return max(MIN_DECODED_LIMIT, DECODED_PER_BYTE * reader.size)


def require_limits(
    reader: Reader,
    decoder_of: DecoderOf,
    max_bytes: int | None,
    max_operations: int | None = None,
    names: Collection[str] | None = None,
    *,
    shared: bool = False,
    independent: Collection[str] = (),
) -> None:
    """Check what decoding a file takes at most, from its header alone and before anything is allocated.

    Decoded bytes and operations have limits. Peak memory is bounded by the decoded bytes: a file that would take more
    than 2.5 times as much is refused, unless its own size accounts for it or `max_bytes` leaves room for it.

    Args:
        reader: the file.
        decoder_of: look-up of decoders.
        max_bytes: most bytes to decode to; None: `default_limit`.
        max_operations: most operations; None: 2 for each byte that may be decoded, and 65,536 for each of payload.
        names: the entries that will be decoded; None: all.
        shared: the names of tied tensors share one in memory; False: each has a copy, as in most files, which counts.
        independent: names that have a copy although `shared`.
    """
    limit = default_limit(reader) if max_bytes is None else max_bytes
    payload = reader.size - reader.header_bytes
    if max_operations is None:
        max_operations = max(MIN_OPERATIONS, OPERATIONS_PER_DECODED * limit) + OPERATIONS_PER_BYTE * payload
    if names is None:  # before the entries are made, which takes longer
        stored = len(reader.schemes) - reader.schemes.count(ALIAS) - reader.schemes.count(MEMBER)
        _require(
            reader, OPERATIONS_PER_TENSOR * stored, max_operations, "operations", "max_operations (--max-operations)"
        )
    named = [reader.entry(name) for name in (reader.names if names is None else names)]
    stored_names = dict.fromkeys(reader.holder(entry.name) for entry in named if entry.scheme != ALIAS)
    entries = [reader.entry(block) for name in stored_names for block, _ in blocks_of(reader, name)]
    total = sum(map(decoded_bytes, entries))
    apart = set(independent)
    copies = sum(
        decoded_bytes(entry) for entry in named if entry.scheme == ALIAS and (not shared or entry.name in apart)
    )
    _require(reader, total + copies, limit, "bytes", "max_bytes (--max-size)")
    operations, peak = OPERATIONS_PER_TENSOR * len(entries), 0
    for entry in entries:
        cost = _cost(reader, entry, decoder_of(entry))
        operations, peak = operations + cost.operations, peak + cost.bytes
    room = int(PEAK_PER_DECODED * max(total, max_bytes or 0)) + PEAK_ROOM + PEAK_PER_BYTE * payload
    _require(reader, peak, room, "bytes of memory", "max_bytes (--max-size)")
    _require(reader, operations, max_operations, "operations", "max_operations (--max-operations)")


def _require(reader: Reader, number: int, limit: int, what: str, argument: str) -> None:
    if number > limit:
        raise ArtifactError(
            f"{reader.where} takes {number:,} {what} to decode, more than the {limit:,} allowed; "
            f"raise {argument} if you trust where it comes from"
        )


def _cost(reader: Reader, entry: Entry, decoder: Decoder) -> Cost:
    """Return the cost of decoding an entry, streams included."""
    layout = layout_of(reader, entry, decoder)
    cost = decoder.cost(entry.shape, dtype_of(entry), entry.params)
    costs = [(cost.operations, cost.bytes, 0)]
    for stream, expected in zip(entry.streams, layout, strict=True):
        costs.append(entropy.cost(stream.coder, expected.rows * expected.columns, expected.dtype))
    operations, kept, temporary = zip(*costs, strict=True)
    return Cost(sum(operations), sum(kept) + max(temporary))


def layout_of(reader: Reader, entry: Entry, decoder: Decoder) -> tuple[StreamLayout, ...]:
    """Return the layout of an entry's streams."""
    try:
        layout = decoder.layout(entry.shape, dtype_of(entry), entry.params)
        if len(layout) != len(entry.streams):
            raise ArtifactError(
                f"scheme {decoder.name} needs {len(layout)} streams, not {len(entry.streams)}; the file is corrupt"
            )
    except ArtifactError as error:
        raise ArtifactError(f"tensor {entry.name!r} of {reader.where}: {error}") from error
    return layout


def decode_all(
    reader: Reader,
    decoder_of: DecoderOf,
    workers: int,
    decode: DecodeOne | None = None,
    device: torch.device | None = None,
    names: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """Decode stored tensors, the longest first, so that no thread works on it alone at the end.

    Args:
        reader, decoder_of: the file, and its decoders.
        workers: threads. A tensor that is longer than one thread's share is itself decoded on all of them.
        decode: decodes one entry; default: on the CPU.
        device: where it puts the tensor.
        names: of stored tensors; None: all.
    """
    decode = decode or decode_one
    wanted = [name for name in (reader.names if names is None else names) if reader.entry(name).scheme != ALIAS]
    stored = list(dict.fromkeys(map(reader.holder, wanted)))
    blocks = [(name, block, part) for name in stored for block, part in blocks_of(reader, name)]
    lengths = {block: reader.header(block).length for _, block, _ in blocks}
    blocks.sort(key=lambda item: lengths[item[1]], reverse=True)
    share = sum(lengths.values()) / workers
    decoded = {name: _empty(reader, entry, device) for name in stored if (entry := reader.entry(name)).scheme == BLOCKS}
    queue = iter(blocks)

    def decode_next(_: int) -> None:
        for name, block, part in queue:  # threads share it: a task for each of many small tensors would take longer
            tensor = decode(reader, block, decoder_of, workers if lengths[block] > share else 1)
            if block == name:
                decoded[name] = tensor
            else:
                decoded[name].view(-1)[part] = tensor.reshape(-1)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(decode_next, range(workers)))
    decoded = {name: _complete(reader.entry(name), tensor) for name, tensor in decoded.items()}
    members = {
        name: member.clone()  # memory of its own
        for group in stored
        if group in reader.groups
        for name, member in zip(reader.groups[group], _members(reader, group, decoded.pop(group)), strict=True)
    }
    return decoded | (members if names is None else {name: members[name] for name in wanted if name in members})


def decode_entry(reader: Reader, name: str, decoder_of: DecoderOf, threads: int | None = None) -> Tensor:
    """Read and decode one stored tensor on at most `threads` threads."""
    if (entry := reader.entry(name)).scheme == MEMBER:
        return _group(reader, reader.holder(name), decoder_of, threads)[reader.position(name)].clone()
    if entry.scheme != BLOCKS:
        return decode_one(reader, name, decoder_of, threads)
    out = _empty(reader, entry)
    for block, part in blocks_of(reader, name):
        out.view(-1)[part] = decode_one(reader, block, decoder_of, threads).reshape(-1)
    return _complete(entry, out)


def _members(reader: Reader, group: str, decoded: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of a group, views of it."""
    names = reader.groups[group]
    return decoded.reshape(len(names), *reader.entry(names[0]).shape).unbind()


def _group(reader: Reader, group: str, decoder_of: DecoderOf, threads: int | None) -> tuple[Tensor, ...]:
    """Return the tensors of a group; the last few groups of a file stay decoded, for the next tensor of each."""
    with _deciding:
        recent = _recent.setdefault(reader, {})
        known = recent.get(group)
    if known is None:
        known = _members(reader, group, decode_entry(reader, group, decoder_of, threads))
        with _deciding:
            recent[group] = known
            while len(recent) > _GROUPS:
                del recent[next(iter(recent))]
    return known


def blocks_of(reader: Reader, name: str) -> list[tuple[str, slice]]:
    """Return the entries that a stored tensor consists of, each with its part of the elements in row-major order."""
    if reader.entry(name).scheme != BLOCKS:
        return [(name, slice(None))]
    blocks = [reader.entry(block) for block in reader.blocks(name)]
    ends = accumulate(math.prod(block.shape) for block in blocks)
    return [(block.name, slice(end - math.prod(block.shape), end)) for block, end in zip(blocks, ends, strict=True)]


def is_planes(reader: Reader, entry: Entry) -> bool:
    """Return whether the blocks of a complex tensor hold its real parts and then its imaginary parts."""
    if entry.scheme != BLOCKS:
        return False
    dtype, part = dtype_of(entry), dtype_of(reader.entry(reader.blocks(entry.name)[0]))
    if part != dtype and (not dtype.is_complex or part != dtype.to_real()):
        raise ArtifactError(f"tensor {entry.name!r} of {reader.where} has blocks of {part}; the file is damaged")
    return part != dtype


def _empty(reader: Reader, entry: Entry, device: torch.device | None = None) -> Tensor:
    """Return memory for the blocks of a tensor; of planes, (2, …)."""
    if is_planes(reader, entry):
        return torch.empty((2, *entry.shape), dtype=dtype_of(entry).to_real(), device=device or "cpu")
    return torch.empty(entry.shape, dtype=dtype_of(entry), device=device or "cpu")


def _complete(entry: Entry, decoded: Tensor) -> Tensor:
    """Return the tensor that was decoded: complex if planes were."""
    return from_planes(decoded, entry.shape) if decoded.dtype != dtype_of(entry) else decoded


def decode_one(reader: Reader, name: str, decoder_of: DecoderOf, threads: int | None = None) -> Tensor:
    """Read and decode one entry, which is a stored tensor or a block of one."""
    entry = reader.read(name)
    dtype, decoder = dtype_of(entry), decoder_of(entry)
    layout = layout_of(reader, entry, decoder)
    try:
        streams = tuple(
            entropy.decode(
                stream.coder, stream.payload, expected.rows, expected.columns, expected.hints, expected.dtype, threads
            )
            for stream, expected in zip(entry.streams, layout, strict=True)
        )
        return decoder.decode(Encoded(decoder.name, entry.shape, dtype, entry.params, streams))
    except ArtifactError as error:
        raise ArtifactError(f"tensor {name!r} of {reader.where}: {error}") from error
