"""Row-class ANS: rANS with one static table for each of at most 16 classes of rows.

The row-class format of the Parameter Golf community, implemented from its description: k-means clusters the rows of all
tensors by the square roots of their histograms (where Euclidean distance is Hellinger distance), each class has a
frequency table quantized to 12 to 14 bits, and tables and class indices are compressed with LZMA. This side information
counts; names and shapes do not, in favor of the format.

The coder is rANS (Duda, arXiv 1311.2540) with one 64-bit state and 32-bit refills, independent of birdie's.
"""

import lzma
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

Integers = NDArray[np.integer]
Matrix = NDArray[np.float32]

CLASS_COUNTS = (4, 8, 16)
PRECISIONS = (12, 13, 14)
_LOWEST = 1 << 31
_SEEDS = 3
_ROUNDS = 40
_FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 1, "pb": 1}]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Output of `encode`.

    Attributes:
        side: tables and classes, compressed with LZMA.
        words: refills of the rANS state, uint32.
    """

    side: bytes
    words: NDArray[np.uint32]

    @property
    def size(self) -> int:
        """Bytes of tables, classes and words."""
        return len(self.side) + self.words.nbytes


def encode(arrays: Sequence[Integers]) -> Encoded:
    """Encode matrices (rows, columns), with the best number of classes and precision.

    Args:
        arrays: at least one value; at most 2**14 different values, within int16.

    Raises:
        ValueError: there are too many different values.
    """
    values, flat = np.unique(np.concatenate([array.ravel() for array in arrays]), return_inverse=True)
    symbols = flat.astype(np.uint16)
    lengths = _row_lengths([array.shape for array in arrays])
    counts = np.zeros((lengths.size, values.size), np.int64)
    _count(symbols, lengths, counts)
    best: Encoded | None = None
    for kinds in CLASS_COUNTS:
        classes = cluster(counts, min(kinds, lengths.size))
        sums = np.stack([counts[classes == kind].sum(0) for kind in range(int(classes.max()) + 1)])
        for precision in PRECISIONS:
            if values.size > 1 << precision:
                continue
            tables = np.stack([normalized(row, precision) for row in sums])
            side = _pack_side(values, tables, classes, precision)
            coded = Encoded(side, _encode_words(symbols, lengths, classes, tables, precision))
            best = coded if best is None or coded.size < best.size else best
    if best is None:
        raise ValueError(f"{values.size:,} different values are too many for static tables")
    return best


def decode(coded: Encoded, shapes: Sequence[tuple[int, ...]]) -> list[Integers]:
    """Invert `encode`: return matrices of `shapes`, int16.

    Raises:
        ValueError: the words do not match the symbols.
    """
    lengths = _row_lengths(shapes)
    values, tables, classes, precision = _unpack_side(coded.side, lengths.size)
    slots = np.empty((tables.shape[0], 1 << precision), np.uint16)
    for kind, table in enumerate(tables):
        slots[kind] = np.repeat(np.arange(table.size, dtype=np.uint16), table)
    symbols = np.empty(int(lengths.sum()), np.uint16)
    starts = np.cumsum(tables, 1) - tables
    used = _decode(coded.words, lengths, classes, slots, tables.astype(np.uint64), starts.astype(np.uint64), symbols)
    if used != coded.words.size:
        raise ValueError("the words do not end where the symbols do")
    ends = np.cumsum([rows * columns for rows, columns in shapes])[:-1]
    parts = np.split(values[symbols], ends)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def cluster(counts: NDArray[np.int64], kinds: int) -> NDArray[np.uint8]:
    """Return the class of each row, 0, 1, … without gaps: k-means of the histograms (rows, symbols) by Hellinger
    distance.

    Of several starts (k-means++), the one whose classes have the least entropy is used.
    """
    points = np.sqrt(counts / np.maximum(counts.sum(1, keepdims=True), 1)).astype(np.float32)
    best, best_bits = np.zeros(len(points), np.int64), np.inf
    for seed in range(_SEEDS):
        classes = _k_means(points, kinds, np.random.default_rng(seed))
        bits = sum(_entropy(counts[classes == kind].sum(0)) for kind in range(kinds))
        if bits < best_bits:
            best, best_bits = classes, bits
    return np.unique(best, return_inverse=True)[1].astype(np.uint8)


def normalized(counts: NDArray[np.int64], precision: int) -> NDArray[np.int64]:
    """Return frequencies that sum to 2**precision, at least 1 where a symbol occurs."""
    total = 1 << precision
    exact = counts * (total / counts.sum())
    out = np.where(counts > 0, np.maximum(np.floor(exact), 1), 0).astype(np.int64)
    while int(out.sum()) != total:
        # Change the frequencies whose change costs the least code length.
        if out.sum() < total:
            gain = np.where(out > 0, counts * np.log2((out + 1) / np.maximum(out, 1)), -1.0)
            chosen = np.argsort(-gain, kind="stable")[: min(total - int(out.sum()), int((out > 0).sum()))]
            out[chosen] += 1
        else:
            fewer = np.maximum(out - 1, 1)
            loss = np.where(out > 1, counts * np.log2(np.maximum(out, 1) / fewer), np.inf)
            chosen = np.argsort(loss, kind="stable")[: min(int(out.sum()) - total, int((out > 1).sum()))]
            out[chosen] -= 1
    return out


def _k_means(points: Matrix, kinds: int, random: np.random.Generator) -> NDArray[np.int64]:
    centers = points[[int(random.integers(len(points)))]]
    for _ in range(kinds - 1):
        far = np.maximum(_distances(points, centers).min(1), 0).astype(np.float64)
        chance = far / far.sum() if far.sum() > 0 else None
        centers = np.vstack([centers, points[[int(random.choice(len(points), p=chance))]]])
    classes = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        nearest = _distances(points, centers).argmin(1)
        if (nearest == classes).all():
            break
        classes = nearest
        for kind in range(kinds):
            if (classes == kind).any():
                centers[kind] = points[classes == kind].mean(0)
    return classes


def _distances(points: Matrix, centers: Matrix) -> Matrix:
    """Return squared distances (points, centers) of points of length 1 (rows without values do not matter)."""
    squares: Matrix = 1 - 2 * points @ centers.T + (centers**2).sum(1)
    return squares


def _entropy(counts: NDArray[np.int64]) -> float:
    """Return the bits of all symbols under their own distribution."""
    seen = counts[counts > 0]
    return float((seen * np.log2(seen.sum() / seen)).sum())


def _row_lengths(shapes: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    return np.concatenate([np.full(rows, columns, np.int64) for rows, columns in shapes])


def _pack_side(values: Integers, tables: NDArray[np.int64], classes: NDArray[np.uint8], precision: int) -> bytes:
    head = np.array([precision, tables.shape[0], values.size], "<u2").tobytes() + values.astype("<i2").tobytes()
    content = head + tables.astype("<u2").T.tobytes() + classes.tobytes()
    return lzma.compress(content, format=lzma.FORMAT_RAW, filters=_FILTERS)


def _unpack_side(side: bytes, rows: int) -> tuple[Integers, NDArray[np.int64], NDArray[np.uint8], int]:
    content = lzma.decompress(side, format=lzma.FORMAT_RAW, filters=_FILTERS)
    precision, kinds, size = (int(number) for number in np.frombuffer(content, "<u2", 3))
    values = np.frombuffer(content, "<i2", size, 6)
    tables = np.frombuffer(content, "<u2", kinds * size, 6 + 2 * size).reshape(size, kinds).T.astype(np.int64)
    classes = np.frombuffer(content, np.uint8, rows, 6 + 2 * size * (1 + kinds))
    return values.astype(np.int16), tables, classes, precision


def _encode_words(
    symbols: NDArray[np.uint16],
    lengths: NDArray[np.int64],
    classes: NDArray[np.uint8],
    tables: NDArray[np.int64],
    precision: int,
) -> NDArray[np.uint32]:
    starts = np.cumsum(tables, 1) - tables
    buffer = np.empty(symbols.size + 4, np.uint32)
    first = _encode(symbols, lengths, classes, tables.astype(np.uint64), starts.astype(np.uint64), precision, buffer)
    return buffer[first:].copy()


@njit(cache=True)
def _count(symbols, lengths, counts):  # type: ignore[no-untyped-def]
    at = 0
    for row in range(lengths.size):
        for _ in range(lengths[row]):
            counts[row, symbols[at]] += 1
            at += 1


@njit(cache=True)
def _encode(symbols, lengths, classes, tables, starts, precision, buffer):  # type: ignore[no-untyped-def]
    shift, word = np.uint64(precision), np.uint64(32)
    x, at, index = np.uint64(_LOWEST), buffer.size, symbols.size
    for row in range(lengths.size - 1, -1, -1):
        kind = classes[row]
        for _ in range(lengths[row]):
            index -= 1
            frequency = tables[kind, symbols[index]]
            if x >= frequency << (np.uint64(63) - shift):
                at -= 1
                buffer[at] = np.uint32(x & np.uint64(0xFFFFFFFF))
                x >>= word
            x = ((x // frequency) << shift) + x % frequency + starts[kind, symbols[index]]
    buffer[at - 1] = np.uint32(x & np.uint64(0xFFFFFFFF))
    buffer[at - 2] = np.uint32(x >> word)
    return at - 2


@njit(cache=True)
def _decode(words, lengths, classes, slots, tables, starts, symbols):  # type: ignore[no-untyped-def]
    mask = np.uint64(slots.shape[1] - 1)
    shift = np.uint64(0)
    while (np.uint64(1) << shift) <= mask:
        shift += np.uint64(1)
    x = np.uint64(words[0]) << np.uint64(32) | np.uint64(words[1])
    at, index = 2, 0
    for row in range(lengths.size):
        kind = classes[row]
        for _ in range(lengths[row]):
            slot = x & mask
            symbol = slots[kind, slot]
            symbols[index] = symbol
            index += 1
            x = tables[kind, symbol] * (x >> shift) + slot - starts[kind, symbol]
            if x < np.uint64(_LOWEST) and at < words.size:
                x = x << np.uint64(32) | np.uint64(words[at])
                at += 1
    return at if x == np.uint64(_LOWEST) else -1
