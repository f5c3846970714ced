"""Encoded tensors → the bytes of a file, and the numbers by which files call schemes and dtypes.

Coding a tensor twice is coding it once: a search over steps pays only for what changed.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from birdie.artifact import container
from birdie.artifact.container import Entry, Stream
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.decoders import DECODERS
from birdie.compress.tensors import kernel
from birdie.entropy import coder as entropy
from birdie.entropy.hints import Effort
from birdie.runtime.callbacks import Progress

SCHEMES = {name: number for number, name in enumerate(DECODERS, 1)}
# The numbers in the file. Never change one; new ones go at the end.
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
)  # fmt: skip


class Meter:
    """Counts coded tensors for a progress callback; the total grows if the first guess was short."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def step(self) -> None:
        self.done += 1
        self.total = max(self.total, self.done)
        self.report(self.done)

    def finish(self) -> None:
        self.report(self.total)

    def report(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, self.total)


class Packer:
    """Encoded tensors → the bytes of the whole file. What the last call coded is not coded again."""

    def __init__(
        self, pool: ThreadPoolExecutor, effort: Effort, aliases: list[Entry], metadata: bytes, meter: Meter
    ) -> None:
        self.pool, self.effort, self.aliases, self.metadata, self.meter = pool, effort, aliases, metadata, meter
        self.known: dict[int, tuple[Encoded, Entry]] = {}

    def __call__(self, encoded: Mapping[str, Encoded]) -> bytes:
        futures = {
            name: self.pool.submit(self._entry, name, item)
            for name, item in encoded.items()
            if id(item) not in self.known
        }
        entries = {}
        for name, item in encoded.items():
            entries[name] = futures[name].result() if name in futures else self.known[id(item)][1]
            self.meter.step()
        self.known = {id(item): (item, entries[name]) for name, item in encoded.items()}
        return container.to_bytes([*entries.values(), *self.aliases], self.metadata)

    def _entry(self, name: str, encoded: Encoded) -> Entry:
        layout = DECODERS[encoded.scheme].layout(encoded.shape, encoded.dtype, encoded.params)
        streams = []
        for values, expected in zip(encoded.streams, layout, strict=True):
            whole = kernel(encoded.shape, expected.columns)
            hints = expected.hints if whole == (1, 1) else replace(expected.hints, kernel=whole)
            coded = entropy.encode(values, hints, self.effort)
            streams.append(Stream(coded.coder, coded.payload))
        code = DTYPES.index(encoded.dtype)
        return Entry(name, SCHEMES[encoded.scheme], code, encoded.shape, encoded.params, tuple(streams))
