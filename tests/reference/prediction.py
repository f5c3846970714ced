"""Linear prediction of symbols by symbols before them, in plain integers (format.md, "Prediction")."""

from tests.reference.numbers import Bits

Grid = list[list[int]]


def take(bits: Bits, rows: int) -> tuple:
    """("none",), ("rows", distances, weights) or ("taps", weights by place looked back to)."""
    kind = bits.number(22)
    if kind == 0:
        return ("none",)
    if kind == 1:
        distances = [[bits.number(58 + k) for _ in range(rows)] for k in range(2)]
        weights = [[bits.signed(61) for _ in range(rows)]]
        weights += [[bits.signed(62 + k) if back else 0 for back in distances[k]] for k in range(2)]
        return ("rows", distances, weights)
    height, width = bits.number(56) + 1, bits.number(56) + 1
    n = height * width
    across = [1, 2, width, width + 1, width - 1, 2 * width, n, 2 * n, n - 1, n + 1, n - width, n + width]
    listed = [(0, back) for back in across] + [(1, 0), (2, 0), (1, -1), (1, 1), (1, -width), (1, width)]
    places = [place for i, place in enumerate(listed) if place != (0, 0) and place not in listed[:i]]
    return ("taps", {place: [bits.signed(64 + i) for _ in range(n)] for i, place in enumerate(places)})


def add(foretold: tuple, differences: Grid, zero: int, size: int) -> Grid:
    """The symbols whose differences from what is foretold these are."""
    if foretold[0] == "none":
        return differences
    symbols: Grid = []
    means = [0] * len(differences[0])
    for row, left in enumerate(differences):
        symbols.append([])
        for column, difference in enumerate(left):
            if foretold[0] == "rows":
                guess = from_rows(foretold[1], foretold[2], symbols, row, column, means[column], zero)
            else:
                guess = from_taps(foretold[1], symbols, row, column, len(left), zero)
            symbols[row].append((difference - size // 2 + guess + zero) % size)
        for column, symbol in enumerate(symbols[row]):
            mean = means[column]
            means[column] = mean + ((256 * (symbol - zero) - mean) * (65536 // (min(row, 1023) + 1)) >> 16)
    return symbols


def from_rows(distances: Grid, weights: Grid, symbols: Grid, row: int, column: int, mean: int, zero: int) -> int:
    total = weights[0][row] * mean
    for k in range(2):
        if distances[k][row]:
            total += 256 * weights[k + 1][row] * (symbols[row - distances[k][row]][column] - zero)
    return (total + 1024) >> 11


def from_taps(weights: dict, symbols: Grid, row: int, column: int, columns: int, zero: int) -> int:
    total = 0
    for (up, left), shares in weights.items():
        if row - up >= 0 and 0 <= column - left < columns and shares[column % len(shares)]:
            total += shares[column % len(shares)] * (symbols[row - up][column - left] - zero)
    return (total + 16) >> 5
