"""Encoded tensors → the bytes of a file. Coding a tensor twice is coding it once: a search pays only for changes."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch import Tensor

from birdie.artifact import container
from birdie.artifact import metadata as file_metadata
from birdie.artifact.codes import foreign_names, scheme_codes
from birdie.artifact.container import ALIAS, Entry, Stream
from birdie.artifact.decoding import DTYPES
from birdie.compress import registry
from birdie.compress.scheme import Encoded
from birdie.compress.tensors import kernel
from birdie.entropy import coder as entropy
from birdie.entropy.stream import Effort
from birdie.runtime.callbacks import Progress


class Meter:
    """Counts coded tensors for a progress callback; the total grows if the first guess was short."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def step(self) -> None:
        """Count one tensor."""
        self.done += 1
        self.total = max(self.total, self.done)
        self.report(self.done)

    def finish(self) -> None:
        """Report that all are done."""
        self.report(self.total)

    def report(self, done: int) -> None:
        """Call the callback."""
        if self.progress is not None:
            self.progress(done, self.total)


class Writer:
    """Encoded tensors → the bytes of the whole file. What the last call coded is not coded again.

    Args:
        pool: threads that code.
        effort: of the entropy coder.
        aliases: second names, which have no bytes of their own.
        about: what the file says about itself besides its tensors (`birdie.artifact.metadata`).
        meter: counts coded tensors.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, effort: Effort, aliases: list[Entry], about: Mapping[str, Any], meter: Meter
    ) -> None:
        self.pool, self.effort, self.aliases, self.about, self.meter = pool, effort, aliases, about, meter
        self._coded: dict[int, tuple[Encoded, tuple[Stream, ...]]] = {}
        self._metadata: dict[tuple[str, ...], bytes] = {}

    def to_bytes(self, encoded: Mapping[str, Encoded]) -> bytes:
        """Return the file that holds these tensors."""
        futures = {
            name: self.pool.submit(self._streams, item) for name, item in encoded.items() if id(item) not in self._coded
        }
        coded = {}
        for name, item in encoded.items():
            streams = futures[name].result() if name in futures else self._coded[id(item)][1]
            coded[id(item)] = item, streams
            self.meter.step()
        self._coded = coded
        codes = scheme_codes(item.scheme for item in encoded.values())
        entries = [
            Entry(name, codes[item.scheme], DTYPES.index(item.dtype), item.shape, item.params, coded[id(item)][1])
            for name, item in encoded.items()
        ]
        return container.to_bytes([*entries, *self.aliases], self._about(foreign_names(codes)))

    def size(self, encoded: Mapping[str, Encoded]) -> int:
        """Return the bytes of the file that holds these tensors."""
        return len(self.to_bytes(encoded))

    def _streams(self, encoded: Encoded) -> tuple[Stream, ...]:
        layout = registry.decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
        streams = []
        for values, expected in zip(encoded.streams, layout, strict=True):
            taps = kernel(encoded.shape, expected.columns)
            hints = expected.hints if taps == (1, 1) else replace(expected.hints, kernel=taps)
            coded = entropy.encode(values, hints, self.effort)
            streams.append(Stream(coded.coder, coded.payload))
        return tuple(streams)

    def _about(self, schemes: Mapping[str, str]) -> bytes:
        key = tuple(schemes.values())
        if key not in self._metadata:
            self._metadata[key] = file_metadata.to_bytes(**self.about, schemes=schemes)
        return self._metadata[key]


def alias_entries(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> list[Entry]:
    """Return the entries of second names (`ties`: second → first)."""
    return [
        Entry(name, ALIAS, DTYPES.index(tensors[first].dtype), tuple(tensors[first].shape), target=first)
        for name, first in ties.items()
    ]
