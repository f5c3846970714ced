"""Coder 5 in plain integers, without the context mixing (coders.md, "Side information of coder 5")."""

from dataclasses import dataclass
from typing import Any

from tests.reference import prediction
from tests.reference.context_mixing import Chunk, Model
from tests.reference.side_information import Bits, alphabet, opened, words_of

CHUNK = 2**20
PRIORS = ("Gaussian", "logistic", "Laplace")


@dataclass
class Side:
    """Side information of coder 5."""

    values: list[int]
    transposed: int
    zero: int
    low: int
    scale: int
    prior: str
    pseudo_counts: tuple[int, int]
    predicted: tuple[Any, ...]
    words: list[int]
    shape: tuple[int, int]


def described(bits: Bits, rows: int, columns: int) -> Side:
    values, _, _ = alphabet(bits)
    assert values is not None
    scan, zero, low, scale = bits.number(5), bits.number(23), bits.number(8), bits.number(6)
    kind = PRIORS[bits.number(7)]
    pseudo_counts = (2 ** bits.number(9), 2 ** bits.number(9))
    if scan:
        rows, columns = columns, rows
    predicted = prediction.take(bits, rows)
    words = [bits.number(21) for _ in range(0, rows, max(1, CHUNK // columns))]
    return Side(values, scan, zero, low, scale, kind, pseudo_counts, predicted, words, (rows, columns))


def decode_mixed(payload: bytes, rows: int, columns: int, states: int = 1) -> list[list[int]]:
    """Return the rows of values of coder 5; `states` are those of the trellis whose paths they are."""
    bits, rest = opened(payload)
    side = described(bits, rows, columns)
    (rows, columns), size = side.shape, len(side.values)
    step = max(1, CHUNK // columns)
    center = side.zero if side.predicted == ("none",) else size // 2
    on_paths = side.predicted == ("none",) and not side.transposed and not side.low
    paths = (states, tuple(side.values)) if on_paths else ()
    model = Model(((size - 1) >> side.low) + 1, center >> side.low, side.scale, side.prior, side.pseudo_counts, *paths)
    grid: list[list[int]] = []
    for count in side.words:
        pairs = words_of(rest[: 4 * count])
        words = [low | high << 16 for low, high in zip(pairs[::2], pairs[1::2], strict=True)]
        rest = rest[4 * count :]
        height = min(step, rows - len(grid))
        grid += Chunk(model, words).decode(height, columns)
    if side.low:
        data = int.from_bytes(rest[5:], "little")
        for index in range(rows * columns):
            more = data >> index * side.low & 2**side.low - 1
            row, column = divmod(index, columns)
            grid[row][column] = grid[row][column] << side.low | more
    symbols = prediction.add(side.predicted, grid, side.zero, size)
    out = [[side.values[symbol] for symbol in row] for row in symbols]
    return [list(row) for row in zip(*out, strict=True)] if side.transposed else out
