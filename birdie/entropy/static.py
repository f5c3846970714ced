"""Static interleaved rANS of a whole array: alphabet, references, classes and tables chosen, described, and applied.

    values ─ scan ─ alphabet ─► symbols ─ reference rows ─► symbols ─ classes, tables ─► rANS words, in chunks

A payload is: length of the side information in words (a varint), its words, the words of each chunk, and the low bits
of a split alphabet. Chunks hold whole rows, about a million symbols, and decode independently on as many threads.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from birdie.cursor import varint
from birdie.entropy import alphabet as alphabets
from birdie.entropy import classes as row_classes
from birdie.entropy import model, rans, reference
from birdie.entropy.alphabet import Alphabet, Symbols
from birdie.entropy.numbers import Reader, Writer
from birdie.entropy.raw import Bytes, check_range
from birdie.entropy.stream import Effort
from birdie.errors import ArtifactError

_Integer = TypeVar("_Integer", bound=np.integer)

CHUNK = 1 << 20
MIN_PRECISION = 8
MIN_COLUMNS = 8  # of rows that have references or classes: shorter ones would cost more to describe than they save
_SCAN, _PRECISION, _CLASSES, _WORDS = 5, 6, 7, 21


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way to code the symbols, and the bits it takes.

    Attributes:
        symbols: (rows, columns) as scanned, references already subtracted.
        columns_first: the array was transposed before it was scanned.
        distances: reference of each row, or None.
        classes: class of each row.
        shapes: table of each class.
    """

    symbols: Symbols
    columns_first: bool
    distances: NDArray[np.int64] | None
    classes: NDArray[np.uint8]
    shapes: tuple[model.Shape, ...]
    precision: int
    bits: float


def encode(values: NDArray[np.integer], effort: Effort) -> bytes:
    """Code `values` (rows, columns), at least two different ones, all within int32."""
    alphabet, symbols = alphabets.choose(values)
    plan = _best_plan(symbols, alphabet, effort)
    frequencies = np.stack([shape.frequencies(alphabet.size, plan.precision) for shape in plan.shapes])
    chunks = [
        rans.encode(part, kinds, frequencies, plan.precision) for part, kinds in _chunks(plan.symbols, plan.classes)
    ]
    scanned = values.T if plan.columns_first else values
    low = alphabets.low_bits(scanned, alphabet) if alphabet.kind == alphabets.SPLIT else b""
    side = _describe(plan, alphabet, [chunk.size for chunk in chunks])
    words = b"".join(chunk.astype("<u2").tobytes() for chunk in (side, *chunks))
    return varint(side.size) + words + low


def _describe(plan: _Plan, alphabet: Alphabet, lengths: list[int]) -> NDArray[np.uint16]:
    writer = Writer()
    alphabet.put(writer)
    writer.put(_SCAN, int(plan.columns_first) + 2 * (plan.distances is not None))
    writer.put(_PRECISION, plan.precision - MIN_PRECISION)
    writer.put(_CLASSES, len(plan.shapes) - 1)
    if plan.distances is not None:
        reference.put(writer, plan.distances)
    if len(plan.shapes) > 1:
        row_classes.put(writer, plan.classes)
    for shape in plan.shapes:
        shape.put(writer, alphabet.size)
    writer.put_all(_WORDS, lengths)
    return writer.finish()


def _chunks(
    symbols: NDArray[_Integer], classes: NDArray[np.uint8]
) -> Iterator[tuple[NDArray[_Integer], NDArray[np.uint8]]]:
    """Parts that are coded on their own. With one class rows mean nothing, and the array is cut as one long row."""
    if int(classes.max()) == 0:
        flat = symbols.reshape(1, -1)
        for start in range(0, flat.shape[1], CHUNK):
            yield flat[:, start : start + CHUNK], classes[:1]
        return
    rows = max(1, CHUNK // symbols.shape[1])
    for start in range(0, symbols.shape[0], rows):
        yield symbols[start : start + rows], classes[start : start + rows]


def _best_plan(symbols: Symbols, alphabet: Alphabet, effort: Effort) -> _Plan:
    """The cheapest way found: "fast" compares a few, "max" every scan, class count and use of references."""
    size = alphabet.size
    precision = 12 if size <= 64 or (effort == "fast" and size <= 256) else 14 if size <= 1024 else 15
    single = np.zeros(symbols.shape[0], np.uint8)
    plans = [_planned(symbols, False, None, single, size, precision)]
    for columns_first in (False,) if effort == "fast" else (False, True):
        scanned = np.ascontiguousarray(symbols.T) if columns_first else symbols
        rows, columns = scanned.shape
        if rows < 8 or columns < MIN_COLUMNS or symbols.size < 2048 or rows * size > 1 << 27:
            continue
        numbers = (16,) if effort == "fast" else (2, 4, 8, 16, 32)
        plans += _classed(scanned, columns_first, None, size, precision, numbers)
        distances = reference.choose(scanned) if alphabet.kind == alphabets.AFFINE else np.zeros(rows, np.int64)
        if distances.any():
            different = reference.subtract(scanned, distances, size)
            plans += _classed(different, columns_first, distances, size, precision, numbers)
    plan = min(plans, key=lambda plan: plan.bits)
    return _refined(plan, size, 1 if effort == "fast" else 3)


def _planned(
    symbols: Symbols,
    columns_first: bool,
    distances: NDArray[np.int64] | None,
    classes: NDArray[np.uint8],
    size: int,
    precision: int,
    counts: NDArray[np.int64] | None = None,
    quick: bool = True,
) -> _Plan:
    """The plan with these classes and the best tables for them; `counts` are the histograms of the rows."""
    kinds = int(classes.max()) + 1
    if counts is None or kinds == 1:
        sums = [np.bincount(symbols.ravel(), minlength=size)]
    else:
        sums = [counts[classes == kind].sum(0) for kind in range(kinds)]
    fits = [model.fit(total, precision, quick=quick) for total in sums]
    bits = sum(cost for _, cost in fits) + _naming_bits(classes)
    if distances is not None:
        bits += _naming_bits(distances > 0) + np.count_nonzero(distances) * (np.log2(distances.size) + 1)
    shapes = tuple(shape for shape, _ in fits)
    return _Plan(symbols, columns_first, distances, classes, shapes, precision, bits)


def _classed(
    symbols: Symbols,
    columns_first: bool,
    distances: NDArray[np.int64] | None,
    size: int,
    precision: int,
    numbers: tuple[int, ...],
) -> list[_Plan]:
    """One plan for each number of classes that the rows can fill."""
    counts = row_classes.histograms(symbols, size)
    plans = []
    for number in numbers:
        if number <= symbols.shape[0] // 2:
            found = row_classes.cluster(counts, number)
            plans.append(_planned(symbols, columns_first, distances, found, size, precision, counts))
    return plans


def _refined(plan: _Plan, size: int, rounds: int) -> _Plan:
    """`plan` with carefully fitted tables; in further rounds rows move to the table that now suits them best."""
    single = len(plan.shapes) == 1
    counts = None if single else row_classes.histograms(plan.symbols, size)
    best, classes = plan, plan.classes
    for _ in range(1 if single else rounds):
        fitted = _planned(
            plan.symbols, plan.columns_first, plan.distances, classes, size, plan.precision, counts, quick=False
        )
        best = min(best, fitted, key=lambda plan: plan.bits)
        if counts is None:
            break
        tables = np.stack([shape.frequencies(size, plan.precision) for shape in fitted.shapes])
        found = row_classes.assign(counts, tables, plan.precision, classes)
        classes = row_classes.renumbered(found, found.astype(np.float64))
    return best


def _naming_bits(found: NDArray[np.generic]) -> float:
    """Order-0 entropy of the classes, in bits."""
    counts = np.unique(found, return_counts=True)[1]
    return float(-(counts * np.log2(counts / found.size)).sum())


def decode(payload: Bytes, rows: int, columns: int, dtype: np.dtype[np.integer], threads: int) -> NDArray[np.integer]:
    """Undo `encode`: (rows, columns) of `dtype`, or of int8 or int16 if that was int32 and they hold all values.

    Raises:
        ArtifactError: the payload is not that of such an array.
    """
    side, rest = _side(payload)
    reader = Reader(side)
    alphabet = Alphabet.take(reader)
    scan = reader.take(_SCAN, 3, "the scan")
    precision = reader.take(_PRECISION, rans.MAX_PRECISION - MIN_PRECISION, "the precision") + MIN_PRECISION
    count = reader.take(_CLASSES, row_classes.MAX_CLASSES - 1, "the number of classes") + 1
    if scan & 1:
        rows, columns = columns, rows
    if columns < MIN_COLUMNS and (scan & 2 or count > 1):
        raise ArtifactError(f"rows of {columns} in a stream have references or classes; the file is damaged")
    distances = reference.take(reader, rows) if scan & 2 else None
    classes = row_classes.take(reader, rows, count) if count > 1 else np.zeros(rows, np.uint8)
    frequencies = model.take(reader, count, alphabet.size, precision)
    plain = distances is None and alphabet.kind != alphabets.SPLIT
    values = alphabet.values if plain else np.arange(alphabet.size)
    if alphabet.kind != alphabets.SPLIT:
        low, high = int(alphabet.values[0]), int(alphabet.values[-1])
        check_range(low, high, dtype)
        dtype = _narrowest(low, high) if dtype == np.int32 else dtype
    out = np.empty((rows, columns), dtype if plain else np.uint16)
    table = rans.decode_table(frequencies, values, precision)
    parts = list(_chunks(out, classes))
    lengths = reader.take_all(_WORDS, len(parts))
    reader.finish()
    after = _decode_chunks(rest, lengths, parts, table, precision, threads)
    if alphabet.kind != alphabets.SPLIT and len(after):
        raise ArtifactError("bytes follow the last chunk of a stream; the file is damaged")
    if not plain:
        out = _valued(out, distances, alphabet, after, dtype)
    return out.T if scan & 1 else out


def _side(payload: Bytes) -> tuple[NDArray[np.uint16], memoryview]:
    """The words of the side information and all that follows them."""
    length = shift = at = 0
    view = memoryview(payload)
    while True:
        if at >= min(len(view), 10):
            raise ArtifactError("a coded stream is cut at its start; the file is damaged")
        length |= (view[at] & 0x7F) << shift
        shift += 7
        at += 1
        if view[at - 1] < 0x80:
            break
    if (at > 1 and view[at - 1] == 0) or length > (len(view) - at) // 2:
        raise ArtifactError(
            "a coded stream is cut in its side information or misstates its length; the file is damaged"
        )
    return np.frombuffer(view[at : at + 2 * length], "<u2").astype(np.uint16), view[at + 2 * length :]


def _decode_chunks(
    data: memoryview,
    lengths: NDArray[np.int64],
    parts: list[tuple[NDArray[np.integer], NDArray[np.uint8]]],
    table: NDArray[np.uint64],
    precision: int,
    threads: int,
) -> memoryview:
    """Fill `parts` from the words in `data`; what follows the words is returned."""
    ends = 2 * np.cumsum(lengths)
    if int(lengths.max()) > len(data) or int(ends[-1]) > len(data):
        raise ArtifactError("the chunks of a stream are longer than its payload; the file is damaged")

    def work(index: int) -> None:
        out, kinds = parts[index]
        end = int(ends[index])
        rans.decode(data[end - 2 * int(lengths[index]) : end], kinds, table, precision, out)

    if threads > 1 and len(parts) > 1:
        with ThreadPoolExecutor(min(threads, len(parts))) as pool:
            list(pool.map(work, range(len(parts))))
    else:
        for index in range(len(parts)):
            work(index)
    return data[int(ends[-1]) :]


def _valued(
    symbols: Symbols,
    distances: NDArray[np.int64] | None,
    alphabet: Alphabet,
    low: memoryview,
    dtype: np.dtype[np.integer],
) -> NDArray[np.integer]:
    if distances is not None:
        reference.add(symbols, distances, alphabet.size)
    out = np.empty(symbols.shape, dtype)
    if alphabet.kind == alphabets.SPLIT:
        alphabets.join(symbols.ravel(), low, alphabet, out.ravel())
    else:
        alphabets.look_up(symbols, alphabet, out)
    return out


def _narrowest(low: int, high: int) -> np.dtype[np.integer]:
    """The narrowest signed dtype for `low` … `high`, 32 bits at the most."""
    narrow = (kind for kind in (np.int8, np.int16) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return np.dtype(next(narrow, np.int32))
