"""rANS in tiles: 32 columns of about a thousand rows that decode alone, a column in a lane.

    symbols ─► encode: a tile after the other, from its last row up ─► words of all tiles, and where each begins
    words ─► numbers (integers) or weights (number · row · column, rounded to the dtype) ─► rows × 32 columns

A lane codes one column of a tile from top to bottom, so the state of a trellis stays with it. The lanes of a tile share
one stream of 16-bit words: in each row those whose state fell below 2**16 take the next words in the order of lanes. A
GPU decodes a tile with a warp, which finds a lane's word by counting; a processor goes from lane to lane and waits for
none, because states do not depend on each other. An entry of a table says in 32 bits all that a symbol needs.

Words are what a tile costs above the entropy. It begins with the states, 32 bits each, of which a lane uses 24 on
average. The encoder starts low, at 2**start, and in the last rows of a tile (its tail) no lane takes words, so that the
end costs little. Rows of nothing but zeros are left out.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.factors import Factors
from birdie.entropy.rans import Words, encode_table
from birdie.entropy.trellis_states import Machine, chunk_rows
from birdie.errors import ArtifactError
from birdie.system.kernels import inlined, inner, njit

LANES = 32
PRECISION = 12  # log2 of the slots of a table
MOST_SYMBOLS, MOST_TAIL, MOST_START, MOST_RAW = 256, 255, 16, 4
SPAN = 1 << 20  # of the values: the first and the last one are less apart
Kind = Literal["int", "bfloat16", "float16", "float32"]
_KINDS = get_args(Kind)
_ROWS = 1024  # of a tile, about
_TILES = 32  # that are coded at a time
_HALF = np.uint32(16)  # bits of a word
_ZERO, _ONE = np.uint32(0), np.uint32(1)
_NONE, _ALL = np.uint64(0), np.uint64(32)  # unsigned indices need no check for those from the end
# What a lane has beside its state: what an odd state of its path adds to a slot, its entry, the state of its path. One
# array holds them, because the loop over states has no register to spare.
_ODD, _ENTRY, _PATH = np.uint64(32), np.uint64(64), np.uint64(96)
_OFFSET, _SYMBOL = np.uint32(0xFFF), np.uint32(0xFF)  # fields of an entry: offset 12 bits, symbol 8, frequency − 1 12
_SYMBOL_AT, _FREQUENCY_AT = np.uint32(12), np.uint32(20)


def height(columns: int) -> int:
    """Return the rows of a tile: about a thousand, and a multiple of those after which paths of a trellis restart."""
    chunk = chunk_rows(columns)
    return chunk * max(1, round(_ROWS / chunk))


def count(rows: int, columns: int) -> int:
    """Return the number of tiles of an array."""
    return -(-rows // height(columns)) * -(-columns // LANES)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Words of the tiles of an array, tiles of the same rows one after the other."""

    lengths: NDArray[np.int64]  # (tiles,) words of each
    tails: NDArray[np.uint8]  # (tiles,) last rows in which no lane takes words
    starts: NDArray[np.uint8]  # (tiles,) log2 of the state that the encoder began with


@dataclass(frozen=True, slots=True)
class TileTables:
    """Meaning of the symbols of each row."""

    kinds: NDArray[np.uint8]  # (rows,) class of each row; as many as there are classes for one that is left out
    frequencies: NDArray[np.int64]  # (tables, symbols), of each class, or of each class for even and for odd states
    values: NDArray[np.int64]  # (symbols,) rising; with raw bits the first number of each symbol
    raw: int  # low bits of a number that are not coded: a symbol stands for 2**raw numbers
    paths: Machine  # machine of the trellis; that of one state for a plain grid
    paired: bool  # whether tables come in pairs

    def entries(self) -> NDArray[np.uint32]:
        """Return the slots of all tables, one after the other."""
        out = np.empty((len(self.frequencies), 1 << PRECISION), np.uint32)
        _fill(self.frequencies, out)
        return out.reshape(-1)

    def rules(self) -> tuple[int, int, int]:
        """Return shift and flip of the machine, s >> 1 ^ odd · shift ^ parity · flip, and what an odd state adds."""
        states = len(self.paths.odd)
        shift = int(self.paths.next_state[-1, 0]) ^ (states - 1) >> 1
        return shift, int(self.paths.next_state[0, 1]), self.paired << PRECISION


def encode(
    symbols: NDArray[np.uint16],
    kinds: NDArray[np.uint8],
    frequencies: NDArray[np.int64],
    odd: NDArray[np.uint8] | None,
    raw: int = 0,
) -> tuple[Words, Tiles]:
    """Code symbols (rows, columns): return the words of all tiles, and what else describes them.

    Args:
        symbols: C-contiguous.
        kinds, frequencies: as of `Tables`, with tables in pairs if there is `odd`.
        odd: (rows, columns) 1 for a symbol in an odd state of the trellis.
        raw: low bits of `symbols` that are not part of the symbol.
    """
    rows, columns = symbols.shape
    parities, odd = (1, np.zeros((1, columns), np.uint8)) if odd is None else (2, odd)
    table, tall = encode_table(frequencies), min(height(columns), rows)
    buffer = np.empty((_TILES, LANES * tall + 2 * LANES), np.uint16)
    words, parts = [], []
    for first in range(0, rows, tall):
        for column in range(0, columns, _TILES * LANES):
            begins = np.empty(min(_TILES, -(-(columns - column) // LANES)), np.int64)
            tails, starts = np.empty(begins.size, np.uint8), np.empty(begins.size, np.uint8)
            _encode(symbols, kinds, parities, odd, raw, table, first, tall, column, buffer, begins, tails, starts)
            words += [tile[begin:].copy() for tile, begin in zip(buffer, begins, strict=False)]
            parts.append((buffer.shape[1] - begins, tails, starts))
    lengths, tails, starts = (np.concatenate(part) for part in zip(*parts, strict=True))
    return np.concatenate(words), Tiles(lengths, tails, starts)


_NO_FACTORS = Factors(np.zeros((1, 1), np.float32), np.zeros(0, np.float32), 1, False, 0.0)


def decode(
    data: memoryview,
    tiles: Tiles,
    tables: TileTables,
    out: NDArray[np.integer],
    threads: int,
    factors: Factors | None = None,
    kind: Kind = "int",
) -> None:
    """Fill `out` (rows, columns), C-contiguous, with the values, cut to its dtype, or with weights.

    Args:
        data: bytes of the words.
        tiles, tables: of the stream.
        out: of an integer type; for weights, words of their size.
        threads: that decode tiles.
        factors: of weights; values are then below 2**23, so that twice as much is exact.
        kind: what is written.
    """
    rows, columns = out.shape
    words = np.zeros(len(data) // 2 + LANES, "<u2")
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    words = words.astype(np.uint16, copy=False)
    values = np.zeros(MOST_SYMBOLS, np.int32)
    values[: tables.values.size] = tables.values
    listed = bool((np.diff(tables.values) != 1 << tables.raw).any())
    count, by = len(tables.frequencies), factors or _NO_FACTORS
    seen = tables.kinds >= count >> tables.paired
    factor = np.ascontiguousarray(by.rows), by.columns, by.group_size, int(by.halves), np.float32(by.limit)
    arguments = (
        *(words, np.cumsum(tiles.lengths), tiles.tails, tiles.starts, tables.kinds, tables.entries(), seen),
        *(*tables.rules(), count << PRECISION, rows, columns, height(columns), chunk_rows(columns)),
        *(values.view(np.uint32), listed, tables.raw, *factor, _KINDS.index(kind)),
        out.view(f"u{out.itemsize}").reshape(-1),  # signed or not: fewer kernels to compile
    )
    parts = range(0, tiles.lengths.size, _TILES)

    def decode_some(first: int) -> bool:
        return bool(_decode(first, min(first + _TILES, tiles.lengths.size), *arguments))

    if threads > 1 and len(parts) > 1:
        with ThreadPoolExecutor(min(threads, len(parts))) as pool:
            sound = all(pool.map(decode_some, parts))
    else:
        sound = all(map(decode_some, parts))
    if not sound:
        raise ArtifactError("a tile of a stream does not end where it should; the file is damaged")
    if not seen.all():
        raise ArtifactError("a row of zeros is coded in a stream; the file is damaged")


@njit(nogil=True, cache=True, _nrt=False)
def _fill(frequencies, out):  # type: ignore[no-untyped-def]
    for table in range(frequencies.shape[0]):
        slot = 0
        for symbol in range(frequencies.shape[1]):
            frequency = frequencies[table, symbol]
            for offset in range(frequency):
                out[table, slot] = (frequency - 1) << 20 | symbol << 12 | offset
                slot += 1


@inlined
def _pushed(x, entry):  # type: ignore[no-untyped-def]
    """Return the state after a symbol, before words are given off."""
    frequency = entry & np.uint64(0xFFFF_FFFF)
    # Below 2**40 the quotient of floats is rounded down to that of integers, in half the time.
    quotient = np.uint64(np.int64(np.float64(np.int64(x)) / np.float64(np.int64(frequency))))
    return (quotient << np.uint64(12)) + (x - quotient * frequency) + (entry >> np.uint64(32))


@inner
def _tail(symbols, kinds, parities, odd, raw, table, start):  # type: ignore[no-untyped-def]
    """Return the fewest last rows after which all states are in [2**16, 2**32) if they begin at 2**start, or -1."""
    rows, columns = symbols.shape
    least, most, left_out = np.int64(0), np.int64(255), table.shape[0] // parities
    for column in range(columns):
        x, taken, enough = np.uint64(1) << np.uint64(start), np.int64(0), np.int64(-1)
        while True:
            if enough < 0 and x >= np.uint64(1 << 16):
                enough = taken
            row = rows - 1 - taken
            if row < 0 or taken >= most:
                break
            if kinds[row] < left_out:
                half = odd[row * (parities - 1), column]
                symbol = np.uint64(symbols[row, column])
                x = x << np.uint64(raw) | symbol & (np.uint64(1 << raw) - np.uint64(1))
                x = _pushed(x, table[np.int64(kinds[row]) * parities + half, symbol >> np.uint64(raw)])
                if x >= np.uint64(1 << 32):
                    break
            taken += 1
        most = min(most, taken)
        if enough < 0 or enough > most:
            return np.int64(-1)
        least = max(least, enough)
    return least if least <= most else np.int64(-1)


@njit(nogil=True, cache=True)
def _encode(  # type: ignore[no-untyped-def]
    symbols, kinds, parities, odd, raw, table, first_row, height, first_column, buffer, begins, tails, starts
):
    """Fill the end of each tile's part of `buffer`, and begins, tails and starts (tiles,)."""
    last_row = min(first_row + height, symbols.shape[0])
    rows, kind = last_row - first_row, kinds[first_row:last_row]
    above, below = (first_row, last_row) if parities == 2 else (0, 1)
    x, left_out = np.empty(32, np.uint64), table.shape[0] // parities
    low_bits = np.uint64(1 << raw) - np.uint64(1)
    for tile in range(begins.size):
        first = first_column + 32 * tile
        width = min(symbols.shape[1] - first, 32)
        some, half = symbols[first_row:last_row, first : first + width], odd[above:below, first : first + width]
        start, tail = np.int64(1), _tail(some, kind, parities, half, raw, table, np.int64(1))
        while tail < 0:  # a start at 2**16 needs no tail
            start += 1
            tail = _tail(some, kind, parities, half, raw, table, start)
        position, words = buffer.shape[1], buffer[tile]
        for lane in range(width):
            x[lane] = np.uint64(1) << np.uint64(start)
        for row in range(rows - 1, -1, -1):
            if kind[row] >= left_out:
                continue
            entries, states = np.int64(kind[row]) * parities, row * (parities - 1)
            limit = np.uint64(20 - raw) if row < rows - tail else np.uint64(32)
            for lane in range(width - 1, -1, -1):
                symbol, state = np.uint64(some[row, lane]), x[lane]
                entry = table[entries + half[states, lane], symbol >> np.uint64(raw)]
                need = state >= (entry & np.uint64(0xFFFF_FFFF)) << limit
                words[position - 1] = np.uint16(state & np.uint64(0xFFFF))
                position -= np.int64(need)
                state = state >> np.uint64(16) if need else state
                x[lane] = _pushed(state << np.uint64(raw) | symbol & low_bits, entry)
        for lane in range(width - 1, -1, -1):
            position -= 2
            words[position], words[position + 1] = np.uint16(x[lane] >> np.uint64(16)), np.uint16(x[lane])
        begins[tile], tails[tile], starts[tile] = position, tail, start


@inlined
def _number(entry, low, mask, raw, low_bits):  # type: ignore[no-untyped-def]
    """Return the number of an entry whose offset has given way to raw bits."""
    return low + ((entry >> _SYMBOL_AT & mask) << raw) + (entry & low_bits)


@njit(nogil=True, cache=True)
def _decode(  # type: ignore[no-untyped-def]
    begin,
    end,
    words,
    ends,
    tails,
    starts,
    kinds,
    slots,
    seen,
    shift,
    flip,
    paired,
    left_out,
    rows,
    columns,
    height,
    chunk,
    values,
    listed,
    raw,
    by_row,
    by_column,
    group_size,
    double,
    limit,
    kind,
    out,
):
    """Fill the part of tiles `begin` to `end` in `out`; return whether each ends as it should.

    A loop over lanes is either that of the states, or one of known length and without calls, which the compiler turns
    into vector instructions.
    """
    lanes, real, turns = np.zeros(128, np.uint32), np.zeros(32, np.uint32), np.array([1 << 16, 0], np.uint32)
    group, factor, weights = np.zeros(32, np.int64), np.ones(32, np.float32), np.zeros(64, np.float32)
    shift, flip, paired, double = np.uint32(shift), np.uint32(flip), np.uint32(paired), np.uint32(double)
    size, sound, across, low = np.int64(1 << 12) << np.int64(paired > 0), True, -(-columns // 32), values[0]
    bits, grouped, mask = weights.view(np.uint32), by_row.shape[1] > 1, np.uint32(0xFFFFF if listed else 0xFF)
    raw, low_bits = np.uint32(raw), np.uint32((1 << raw) - 1)
    zero = np.uint32((_ZERO - low) >> raw) << _SYMBOL_AT | (_ZERO - low) & low_bits  # an entry of the number 0
    for tile in range(begin, end):
        first_row, column = tile // across * height, tile % across * 32
        width, last_row = min(columns - column, 32), min(first_row + height, rows)
        restart = first_row
        position, last = np.uint64(ends[tile - 1]) if tile else np.uint64(0), np.uint64(ends[tile])
        if position + np.uint64(2 * width) > last:
            sound = False
            continue
        for lane in range(_NONE, _ALL):
            real[lane] = _ZERO
        for lane in range(_NONE, np.uint64(width)):
            lanes[lane] = np.uint32(words[position]) << _HALF | np.uint32(words[position + np.uint64(1)])
            position += np.uint64(2)
            real[lane], group[lane] = _ZERO - _ONE, (column + np.int64(lane)) // group_size
            if by_column.size:
                factor[lane] = by_column[np.uint64(column) + lane]
        for row in range(first_row, last_row):
            if position > last:
                break
            if row == restart:
                restart += chunk
                for lane in range(_NONE, _ALL):
                    lanes[lane + _PATH], lanes[lane + _ODD] = _ZERO, _ZERO
            first, target = np.int64(kinds[row]) * size, np.uint64(row) * np.uint64(columns) + np.uint64(column)
            scale = by_row[row, 0] if kind else np.float32(0)
            if first < left_out:
                least = turns[np.int64(row >= last_row - tails[tile])]
                # A word is loaded in any case: a branch would be a coin toss.
                if raw:
                    for lane in range(_NONE, np.uint64(width)):
                        state, word = lanes[lane], np.uint32(words[position])
                        entry = slots[np.uint64(first) + np.uint64(state & _OFFSET | lanes[lane + _ODD])]
                        rest = np.uint32(((entry >> _FREQUENCY_AT) + _ONE) * (state >> _SYMBOL_AT) + (entry & _OFFSET))
                        entry, rest = entry & ~_OFFSET | rest & low_bits, rest >> raw
                        need = rest < least
                        position += np.uint64(need)
                        lanes[lane] = np.uint32(rest << _HALF | word) if need else rest
                        lanes[lane + _ENTRY] = entry
                else:
                    for lane in range(_NONE, np.uint64(width)):
                        state, word = lanes[lane], np.uint32(words[position])
                        entry = slots[np.uint64(first) + np.uint64(state & _OFFSET | lanes[lane + _ODD])]
                        rest = np.uint32(((entry >> _FREQUENCY_AT) + _ONE) * (state >> _SYMBOL_AT) + (entry & _OFFSET))
                        need = rest < least
                        position += np.uint64(need)
                        lanes[lane] = np.uint32(rest << _HALF | word) if need else rest
                        lanes[lane + _ENTRY] = entry
                if listed:
                    for lane in range(_NONE, _ALL):
                        number = values[lanes[lane + _ENTRY] >> _SYMBOL_AT & _SYMBOL]
                        lanes[lane + _ENTRY] = (number - low) << _SYMBOL_AT
            else:
                scale = np.float32(0)
                for lane in range(_NONE, _ALL):
                    lanes[lane + _ENTRY] = zero
            if grouped:
                for lane in range(_NONE, np.uint64(width)):
                    factor[lane] = by_row[row, group[lane]]
                scale = np.float32(1)
            some = _ZERO
            for lane in range(_NONE, _ALL):
                path, number = lanes[lane + _PATH], _number(lanes[lane + _ENTRY], low, mask, raw, low_bits)
                some = np.uint32(some | number & real[lane])
                half = path & _ONE
                weight = np.float32(np.int32((number << double) + half)) * scale * factor[lane]
                weights[lane] = min(max(weight, -limit), limit)
                following = path >> _ONE ^ (_ZERO - half) & shift ^ (_ZERO - (number & _ONE)) & flip
                lanes[lane + _PATH], lanes[lane + _ODD] = following, (_ZERO - (following & _ONE)) & paired
            if some != _ZERO:  # never a store of False, which could undo that of another thread
                seen[row] = True
            if kind == 1:
                for lane in range(_NONE, np.uint64(width)):  # to the nearest, ties to even
                    out[target + lane] = (bits[lane] + np.uint32(0x7FFF) + (bits[lane] >> _HALF & _ONE)) >> _HALF
            elif kind == 2:
                for lane in range(_NONE, _ALL):  # below 2**-14 the steps of float16 are those of float32 at 0.5
                    weights[lane + _ALL] = abs(weights[lane]) + np.float32(0.5)
                for lane in range(_NONE, np.uint64(width)):
                    word = bits[lane] & np.uint32(0x7FFFFFFF)
                    normal = (word + np.uint32(0xFFF) + (word >> np.uint32(13) & _ONE)) >> np.uint32(13)
                    small = bits[lane + _ALL] - np.uint32(0x3F000000)
                    half = small if word < np.uint32(0x38800000) else normal - np.uint32(112 << 10)
                    out[target + lane] = half | bits[lane] >> _HALF & np.uint32(0x8000)
            elif kind == 3:
                for lane in range(_NONE, np.uint64(width)):
                    out[target + lane] = bits[lane]
            else:
                for lane in range(_NONE, np.uint64(width)):
                    out[target + lane] = _number(lanes[lane + _ENTRY], low, mask, raw, low_bits)
        sound &= position == last
        for lane in range(_NONE, np.uint64(width)):
            sound &= lanes[lane] == _ONE << np.uint32(starts[tile])
    return sound
