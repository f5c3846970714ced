"""Writer of files: encoded tensors → bytes. Unchanged tensors are not coded again, which makes searches cheap."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from birdie.artifact import container
from birdie.artifact import metadata as file_metadata
from birdie.artifact.codes import scheme_codes
from birdie.artifact.container import ALIAS, BLOCKS, MEMBER, Entry, Stream, block_name
from birdie.artifact.file import DTYPES
from birdie.artifact.resume import Resume, StoredStream
from birdie.compress import registry
from birdie.compress.rate.assignment import Group
from birdie.compress.scheme import Blocks, Encoded
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.state import EncodedState, problem_of
from birdie.compress.tensors import kernel
from birdie.entropy import coder as entropy
from birdie.entropy.hints import Effort, Hints
from birdie.errors import WeightsError
from birdie.runtime.callbacks import Progress
from birdie.runtime.distributed import World
from birdie.runtime.outputs import Source
from birdie.runtime.provenance import versions

_RECORD = 1  # the code of a record's entry, which its name replaces: the container does not interpret it


class Meter:
    """Counter of coded tensors for a progress callback.

    Args:
        progress: called with (done, total).
        rounds: expected number of times that all tensors are coded; the total grows if there are more.
    """

    def __init__(self, progress: Progress | None, rounds: int = 1) -> None:
        self.progress, self.rounds, self.done, self.total = progress, rounds, 0, 0

    def begin(self, tensors: int) -> None:
        """Start a round in which `tensors` tensors are coded."""
        self.total = max(self.total, self.rounds * tensors, self.done + tensors)

    def count(self) -> None:
        """Count one tensor."""
        self.done += 1
        self.total = max(self.total, self.done)
        self._report(self.done)

    def finish(self) -> None:
        """Report that all tensors are coded."""
        self._report(self.total)

    def _report(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, self.total)


@dataclass(frozen=True, slots=True)
class CodedTensor(Encoded):
    """A tensor whose streams are coded already; it can be written, not decoded.

    Attributes:
        coded: the streams in the order of the layout; `streams` is empty.
        crc: CRC-32 of their payloads, if it is known.
    """

    coded: tuple[Stream, ...] = ()
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class EstimatedTensor(Encoded):
    """A tensor of a sample.

    Attributes:
        data: bytes of its weights, about; tables: bytes of what describes them.
    """

    data: float = 0.0
    tables: float = 0.0


class Writer:
    """Encoded tensors → bytes of the complete file. Tensors that the last call coded are not coded again.

    Args:
        pool: threads that code.
        effort: of the entropy coder.
        about: the file's metadata, arguments of `birdie.artifact.metadata.to_bytes`.
        meter: counts coded tensors.
        resume: takes coded tensors of a model that is too large for memory.
        hidden: entries beside the tensors.
        groups: name of a tensor → the tensors of the file that it consists of.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        effort: Effort,
        about: Mapping[str, Any],
        meter: Meter,
        resume: Resume | None = None,
        hidden: Sequence[Entry] = (),
        groups: Mapping[str, Group] | None = None,
    ) -> None:
        self.hidden, self.groups = hidden, groups or {}
        self.pool, self.effort, self.about, self.meter, self.resume = pool, effort, about, meter, resume
        self._coded: dict[int, tuple[Encoded, tuple[Stream, ...]]] = {}

    def to_bytes(self, encoded: EncodedState) -> bytes:
        """Return the file that holds these tensors."""
        return container.to_bytes(*self._content(encoded))

    def size(self, encoded: EncodedState) -> int:
        """Return the bytes of the file that holds these tensors."""
        return container.file_bytes(*self._content(encoded))

    def write(self, path: Source | BytesIO, encoded: EncodedState) -> None:
        """Write the file that holds these tensors, completely or not at all."""
        container.write(path, *self._content(encoded))

    def coded(self, encoded: Encoded, key: str = "") -> Encoded:
        """Return the tensor with its coded streams in place of integers, which take several times the memory."""
        self.meter.count()
        coded = self._code_tensor(encoded)
        tensor = CodedTensor(encoded.scheme, encoded.shape, encoded.dtype, encoded.params, (), coded)
        return tensor if self.resume is None else self._kept(self.resume, tensor, key)

    def recalled(self, key: str) -> Encoded | None:
        """Return the tensor that a process which died has coded under this key, if there is one."""
        entry = None if self.resume is None else self.resume.recall(self._complete(key))
        if entry is None or entry.dtype >= len(DTYPES):
            return None
        self.meter.count()
        return _from_record(entry)

    def _kept(self, resume: Resume, tensor: CodedTensor, key: str) -> CodedTensor:
        """Write a tensor as a record, whose entry has the name of the scheme."""
        kind = DTYPES.index(tensor.dtype), tensor.shape, tensor.params
        return _from_record(resume.keep(self._complete(key), Entry(tensor.scheme, _RECORD, *kind, tensor.coded)))

    def _complete(self, key: str) -> str:
        """Return a key that names the coder as well."""
        return f"{versions()['birdie']} {self.effort} {key}"

    def collected(self, encoded: EncodedState, world: World) -> EncodedState:
        """Return, on rank 0, the same tensors with payloads that this machine can read; all ranks must call it."""
        if self.resume is None or world.size == 1:
            return encoded
        coded = [tensor for tensor in dict(_parts(encoded.tensors)).values() if isinstance(tensor, CodedTensor)]
        streams = [stream for tensor in coded for stream in tensor.coded if isinstance(stream, StoredStream)]
        copies = self.resume.collect(world, streams)

        def copied(tensor: Encoded) -> Encoded:
            if isinstance(tensor, Blocks):
                return replace(tensor, parts=tuple(map(copied, tensor.parts)))
            if isinstance(tensor, CodedTensor):
                return replace(tensor, coded=tuple(map(moved, tensor.coded)))
            return tensor

        def moved(stream: Stream) -> Stream:
            if isinstance(stream, StoredStream):
                return replace(stream, path=copies.get(stream.path, stream.path))
            return stream

        return EncodedState({name: copied(tensor) for name, tensor in encoded.tensors.items()}, encoded.ties)

    def estimated(self, encoded: Encoded, _key: str = "") -> Encoded:
        """Return the tensor with an estimate of its bytes in place of integers; see `estimate`."""
        data, tables = self._estimate_tensor(encoded)
        return EstimatedTensor(encoded.scheme, encoded.shape, encoded.dtype, encoded.params, (), data, tables)

    def _content(self, encoded: EncodedState) -> tuple[list[Entry], bytes]:
        """Return the entries and the metadata of the file."""
        tensors = dict(_parts(encoded.tensors))
        codes, foreign = scheme_codes(tensor.scheme for tensor in tensors.values())
        streams = self._code(tensors)
        entries = [*self.hidden]
        for name, tensor in tensors.items():
            kind = codes[tensor.scheme], DTYPES.index(tensor.dtype), tensor.shape
            crc = tensor.crc if isinstance(tensor, CodedTensor) else None
            entries.append(Entry(name, *kind, tensor.params, streams[name], crc=crc))
        for name, tensor in encoded.tensors.items():
            if isinstance(tensor, Blocks):
                entries.append(Entry(name, BLOCKS, DTYPES.index(tensor.dtype), tensor.shape))
        kinds = {name: (DTYPES.index(tensor.dtype), tensor.shape) for name, tensor in encoded.tensors.items()}
        for group, members in self.groups.items():
            if group in kinds:
                kinds |= dict.fromkeys(members.names, (kinds[group][0], members.shape))
                entries += [Entry(name, MEMBER, *kinds[name], target=group) for name in members.names]
        entries += [Entry(name, ALIAS, *kinds[first], target=first) for name, first in encoded.ties.items()]
        return entries, file_metadata.to_bytes(**self.about, schemes=foreign)

    def estimate(self, encoded: EncodedState) -> dict[str, tuple[float, float]]:
        """Return about the bytes of each tensor in a fraction of the time: of its weights, and of what describes them.

        The first are those of effort "fast"; more rows of the same kind take more in proportion.
        """
        parts = zip(encoded.tensors, self.pool.map(self._estimate_tensor, encoded.tensors.values()), strict=True)
        return {name: (data, tables if self.effort == "fast" else 0.0) for name, (data, tables) in parts}

    def _code(self, tensors: Mapping[str, Encoded]) -> dict[str, tuple[Stream, ...]]:
        """Return the coded streams of every tensor; only tensors that are not coded yet are coded."""
        coded = {name: self._coded.get(id(tensor), (None, None))[1] for name, tensor in tensors.items()}
        coded |= {name: tensor.coded for name, tensor in tensors.items() if isinstance(tensor, CodedTensor)}
        futures = {
            name: self.pool.submit(self._code_tensor, tensors[name])
            for name, streams in coded.items()
            if streams is None
        }
        self.meter.begin(len(futures))
        streams = {}
        for name, known in coded.items():
            streams[name] = futures[name].result() if known is None else known
            if known is None:
                self.meter.count()
        self._coded = {id(tensor): (tensor, streams[name]) for name, tensor in tensors.items()}
        return streams

    def _code_tensor(self, encoded: Encoded) -> tuple[Stream, ...]:
        coded = (entropy.encode(values, hints, self.effort) for values, hints in _hinted(encoded))
        return tuple(Stream(one.coder, one.payload) for one in coded)

    def _estimate_tensor(self, encoded: Encoded) -> tuple[float, float]:
        if isinstance(encoded, Blocks):
            data, tables = zip(*map(self._estimate_tensor, encoded.parts), strict=True)
            return sum(data), sum(tables)
        if isinstance(encoded, EstimatedTensor):
            return encoded.data, encoded.tables
        if isinstance(encoded, CodedTensor):
            return sum(stream.length for stream in encoded.coded), 0.0
        parts = [entropy.estimate(values, hints) for values, hints in _hinted(encoded)]
        return sum(data for data, _ in parts), sum(tables for _, tables in parts)


def opened(encoded: Encoded) -> Encoded:
    """Return an encoded tensor with its integers, decoded if they are coded already."""
    if isinstance(encoded, Blocks):
        return replace(encoded, parts=tuple(map(opened, encoded.parts)))
    if not isinstance(encoded, CodedTensor):
        return encoded
    layout = registry.decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    streams = tuple(
        entropy.decode(one.coder, one.payload, kind.rows, kind.columns, kind.hints, kind.dtype)
        for one, kind in zip(encoded.coded, layout, strict=True)
    )
    return Encoded(encoded.scheme, encoded.shape, encoded.dtype, encoded.params, streams)


def lossless_entries(tensors: Mapping[str, Tensor], pool: ThreadPoolExecutor, effort: Effort) -> list[Entry]:
    """Return entries that keep every bit of some tensors."""
    if not tensors:
        return []
    for name, tensor in tensors.items():
        if problem := problem_of(tensor):
            raise WeightsError(f"tensor {name!r} ({problem}) cannot be stored; make it dense and of a plain dtype")
    encoded = {name: Lossless().encode(name, tensor.detach().cpu()) for name, tensor in tensors.items()}
    return Writer(pool, effort, {}, Meter(None))._content(EncodedState(encoded, {}))[0]


def _from_record(entry: Entry) -> CodedTensor:
    kind = entry.name, entry.shape, DTYPES[entry.dtype], entry.params
    return CodedTensor(*kind, (), entry.streams, entry.crc)


def _parts(tensors: Mapping[str, Encoded]) -> Iterator[tuple[str, Encoded]]:
    """Yield the entries of the file that have streams: tensors, and blocks of tensors."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Blocks):
            yield from ((block_name(name, index), part) for index, part in enumerate(tensor.parts))
        else:
            yield name, tensor


def _hinted(encoded: Encoded) -> Iterator[tuple[NDArray[np.integer], Hints]]:
    """Yield each stream with the facts that help to code it."""
    layout = registry.decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    for values, expected in zip(encoded.streams, layout, strict=True):
        taps = kernel(encoded.shape, expected.columns)
        yield values, expected.hints if taps == (1, 1) else replace(expected.hints, kernel=taps)
