"""Encoder of the coder "lanes" in plain Python integers: birdie reads it and does not write it any more."""

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy import payload, plan, prediction, row_classes, trellis
from birdie.entropy.side_information import Writer, zigzag

Words = NDArray[np.uint16]


def words_of(
    symbols: NDArray[np.uint16],
    classes: NDArray[np.uint8],
    frequencies: NDArray[np.int64],
    precision: int,
    odd: NDArray[np.uint8] | None,
    lanes: int,
) -> tuple[Words, NDArray[np.int64]]:
    """Return the words of a chunk, lane by lane, and how many each lane has (format.md, "Coder 6")."""
    tables = classes[:, None] * np.int64(1 if odd is None else 2) + (0 if odd is None else odd)
    coded = frequencies[tables, symbols].tolist()
    begins = (np.cumsum(frequencies, 1) - frequencies)[tables, symbols].tolist()
    states, words = [0] * lanes, [list[int]() for _ in range(lanes)]
    for frequency_row, begin_row in zip(reversed(coded), reversed(begins), strict=True):
        for column in reversed(range(len(frequency_row))):
            lane, frequency = column % lanes, frequency_row[column]
            x = states[lane]
            if x >= frequency << 40 - precision:
                words[lane].append(x & 0xFFFF)
                x >>= 16
            states[lane] = (x // frequency << precision) + x % frequency + begin_row[column]
    for lane, x in enumerate(states):
        while x:
            words[lane].append(x & 0xFFFF)
            x >>= 16
    flat = [word for lane in words for word in reversed(lane)]
    return np.array(flat, np.uint16), np.array([len(lane) for lane in words], np.int64)


def encode(values: NDArray[np.integer], kernel: tuple[int, int], states: int, lanes: int) -> bytes:
    """Return the payload of `values` (rows, columns), described as the coder "static" would."""
    best = plan.search(values, kernel, states)
    way, size = best.way, best.alphabet.size
    frequencies = np.stack([table.frequencies(size, best.precision) for table in best.tables])
    height, chunks = trellis.chunk_rows(way.symbols.shape[1]), []
    for first in range(0, len(way.symbols), height):
        part = slice(first, first + height)
        odd = None if way.odd is None else way.odd[part]
        chunks.append(words_of(way.symbols[part], way.classes[part], frequencies, best.precision, odd, lanes))
    writer, count = Writer(), int(way.classes.max()) + 1
    best.alphabet.put(writer)
    writer.put(5, int(way.columns_first))
    writer.put(6, best.precision - 8)
    writer.put(7, count - 1 + (0 if way.odd is None else row_classes.MAX_CLASSES))
    prediction.put(writer, way.predictor)
    if way.predictor is not None:
        writer.put(23, best.zero)
    if count > 1:
        row_classes.put(writer, way.classes)
    for table in best.tables:
        table.put(writer, size)
    lengths = np.concatenate([counts for _, counts in chunks])
    writer.put(20, lanes.bit_length() - 1)
    writer.put_all(21, lengths[:1])
    writer.put_all(57, zigzag(np.diff(lengths)))
    scanned = values.T if way.columns_first else values
    low = alphabets.low_bits(scanned, best.alphabet) if best.alphabet.kind == alphabets.SPLIT else b""
    return payload.join(writer.finish(), [words for words, _ in chunks], low)
