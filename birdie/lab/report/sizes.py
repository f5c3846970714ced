"""Bytes of an artifact by tensor and kind, read from its streams; histograms of the quantized weights."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from birdie.artifact import ALIAS, MEMBER, File, Reader, stored_as
from birdie.compress import StreamLayout, decoder
from birdie.entropy import MIXED, decode, starting_probabilities

_MOST_SYMBOLS = 512  # of a histogram: more are no bars that can be seen


@dataclass(frozen=True, slots=True)
class TensorSize:
    """Bytes of a tensor.

    Attributes:
        name, scheme, shape: as `inspect` shows them.
        weights: number of elements.
        symbols: bytes of the streams of quantized weights.
        side: bytes of scales and other side information.
    """

    name: str
    scheme: str
    shape: tuple[int, ...]
    weights: int
    symbols: int
    side: int

    @property
    def bytes(self) -> int:
        """All bytes of the tensor."""
        return self.symbols + self.side

    @property
    def bits(self) -> float:
        """Bits per weight; 0 without weights."""
        return 8 * self.bytes / self.weights if self.weights else 0.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Quantized weights of a tensor.

    Attributes:
        name: of the tensor; of one in blocks, the histogram is that of the first.
        values: (n,) the integers that occur, or may occur.
        shares: (n,) fraction of the weights.
        probabilities: (n,) that context mixing starts from; None for other coders, and for values coded as differences.
        entropy: bits per weight of `shares`.
        bits: bits per weight that the stream takes.
    """

    name: str
    values: NDArray[np.int64]
    shares: NDArray[np.float64]
    probabilities: NDArray[np.float64] | None
    entropy: float
    bits: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of an artifact.

    Attributes:
        tensors: in the order of the file.
        header: bytes of header and metadata.
        histograms: of the tensors that have integers, the largest first.
    """

    tensors: tuple[TensorSize, ...]
    header: int
    histograms: tuple[Histogram, ...]


def sizes_of(path: Path, histograms: int = 6) -> Sizes:
    """Return where the bytes of an artifact went.

    Args:
        histograms: number of tensors whose integers are decoded and counted.
    """
    with File(path, decoder) as reader:
        reader.require(reader.default_limit)
        tensors: list[TensorSize] = []
        firsts: dict[str, tuple[str, tuple[StreamLayout, ...]]] = {}  # name → its first block, and the layout of that
        stored = {name: name for name in reader.names if reader.entry(name).kind not in (ALIAS, MEMBER)}
        stored |= {f"{one[0]} and {len(one) - 1} others like it": group for group, one in reader.groups.items()}
        for name, holder in stored.items():
            entry = reader.entry(holder)
            symbols = side = 0
            for block, _ in reader.parts(holder):
                part = reader.entry(block)
                layout = reader.layout(part)
                firsts.setdefault(name, (block, layout))
                for length, stream in zip(reader.header(block).lengths, layout, strict=True):
                    if len(layout) == 1 or stream.hints.role == "symbols":
                        symbols += length
                    else:
                        side += length
            weights = int(np.prod(entry.shape, dtype=np.int64))
            scheme = stored_as(reader.entry(firsts[name][0]), reader.fields.get("schemes", {}))
            tensors.append(TensorSize(name, scheme, entry.shape, weights, symbols, side))
        counted: list[Histogram] = []
        for tensor in sorted(tensors, key=lambda one: -one.weights):
            if len(counted) < histograms and (one := _histogram(reader, tensor.name, *firsts[tensor.name])) is not None:
                counted.append(one)
        header = reader.size - sum(tensor.bytes for tensor in tensors)
        return Sizes(tuple(tensors), header, tuple(counted))


def _histogram(reader: Reader, name: str, block: str, layout: tuple[StreamLayout, ...]) -> Histogram | None:
    """Return the histogram of the largest stream of symbols of a tensor's block; None if none has few values."""
    streams = reader.read(block).streams
    rows = [index for index, one in enumerate(layout) if one.hints.role == "symbols"]
    if not rows:
        return None
    index = max(rows, key=lambda number: layout[number].rows * layout[number].columns)
    stream, one = streams[index], layout[index]
    values = decode(stream.coder, stream.payload, one.rows, one.columns, one.hints, one.dtype)
    symbols, counts = np.unique(values, return_counts=True)
    if not 2 <= symbols.size <= _MOST_SYMBOLS:
        return None
    shares = counts / values.size
    entropy = float(-(shares * np.log2(shares)).sum())
    bits = 8 * len(stream.payload) / values.size
    start = None
    if stream.coder == MIXED:
        start = starting_probabilities(stream.payload, one.rows, one.columns)
    if start is None:
        return Histogram(name, symbols.astype(np.int64), shares, None, entropy, bits)
    possible, probabilities = start
    full = np.zeros(possible.size)
    full[np.searchsorted(possible, symbols)] = shares
    return Histogram(name, possible, full, probabilities, entropy, bits)
