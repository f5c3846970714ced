"""Linear prediction of symbols by symbols before them, in plain integers (coders.md, "Prediction")."""

from typing import Any

from tests.reference.side_information import Bits

Grid = list[list[int]]


def take(bits: Bits, rows: int) -> tuple[Any, ...]:
    """Return ("none",), ("rows", distances, weights) or ("taps", weights by offset)."""
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
    taps = [offset for i, offset in enumerate(listed) if offset != (0, 0) and offset not in listed[:i]]
    return ("taps", {offset: [bits.signed(64 + i) for _ in range(n)] for i, offset in enumerate(taps)})


def add(predicted: tuple[Any, ...], residuals: Grid, zero: int, size: int) -> Grid:
    """Return the symbols that have these residuals."""
    if predicted[0] == "none":
        return residuals
    symbols: Grid = []
    means = [0] * len(residuals[0])
    for row, left in enumerate(residuals):
        symbols.append([])
        for column, residual in enumerate(left):
            if predicted[0] == "rows":
                guess = from_rows(predicted[1], predicted[2], symbols, row, column, means[column], zero)
            else:
                guess = from_taps(predicted[1], symbols, row, column, len(left), zero)
            symbols[row].append((residual - size // 2 + guess + zero) % size)
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


def from_taps(
    weights: dict[tuple[int, int], list[int]], symbols: Grid, row: int, column: int, columns: int, zero: int
) -> int:
    total = 0
    for (up, left), shares in weights.items():
        if row - up >= 0 and 0 <= column - left < columns and shares[column % len(shares)]:
            total += shares[column % len(shares)] * (symbols[row - up][column - left] - zero)
    return (total + 16) >> 5
