"""Static interleaved rANS of a whole array: alphabet, prediction, classes and tables chosen, described, and applied.

    values ─ scan ─ alphabet ─► symbols ─ prediction ─► differences ─ classes, tables ─► rANS words, in chunks

A payload is: length of the side information in words (a varint), its words, the words of each chunk, and the low bits
of a split alphabet. Chunks hold whole rows, about a million symbols, and decode independently on as many threads. On
the paths of a trellis each class has a second table, for odd states.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy import classes as row_classes
from birdie.entropy import model, prediction, rans, trellis
from birdie.entropy.alphabet import Alphabet, Symbols
from birdie.entropy.numbers import Reader, Writer
from birdie.entropy.prediction import Prediction
from birdie.entropy.raw import Bytes, check_range
from birdie.entropy.varint import varint
from birdie.errors import ArtifactError

_Integer = TypeVar("_Integer", bound=np.integer)

MIN_PRECISION = 8
MIN_COLUMNS = 8  # of rows that have classes: shorter ones would cost more to describe than they save
_NUMBERS = (4, 16)  # of classes that are tried
_PRECISIONS = (12, 14, 15)  # tried where one pair of tables serves a trellis
_FORETOLD = (
    0.995  # share of the bits without prediction that one with must get below: it decodes at a third of the speed
)
_SCAN, _PRECISION, _CLASSES, _WORDS, _ZERO = 5, 6, 7, 21, 23


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way to code the symbols, and the bits it takes.

    Attributes:
        symbols: (rows, columns) as scanned, what was foretold already subtracted.
        columns_first: the array was transposed before it was scanned.
        predicted: None, or what was subtracted.
        classes: class of each row.
        shapes: table of each class; if `odd`, one for even states and one for odd ones of each.
        odd: None, or (rows, columns) whether a symbol is met in an odd state of the trellis.
    """

    symbols: Symbols
    columns_first: bool
    predicted: Prediction | None
    classes: NDArray[np.uint8]
    shapes: tuple[model.Shape, ...]
    precision: int
    bits: float
    odd: NDArray[np.uint8] | None = None


def encode(values: NDArray[np.integer], kernel: tuple[int, int], states: int = 1) -> bytes:
    """Code `values` (rows, columns), at least two different ones, all within int32.

    `kernel` is the height and width of the convolution whose weights they are, (1, 1) for a matrix; `states` those of
    the trellis on whose paths they lie, negative along rows.
    """
    alphabet, symbols = alphabets.choose(values)
    zero = 0 if alphabet.kind == alphabets.SPLIT else alphabets.zero(alphabet, symbols)
    plan = _best_plan(symbols, alphabet, zero, kernel)
    if abs(states) > 1 and alphabet.kind != alphabets.SPLIT:
        plan = min(plan, _on_paths(symbols, trellis.odds(values, states), alphabet.size), key=lambda each: each.bits)
    frequencies = np.stack([shape.frequencies(alphabet.size, plan.precision) for shape in plan.shapes])
    paths = plan.odd is not None
    parts = list(_chunks(plan.symbols, plan.classes, paths))
    odds = [None] * len(parts) if plan.odd is None else [part for part, _ in _chunks(plan.odd, plan.classes, True)]
    chunks = [
        rans.encode(part, kinds, frequencies, plan.precision, odd)
        for (part, kinds), odd in zip(parts, odds, strict=True)
    ]
    scanned = values.T if plan.columns_first else values
    low = alphabets.low_bits(scanned, alphabet) if alphabet.kind == alphabets.SPLIT else b""
    side = _describe(plan, alphabet, zero, [chunk.size for chunk in chunks])
    words = b"".join(chunk.astype("<u2").tobytes() for chunk in (side, *chunks))
    return varint(side.size) + words + low


def _describe(plan: _Plan, alphabet: Alphabet, zero: int, lengths: list[int]) -> NDArray[np.uint16]:
    writer = Writer()
    alphabet.put(writer)
    writer.put(_SCAN, int(plan.columns_first))
    writer.put(_PRECISION, plan.precision - MIN_PRECISION)
    count = int(plan.classes.max()) + 1
    writer.put(_CLASSES, count - 1 + (0 if plan.odd is None else row_classes.MAX_CLASSES))
    prediction.put(writer, plan.predicted)
    if plan.predicted is not None:
        writer.put(_ZERO, zero)
    if count > 1:
        row_classes.put(writer, plan.classes)
    for shape in plan.shapes:
        shape.put(writer, alphabet.size)
    writer.put_all(_WORDS, lengths)
    return writer.finish()


def _chunks(
    symbols: NDArray[_Integer], classes: NDArray[np.uint8], paths: bool
) -> Iterator[tuple[NDArray[_Integer], NDArray[np.uint8]]]:
    """Parts that are coded on their own. With one class and no paths rows mean nothing: it is cut as one long row."""
    if int(classes.max()) == 0 and not paths:
        flat = symbols.reshape(1, -1)
        for start in range(0, flat.shape[1], trellis.CHUNK):
            yield flat[:, start : start + trellis.CHUNK], classes[:1]
        return
    rows = trellis.chunk_rows(symbols.shape[1])
    for start in range(0, symbols.shape[0], rows):
        yield symbols[start : start + rows], classes[start : start + rows]


def _best_plan(symbols: Symbols, alphabet: Alphabet, zero: int, kernel: tuple[int, int]) -> _Plan:
    """The cheapest way found: with and without classes, rows or columns first, as they are or predicted."""
    size = alphabet.size
    precision = 12 if size <= 256 else 14 if size <= 1024 else 15
    plans = [_planned(symbols, False, None, np.zeros(symbols.shape[0], np.uint8), size, precision)]
    plans += _classed(symbols, False, None, size, precision)
    plans += _classed(np.ascontiguousarray(symbols.T), True, None, size, precision)
    best = min(plans, key=lambda plan: plan.bits)
    if alphabet.kind == alphabets.AFFINE and symbols.size >= 2048:
        plans = []
        for predicted in prediction.candidates(symbols, zero, kernel):
            left = predicted.subtract(symbols, zero, size)
            plans.append(_planned(left, False, predicted, np.zeros(symbols.shape[0], np.uint8), size, precision))
            plans += _classed(left, False, predicted, size, precision)
        foretold = min(plans, key=lambda plan: plan.bits, default=best)
        best = foretold if foretold.bits < _FORETOLD * best.bits else best
    return _refined(best, size)


def _planned(
    symbols: Symbols,
    columns_first: bool,
    predicted: Prediction | None,
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
    writer = Writer()
    prediction.put(writer, predicted)
    bits = sum(cost for _, cost in fits) + _naming_bits(classes) + 16 * writer.finish().size
    shapes = tuple(shape for shape, _ in fits)
    return _Plan(symbols, columns_first, predicted, classes, shapes, precision, bits)


def _classed(
    symbols: Symbols, columns_first: bool, predicted: Prediction | None, size: int, precision: int
) -> list[_Plan]:
    """One plan for each number of classes that the rows can fill."""
    rows, columns = symbols.shape
    if rows < 8 or columns < MIN_COLUMNS or symbols.size < 2048 or rows * size > 1 << 27:
        return []
    counts = row_classes.histograms(symbols, size)
    plans = []
    for number in _NUMBERS:
        if number <= rows // 2:
            found = row_classes.cluster(counts, number)
            plans.append(_planned(symbols, columns_first, predicted, found, size, precision, counts))
    return plans


def _refined(plan: _Plan, size: int) -> _Plan:
    """`plan` with carefully fitted tables."""
    counts = None if len(plan.shapes) == 1 else row_classes.histograms(plan.symbols, size)
    fitted = _planned(
        plan.symbols, plan.columns_first, plan.predicted, plan.classes, size, plan.precision, counts, quick=False
    )
    return min(plan, fitted, key=lambda plan: plan.bits)


def _on_paths(symbols: Symbols, odd: NDArray[np.uint8], size: int) -> _Plan:
    """The cheapest plan found with tables for even and for odd states."""
    rows, columns = symbols.shape
    joint = symbols + np.uint16(size) * odd
    found = [np.zeros(rows, np.uint8)]
    counts = np.bincount(joint.ravel(), minlength=2 * size).reshape(1, -1)
    if rows >= 8 and columns >= MIN_COLUMNS and symbols.size >= 2048 and rows * size <= 1 << 26:
        counts = row_classes.histograms(joint, 2 * size)
        plain = counts.reshape(rows, 2, size).sum(1)
        found += [row_classes.cluster(plain, number) for number in _NUMBERS if number <= rows // 2]

    def planned(classes: NDArray[np.uint8], precision: int, *, quick: bool) -> _Plan:
        sums = [counts[classes[: len(counts)] == kind].sum(0) for kind in range(int(classes.max()) + 1)]
        tables = [half if half.any() else total[:size] + total[size:] for total in sums for half in np.split(total, 2)]
        fits = [model.fit(table, precision, quick=quick, patient=not quick) for table in tables]
        bits = sum(cost for _, cost in fits) + _naming_bits(classes)
        return _Plan(symbols, False, None, classes, tuple(shape for shape, _ in fits), precision, bits, odd)

    usual = 12 if size <= 256 else 14 if size <= 1024 else 15
    best = min((planned(classes, usual, quick=True) for classes in found), key=lambda plan: plan.bits)
    careful = [planned(found[0], precision, quick=False) for precision in _PRECISIONS if precision >= usual]
    if best.classes.any():
        careful.append(planned(best.classes, usual, quick=False))
    return min(best, *careful, key=lambda plan: plan.bits)


def _naming_bits(found: NDArray[np.generic]) -> float:
    """Order-0 entropy of the classes, in bits."""
    counts = np.unique(found, return_counts=True)[1]
    return float(-(counts * np.log2(counts / found.size)).sum())


def decode(
    payload: Bytes, rows: int, columns: int, dtype: np.dtype[np.integer], threads: int, states: int = 1
) -> NDArray[np.integer]:
    """Undo `encode`: (rows, columns) of `dtype`, or of int8 or int16 if that was int32 and they hold all values.

    Raises:
        ArtifactError: the payload is not that of such an array.
    """
    side, rest = side_words(payload)
    reader = Reader(side)
    alphabet = Alphabet.take(reader)
    columns_first = reader.take(_SCAN, 1, "the scan")
    precision = reader.take(_PRECISION, rans.MAX_PRECISION - MIN_PRECISION, "the precision") + MIN_PRECISION
    most = row_classes.MAX_CLASSES
    form = reader.take(_CLASSES, most - 1 + (abs(states) > 1) * most, "the number of classes")
    paths, count = trellis.machine(states if form >= most else 1), form % most + 1
    if columns_first:
        rows, columns = columns, rows
    if columns < MIN_COLUMNS and count > 1:
        raise ArtifactError(f"rows of {columns} in a stream have classes; the file is damaged")
    predicted = prediction.take(reader, rows, columns)
    zero = reader.take(_ZERO, alphabet.size - 1, "the zero") if predicted is not None else 0
    classes = row_classes.take(reader, rows, count) if count > 1 else np.zeros(rows, np.uint8)
    frequencies = model.take(reader, count << form // most, alphabet.size, precision)
    plain = predicted is None and alphabet.kind != alphabets.SPLIT
    values = alphabet.values if plain else np.arange(alphabet.size)
    if alphabet.kind != alphabets.SPLIT:
        check_range(int(alphabet.values[0]), int(alphabet.values[-1]), dtype)
        dtype = alphabets.narrowest(alphabet, dtype)
    out = np.empty((rows, columns), dtype if plain else np.uint16)
    table = rans.decode_table(frequencies, values, precision)
    parts = list(_chunks(out, classes, form >= most))
    lengths = reader.take_all(_WORDS, len(parts))
    reader.finish()

    def work(index: int, words: memoryview) -> None:
        part, kinds = parts[index]
        rans.decode(words, kinds, table, precision, paths, part)

    after = decode_chunks(rest, lengths, 2, work, threads)
    if alphabet.kind != alphabets.SPLIT and len(after):
        raise ArtifactError("bytes follow the last chunk of a stream; the file is damaged")
    if not plain:
        out = _valued(out if predicted is None else predicted.add(out, zero, alphabet.size), alphabet, after, dtype)
    return out.T if columns_first else out


def side_words(payload: Bytes) -> tuple[NDArray[np.uint16], memoryview]:
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


def decode_chunks(
    data: memoryview, lengths: NDArray[np.int64], width: int, work: Callable[[int, memoryview], None], threads: int
) -> memoryview:
    """Give `work` each chunk's number and its words of `width` bytes in `data`; what follows the chunks is returned."""
    ends = width * np.cumsum(lengths)
    if int(lengths.max()) > len(data) or int(ends[-1]) > len(data):
        raise ArtifactError("the chunks of a stream are longer than its payload; the file is damaged")

    def part(index: int) -> None:
        end = int(ends[index])
        work(index, data[end - width * int(lengths[index]) : end])

    if threads > 1 and len(lengths) > 1:
        with ThreadPoolExecutor(min(threads, len(lengths))) as pool:
            list(pool.map(part, range(len(lengths))))
    else:
        for index in range(len(lengths)):
            part(index)
    return data[int(ends[-1]) :]


def _valued(symbols: Symbols, alphabet: Alphabet, low: memoryview, dtype: np.dtype[np.integer]) -> NDArray[np.integer]:
    out = np.empty(symbols.shape, dtype)
    if alphabet.kind == alphabets.SPLIT:
        alphabets.join(symbols.ravel(), low, alphabet, out.ravel())
    else:
        alphabets.look_up(symbols, alphabet, out)
    return out
