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
_LEAST, _MOST_COUNTS = 2048, 1 << 26  # symbols, and entries of the histograms of rows, for which classes are tried
_SMALL, _MANY = 1 << 15, 1 << 18
_SAMPLE = 1 << 14  # symbols that tell which ways are worth trying
_PREDICTION_SHARE = 0.995  # prediction must save so much of the bits: it decodes at a third of the speed
_SCAN, _PRECISION, _CLASSES, _WORDS, _ZERO = 5, 6, 7, 21, 23  # contexts of the side information


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to code the symbols.

    Attributes:
        symbols: (rows, columns) in scan order, residuals if there is a prediction.
        columns_first: the array was transposed.
        predictor: the prediction that was subtracted, or None.
        classes: class of each row.
        counts: (tables, size) histogram of each class; if `odd`, two for each: for even and for odd states.
        odd: None, or (rows, columns) 1 for a symbol in an odd state of the trellis.
    """

    symbols: Symbols
    columns_first: bool
    predictor: Prediction | None
    classes: NDArray[np.uint8]
    counts: NDArray[np.int64]
    odd: NDArray[np.uint8] | None

    def bits(self) -> float:
        """Return about the bits that it takes, without tables."""
        return _entropy(self.counts) + self.side_bits()

    def side_bits(self) -> float:
        """Return the bits of classes and prediction."""
        if self.predictor is None:
            return _class_bits(self.classes)
        writer = Writer()
        prediction.put(writer, self.predictor)
        return _class_bits(self.classes) + 16 * writer.finish().size

    def rough_bits(self) -> float:
        """Return about the bits that it takes."""
        described = 24 + 6 * np.minimum(np.count_nonzero(self.counts, axis=1), 16)
        return self.bits() + float(described.sum())


@dataclass(frozen=True, slots=True)
class _Plan:
    """A way with its tables.

    Attributes:
        tables: in the order of the way's histograms.
        precision: log2 of the number of slots of a table.
        bits: that everything takes.
    """

    way: _Way
    tables: tuple[frequency_tables.Description, ...]
    precision: int
    bits: float


def encode(values: NDArray[np.integer], kernel: tuple[int, int], states: int = 1) -> bytes:
    """Code `values` (rows, columns), at least two different ones, all within int32.

    Args:
        values: the array.
        kernel: height and width of the convolution whose weights they are, (1, 1) for a matrix.
        states: states of the trellis on whose paths they lie, negative along rows.
    """
    alphabet, symbols = alphabets.choose(values)
    zero = _zero(alphabet, symbols)
    plan = _plan(values, symbols, alphabet, zero, kernel, states)
    way = plan.way
    frequencies = np.stack([table.frequencies(alphabet.size, plan.precision) for table in plan.tables])
    parts = list(_chunks(way.symbols, way.classes, way.odd is not None))
    odd_parts = [None] * len(parts) if way.odd is None else [part for part, _ in _chunks(way.odd, way.classes, True)]
    chunks = [
        rans.encode(part, classes, frequencies, plan.precision, odd)
        for (part, classes), odd in zip(parts, odd_parts, strict=True)
    ]
    scanned = values.T if way.columns_first else values
    low = alphabets.low_bits(scanned, alphabet) if alphabet.kind == alphabets.SPLIT else b""
    return payload.join(_describe(plan, alphabet, zero, [chunk.size for chunk in chunks]), chunks, low)


def _describe(plan: _Plan, alphabet: Alphabet, zero: int, lengths: list[int]) -> NDArray[np.uint16]:
    """Return the side information."""
    writer, way = Writer(), plan.way
    alphabet.put(writer)
    writer.put(_SCAN, int(way.columns_first))
    writer.put(_PRECISION, plan.precision - MIN_PRECISION)
    count = int(way.classes.max()) + 1
    writer.put(_CLASSES, count - 1 + (0 if way.odd is None else row_classes.MAX_CLASSES))
    prediction.put(writer, way.predictor)
    if way.predictor is not None:
        writer.put(_ZERO, zero)
    if count > 1:
        row_classes.put(writer, way.classes)
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


def estimate(values: NDArray[np.integer], states: int = 1) -> tuple[float, float]:
    """Return about the bits of data and of tables that `encode` takes without prediction.

    A larger array of the same kind takes more bits of data in proportion, but no more tables.
    """
    alphabet, symbols = alphabets.choose(values)
    low = 8 * len(alphabets.low_bits(values, alphabet)) if alphabet.kind == alphabets.SPLIT else 0
    if abs(states) > 1 and alphabet.kind != alphabets.SPLIT:
        ways = _class_ways(symbols, False, None, alphabet.size, trellis.odd_states(values, states))
    else:
        ways = _plain_ways(symbols, alphabet, 0, [], columns=True)
    best = min(ways, key=_Way.rough_bits)
    return best.bits() + low, best.rough_bits() - best.bits()


def _plan(
    values: NDArray[np.integer], symbols: Symbols, alphabet: Alphabet, zero: int, kernel: tuple[int, int], states: int
) -> _Plan:
    """Return the cheapest way with the best tables for it; in a small array tables decide which way is cheapest."""
    ways = _ways(values, symbols, alphabet, zero, kernel, states)
    if symbols.size > _SMALL:
        ways = [min(ways, key=_Way.rough_bits)]
    return min((plan for way in ways for plan in _plans(way, alphabet.size)), key=lambda plan: plan.bits)


def _plans(way: _Way, size: int) -> Iterator[_Plan]:
    """Yield the way with the best tables of each precision that may be best."""
    least = 12 if size <= 256 else 14 if size <= 1024 else 15
    several = way.odd is not None and len(way.counts) == 2
    for precision in (one for one in _PRECISIONS if one == least or (several and one > least)):
        fits = [frequency_tables.fit(one, precision, newton=way.odd is not None) for one in way.counts]
        bits = sum(cost for _, cost in fits) + way.side_bits()
        yield _Plan(way, tuple(table for table, _ in fits), precision, bits)


def _zero(alphabet: Alphabet, symbols: Symbols) -> int:
    return 0 if alphabet.kind == alphabets.SPLIT else alphabets.zero_symbol(alphabet, symbols)


def _ways(
    values: NDArray[np.integer], symbols: Symbols, alphabet: Alphabet, zero: int, kernel: tuple[int, int], states: int
) -> list[_Way]:
    """Return ways worth comparing: with and without classes, rows or columns first, with and without prediction.

    For the paths of a trellis tables for even and odd states are nearly always best, and rows are usually more unequal
    than columns: in a large array some rows and a trial of the prediction tell whether anything else is worth trying.
    """
    predictors: list[Prediction] = []
    if alphabet.kind == alphabets.AFFINE and symbols.size >= _LEAST:
        predictors = prediction.candidates(symbols, zero, kernel)
    every = symbols.size // _SAMPLE
    some = slice(min(every // 2, len(symbols) - 1), None, max(every, 1))
    columns = every < 2 or _columns_pay(symbols[some], alphabet.size)
    if abs(states) == 1 or alphabet.kind == alphabets.SPLIT:
        return _plain_ways(symbols, alphabet, zero, predictors, columns)
    ways = _class_ways(symbols, False, None, alphabet.size, trellis.odd_states(values, states))
    if every > 1 and not columns and not predictors:
        return ways
    return ways + _plain_ways(symbols, alphabet, zero, predictors, columns)


def _columns_pay(symbols: Symbols, size: int) -> bool:
    """Return whether classes of columns take fewer bits than classes of rows."""
    by_row = min(way.bits() for way in _class_ways(symbols, False, None, size))
    by_column = _class_ways(np.ascontiguousarray(symbols.T), True, None, size)
    return min(way.bits() for way in by_column) < by_row


def _plain_ways(
    symbols: Symbols, alphabet: Alphabet, zero: int, predictors: list[Prediction], columns: bool
) -> list[_Way]:
    """Return the ways with one table a class; one with prediction only if it saves enough."""
    ways = _class_ways(symbols, False, None, alphabet.size)
    if columns:
        ways += _class_ways(np.ascontiguousarray(symbols.T), True, None, alphabet.size)[1:]
    predicted = []
    for predictor in predictors:
        residuals = predictor.subtract(symbols, zero, alphabet.size)
        predicted += _class_ways(residuals, False, predictor, alphabet.size)
    least = min(way.rough_bits() for way in ways)
    return ways + [way for way in predicted if way.rough_bits() < _PREDICTION_SHARE * least]


def _class_ways(
    symbols: Symbols,
    columns_first: bool,
    predictor: Prediction | None,
    size: int,
    odd: NDArray[np.uint8] | None = None,
) -> list[_Way]:
    """Return the way of one class first, then one for each number of classes that the rows can fill."""
    rows, columns = symbols.shape
    joint, parities = (symbols, 1) if odd is None else (symbols + np.uint16(size) * odd, 2)
    labelings = [np.zeros(rows, np.uint8)]
    if rows >= 8 and columns >= MIN_COLUMNS and symbols.size >= _LEAST and rows * size <= _MOST_COUNTS:
        counts = row_classes.histograms(joint, parities * size)
        plain = counts if odd is None else counts[:, :size] + counts[:, size:]
        possible = [count for count in _CLASS_COUNTS if count <= rows // 2]
        many = symbols.size >= _MANY  # so many that the tables of more classes take next to nothing
        labelings += [row_classes.cluster(plain, count) for count in (possible[-1:] if many else possible)]
    else:
        counts = row_classes.histograms(joint.reshape(1, -1), parities * size)
    ways = []
    for classes in labelings:
        labels = classes if len(counts) == rows else np.zeros(1, np.uint8)
        sums = row_classes.sums(counts, labels, int(classes.max()) + 1).reshape(-1, size)
        for index in np.flatnonzero(~sums.any(1)):  # a table must have something to describe: that of the other half
            sums[index] = sums[index ^ 1]
        ways.append(_Way(symbols, columns_first, predictor, classes, sums, odd))
    return ways


def _entropy(counts: NDArray[np.int64]) -> float:
    """Bits of symbols with these counts under their own frequencies, row by row.

    That is too little by half a nat for each frequency that is fitted (Miller 1955), which is added.
    """
    totals, occurring = counts.sum(1, keepdims=True), np.maximum(counts, 1)
    bits = counts * (np.log2(np.maximum(totals, 1)) - np.log2(occurring))
    return float(bits.sum()) + 0.7213 * float(np.maximum(np.count_nonzero(counts, axis=1) - 1, 0).sum())


def _class_bits(classes: NDArray[np.uint8]) -> float:
    """Order-0 entropy of the classes, in bits."""
    counts = np.bincount(classes)
    counts = counts[counts > 0]
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
