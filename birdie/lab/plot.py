"""Curves in the terminal, in braille characters of 2 × 4 dots; both axes have ticks and units.

Written here because the libraries for it do not fit: plotext 6 has a new interface and a compiled kernel, plotille
labels its ticks with ten digits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from birdie.errors import DataError

COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue", "white", "bright_black")
"""One for each curve."""
_Canvas = list[list[tuple[int, int]]]  # (dots, index of the curve) of each character
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, then row, from the top
_EARLY = 0.05  # part of the x axis whose values, the highest of a loss, do not stretch the y axis
_MANY = 10  # points after it, from which on that holds


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a curve, in the order of x.

    Attributes:
        name: for the legend.
        points: (x, y) pairs; those that are not finite are left out.
    """

    name: str
    points: tuple[tuple[float, float], ...]


def plot(curves: Sequence[Curve], *, x_label: str, y_label: str, width: int = 80, height: int = 16) -> list[Text]:
    """Return the lines of a plot.

    Args:
        curves: at most as many as `COLORS`.
        x_label, y_label: quantity and unit.
        width, height: of the plot with its axes, in characters, without the legend.
    """
    if len(curves) > len(COLORS):
        raise DataError(f"{len(curves)} curves are too many to tell apart; choose at most {len(COLORS)} runs")
    finite = [[point for point in curve.points if all(map(math.isfinite, point))] for curve in curves]
    points = [point for line in finite for point in line]
    if not points:
        raise DataError(f"the runs logged no {y_label.partition(',')[0]}; nothing can be plotted")
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    late = [y for x, y in points if x >= left + _EARLY * (right - left)]
    low, high = min(y for _, y in points), max(late if len(late) >= _MANY else (y for _, y in points))
    right, high = _apart(left, right, 1), _apart(low, high, 1e-3)
    ticks = _ticks(low, high, max(2, height // 4))
    labels = {round((high - tick) / (high - low) * (height - 1)): text for tick, text in ticks}
    margin = max(map(len, labels.values()))
    columns = max(10, width - margin - 2)
    canvas: _Canvas = [[(0, 0)] * columns for _ in range(height)]
    ends: dict[tuple[int, int], int] = {}  # letters tell curves apart where colors cannot
    for index, line in enumerate(finite):
        dots = [
            ((x - left) / (right - left) * (2 * columns - 1), (high - y) / (high - low) * (4 * height - 1))
            for x, y in line
        ]
        for start, end in zip(dots, dots[1:] or dots, strict=False):
            _draw(canvas, start, end, index)
        if dots:
            ends[max(0, round(dots[-1][1])) // 4, round(dots[-1][0]) // 2] = index
    lines = [Text(f"{y_label}{'  (cut at the top: the first steps)' * any(y > high for _, y in points)}")]
    for row, cells in enumerate(canvas):
        text = Text(f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}")
        for column, (bits, index) in enumerate(cells):
            last = ends.get((row, column))
            if last is not None:
                text.append(_letter(last), COLORS[last])
            else:
                text.append(chr(0x2800 + bits) if bits else " ", COLORS[index] if bits else None)
        lines.append(text)
    return [*lines, *_x_axis(left, right, columns, margin, x_label), _legend(curves)]


def _apart(low: float, high: float, apart: float) -> float:
    """Return `high`, or a number above `low` if the two are too close for an axis."""
    return high if high - low > 1e-9 * max(1.0, abs(low), abs(high)) else low + apart * max(1.0, abs(low) * 1e-6)


def _draw(canvas: _Canvas, start: tuple[float, float], end: tuple[float, float], index: int) -> None:
    """Draw a line between two points, given in dots; what lies outside the canvas is cut off."""
    steps = max(1, math.ceil(max(abs(end[0] - start[0]), abs(end[1] - start[1]))))
    for number in range(steps + 1):
        x, y = (round(a + (b - a) * number / steps) for a, b in zip(start, end, strict=True))
        if y >= 0:
            bits, _ = canvas[y // 4][x // 2]
            canvas[y // 4][x // 2] = bits | _DOTS[x % 2][y % 4], index


def _ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """Return about `count` round numbers from `low` to `high`, with their text."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    enough = next(factor for factor in (1, 2, 5, 10) if factor * power * count >= high - low)
    for factor in (10, 5, 2, 1):  # the largest step that is not too coarse to have a tick in the range
        step = factor * power
        numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        if factor <= enough and numbers:
            break
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(number * step, f"{number * step:,.{digits}f}") for number in numbers]


def _x_axis(left: float, right: float, columns: int, margin: int, label: str) -> list[Text]:
    rule, numbers = ["─"] * columns, [" "] * (columns + margin + 2)
    for tick, text in _ticks(left, right, max(2, columns // 16)):
        column = round((tick - left) / (right - left) * (columns - 1))
        start = min(max(column + margin + 2 - len(text) // 2, 0), len(numbers) - len(text))
        if any(cell != " " for cell in numbers[max(0, start - 1) : start + len(text) + 1]):
            continue
        rule[column] = "┬"
        numbers[start : start + len(text)] = text
    return [
        Text(f"{'':>{margin}} └{''.join(rule)}"),
        Text("".join(numbers).rstrip()),
        Text(label.rjust(columns + margin + 2)),
    ]


def _legend(curves: Sequence[Curve]) -> Text:
    text = Text()
    for index, curve in enumerate(curves):
        name = "".join(c if c.isprintable() else "?" for c in curve.name)
        text.append(f"━{_letter(index)} ", COLORS[index]).append(f"{name}   ")
    return text


def _letter(index: int) -> str:
    return chr(ord("a") + index)
