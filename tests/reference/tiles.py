"""Tiles in plain Python integers (coders.md, "Coder 6")."""

from dataclasses import dataclass

from tests.reference.frequency_tables import frequencies
from tests.reference.side_information import Bits, alphabet, opened, words_of
from tests.reference.trellis import after

CHUNK = 2**20
ROWS = 1024  # of a tile, about
COLUMNS = 32


@dataclass
class TiledSide:
    """Side information of coder 6; `words`, `tails` and `starts` are those of each tile."""

    values: list[int]
    raw: int
    transposed: int
    paired: int
    left_out: int
    classes: int
    kinds: list[int]
    tables: list[list[int]]
    height: int
    words: list[int]
    tails: list[int]
    starts: list[int]
    shape: tuple[int, int]


def described(bits: Bits, rows: int, columns: int) -> TiledSide:
    values, _, size = alphabet(bits)
    assert values is not None
    raw, scan = bits.number(83), bits.number(5)
    if scan:
        rows, columns = columns, rows
    paired, count = divmod(bits.number(7), 32)
    count += 1
    left_out = bits.number(80)
    kinds = bits.chain(24, rows, 31) if count > 1 or left_out else [0] * rows
    tables = [frequencies(bits, size // 2**raw, 12) for _ in range(count * (1 + paired))]
    restart = max(1, CHUNK // columns)
    height = restart * max(1, round(ROWS / restart))
    tiles = -(-rows // height) * -(-columns // COLUMNS)
    words = [bits.number(21)]
    for _ in range(tiles - 1):
        words.append(words[-1] + bits.signed(57))
    tails = [bits.number(81) for _ in range(tiles)]
    starts = [bits.number(82) for _ in range(tiles)]
    shape = rows, columns
    return TiledSide(values, raw, scan, paired, left_out, count, kinds, tables, height, words, tails, starts, shape)


def decode_tile(
    words: list[int], kinds: list[int], width: int, tile: int, side: TiledSide, states: int
) -> list[list[int]]:
    """Return the rows of one tile of `width` columns."""
    lanes = [words[2 * lane] << 16 | words[2 * lane + 1] for lane in range(width)]
    slots = [[(s, f, i) for s, f in enumerate(table) for i in range(f)] for table in side.tables]
    at, out, path = 2 * width, [], [0] * width
    restart = max(1, CHUNK // side.shape[1])
    for row, kind in enumerate(kinds):
        if row % restart == 0:
            path = [0] * width
        if kind == side.classes:
            out.append([0] * width)
        else:
            out.append([])
            for lane in range(width):
                table = 2 * kind + path[lane] % 2 if side.paired else kind
                symbol, frequency, offset = slots[table][lanes[lane] % 4096]
                x = frequency * (lanes[lane] // 4096) + offset
                out[row].append(side.values[2**side.raw * symbol + x % 2**side.raw])
                x //= 2**side.raw
                if row < len(kinds) - side.tails[tile] and x < 2**16:
                    x = x << 16 | words[at]
                    at += 1
                lanes[lane] = x
        path = [after(states, state, value) for state, value in zip(path, out[row], strict=True)]
    if at != len(words) or lanes != [2 ** side.starts[tile]] * width:
        raise ValueError("the tile does not end where it should")
    return out


def decode_tiles(payload: bytes, rows: int, columns: int, states: int = 1) -> list[list[int]]:
    """Return the rows of values of coder 6; `states` are those of the trellis whose paths they are."""
    bits, rest = opened(payload)
    side = described(bits, rows, columns)
    rows, columns = side.shape
    words, out, tile = words_of(rest), [list[int]() for _ in range(rows)], 0
    for first in range(0, rows, side.height):
        kinds = side.kinds[first : first + side.height]
        for column in range(0, columns, COLUMNS):
            some, words = words[: side.words[tile]], words[side.words[tile] :]
            for row, part in enumerate(decode_tile(some, kinds, min(COLUMNS, columns - column), tile, side, states)):
                out[first + row] += part
            tile += 1
    if words or any(kind < side.classes and not any(row) for kind, row in zip(side.kinds, out, strict=True)):
        raise ValueError("words are left, or a row of zeros is coded")
    return [list(row) for row in zip(*out, strict=True)] if side.transposed else out
