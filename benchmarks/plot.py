"""Chart of bytes against decoding speed as SVG, without a plotting library.

Faster coders are further right, smaller files further down; a coder that no other beats on both is on the lower right
edge.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 44, 56
BIRDIE_COLOR, RIVAL_COLOR, _TEXT_COLOR, _GRID_COLOR = "#c2410c", "#475569", "#1e293b", "#e2e8f0"
LINE_HEIGHT = 13  # minimum distance of two labels


def svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return the chart of rows with `codec`, `bytes`, `decode_s` and `symbols`; rows without numbers are skipped.

    Raises:
        ValueError: no row has numbers.
    """
    points: list[tuple[str, float, float]] = [
        (row["codec"], row["symbols"] / row["decode_s"] / 1e6, 8 * row["bytes"] / row["symbols"])
        for row in rows
        if row["bytes"] and row["decode_s"]
    ]
    if not points:
        raise ValueError("no row has bytes and a decoding time to draw")
    speeds, bits = [speed for _, speed, _ in points], [size for _, _, size in points]
    first, last = math.floor(math.log10(min(speeds))), math.ceil(math.log10(max(speeds)))
    last = max(last, first + 1)
    margin = 0.08 * (max(bits) - min(bits)) or 0.1
    low, high = min(bits) - margin, max(bits) + margin

    def to_x(speed: float) -> float:
        return _LEFT + (math.log10(speed) - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)

    def to_y(size: float) -> float:
        return _TOP + (high - size) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(WIDTH / 2, 24, title, anchor="middle", size=14),
    ]
    for power in range(first, last + 1):
        x = to_x(10.0**power)
        parts.append(grid_line(x, _TOP, x, HEIGHT - _BOTTOM))
        parts.append(text(x, HEIGHT - _BOTTOM + 18, f"{10.0**power:g}", anchor="middle"))
    for value in ticks(low, high):
        parts.append(grid_line(_LEFT, to_y(value), WIDTH - _RIGHT, to_y(value)))
        parts.append(text(_LEFT - 8, to_y(value) + 4, f"{value:g}", anchor="end"))
    parts.append(text((WIDTH - _RIGHT + _LEFT) / 2, HEIGHT - 14, "decodes, million symbols a second", anchor="middle"))
    parts.append(text(_LEFT, _TOP - 8, "bits a symbol"))
    labels: list[tuple[float, float]] = []
    for name, speed, size in sorted(points, key=lambda point: -point[2]):
        x, y = to_x(speed), to_y(size)
        color = BIRDIE_COLOR if name.startswith("birdie") else RIVAL_COLOR
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>')
        label = y + 4
        while any(abs(label - other) < LINE_HEIGHT and abs(x - other_x) < 120 for other_x, other in labels):
            label += LINE_HEIGHT
        labels.append((x, label))
        parts.append(text(x + 9, label, name, color=color))
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Return about five round values between `low` and `high`."""
    step = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(step * factor for factor in (0.2, 0.5, 1, 2, 5) if (high - low) / (step * factor) <= 6)
    return [round(index * step, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def grid_line(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a line of the grid."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_GRID_COLOR}"/>'


def text(x: float, y: float, content: str, *, anchor: str = "start", size: int = 12, color: str = _TEXT_COLOR) -> str:
    """Return a text at (x, y)."""
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}"'
    return f"<text {attributes}>{escape(content)}</text>"
