"""Bytes against decode speed as a small SVG, written by hand: no plotting library.

Right is faster, down is smaller; a coder that nothing beats on both sits on the lower right edge.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 44, 56
OURS, THEIRS, _INK, _GRID = "#c2410c", "#475569", "#1e293b", "#e2e8f0"
LINE = 13  # least distance of two labels


def svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """The picture of rows with `codec`, `bytes`, `decode_s` and `symbols`; rows without figures are left out.

    Raises:
        ValueError: no row has figures.
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

    def across(speed: float) -> float:
        return _LEFT + (math.log10(speed) - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)

    def down(size: float) -> float:
        return _TOP + (high - size) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(WIDTH / 2, 24, title, anchor="middle", size=14),
    ]
    for power in range(first, last + 1):
        x = across(10.0**power)
        parts.append(rule(x, _TOP, x, HEIGHT - _BOTTOM))
        parts.append(text(x, HEIGHT - _BOTTOM + 18, f"{10.0**power:g}", anchor="middle"))
    for value in ticks(low, high):
        parts.append(rule(_LEFT, down(value), WIDTH - _RIGHT, down(value)))
        parts.append(text(_LEFT - 8, down(value) + 4, f"{value:g}", anchor="end"))
    parts.append(text((WIDTH - _RIGHT + _LEFT) / 2, HEIGHT - 14, "decodes, million symbols a second", anchor="middle"))
    parts.append(text(_LEFT, _TOP - 8, "bits a symbol"))
    taken: list[tuple[float, float]] = []
    for name, speed, size in sorted(points, key=lambda point: -point[2]):
        x, y = across(speed), down(size)
        colour = OURS if name.startswith("birdie") else THEIRS
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        label = y + 4
        while any(abs(label - other) < LINE and abs(x - place) < 120 for place, other in taken):
            label += LINE
        taken.append((x, label))
        parts.append(text(x + 9, label, name, colour=colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Round values between `low` and `high`, about five."""
    step = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(step * factor for factor in (0.2, 0.5, 1, 2, 5) if (high - low) / (step * factor) <= 6)
    return [round(index * step, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def rule(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line of the grid."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_GRID}"/>'


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, colour: str = _INK) -> str:
    """Words at (x, y)."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(words)}</text>"
