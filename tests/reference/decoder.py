"""Reference decoder of coded streams in plain Python integers, written from docs/coders.md: the oracle of birdie's.

It shares no code with birdie and prefers plainness to speed. It does not look for damage: its input is valid streams.
"""

from dataclasses import dataclass
from typing import Any

from tests.reference import prediction
from tests.reference.frequency_tables import frequencies
from tests.reference.mixed import decode_mixed
from tests.reference.side_information import Bits, alphabet, opened, unsigned, words_of
from tests.reference.tiles import decode_tiles
from tests.reference.trellis import after

CHUNK = 2**20


def decode_chunk(words: list[int], kinds: list[int], columns: int, side: "Side", states: int) -> list[int]:
    """Return the symbols of one chunk in row-major order (coders.md, "Chunks of coder 4")."""
    size = 3 if side.paired else 2
    lanes = [sum(words[size * lane + i] << 16 * i for i in range(size)) for lane in range(4)]
    least = 1 << (24 if side.paired else 16)
    at, out, state = 4 * size, [], [0] * columns
    slots = [[(s, f, i) for s, f in enumerate(table) for i in range(f)] for table in side.tables]
    for kind in kinds:
        for column in range(columns):
            x, path = lanes[column % 4], column if states > 0 else 0
            table = 2 * kind + state[path] % 2 if side.paired else kind
            symbol, frequency, offset = slots[table][x % 2**side.precision]
            x = frequency * (x >> side.precision) + offset
            if x < least:
                x = x << 16 | words[at]
                at += 1
            lanes[column % 4] = x
            out.append(symbol)
            if side.paired:
                assert side.values is not None
                state[path] = after(states, state[path], side.values[symbol])
    if at != len(words) or lanes != [least] * 4:
        raise ValueError("the chunk does not end where it should")
    return out


@dataclass
class Side:
    """Side information of coder 4; `words` are those of the chunks."""

    values: list[int] | None
    center: int
    size: int
    transposed: int
    precision: int
    predicted: tuple[Any, ...]
    zero: int
    paired: int
    kinds: list[int]
    tables: list[list[int]]
    parts: list[tuple[list[int], int]]
    words: list[int]
    shape: tuple[int, int]


def described(bits: Bits, rows: int, columns: int) -> Side:
    values, center, size = alphabet(bits)
    scan, precision = bits.number(5), bits.number(6) + 8
    paired, count = divmod(bits.number(7), 32)
    count += 1
    if scan:
        rows, columns = columns, rows
    predicted = prediction.take(bits, rows)
    zero = bits.number(23) if predicted != ("none",) else 0
    kinds = bits.chain(24, rows, 31) if count > 1 else [0] * rows
    tables = [frequencies(bits, size, precision) for _ in range(count * (1 + paired))]
    if max(kinds) == 0 and not paired:
        parts = [([0], min(CHUNK, rows * columns - i)) for i in range(0, rows * columns, CHUNK)]
    else:
        step = max(1, CHUNK // columns)
        parts = [(kinds[i : i + step], columns) for i in range(0, rows, step)]
    words = [bits.number(21) for _ in parts]
    shape = rows, columns
    return Side(values, center, size, scan, precision, predicted, zero, paired, kinds, tables, parts, words, shape)


def decode_static(payload: bytes, rows: int, columns: int, states: int = 1) -> list[list[int]]:
    """Return the rows of values of coder 4; `states` are those of the trellis whose paths they are."""
    bits, rest = opened(payload)
    side = described(bits, rows, columns)
    rows, columns = side.shape
    flat: list[int] = []
    for part, length in zip(side.parts, side.words, strict=True):
        flat += decode_chunk(words_of(rest[: 2 * length]), *part, side, states)
        rest = rest[2 * length :]
    grid = [flat[i : i + columns] for i in range(0, rows * columns, columns)]
    grid = prediction.add(side.predicted, grid, side.zero, side.size)
    if side.values is None:
        out = split_values(grid, rest, side.center)
    else:
        out = [[side.values[symbol] for symbol in row] for row in grid]
    return [list(row) for row in zip(*out, strict=True)] if side.transposed else out


def split_values(grid: list[list[int]], low: bytes, center: int) -> list[list[int]]:
    out: list[list[int]] = []
    at = 0
    for row in grid:
        out.append([])
        for token in row:
            width = (token - 256) // 8 + 5 if token >= 256 else 0
            high = 8 + token % 8 if token >= 256 else token
            for bit in range(at + width - 1, at - 1, -1):
                high = 2 * high + (low[bit >> 3] >> (bit & 7) & 1)
            at += width
            out[-1].append(center + unsigned(high))
    return out


def decode_numbers(payload: bytes, rows: int, columns: int) -> list[list[int]]:
    """Return the rows of values of coder 3."""
    bits = Bits(words_of(payload))
    running, center = bits.number(0), bits.signed(1)
    flat, previous = [], center
    for n in bits.chain(2, rows * columns, 31):
        flat.append((previous if running else center) + unsigned(n))
        previous = flat[-1]
    return [flat[i : i + columns] for i in range(0, rows * columns, columns)]


def decode_plain(coder: int, payload: bytes, rows: int, columns: int) -> list[list[int]]:
    """Return the rows of values of coders 0, 1 and 2."""
    count = rows * columns
    if coder == 0:
        flat = [int.from_bytes(payload, "little", signed=True)] * count
    elif coder == 1:
        flat = list(payload)
    else:
        width, low = payload[0], int.from_bytes(payload[1:5], "little", signed=True)
        data = int.from_bytes(payload[5:], "little")
        flat = [low + (data >> width * i & 2**width - 1) for i in range(count)]
    return [flat[i : i + columns] for i in range(0, count, columns)]


def decode(coder: int, payload: bytes, rows: int, columns: int, states: int = 1) -> list[list[int]]:
    """Return the rows of values of any stream; `states` are those of the trellis whose paths they are."""
    if coder <= 2:
        return decode_plain(coder, payload, rows, columns)
    if coder == 5:
        return decode_mixed(payload, rows, columns, states)
    if coder == 6:
        return decode_tiles(payload, rows, columns, states)
    if coder == 4:
        return decode_static(payload, rows, columns, states)
    return decode_numbers(payload, rows, columns)
