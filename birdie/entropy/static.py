"""Coders "static" and "lanes": interleaved rANS with a frequency table per class of rows.

    values ─ scan ─ alphabet ─► symbols ─ prediction ─► residuals ─ classes, tables ─► rANS words, in chunks

The encoder compares ways to code the array by their cost in bits, and describes the cheapest in the side information.
On the paths of a trellis each class has a second table, for odd states. The low bits of a split alphabet follow the
chunks.

The two coders differ in the chunks alone. Those of "static" have four states that share their words; those of "lanes"
have many states with words of their own, which a GPU decodes side by side (`birdie.compress.device`) and a processor
faster. That pays where three bytes for each lane are next to nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy import frequency_tables, payload, prediction, rans, rans_lanes, row_classes, trellis
from birdie.entropy.alphabet import Alphabet, Symbols
from birdie.entropy.prediction import Prediction
from birdie.entropy.raw import Bytes, check_range, narrowest
from birdie.entropy.side_information import Reader, Writer, unzigzag, zigzag
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
_LEAST_IN_LANES = 1 << 16  # values
_MOST_LANES = 128  # written: 0.1 % of the bytes at three bits a value
_BYTES_PER_LANE = 3000  # of a chunk at least: a thousand times what a lane costs
_STEPS = 16  # values of a lane in a row, at least: a processor takes four lanes at a time for so long
# Contexts of the side information
_SCAN, _PRECISION, _CLASSES, _LANES, _WORDS, _ZERO, _MORE_WORDS = 5, 6, 7, 20, 21, 23, 57


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
        alphabet: of the symbols.
        zero: the symbol that predictions count from.
        tables: in the order of the way's histograms.
        precision: log2 of the number of slots of a table.
        bits: that everything takes.
    """

    alphabet: Alphabet
    zero: int
    way: _Way
    tables: tuple[frequency_tables.Description, ...]
    precision: int
    bits: float


def encode(values: NDArray[np.integer], kernel: tuple[int, int], states: int = 1, lanes: int = 0) -> bytes:
    """Code `values` (rows, columns), at least two different ones, all within int32, in the coder "static".

    Args:
        values: the array.
        kernel: height and width of the convolution whose weights they are, (1, 1) for a matrix.
        states: states of the trellis on whose paths they lie, negative along rows.
        lanes: code in so many, in the coder "lanes": a power of two from 4 to 256, at most one a column or 4; not for
            paths along rows.
    """
    return _write(values, _plan(values, kernel, states), lanes)


def encode_fastest(values: NDArray[np.integer], kernel: tuple[int, int], states: int = 1) -> tuple[bytes, bool]:
    """Code as `encode` in the coder that decodes fastest: return the payload, and whether it is "lanes"."""
    plan = _plan(values, kernel, states)
    lanes = _lanes(plan, states)
    return _write(values, plan, lanes), lanes > 0


def _lanes(plan: _Plan, states: int) -> int:
    """Return the number of lanes in which to code a plan; 0 where the coder "static" suits it better.

    Prediction and low bits are undone after the chunks, one value after the other: no lane makes that faster.
    """
    way = plan.way
    rows, columns = way.symbols.shape
    if way.predictor is not None or plan.alphabet.kind == alphabets.SPLIT or (way.odd is not None and states < 0):
        return 0
    bytes_per_chunk = plan.bits / 8 * min(1.0, trellis.chunk_rows(columns) / rows)
    most = min(_MOST_LANES, columns // _STEPS, int(bytes_per_chunk) // _BYTES_PER_LANE)
    fits = rows * columns >= _LEAST_IN_LANES and columns <= trellis.CHUNK and most >= rans_lanes.LEAST
    return 1 << most.bit_length() - 1 if fits else 0


def _write(values: NDArray[np.integer], plan: _Plan, lanes: int) -> bytes:
    way, alphabet = plan.way, plan.alphabet
    frequencies = np.stack([table.frequencies(alphabet.size, plan.precision) for table in plan.tables])
    parts = list(_chunks(way.symbols, way.classes, way.odd is not None or lanes > 0))
    odd_parts = [None] * len(parts) if way.odd is None else [part for part, _ in _chunks(way.odd, way.classes, True)]
    coded = [
        _encode_chunk(part, classes, frequencies, plan.precision, odd, lanes)
        for (part, classes), odd in zip(parts, odd_parts, strict=True)
    ]
    chunks, lengths = zip(*coded, strict=True)
    scanned = values.T if way.columns_first else values
    low = alphabets.low_bits(scanned, alphabet) if alphabet.kind == alphabets.SPLIT else b""
    return payload.join(_describe(plan, lanes, np.concatenate(lengths)), chunks, low)


def _encode_chunk(
    symbols: NDArray[np.uint16],
    classes: NDArray[np.uint8],
    frequencies: NDArray[np.int64],
    precision: int,
    odd: NDArray[np.uint8] | None,
    lanes: int,
) -> tuple[rans.Words, NDArray[np.int64]]:
    """Return the words of a chunk, and how many these are, in each of its lanes if there are any."""
    if lanes:
        return rans_lanes.encode(symbols, classes, frequencies, precision, odd, lanes)
    words = rans.encode(symbols, classes, frequencies, precision, odd)
    return words, np.array([words.size])


def _describe(plan: _Plan, lanes: int, lengths: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Return the side information; `lengths` are the words of each chunk, or of each lane of all chunks."""
    writer, way = Writer(), plan.way
    plan.alphabet.put(writer)
    writer.put(_SCAN, int(way.columns_first))
    writer.put(_PRECISION, plan.precision - MIN_PRECISION)
    count = int(way.classes.max()) + 1
    writer.put(_CLASSES, count - 1 + (0 if way.odd is None else row_classes.MAX_CLASSES))
    prediction.put(writer, way.predictor)
    if way.predictor is not None:
        writer.put(_ZERO, plan.zero)
    if count > 1:
        row_classes.put(writer, way.classes)
    for table in plan.tables:
        table.put(writer, plan.alphabet.size)
    _put_lengths(writer, lanes, lengths)
    return writer.finish()


def _put_lengths(writer: Writer, lanes: int, lengths: NDArray[np.int64]) -> None:
    if lanes:  # about as long as one another
        writer.put(_LANES, lanes.bit_length() - 1)
        writer.put_all(_WORDS, lengths[:1])
        writer.put_all(_MORE_WORDS, zigzag(np.diff(lengths)))
    else:
        writer.put_all(_WORDS, lengths)


def _chunks(
    symbols: NDArray[_Integer], classes: NDArray[np.uint8], in_rows: bool
) -> Iterator[tuple[NDArray[_Integer], NDArray[np.uint8]]]:
    """Yield the parts that are coded independently, with the classes of their rows.

    With one class, unpaired tables and no lanes rows mean nothing, so the array is cut as one long row.
    """
    if int(classes.max()) == 0 and not in_rows:
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


def _plan(values: NDArray[np.integer], kernel: tuple[int, int], states: int) -> _Plan:
    """Return the cheapest way with the best tables for it; in a small array tables decide which way is cheapest."""
    alphabet, symbols = alphabets.choose(values)
    zero = _zero(alphabet, symbols)
    ways = _ways(values, symbols, alphabet, zero, kernel, states)
    if symbols.size > _SMALL:
        ways = [min(ways, key=_Way.rough_bits)]
    best: tuple[float, int, _Plan] | None = None
    for index in sorted(range(len(ways)), key=lambda index: ways[index].rough_bits()):  # the others are soon too long
        for plan in _plans(ways[index], alphabet, zero, math.inf if best is None else best[0]):
            if best is None or (plan.bits, index) < best[:2]:
                best = plan.bits, index, plan
    assert best is not None
    return best[2]


def _plans(way: _Way, alphabet: Alphabet, zero: int, most: float) -> Iterator[_Plan]:
    """Yield the way with the best tables of each precision that may be best, unless it takes more than `most` bits."""
    least = 12 if alphabet.size <= 256 else 14 if alphabet.size <= 1024 else 15
    several = way.odd is not None and len(way.counts) == 2
    side = way.side_bits()
    rest = side + np.cumsum(frequency_tables.least_bits(way.counts)[::-1])[::-1]  # from each table on, at least
    for precision in (one for one in _PRECISIONS if one == least or (several and one > least)):
        tables, bits = [], 0.0
        for counts, missing in zip(way.counts, rest, strict=True):
            if bits + missing > most:
                break
            table, cost = frequency_tables.fit(counts, precision, newton=way.odd is not None)
            tables.append(table)
            bits += cost
        else:
            yield _Plan(alphabet, zero, way, tuple(tables), precision, bits + side)


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


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream whose side information is decoded.

    Attributes:
        rows, columns: of the array in scan order.
        alphabet: of the symbols.
        columns_first: the array was transposed.
        precision: log2 of the number of slots of a table.
        paths: machine of the trellis whose states select the tables; that of one state where tables are not in pairs.
        predictor: prediction to add, or None; zero: the symbol that it counts from.
        classes: (rows,) class of each row.
        frequencies: (tables, size), of each class, or of each class for even and for odd states.
        in_rows: chunks are whole rows.
        lengths: (chunks, 1) words of each chunk, or (chunks, lanes) words of each lane.
        data: the bytes that follow the side information: the words, then low bits.
    """

    rows: int
    columns: int
    alphabet: Alphabet
    columns_first: int
    precision: int
    paths: trellis.Machine
    predictor: Prediction | None
    zero: int
    classes: NDArray[np.uint8]
    frequencies: NDArray[np.int64]
    in_rows: bool
    lengths: NDArray[np.int64]
    data: memoryview

    @property
    def direct(self) -> bool:
        """Return whether the words stand for values: there are neither residuals nor low bits."""
        return self.predictor is None and self.alphabet.kind != alphabets.SPLIT


def open_stream(data: Bytes, rows: int, columns: int, states: int = 1, *, in_lanes: bool = False) -> Opened:
    """Decode the side information of a stream of the coder "static", or "lanes", of `rows` × `columns` values."""
    side, words = payload.split(data)
    reader = Reader(side)
    alphabet = Alphabet.take(reader)
    columns_first = reader.take(_SCAN, 1, "the scan")
    precision = reader.take(_PRECISION, rans.MAX_PRECISION - MIN_PRECISION, "the precision") + MIN_PRECISION
    most = row_classes.MAX_CLASSES
    # A path along the rows leads from lane to lane, so that they would not be independent.
    may_pair = states > 1 if in_lanes else abs(states) > 1
    form = reader.take(_CLASSES, most - 1 + may_pair * most, "the number of classes")
    paired, count = form // most, form % most + 1
    if columns_first:
        rows, columns = columns, rows
    if columns < MIN_COLUMNS and count > 1:
        raise ArtifactError(f"rows of {columns} in a stream have classes; the file is damaged")
    predictor = prediction.take(reader, rows, columns)
    zero = reader.take(_ZERO, alphabet.size - 1, "the zero") if predictor is not None else 0
    classes = row_classes.take(reader, rows, count) if count > 1 else np.zeros(rows, np.uint8)
    frequencies = frequency_tables.take(reader, count << paired, alphabet.size, precision)
    in_rows = bool(paired or in_lanes or classes.any())
    chunks = -(-rows // trellis.chunk_rows(columns)) if in_rows else -(-rows * columns // trellis.CHUNK)
    lengths = _take_lengths(reader, chunks, columns, in_lanes=in_lanes)
    reader.finish()
    if int(lengths.min()) < 0 or int(lengths.max()) > len(words) or 2 * int(lengths.sum()) > len(words):
        raise ArtifactError("the chunks of a stream are longer than its payload; the file is damaged")
    return Opened(
        rows,
        columns,
        alphabet,
        columns_first,
        precision,
        trellis.machine(states if paired else 1),
        predictor,
        zero,
        classes,
        frequencies,
        in_rows,
        lengths,
        words,
    )


def _take_lengths(reader: Reader, chunks: int, columns: int, *, in_lanes: bool) -> NDArray[np.int64]:
    """Read the words of each chunk, (chunks, 1), or of each lane, (chunks, lanes)."""
    if not in_lanes:
        return reader.take_all(_WORDS, chunks)[:, None]
    lanes = 1 << reader.take(_LANES, rans_lanes.MOST.bit_length() - 1, "log2 of the lanes")
    # With more lanes than columns some would stay empty, and looking at them takes time.
    if not rans_lanes.LEAST <= lanes <= max(columns, rans_lanes.LEAST):
        raise ArtifactError(f"rows of {columns} in a stream have {lanes} lanes; the file is damaged")
    first, more = reader.take_all(_WORDS, 1), unzigzag(reader.take_all(_MORE_WORDS, chunks * lanes - 1))
    return np.cumsum(np.concatenate([first, more])).reshape(chunks, lanes)


def decode(
    data: Bytes, rows: int, columns: int, dtype: np.dtype[np.integer], threads: int, states: int = 1
) -> NDArray[np.integer]:
    """Undo `encode`: (rows, columns) of `dtype`, or of int8 or int16 if that was int32 and they hold all values."""
    return _decode(open_stream(data, rows, columns, states), dtype, threads)


def decode_lanes(
    data: Bytes, rows: int, columns: int, dtype: np.dtype[np.integer], threads: int, states: int = 1
) -> NDArray[np.integer]:
    """Undo `encode` in lanes as `decode` does without."""
    return _decode(open_stream(data, rows, columns, states, in_lanes=True), dtype, threads)


def _decode(stream: Opened, dtype: np.dtype[np.integer], threads: int) -> NDArray[np.integer]:
    alphabet, direct = stream.alphabet, stream.direct
    if alphabet.kind != alphabets.SPLIT:
        lowest, highest = int(alphabet.values[0]), int(alphabet.values[-1])
        check_range(lowest, highest, dtype)
        dtype = narrowest(lowest, highest, dtype)
    # Without residuals and tokens the rANS decoder writes values at once, with no symbols in between.
    out = np.empty((stream.rows, stream.columns), dtype if direct else np.uint16)
    values = alphabet.values if direct else np.arange(alphabet.size)
    table = rans.decode_table(stream.frequencies, values, stream.precision, min(stream.paths.odd.size, 2))
    parts = list(_chunks(out, stream.classes, stream.in_rows))

    def decode_part(index: int, words: memoryview) -> None:
        part, classes = parts[index]
        _decode_chunk(words, stream.lengths[index], classes, table, stream.precision, stream.paths, part)

    tail = payload.decode_chunks(stream.data, stream.lengths.sum(1), 2, decode_part, threads)
    if alphabet.kind != alphabets.SPLIT and len(tail):
        raise ArtifactError("bytes follow the last chunk of a stream; the file is damaged")
    if not direct:
        symbols = out if stream.predictor is None else stream.predictor.add(out, stream.zero, alphabet.size)
        out = np.empty(symbols.shape, dtype)
        alphabets.values_of(symbols, alphabet, tail, out)
    return out.T if stream.columns_first else out


def _decode_chunk(
    words: memoryview,
    lengths: NDArray[np.int64],
    classes: NDArray[np.uint8],
    table: NDArray[np.uint64],
    precision: int,
    paths: trellis.Machine,
    out: NDArray[np.integer],
) -> None:
    if lengths.size > 1:
        rans_lanes.decode(words, lengths, classes, table, precision, paths, out)
    else:
        rans.decode(words, classes, table, precision, paths, out)
