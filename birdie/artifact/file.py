"""A .birdie file opened for decoding: limits, checked before anything is allocated, and tensors.

    entry ──decoder's layout──► streams ──entropy decoding──► integers ──decoder──► tensor

Neither saving nor the schemes are imported: the one-file decoder passes a table of its own.
"""

import functools
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from birdie.artifact import codes
from birdie.artifact import metadata as file_metadata
from birdie.artifact.container import ALIAS, BLOCKS, DELTA, MEMBER, Entry, Reader
from birdie.compress.scheme import Cost, Decoder, Encoded, StreamLayout
from birdie.compress.tensors import empty, from_planes
from birdie.compress.tiled import Product, Recode
from birdie.entropy import coder as entropy
from birdie.errors import ArtifactError
from birdie.system.outputs import Source

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in codes.DTYPES)
# Bytes that a file may decode to without the caller's word: so many, or so many for each of its own.
MIN_DECODED_LIMIT = 1 << 30
DECODED_PER_BYTE = 64
BASES = 2  # times the bytes of a base
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
PEAK_PER_BASE_BYTE = 4
OPERATIONS_PER_BASE_BYTE = 1200
_GROUPS = 8  # groups of tiny tensors of a file that stay decoded, when tensors are read one by one


def dtype_of(entry: Entry) -> torch.dtype:
    """Return the dtype of an entry's tensor."""
    kind: torch.dtype = getattr(torch, codes.dtype_name(entry))
    return kind


def decoded_bytes(entry: Entry) -> int:
    """Return the bytes of an entry's tensor."""
    return math.prod(entry.shape) * dtype_of(entry).itemsize


Data = Source | bytes | memoryview
"""A path, or the bytes of a file."""


class BaseTensors(Protocol):
    """Tensors of the checkpoint that a file holds deltas to (birdie.artifact.base)."""

    @property
    def where(self) -> str:
        """The checkpoint, for messages."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of all its tensors."""
        ...

    @property
    def decoder(self) -> Decoder:
        """Decoder of deltas."""
        ...

    @property
    def is_given(self) -> bool:
        """Fact that the reader has it in addition to the file."""
        ...

    @property
    def close(self) -> Callable[[], None]:
        """Function that gives back what is open."""
        ...

    def __call__(self, name: str) -> Tensor | None:
        """Return a tensor; None if there is none of that name."""
        ...


class File(Reader):
    """A .birdie file opened for decoding, from any thread.

    Args:
        source: a path, or the bytes of a file.
        decoder: name of a scheme → its decoder; raises ArtifactError where there is none.
        base: of a file of deltas.

    Attributes:
        device: where tensors are decoded.
    """

    device = torch.device("cpu")

    def __init__(self, source: Data, decoder: Callable[[str], Decoder], base: BaseTensors | None = None) -> None:
        self._decoder, self._base = decoder, base  # first: closed if the header is damaged
        super().__init__(source)
        self._groups: dict[str, tuple[Tensor, ...]] = {}  # decoded lately
        self._deciding = threading.Lock()

    def close(self) -> None:
        """Close the file, and its base."""
        super().close()
        if self._base is not None:
            self._base.close()

    @property
    def needs_base(self) -> bool:
        """Return whether tensors are stored as deltas."""
        return DELTA in self.kinds

    def is_delta(self, name: str) -> bool:
        """Return whether a tensor, or a block of it, is stored as a delta."""
        return any(self.entry(block).kind == DELTA for block in self.blocks(self.holder(self.stored(name))))

    @property
    def default_limit(self) -> int:
        """Bytes that the file may decode to if the caller says nothing: 1 GiB, 64 × the file, or 2 × its base."""
        return max(
            MIN_DECODED_LIMIT,
            DECODED_PER_BYTE * self.size,
            BASES * self._base.bytes if self._base is not None and self._base.is_given else 0,
        )

    def require(
        self,
        max_bytes: int | None = None,
        max_operations: int | None = None,
        names: Collection[str] | None = None,
        *,
        shared: bool = True,
        independent: Collection[str] = (),
    ) -> None:
        """Check what decoding takes at most, from the header alone and before anything is allocated.

        Decoded bytes and operations have limits. Peak memory is bounded by the decoded bytes: a file that would take
        more than 2.5 times as much is refused, unless its own size accounts for it or `max_bytes` leaves room for it.

        Args:
            max_bytes: most bytes to decode to; None: `default_limit`.
            max_operations: most operations; None: 2 for each byte that may be decoded, and 65,536 for each of payload.
            names: the tensors that will be decoded; None: all.
            shared: the names of tied tensors share one in memory; False: each has a copy, as in most files, which
                counts.
            independent: names that have a copy although `shared`.
        """
        if names is None and self.needs_base:
            self._require_base()
        limit = self.default_limit if max_bytes is None else max_bytes
        payload = self.size - self.header_bytes
        if max_operations is None:
            max_operations = max(MIN_OPERATIONS, OPERATIONS_PER_DECODED * limit) + OPERATIONS_PER_BYTE * payload
            if self._base is not None:  # as large as what it is subtracted from, which the caller gives
                max_operations += OPERATIONS_PER_BASE_BYTE * self._base.bytes
        operations = "operations", max_operations, "max_operations (--max-operations)"
        if names is None:  # before the entries are made, which takes longer
            stored = len(self.kinds) - self.kinds.count(ALIAS) - self.kinds.count(MEMBER)
            self._require(OPERATIONS_PER_TENSOR * stored, *operations)
        named = [self.entry(name) for name in (self.names if names is None else names)]
        holders = dict.fromkeys(self.holder(self.stored(entry.name)) for entry in named)
        entries = [self.entry(block) for name in holders for block, _ in self.parts(name)]
        if any(entry.kind == DELTA for entry in entries):
            self._require_base()
        total = sum(map(decoded_bytes, entries))
        apart = set(independent)
        copies = sum(
            decoded_bytes(entry) for entry in named if entry.kind == ALIAS and (not shared or entry.name in apart)
        )
        self._require(total + copies, "bytes", limit, "max_bytes (--max-size)")
        costs = [self._cost(entry) for entry in entries]
        room = int(PEAK_PER_DECODED * max(total, max_bytes or 0)) + PEAK_ROOM + PEAK_PER_BYTE * payload
        room += 0 if self._base is None else PEAK_PER_BASE_BYTE * self._base.bytes
        self._require(sum(cost.bytes for cost in costs), "bytes of memory", room, "max_bytes (--max-size)")
        self._require(OPERATIONS_PER_TENSOR * len(costs) + sum(cost.operations for cost in costs), *operations)

    def _require_base(self) -> None:
        if self._base is None:
            raise self._lacks_base()

    def _lacks_base(self) -> ArtifactError:
        if file_metadata.is_inside(self.fields):
            return ArtifactError(f"{self.where} holds deltas between its tensors; decompress it with birdie")
        of, _ = file_metadata.base_in(self.fields)
        return ArtifactError(
            f"{self.where} holds deltas to another checkpoint{f', {of},' if of else ''} without which it "
            "cannot be decoded; give that as base=… (--base)"
        )

    def _require(self, number: int, what: str, limit: int, argument: str) -> None:
        if number > limit:
            raise ArtifactError(
                f"{self.where} takes {number:,} {what} to decode, more than the {limit:,} allowed; "
                f"raise {argument} if you trust where it comes from"
            )

    def _cost(self, entry: Entry) -> Cost:
        """Return the cost of decoding an entry, streams included."""
        decoder, layout = self.decoder_of(entry), self.layout(entry)
        cost = decoder.cost(entry.shape, dtype_of(entry), entry.params)
        streams = [
            entropy.cost(stream.coder, expected.rows * expected.columns, expected.dtype)
            for stream, expected in zip(entry.streams, layout, strict=True)
        ]
        operations, kept, temporary = zip((cost.operations, cost.bytes, 0), *streams, strict=True)
        return Cost(sum(operations), sum(kept) + max(temporary))

    def decoder_of(self, entry: Entry) -> Decoder:
        """Return the decoder of an entry."""
        if entry.kind == DELTA:
            if self._base is None:
                raise self._lacks_base()
            return self._base.decoder
        foreign = {} if entry.scheme in codes.SCHEMES else self.fields.get("schemes", {})
        return self._decoder(codes.scheme_name(entry, foreign))

    def layout(self, entry: Entry) -> tuple[StreamLayout, ...]:
        """Return the layout of an entry's streams."""
        decoder = self.decoder_of(entry)
        try:
            layout = decoder.layout(entry.shape, dtype_of(entry), entry.params)
            if len(layout) != len(entry.streams):
                raise ArtifactError(
                    f"scheme {decoder.name} needs {len(layout)} streams, not {len(entry.streams)}; the file is corrupt"
                )
        except ArtifactError as error:
            raise ArtifactError(f"tensor {entry.name!r} of {self.where}: {error}") from error
        return layout

    def parts(self, name: str) -> list[tuple[str, slice]]:
        """Return the entries that a stored tensor consists of, each with its elements in row-major order."""
        if self.entry(name).kind != BLOCKS:
            return [(name, slice(None))]
        blocks = [self.entry(block) for block in self.blocks(name)]
        ends = accumulate(math.prod(block.shape) for block in blocks)
        return [(block.name, slice(end - math.prod(block.shape), end)) for block, end in zip(blocks, ends, strict=True)]

    def is_planes(self, name: str) -> bool:
        """Return whether the blocks of a complex tensor hold its real parts and then its imaginary parts."""
        entry = self.entry(name)
        if entry.kind != BLOCKS:
            return False
        dtype, part = dtype_of(entry), dtype_of(self.entry(self.blocks(name)[0]))
        if part != dtype and (not dtype.is_complex or part != dtype.to_real()):
            raise ArtifactError(f"tensor {name!r} of {self.where} has blocks of {part}; the file is damaged")
        return part != dtype

    def decode_all(self, names: Collection[str] | None = None, workers: int | None = None) -> dict[str, Tensor]:
        """Decode tensors, the longest first, so that no thread works on it alone at the end.

        Args:
            names: of the tensors; None: all. Tied ones share one tensor.
            workers: threads; None: every core. A tensor that is longer than one thread's share is itself decoded on all
                of them.
        """
        names, workers = self.ordered if names is None else names, workers or os.cpu_count() or 1
        holders = dict.fromkeys(self.holder(self.stored(name)) for name in names)
        decoded = {name: self._empty(name) for name in holders if self.entry(name).kind == BLOCKS}
        blocks = [(name, block, part) for name in holders for block, part in self.parts(name)]
        lengths = {block: self.header(block).length for _, block, _ in blocks}
        share = sum(lengths.values()) / workers
        # Differences come last, those to one base together: else it would be decoded for each, and the work that a file
        # asks for would be their product.
        queue = iter(sorted(blocks, key=lambda item: (self._base_name(item[0]), -lengths[item[1]])))

        def decode_next(_: int) -> None:
            for name, block, part in queue:  # threads share it: a task for each of many small tensors would take longer
                threads = workers if lengths[block] > share else 1
                if block == name:
                    decoded[name] = self.decode_entry(block, threads)
                else:
                    self.decode_into(decoded[name].view(-1)[part], block, threads)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(decode_next, range(workers)))
        tensors = {name: self._complete(name, decoded.pop(name)) for name in holders if name not in self.groups}
        for group, members in decoded.items():
            parts = zip(self.groups[group], self._members(group, self._complete(group, members)), strict=True)
            tensors |= {name: member.clone() for name, member in parts}  # memory of its own
        return {name: tensors[self.stored(name)] for name in names}

    def decode(self, name: str, threads: int | None = None) -> Tensor:
        """Read and decode one tensor on at most `threads` threads."""
        name = self.stored(name)
        entry = self.entry(name)
        if entry.kind == MEMBER:
            return self._group(self.holder(name), threads)[self.position(name)].clone()
        if entry.kind != BLOCKS:
            return self.decode_entry(name, threads)
        out = self._empty(name)
        for block, part in self.parts(name):
            self.decode_into(out.view(-1)[part], block, threads)
        return self._complete(name, out)

    def decode_entry(self, name: str, threads: int | None = None) -> Tensor:
        """Read and decode one entry, which is a stored tensor, a block of one, or a group."""
        entry = self.read(name)
        product = self.product(entry, threads)
        if product is None:
            return self._decode_streams(entry, threads)
        out = empty(entry.shape, dtype_of(entry))
        with self.naming(name):
            product.decode(out, threads or os.cpu_count() or 1)
        return out

    def decode_into(self, out: Tensor, name: str, threads: int | None = None) -> None:
        """Read and decode one entry into `out`, which is contiguous and has as many elements."""
        entry = self.read(name)
        product = self.product(entry, threads) if out.device.type == "cpu" and out.dtype == dtype_of(entry) else None
        if product is None:
            out.copy_(self._decode_streams(entry, threads).reshape(out.shape))
            return
        with self.naming(name):
            product.decode(out, threads or os.cpu_count() or 1)

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Say in the message of an ArtifactError which tensor of which file is damaged."""
        try:
            yield
        except ArtifactError as error:
            raise ArtifactError(f"tensor {name!r} of {self.where}: {error}") from error

    def product(self, entry: Entry, threads: int | None = None, recode: Recode | None = None) -> Product | None:
        """Return an entry that was read as numbers and factors; None if it is not coded that way, nor by `recode`."""
        decoder, layout, dtype = self.decoder_of(entry), self.layout(entry), dtype_of(entry)
        payloads, threads = [(stream.coder, stream.payload) for stream in entry.streams], threads or os.cpu_count() or 1
        with self.naming(entry.name):
            return Product.of(decoder, entry.shape, dtype, entry.params, layout, payloads, threads, recode=recode)

    def _decode_streams(self, entry: Entry, threads: int | None) -> Tensor:
        decoder, layout = self.decoder_of(entry), self.layout(entry)
        with self.naming(entry.name):
            streams = tuple(
                entropy.decode(
                    *(stream.coder, stream.payload, expected.rows, expected.columns, expected.hints, expected.dtype),
                    threads,
                )
                for stream, expected in zip(entry.streams, layout, strict=True)
            )
            base = self._base_of(entry) if entry.kind == DELTA else None
            return decoder.decode(Encoded(decoder.name, entry.shape, dtype_of(entry), entry.params, streams, base))

    @functools.cached_property
    def _base_names(self) -> dict[str, str]:
        return file_metadata.base_in(self.fields)[1]

    def _base_name(self, name: str) -> str:
        """Return the name of the base's tensor that a stored tensor is a delta to; empty if it is none."""
        return self._base_names.get(name, name) if self.is_delta(name) else ""

    def _base_of(self, entry: Entry) -> Tensor | None:
        """Return the tensor of the base that an entry is a delta to; of a block, its part."""
        if self._base is None:
            return None
        name = entry.name.partition("\0")[0]
        other = self._base_names.get(name, name)
        tensor, owner = self._base(other), self.entry(name)
        if tensor is None or tensor.numel() != math.prod(owner.shape):
            raise ArtifactError(f"the base {self._base.where} has no {other!r} of {owner.shape}; give another base")
        part = next(part for block, part in self.parts(name) if block == entry.name)
        try:
            converted = tensor.detach().cpu().reshape(-1)[part].to(dtype_of(entry))
        except NotImplementedError as error:  # numbers of 4 bits
            kinds = f"{tensor.dtype}, which cannot be made {dtype_of(entry)}"
            raise ArtifactError(f"the base {self._base.where} has {other!r} of {kinds}; give another base") from error
        return converted.reshape(entry.shape)

    def _members(self, group: str, decoded: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of a group, views of it."""
        names = self.groups[group]
        return decoded.reshape(len(names), *self.entry(names[0]).shape).unbind()

    def _group(self, group: str, threads: int | None) -> tuple[Tensor, ...]:
        """Return the tensors of a group; the last few groups stay decoded, for the next tensor of each."""
        with self._deciding:
            members = self._groups.get(group)
        if members is None:
            members = self._members(group, self.decode(group, threads))
            with self._deciding:
                self._groups[group] = members
                while len(self._groups) > _GROUPS:
                    del self._groups[next(iter(self._groups))]
        return members

    def _empty(self, name: str) -> Tensor:
        """Return memory for the blocks of a tensor; of planes, (2, …)."""
        entry = self.entry(name)
        shape, dtype = entry.shape, dtype_of(entry)
        if self.is_planes(name):
            shape, dtype = (2, *shape), dtype.to_real()
        return empty(shape, dtype) if self.device.type == "cpu" else torch.empty(shape, dtype=dtype, device=self.device)

    def _complete(self, name: str, decoded: Tensor) -> Tensor:
        """Return the tensor that was decoded: complex if planes were."""
        entry = self.entry(name)
        return from_planes(decoded, entry.shape) if decoded.dtype != dtype_of(entry) else decoded
