"""Coder "static": interleaved rANS with a frequency table per class of rows.

    values ─ scan ─ alphabet ─► symbols ─ prediction ─► residuals ─ classes, tables ─► rANS words, in chunks

The encoder compares ways to code the array by their cost in bits, and describes the cheapest in the side information.
On the paths of a trellis each class has a second table, for odd states. The low bits of a split alphabet follow the
chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy import frequency_tables, payload, prediction, rans, row_classes, trellis
from birdie.entropy.alphabet import Alphabet, Symbols
from birdie.entropy.prediction import Prediction
from birdie.entropy.raw import Bytes, check_range, narrowest
from birdie.entropy.side_information import Reader, Writer
from birdie.errors import ArtifactError

_Integer = TypeVar("_Integer", bound=np.integer)

MIN_PRECISION = 8
MIN_COLUMNS = 8  # of rows that have classes: shorter ones would cost more to describe than they save
_CLASS_COUNTS = (4, 16)  # tried
_PRECISIONS = (12, 14, 15)  # tried where a single pair of tables serves a trellis
_PREDICTION_SHARE = 0.995  # prediction must save so much of the bits: it decodes at a third of the speed
_SCAN, _PRECISION, _CLASSES, _WORDS, _ZERO = 5, 6, 7, 21, 23  # contexts of the side information


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way to code the symbols, and the bits it takes.

    Attributes:
        symbols: (rows, columns) in scan order, residuals if there is a prediction.
        columns_first: the array was transposed.
        predictor: the prediction that was subtracted, or None.
        classes: class of each row.
        tables: table of each class; if `odd`, two for each: for even and for odd states.
        odd: None, or (rows, columns) 1 for a symbol in an odd state of the trellis.
    """

    symbols: Symbols
    columns_first: bool
    predictor: Prediction | None
    classes: NDArray[np.uint8]
    tables: tuple[frequency_tables.Description, ...]
    precision: int
    bits: float
    odd: NDArray[np.uint8] | None = None


def encode(values: NDArray[np.integer], kernel: tuple[int, int], states: int = 1) -> bytes:
    """Code `values` (rows, columns), at least two different ones, all within int32.

    Args:
        values: the array.
        kernel: height and width of the convolution whose weights they are, (1, 1) for a matrix.
        states: states of the trellis on whose paths they lie, negative along rows.
    """
    alphabet, symbols = alphabets.choose(values)
    zero = 0 if alphabet.kind == alphabets.SPLIT else alphabets.zero_symbol(alphabet, symbols)
    plan = _best_plan(symbols, alphabet, zero, kernel)
    if abs(states) > 1 and alphabet.kind != alphabets.SPLIT:
        paired = _trellis_plan(symbols, trellis.odd_states(values, states), alphabet.size)
        plan = min(plan, paired, key=_bits)
    frequencies = np.stack([table.frequencies(alphabet.size, plan.precision) for table in plan.tables])
    parts = list(_chunks(plan.symbols, plan.classes, plan.odd is not None))
    odd_parts = [None] * len(parts) if plan.odd is None else [part for part, _ in _chunks(plan.odd, plan.classes, True)]
    chunks = [
        rans.encode(part, classes, frequencies, plan.precision, odd)
        for (part, classes), odd in zip(parts, odd_parts, strict=True)
    ]
    scanned = values.T if plan.columns_first else values
    low = alphabets.low_bits(scanned, alphabet) if alphabet.kind == alphabets.SPLIT else b""
    return payload.join(_describe(plan, alphabet, zero, [chunk.size for chunk in chunks]), chunks, low)


def _describe(plan: _Plan, alphabet: Alphabet, zero: int, lengths: list[int]) -> NDArray[np.uint16]:
    """Return the side information."""
    writer = Writer()
    alphabet.put(writer)
    writer.put(_SCAN, int(plan.columns_first))
    writer.put(_PRECISION, plan.precision - MIN_PRECISION)
    count = int(plan.classes.max()) + 1
    writer.put(_CLASSES, count - 1 + (0 if plan.odd is None else row_classes.MAX_CLASSES))
    prediction.put(writer, plan.predictor)
    if plan.predictor is not None:
        writer.put(_ZERO, zero)
    if count > 1:
        row_classes.put(writer, plan.classes)
    for table in plan.tables:
        table.put(writer, alphabet.size)
    writer.put_all(_WORDS, lengths)
    return writer.finish()


def _chunks(
    symbols: NDArray[_Integer], classes: NDArray[np.uint8], paired: bool
) -> Iterator[tuple[NDArray[_Integer], NDArray[np.uint8]]]:
    """Yield the parts that are coded independently, with the classes of their rows.

    With one class and unpaired tables rows mean nothing, so the array is cut as one long row.
    """
    if int(classes.max()) == 0 and not paired:
        flat = symbols.reshape(1, -1)
        for start in range(0, flat.shape[1], trellis.CHUNK):
            yield flat[:, start : start + trellis.CHUNK], classes[:1]
        return
    rows = trellis.chunk_rows(symbols.shape[1])
    for start in range(0, symbols.shape[0], rows):
        yield symbols[start : start + rows], classes[start : start + rows]


def _bits(plan: _Plan) -> float:
    return plan.bits


def _usual_precision(size: int) -> int:
    return 12 if size <= 256 else 14 if size <= 1024 else 15


def _best_plan(symbols: Symbols, alphabet: Alphabet, zero: int, kernel: tuple[int, int]) -> _Plan:
    """Return the cheapest plan: with and without classes, rows or columns first, with and without prediction."""
    size = alphabet.size
    plans = [_plan(symbols, False, None, np.zeros(symbols.shape[0], np.uint8), size)]
    plans += _class_plans(symbols, False, None, size)
    plans += _class_plans(np.ascontiguousarray(symbols.T), True, None, size)
    best = min(plans, key=_bits)
    if alphabet.kind == alphabets.AFFINE and symbols.size >= 2048:
        plans = []
        for predictor in prediction.candidates(symbols, zero, kernel):
            residuals = predictor.subtract(symbols, zero, size)
            plans.append(_plan(residuals, False, predictor, np.zeros(symbols.shape[0], np.uint8), size))
            plans += _class_plans(residuals, False, predictor, size)
        predicted = min(plans, key=_bits, default=best)
        best = predicted if predicted.bits < _PREDICTION_SHARE * best.bits else best
    # All plans so far have roughly fitted tables, which is enough to choose between them.
    counts = None if len(best.tables) == 1 else row_classes.histograms(best.symbols, size)
    refined = _plan(best.symbols, best.columns_first, best.predictor, best.classes, size, counts, fast=False)
    return min(best, refined, key=_bits)


def _plan(
    symbols: Symbols,
    columns_first: bool,
    predictor: Prediction | None,
    classes: NDArray[np.uint8],
    size: int,
    counts: NDArray[np.int64] | None = None,
    fast: bool = True,
) -> _Plan:
    """Return the plan with these classes and the best tables for them; `counts` are the histograms of the rows."""
    count, precision = int(classes.max()) + 1, _usual_precision(size)
    if counts is None or count == 1:
        sums = [np.bincount(symbols.ravel(), minlength=size)]
    else:
        sums = [counts[classes == label].sum(0) for label in range(count)]
    fits = [frequency_tables.fit(total, precision, fast=fast) for total in sums]
    writer = Writer()
    prediction.put(writer, predictor)
    bits = sum(cost for _, cost in fits) + _class_bits(classes) + 16 * writer.finish().size
    tables = tuple(table for table, _ in fits)
    return _Plan(symbols, columns_first, predictor, classes, tables, precision, bits)


def _class_plans(symbols: Symbols, columns_first: bool, predictor: Prediction | None, size: int) -> list[_Plan]:
    """Return one plan for each number of classes that the rows can fill."""
    rows, columns = symbols.shape
    if rows < 8 or columns < MIN_COLUMNS or symbols.size < 2048 or rows * size > 1 << 27:
        return []
    counts = row_classes.histograms(symbols, size)
    plans = []
    for count in _CLASS_COUNTS:
        if count <= rows // 2:
            plans.append(_plan(symbols, columns_first, predictor, row_classes.cluster(counts, count), size, counts))
    return plans


def _trellis_plan(symbols: Symbols, odd: NDArray[np.uint8], size: int) -> _Plan:
    """Return the cheapest plan with tables for even and for odd states."""
    rows, columns = symbols.shape
    joint = symbols + np.uint16(size) * odd
    labelings = [np.zeros(rows, np.uint8)]
    counts = np.bincount(joint.ravel(), minlength=2 * size).reshape(1, -1)
    if rows >= 8 and columns >= MIN_COLUMNS and symbols.size >= 2048 and rows * size <= 1 << 26:
        counts = row_classes.histograms(joint, 2 * size)
        plain = counts.reshape(rows, 2, size).sum(1)
        labelings += [row_classes.cluster(plain, count) for count in _CLASS_COUNTS if count <= rows // 2]

    def plan(classes: NDArray[np.uint8], precision: int, *, fast: bool) -> _Plan:
        sums = [counts[classes[: len(counts)] == label].sum(0) for label in range(int(classes.max()) + 1)]
        # A half without symbols gets the table of both halves: a table must have something to describe.
        halves = [half if half.any() else total[:size] + total[size:] for total in sums for half in np.split(total, 2)]
        fits = [frequency_tables.fit(half, precision, fast=fast, newton=not fast) for half in halves]
        bits = sum(cost for _, cost in fits) + _class_bits(classes)
        return _Plan(symbols, False, None, classes, tuple(table for table, _ in fits), precision, bits, odd)

    usual = _usual_precision(size)
    best = min((plan(classes, usual, fast=True) for classes in labelings), key=_bits)
    refined = [plan(labelings[0], precision, fast=False) for precision in _PRECISIONS if precision >= usual]
    if best.classes.any():
        refined.append(plan(best.classes, usual, fast=False))
    return min(best, *refined, key=_bits)


def _class_bits(classes: NDArray[np.generic]) -> float:
    """Order-0 entropy of the classes, in bits."""
    counts = np.unique(classes, return_counts=True)[1]
    return float(-(counts * np.log2(counts / classes.size)).sum())


def decode(
    data: Bytes, rows: int, columns: int, dtype: np.dtype[np.integer], threads: int, states: int = 1
) -> NDArray[np.integer]:
    """Undo `encode`: (rows, columns) of `dtype`, or of int8 or int16 if that was int32 and they hold all values.

    Raises:
        ArtifactError: the payload is not that of such an array.
    """
    side, words = payload.split(data)
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
    predictor = prediction.take(reader, rows, columns)
    zero = reader.take(_ZERO, alphabet.size - 1, "the zero") if predictor is not None else 0
    classes = row_classes.take(reader, rows, count) if count > 1 else np.zeros(rows, np.uint8)
    frequencies = frequency_tables.take(reader, count << form // most, alphabet.size, precision)
    if alphabet.kind != alphabets.SPLIT:
        lowest, highest = int(alphabet.values[0]), int(alphabet.values[-1])
        check_range(lowest, highest, dtype)
        dtype = narrowest(lowest, highest, dtype)
    # Without residuals and tokens the rANS decoder writes values at once, with no symbols in between.
    direct = predictor is None and alphabet.kind != alphabets.SPLIT
    out = np.empty((rows, columns), dtype if direct else np.uint16)
    table = rans.decode_table(frequencies, alphabet.values if direct else np.arange(alphabet.size), precision)
    parts = list(_chunks(out, classes, form >= most))
    lengths = reader.take_all(_WORDS, len(parts))
    reader.finish()

    def decode_part(index: int, part_words: memoryview) -> None:
        part, part_classes = parts[index]
        rans.decode(part_words, part_classes, table, precision, paths, part)

    tail = payload.decode_chunks(words, lengths, 2, decode_part, threads)
    if alphabet.kind != alphabets.SPLIT and len(tail):
        raise ArtifactError("bytes follow the last chunk of a stream; the file is damaged")
    if not direct:
        symbols = out if predictor is None else predictor.add(out, zero, alphabet.size)
        out = np.empty(symbols.shape, dtype)
        alphabets.values_of(symbols, alphabet, tail, out)
    return out.T if columns_first else out
