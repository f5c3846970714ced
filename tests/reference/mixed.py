"""Coder 5 in plain integers: the side information around the mixing (format.md, "Side information of coder 5")."""

from dataclasses import dataclass

from tests.reference import prediction
from tests.reference.mixing import Chunk, Model
from tests.reference.numbers import Bits, alphabet, opened, words_of

CHUNK = 2**20
PRIORS = ("Gaussian", "logistic", "Laplace")


@dataclass
class Side:
    """What the side information says."""

    values: list[int]
    transposed: int
    zero: int
    low: int
    scale: int
    prior: str
    steady: tuple[int, int]
    predicted: tuple
    words: list[int]
    shape: tuple[int, int]


def described(bits: Bits, rows: int, columns: int) -> Side:
    values, _, _ = alphabet(bits)
    assert values is not None
    scan, zero, low, scale = bits.number(5), bits.number(23), bits.number(8), bits.number(6)
    kind = PRIORS[bits.number(7)]
    steady = (2 ** bits.number(9), 2 ** bits.number(9))
    if scan:
        rows, columns = columns, rows
    predicted = prediction.take(bits, rows)
    words = [bits.number(21) for _ in range(0, rows, max(1, CHUNK // columns))]
    return Side(values, scan, zero, low, scale, kind, steady, predicted, words, (rows, columns))


def decode_mixed(payload: bytes, rows: int, columns: int, states: int = 1) -> list[list[int]]:
    """Coder 5: rows of values, those of paths through a trellis of so many states."""
    bits, rest = opened(payload)
    side = described(bits, rows, columns)
    (rows, columns), size = side.shape, len(side.values)
    step = max(1, CHUNK // columns)
    centre = side.zero if side.predicted == ("none",) else size // 2
    followed = side.predicted == ("none",) and not side.transposed and not side.low
    paths = (states, tuple(side.values)) if followed else ()
    model = Model(((size - 1) >> side.low) + 1, centre >> side.low, side.scale, side.prior, side.steady, *paths)
    grid: list[list[int]] = []
    for count in side.words:
        pairs = words_of(rest[: 4 * count])
        words = [low | high << 16 for low, high in zip(pairs[::2], pairs[1::2], strict=True)]
        rest = rest[4 * count :]
        height = min(step, rows - len(grid))
        grid += Chunk(model, words).decode(height, columns)
    if side.low:
        data = int.from_bytes(rest[5:], "little")
        for place in range(rows * columns):
            more = data >> place * side.low & 2**side.low - 1
            row, column = divmod(place, columns)
            grid[row][column] = grid[row][column] << side.low | more
    symbols = prediction.add(side.predicted, grid, side.zero, size)
    out = [[side.values[symbol] for symbol in row] for row in symbols]
    return [list(row) for row in zip(*out, strict=True)] if side.transposed else out
