"""Coder "static": interleaved rANS with a frequency table per class of rows.

    Plan ─► side information: alphabet, classes, tables ─► rANS words, in chunks ─► low bits of a split alphabet

The four states of a chunk share its words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy import frequency_tables, payload, prediction, rans, row_classes
from birdie.entropy import trellis_states as trellis
from birdie.entropy.alphabet import Alphabet
from birdie.entropy.coding_plan import MIN_COLUMNS, CodingPlan, search
from birdie.entropy.prediction import Prediction
from birdie.entropy.raw import Bytes, check_range, narrowest
from birdie.entropy.side_information import SideReader, SideWriter
from birdie.errors import ArtifactError

_Integer = TypeVar("_Integer", bound=np.integer)

MIN_PRECISION = 8
# Contexts of the side information
_SCAN, _PRECISION, _CLASSES, _WORDS, _ZERO = 5, 6, 7, 21, 23


def encode(values: NDArray[np.integer], kernel: tuple[int, int], states: int = 1) -> bytes:
    """Code `values` (rows, columns), at least two different ones, all within int32, in the coder "static".

    Args:
        values: the array.
        kernel: height and width of the convolution whose weights they are, (1, 1) for a matrix.
        states: states of the trellis on whose paths they lie, negative along rows.
    """
    return write(values, search(values, kernel, states))


def write(values: NDArray[np.integer], plan: CodingPlan) -> bytes:
    """Return the payload of the array of a plan."""
    way, alphabet = plan.way, plan.alphabet
    frequencies = np.stack([table.frequencies(alphabet.size, plan.precision) for table in plan.tables])
    parts = list(_chunks(way.symbols, way.classes, way.odd is not None))
    odd_parts = [None] * len(parts) if way.odd is None else [part for part, _ in _chunks(way.odd, way.classes, True)]
    chunks = [
        rans.encode(part, classes, frequencies, plan.precision, odd)
        for (part, classes), odd in zip(parts, odd_parts, strict=True)
    ]
    scanned = values.T if way.columns_first else values
    low = alphabets.low_bits(scanned, alphabet) if alphabet.kind == alphabets.SPLIT else b""
    return payload.join(_describe(plan, [chunk.size for chunk in chunks]), chunks, low)


def _describe(plan: CodingPlan, lengths: Sequence[int]) -> NDArray[np.uint16]:
    """Return the side information; `lengths` are the words of each chunk."""
    writer, way = SideWriter(), plan.way
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
    writer.put_all(_WORDS, lengths)
    return writer.finish()


def _chunks(
    symbols: NDArray[_Integer], classes: NDArray[np.uint8], in_rows: bool
) -> Iterator[tuple[NDArray[_Integer], NDArray[np.uint8]]]:
    """Yield the parts that are coded independently, with the classes of their rows.

    With one class and unpaired tables rows mean nothing, so the array is cut as one long row.
    """
    if int(classes.max()) == 0 and not in_rows:
        flat = symbols.reshape(1, -1)
        for start in range(0, flat.shape[1], trellis.CHUNK):
            yield flat[:, start : start + trellis.CHUNK], classes[:1]
        return
    rows = trellis.chunk_rows(symbols.shape[1])
    for start in range(0, symbols.shape[0], rows):
        yield symbols[start : start + rows], classes[start : start + rows]


@dataclass(frozen=True, slots=True)
class OpenedStatic:
    """A stream whose side information is decoded."""

    # rows, columns: of the array in scan order
    rows: int
    columns: int
    alphabet: Alphabet  # of the symbols
    columns_first: int  # the array was transposed
    precision: int  # log2 of the number of slots of a table
    # machine of the trellis whose states select the tables; that of one state where tables are not in pairs
    paths: trellis.Machine
    predictor: Prediction | None  # prediction to add, or None
    zero: int  # the symbol that it counts from
    classes: NDArray[np.uint8]  # (rows,) class of each row
    frequencies: NDArray[np.int64]  # (tables, size), of each class, or of each class for even and for odd states
    in_rows: bool  # chunks are whole rows
    lengths: NDArray[np.int64]  # words of each chunk
    data: memoryview  # the bytes that follow the side information: the words, then low bits

    @property
    def direct(self) -> bool:
        """Return whether the words stand for values: there are neither residuals nor low bits."""
        return self.predictor is None and self.alphabet.kind != alphabets.SPLIT


def open_stream(data: Bytes, rows: int, columns: int, states: int = 1) -> OpenedStatic:
    """Decode the side information of a stream of the coder "static", of `rows` × `columns` values."""
    side, words = payload.split(data)
    reader = SideReader(side)
    alphabet = Alphabet.take(reader)
    columns_first = reader.take(_SCAN, 1, "the scan")
    precision = reader.take(_PRECISION, rans.MAX_PRECISION - MIN_PRECISION, "the precision") + MIN_PRECISION
    most = row_classes.MAX_CLASSES
    may_pair = abs(states) > 1
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
    in_rows = bool(paired or classes.any())
    chunks = -(-rows // trellis.chunk_rows(columns)) if in_rows else -(-rows * columns // trellis.CHUNK)
    lengths = reader.take_all(_WORDS, chunks)
    reader.finish()
    if int(lengths.min()) < 0 or int(lengths.max()) > len(words) or 2 * int(lengths.sum()) > len(words):
        raise ArtifactError("the chunks of a stream are longer than its payload; the file is damaged")
    return OpenedStatic(
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


def decode(
    data: Bytes, rows: int, columns: int, dtype: np.dtype[np.integer], threads: int, states: int = 1
) -> NDArray[np.integer]:
    """Undo `encode`: (rows, columns) of `dtype`, or of int8 or int16 if that was int32 and they hold all values."""
    stream = open_stream(data, rows, columns, states)
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
        rans.decode(words, classes, table, stream.precision, stream.paths, part)

    tail = payload.decode_chunks(stream.data, stream.lengths, 2, decode_part, threads)
    if alphabet.kind != alphabets.SPLIT and len(tail):
        raise ArtifactError("bytes follow the last chunk of a stream; the file is damaged")
    if not direct:
        symbols = out if stream.predictor is None else stream.predictor.add(out, stream.zero, alphabet.size)
        out = np.empty(symbols.shape, dtype)
        alphabets.values_of(symbols, alphabet, tail, out)
    return out.T if stream.columns_first else out
