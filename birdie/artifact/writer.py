"""Writer of files: encoded tensors → bytes. Unchanged tensors are not coded again, which makes searches cheap."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birdie.artifact import container
from birdie.artifact import metadata as file_metadata
from birdie.artifact.codes import scheme_codes
from birdie.artifact.container import ALIAS, Entry, Stream
from birdie.artifact.decoding import DTYPES
from birdie.compress import registry
from birdie.compress.scheme import Encoded
from birdie.compress.state import EncodedState
from birdie.compress.tensors import kernel
from birdie.entropy import coder as entropy
from birdie.entropy.hints import Effort, Hints
from birdie.runtime.callbacks import Progress
from birdie.runtime.files import Source


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
    """

    coded: tuple[Stream, ...] = ()


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
    """

    def __init__(self, pool: ThreadPoolExecutor, effort: Effort, about: Mapping[str, Any], meter: Meter) -> None:
        self.pool, self.effort, self.about, self.meter = pool, effort, about, meter
        self._coded: dict[int, tuple[Encoded, tuple[Stream, ...]]] = {}

    def to_bytes(self, encoded: EncodedState) -> bytes:
        """Return the file that holds these tensors."""
        return container.to_bytes(*self._content(encoded))

    def size(self, encoded: EncodedState) -> int:
        """Return the bytes of the file that holds these tensors."""
        return container.file_bytes(*self._content(encoded))

    def write(self, path: Source, encoded: EncodedState) -> None:
        """Write the file that holds these tensors, completely or not at all.

        Raises:
            OutputError: the file cannot be written.
        """
        container.write(path, *self._content(encoded))

    def coded(self, encoded: Encoded) -> Encoded:
        """Return the tensor with its coded streams in place of integers, which take several times the memory."""
        self.meter.count()
        return CodedTensor(encoded.scheme, encoded.shape, encoded.dtype, encoded.params, (), self._code_tensor(encoded))

    def estimated(self, encoded: Encoded) -> Encoded:
        """Return the tensor with an estimate of its bytes in place of integers; see `estimate`."""
        data, tables = self._estimate_tensor(encoded)
        return EstimatedTensor(encoded.scheme, encoded.shape, encoded.dtype, encoded.params, (), data, tables)

    def _content(self, encoded: EncodedState) -> tuple[list[Entry], bytes]:
        """Return the entries and the metadata of the file."""
        codes, foreign = scheme_codes(tensor.scheme for tensor in encoded.tensors.values())
        streams = self._code(encoded.tensors)
        entries = []
        for name, tensor in encoded.tensors.items():
            kind = codes[tensor.scheme], DTYPES.index(tensor.dtype), tensor.shape
            entries.append(Entry(name, *kind, tensor.params, streams[name]))
        for name, first in encoded.ties.items():
            tensor = encoded.tensors[first]
            entries.append(Entry(name, ALIAS, DTYPES.index(tensor.dtype), tensor.shape, target=first))
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
        if isinstance(encoded, EstimatedTensor):
            return encoded.data, encoded.tables
        if isinstance(encoded, CodedTensor):
            return sum(len(stream.payload) for stream in encoded.coded), 0.0
        parts = [entropy.estimate(values, hints) for values, hints in _hinted(encoded)]
        return sum(data for data, _ in parts), sum(tables for _, tables in parts)


def _hinted(encoded: Encoded) -> Iterator[tuple[NDArray[np.integer], Hints]]:
    """Yield each stream with the facts that help to code it."""
    layout = registry.decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    for values, expected in zip(encoded.streams, layout, strict=True):
        taps = kernel(encoded.shape, expected.columns)
        yield values, expected.hints if taps == (1, 1) else replace(expected.hints, kernel=taps)
