"""Coder "tiles": static tables, and words in tiles of 32 columns that decode alone, on a CPU and on a GPU.

    Plan ─► tables of 12 bits ─► words of tiles          payload ─► Opened ─► values, or weights at once

Tables and classes are those of the coder "static"; `birdie.entropy.rans_tiles` has the words. A tile costs about 17
bits a column, which is little where it has a thousand rows. Prediction and the low bits of a split alphabet are left to
the coder "static": they are undone one value after the other.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy import frequency_tables, payload, rans_tiles, row_classes
from birdie.entropy import trellis_states as trellis
from birdie.entropy.alphabet import AFFINE, LISTED, Alphabet, Symbols
from birdie.entropy.coding_plan import CodingPlan, Way
from birdie.entropy.factors import Factors
from birdie.entropy.planes import blocks
from birdie.entropy.rans_tiles import (
    LANES,
    MOST_RAW,
    MOST_START,
    MOST_SYMBOLS,
    MOST_TAIL,
    PRECISION,
    SPAN,
    Kind,
    Tiles,
    TileTables,
)
from birdie.entropy.raw import Bytes, check_range, narrowest
from birdie.entropy.side_information import SideReader, SideWriter, unzigzag, zigzag
from birdie.errors import ArtifactError

_LEAST = 1 << 16  # values for which tiles are worth a thought
_LANE_BITS, _MOST_SHARE = 17, 0.01  # that a column of a tile costs, and the share of all bits that it may be
_LONG = 768  # rows of a tile, from which on it may be more: sparse weights have few bits
_WORSE = 1.01  # of the bits, if symbols stand for several numbers
_LARGEST = 1 << 23  # magnitude of a number: twice it and one is exact in float32 arithmetic
# Contexts of the side information
_SCAN, _CLASSES, _WORDS, _MORE_WORDS, _LEFT_OUT, _TAIL, _START, _RAW = 5, 7, 21, 57, 80, 81, 82, 83


def pay(plan: CodingPlan) -> bool:
    """Return whether tiles cost next to nothing in the array of a plan."""
    rows, columns = plan.way.symbols.shape
    tall = -(-rows // rans_tiles.height(columns))  # tiles one below the other
    few = _LANE_BITS * columns * tall <= _MOST_SHARE * plan.bits
    return bool(rows * columns >= _LEAST and (few or rows >= _LONG * tall))


def encode(plan: CodingPlan, states: int = 1) -> bytes | None:
    """Return the payload of the array of a plan; None where its symbols cannot be in tiles, or are not worth it.

    Args:
        plan: of the array.
        states: of the trellis on whose paths the values lie, negative along rows, 1 for a plain grid.
    """
    way, alphabet, symbols = plan.way, plan.alphabet, plan.way.symbols
    if (
        way.predictor is not None
        or alphabet.kind == alphabets.SPLIT
        or (abs(states) > 1 and (way.columns_first or states < 0))
        or symbols.shape[1] < LANES
    ):
        return None
    kinds, counts = _leave_out(way, alphabet)
    raw = 0
    if alphabet.size > MOST_SYMBOLS:
        alphabet, symbols, counts, raw = _narrowed(alphabet, symbols, counts)
    if int(alphabet.values[-1] - alphabet.values[0]) >= SPAN or _bits(counts) + raw * symbols.size > _WORSE * plan.bits:
        return None
    count = int(way.classes.max()) + 1
    left_out = int(kinds.max()) == count
    if left_out or plan.precision != PRECISION or alphabet is not plan.alphabet:
        tables = [frequency_tables.fit(table, PRECISION, newton=way.odd is not None)[0] for table in counts]
    else:
        tables = list(plan.tables)
    frequencies = np.stack([table.frequencies(counts.shape[1], PRECISION) for table in tables])
    words, tiles = rans_tiles.encode(symbols, kinds, frequencies, way.odd, raw)
    writer = SideWriter()
    alphabet.put(writer)
    writer.put(_RAW, raw)
    writer.put(_SCAN, int(way.columns_first))
    writer.put(_CLASSES, count - 1 + (0 if way.odd is None else row_classes.MAX_CLASSES))
    writer.put(_LEFT_OUT, int(left_out))
    if count > 1 or left_out:
        row_classes.put(writer, kinds)
    for table in tables:
        table.put(writer, counts.shape[1])
    writer.put_all(_WORDS, tiles.lengths[:1])
    writer.put_all(_MORE_WORDS, zigzag(np.diff(tiles.lengths)))
    writer.put_all(_TAIL, tiles.tails.astype(np.int64))
    writer.put_all(_START, tiles.starts.astype(np.int64))
    return payload.join(writer.finish(), [words])


def _narrowed(
    alphabet: Alphabet, symbols: Symbols, counts: NDArray[np.int64]
) -> tuple[Alphabet, Symbols, NDArray[np.int64], int]:
    """Return an alphabet, symbols and histograms of at most 256 symbols, and the low bits that are not part of these.

    Either the values that occur are few, or a symbol stands for several neighbors.
    """
    present = np.flatnonzero(counts.any(0))
    if present.size <= MOST_SYMBOLS:
        listed, index = np.empty_like(symbols), np.zeros(alphabet.size, np.uint16)
        index[present] = np.arange(present.size)
        for block in blocks(*symbols.shape):  # indices have eight bytes each
            listed[block] = index[symbols[block]]
        return Alphabet(LISTED, alphabet.values[present]), listed, np.ascontiguousarray(counts[:, present]), 0
    raw = (alphabet.size - 1 >> 8).bit_length()
    if alphabet.kind == LISTED or alphabet.values[1] - alphabet.values[0] > 1:
        return alphabet, symbols, counts, 64  # more bits than anything takes
    more, lowest = -alphabet.size % (1 << raw), int(alphabet.values[0])
    below = more if lowest >= more else 0  # so all numbers still fit a dtype of 16 bits that the values fit
    wider = Alphabet(AFFINE, np.arange(alphabet.size + more) + (lowest - below))
    counts = np.pad(counts, ((0, 0), (below, more - below))).reshape(len(counts), -1, 1 << raw).sum(2)
    return wider, symbols + np.uint16(below), counts, raw


def _bits(counts: NDArray[np.int64]) -> float:
    """Return the entropy of symbols with these counts in bits, table by table."""
    totals = counts.sum(1, keepdims=True)
    return float((counts * (np.log2(np.maximum(totals, 1)) - np.log2(np.maximum(counts, 1)))).sum())


def _leave_out(way: Way, alphabet: Alphabet) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return classes with one more for rows of nothing but zeros, and the histograms without these."""
    zero = np.flatnonzero(alphabet.values == 0)
    empty = (way.symbols == zero[0]).all(1) if zero.size else np.zeros(len(way.symbols), np.bool_)
    if not empty.any():
        return way.classes, way.counts
    kinds, counts, parities = way.classes.copy(), way.counts.copy(), 1 if way.odd is None else 2
    kinds[empty] = int(way.classes.max()) + 1
    odd = np.zeros(int(empty.sum()), np.int64) if way.odd is None else way.odd[empty].sum(1, dtype=np.int64)
    zeros, tables = counts[:, zero[0]], way.classes[empty].astype(np.int64) * parities
    np.subtract.at(zeros, tables, way.symbols.shape[1] - odd)
    np.subtract.at(zeros, tables + parities - 1, odd)
    zeros[~(counts > 0).any(1)] = 1  # a table must have something to describe
    return kinds, np.maximum(counts, 0)  # that of the other half may have counted for this one


@dataclass(frozen=True, slots=True)
class OpenedTiles:
    """A stream whose side information is decoded."""

    # rows, columns: of the array in scan order
    rows: int
    columns: int
    # lowest, highest: of the values that may occur
    lowest: int
    highest: int
    columns_first: bool  # the array was transposed
    tables: TileTables  # what symbols mean
    tiles: Tiles  # where their words are
    data: memoryview  # the bytes of the words

    @property
    def exact(self) -> bool:
        """Return whether float32 holds twice each value and one."""
        return max(-self.lowest, self.highest) < _LARGEST


def open_stream(data: Bytes, rows: int, columns: int, states: int = 1) -> OpenedTiles:
    """Decode the side information of a stream of `rows` × `columns` values."""
    side, words = payload.split(data)
    reader = SideReader(side)
    alphabet = Alphabet.take(reader)
    raw = reader.take(_RAW, MOST_RAW, "the raw bits of a tile")
    affine = alphabet.kind == alphabets.AFFINE and int(alphabet.values[-1] - alphabet.values[0]) == alphabet.size - 1
    size, rest = divmod(alphabet.size, 1 << raw)
    if alphabet.kind == alphabets.SPLIT or size > MOST_SYMBOLS or (raw and (rest or not affine)):
        raise ArtifactError("a stream of tiles has an impossible alphabet; the file is damaged")
    if int(alphabet.values[-1] - alphabet.values[0]) >= SPAN:
        raise ArtifactError("the values of a stream of tiles lie too far apart; the file is damaged")
    columns_first = bool(reader.take(_SCAN, int(abs(states) == 1), "the scan"))
    if columns_first:
        rows, columns = columns, rows
    if columns < LANES:
        raise ArtifactError(f"rows of {columns} in a stream have tiles; the file is damaged")
    tiles = rans_tiles.count(rows, columns)
    if 4 * columns * (tiles // -(-columns // LANES)) > len(words):  # before the numbers of so many tiles are decoded
        raise ArtifactError("a stream has too few bytes for its tiles; the file is damaged")
    most = row_classes.MAX_CLASSES
    # A path along the rows leads from tile to tile, so that they would not be independent.
    form = reader.take(_CLASSES, most - 2 + (states > 1) * most, "the number of classes")
    paired, count = form >= most, form % most + 1
    left_out = reader.take(_LEFT_OUT, 1, "the rows that are left out")
    if states < -1 or (left_out and 0 not in alphabet.values) or count == most:
        raise ArtifactError("a stream of tiles is described in an impossible way; the file is damaged")
    kinds = row_classes.take(reader, rows, count + left_out) if count + left_out > 1 else np.zeros(rows, np.uint8)
    frequencies = frequency_tables.take(reader, count << paired, size, PRECISION)
    first, more = reader.take_all(_WORDS, 1), unzigzag(reader.take_all(_MORE_WORDS, tiles - 1))
    lengths = np.cumsum(np.concatenate([first, more]))
    tails, starts = reader.take_all(_TAIL, tiles), reader.take_all(_START, tiles)
    reader.finish()
    if int(tails.max()) > MOST_TAIL or not 1 <= int(starts.min()) <= int(starts.max()) <= MOST_START:
        raise ArtifactError("a tile of a stream begins or ends in an impossible way; the file is damaged")
    if int(lengths.min()) < 0 or int(lengths.max()) > len(words) or 2 * int(lengths.sum()) != len(words):
        raise ArtifactError("the tiles of a stream are not as long as its payload; the file is damaged")
    return OpenedTiles(
        *(rows, columns, int(alphabet.values[0]), int(alphabet.values[-1]), columns_first),
        TileTables(kinds, frequencies, alphabet.values[:: 1 << raw], raw, trellis.machine(states), bool(paired)),
        Tiles(lengths, tails.astype(np.uint8), starts.astype(np.uint8)),
        words,
    )


def decode(
    data: Bytes, rows: int, columns: int, dtype: np.dtype[np.integer], threads: int, states: int = 1
) -> NDArray[np.integer]:
    """Undo `encode`: (rows, columns) of `dtype`, or of int8 or int16 if that was int32 and they hold all values."""
    stream = open_stream(data, rows, columns, states)
    check_range(stream.lowest, stream.highest, dtype)
    out = np.empty((stream.rows, stream.columns), narrowest(stream.lowest, stream.highest, dtype))
    rans_tiles.decode(stream.data, stream.tiles, stream.tables, out, threads)
    return out.T if stream.columns_first else out


def decode_weights(
    stream: OpenedTiles, factors: Factors, out: NDArray[np.unsignedinteger], kind: Kind, threads: int
) -> None:
    """Fill `out` (rows, columns), in scan order, with weights.

    Args:
        factors: rows and columns in scan order.
        out: C-contiguous, words of the weights' size.
        kind: dtype of the weights.
    """
    if max(-stream.lowest, stream.highest) > factors.most:
        raise ArtifactError(f"a number of a stream is beyond {factors.most}; the file is corrupt")
    rans_tiles.decode(stream.data, stream.tiles, stream.tables, out, threads, factors, kind)
