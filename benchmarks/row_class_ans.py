"""The rival that knows about rows: rANS with one static table for each of at most 16 classes of rows.

The row-class format of the Parameter Golf community, written anew from its description: the rows of all tensors are
clustered by k-means on the square roots of their histograms (Euclidean distance there is Hellinger distance), each
class gets a frequency table quantized to 12 to 14 bits, and tables and class numbers go through LZMA. All that side
information is counted; names and shapes are not, in its favour.

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
    """What `encode` wrote.

    Attributes:
        side: tables and classes under LZMA.
        words: the refills of the one rANS state, uint32.
    """

    side: bytes
    words: NDArray[np.uint32]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.side) + self.words.nbytes


def encode(arrays: Sequence[Integers]) -> Encoded:
    """Code matrices (rows, columns); the smallest over class counts and precisions.

    `arrays` hold at least one value; all values together are at most 2**14 different ones within int16.
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
    """Undo `encode`: matrices of `shapes`, int16."""
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
    """k-means of rows, given their histograms (rows, symbols), by Hellinger distance: the class of each, without gaps.

    Of several starts (k-means++) the one whose classes have the least entropy is kept.
    """
    points = np.sqrt(counts / np.maximum(counts.sum(1, keepdims=True), 1)).astype(np.float32)
    best, best_bits = np.zeros(len(points), np.int64), np.inf
    for seed in range(_SEEDS):
        found = _k_means(points, kinds, np.random.default_rng(seed))
        bits = sum(_entropy(counts[found == kind].sum(0)) for kind in range(kinds))
        if bits < best_bits:
            best, best_bits = found, bits
    return np.unique(best, return_inverse=True)[1].astype(np.uint8)


def normalized(counts: NDArray[np.int64], precision: int) -> NDArray[np.int64]:
    """Frequencies that sum to 2**precision, at least 1 where a symbol occurs."""
    whole = 1 << precision
    exact = counts * (whole / counts.sum())
    out = np.where(counts > 0, np.maximum(np.floor(exact), 1), 0).astype(np.int64)
    while int(out.sum()) != whole:
        # Give or take where it changes the code length least.
        if out.sum() < whole:
            gain = np.where(out > 0, counts * np.log2((out + 1) / np.maximum(out, 1)), -1.0)
            chosen = np.argsort(-gain, kind="stable")[: min(whole - int(out.sum()), int((out > 0).sum()))]
            out[chosen] += 1
        else:
            fewer = np.maximum(out - 1, 1)
            loss = np.where(out > 1, counts * np.log2(np.maximum(out, 1) / fewer), np.inf)
            chosen = np.argsort(loss, kind="stable")[: min(int(out.sum()) - whole, int((out > 1).sum()))]
            out[chosen] -= 1
    return out


def _k_means(points: Matrix, kinds: int, random: np.random.Generator) -> NDArray[np.int64]:
    centres = points[[int(random.integers(len(points)))]]
    for _ in range(kinds - 1):
        far = np.maximum(_distances(points, centres).min(1), 0).astype(np.float64)
        chance = far / far.sum() if far.sum() > 0 else None
        centres = np.vstack([centres, points[[int(random.choice(len(points), p=chance))]]])
    found = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        after = _distances(points, centres).argmin(1)
        if (after == found).all():
            break
        found = after
        for kind in range(kinds):
            if (found == kind).any():
                centres[kind] = points[found == kind].mean(0)
    return found


def _distances(points: Matrix, centres: Matrix) -> Matrix:
    """Squared, (points, centres); points have length 1 (those of rows without values do not matter)."""
    squares: Matrix = 1 - 2 * points @ centres.T + (centres**2).sum(1)
    return squares


def _entropy(counts: NDArray[np.int64]) -> float:
    """Bits of all symbols under their own distribution."""
    seen = counts[counts > 0]
    return float((seen * np.log2(seen.sum() / seen)).sum())


def _row_lengths(shapes: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    return np.concatenate([np.full(rows, columns, np.int64) for rows, columns in shapes])


def _pack_side(values: Integers, tables: NDArray[np.int64], classes: NDArray[np.uint8], precision: int) -> bytes:
    head = np.array([precision, tables.shape[0], values.size], "<u2").tobytes() + values.astype("<i2").tobytes()
    whole = head + tables.astype("<u2").T.tobytes() + classes.tobytes()
    return lzma.compress(whole, format=lzma.FORMAT_RAW, filters=_FILTERS)


def _unpack_side(side: bytes, rows: int) -> tuple[Integers, NDArray[np.int64], NDArray[np.uint8], int]:
    whole = lzma.decompress(side, format=lzma.FORMAT_RAW, filters=_FILTERS)
    precision, kinds, size = (int(number) for number in np.frombuffer(whole, "<u2", 3))
    values = np.frombuffer(whole, "<i2", size, 6)
    tables = np.frombuffer(whole, "<u2", kinds * size, 6 + 2 * size).reshape(size, kinds).T.astype(np.int64)
    classes = np.frombuffer(whole, np.uint8, rows, 6 + 2 * size * (1 + kinds))
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
    x, at, place = np.uint64(_LOWEST), buffer.size, symbols.size
    for row in range(lengths.size - 1, -1, -1):
        kind = classes[row]
        for _ in range(lengths[row]):
            place -= 1
            frequency = tables[kind, symbols[place]]
            if x >= frequency << (np.uint64(63) - shift):
                at -= 1
                buffer[at] = np.uint32(x & np.uint64(0xFFFFFFFF))
                x >>= word
            x = ((x // frequency) << shift) + x % frequency + starts[kind, symbols[place]]
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
    at, place = 2, 0
    for row in range(lengths.size):
        kind = classes[row]
        for _ in range(lengths[row]):
            slot = x & mask
            symbol = slots[kind, slot]
            symbols[place] = symbol
            place += 1
            x = tables[kind, symbol] * (x >> shift) + slot - starts[kind, symbol]
            if x < np.uint64(_LOWEST) and at < words.size:
                x = x << np.uint64(32) | np.uint64(words[at])
                at += 1
    return at if x == np.uint64(_LOWEST) else -1
