"""Curves of bytes against KL: the bytes of a coder at another coder's quality, and their chart.

One more bit per weight divides the KL by four, so bytes are nearly linear in log KL: that is how a curve is
interpolated between its points. It is not extrapolated.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.plot import BIRDIE_COLOR, LINE_HEIGHT, RIVAL_COLOR, grid_line, text, ticks

Row = Mapping[str, Any]
WIDTH, HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 190, 44, 56


def frontier(rows: Sequence[Row], against: str = "kl") -> list[Row]:
    """Return the rows that no other row beats on both bytes and `against`, from fine to coarse."""
    best: list[Row] = []
    for row in sorted((row for row in rows if row["bytes"]), key=lambda row: (row[against], row["bytes"])):
        if not best or row["bytes"] < best[-1]["bytes"]:
            best.append(row)
    return best


def bytes_at(rows: Sequence[Row], value: float, against: str = "kl") -> float | None:
    """Return the bytes at `value` of `against`, linear in its logarithm between frontier rows; None beyond its ends."""
    points = [row for row in frontier(rows, against) if row[against] > 0]
    for low, high in itertools.pairwise(points):
        if low[against] <= value <= high[against]:
            first, last = math.log(low[against]), math.log(high[against])
            share = (math.log(value) - first) / (last - first)
            return float(low["bytes"] + share * (high["bytes"] - low["bytes"]))
    exact = [row["bytes"] for row in points if row[against] == value]
    return float(exact[0]) if exact else None


def ratios(
    birdie_rows: Sequence[Row], rival_rows: Sequence[Row], targets: Sequence[float] = (), against: str = "kl"
) -> list[dict[str, Any]]:
    """Return birdie's bytes over a rival's at the quality of each rival row, or at each of `targets` on its curve.

    Args:
        birdie_rows: rows of one model; their frontier counts.
        rival_rows: rows of one rival on the same model.
        targets: values of `against`; default: those of the rival's rows.
        against: "kl", or "disagreement" (one minus agreement).

    Returns:
        rows of rival, quality, its value, both sizes and their ratio; None where a curve does not reach.
    """
    birdie_rows, rival_rows = _with_disagreement(birdie_rows), _with_disagreement(rival_rows)
    if targets:
        name = rival_rows[0]["curve"] if rival_rows else ""
        points = [(name, value, bytes_at(rival_rows, value, against)) for value in targets]
    else:
        points = [(row["scheme"], row[against], float(row["bytes"])) for row in rival_rows]
    lines = []
    for rival, value, rival_bytes in points:
        birdie_bytes = bytes_at(birdie_rows, value, against)
        ratio = None if birdie_bytes is None or rival_bytes is None else round(birdie_bytes / rival_bytes, 4)
        lines.append(
            {
                "rival": rival,
                "equal": against,
                "value": value,
                "rival_bytes": None if rival_bytes is None else round(rival_bytes),
                "birdie_bytes": None if birdie_bytes is None else round(birdie_bytes),
                "ratio": ratio,
            }
        )
    return lines


def _with_disagreement(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "disagreement": 1 - row["agreement"]} for row in rows if row["bytes"]]


def svg(rows: Sequence[Row], title: str) -> str:
    """Return the chart of bytes against KL of each `curve` in `rows`, the KL on a logarithmic axis.

    Raises:
        ValueError: no row has bytes and a positive KL.
    """
    drawn = [row for row in rows if row["bytes"] and row["kl"] and row["kl"] > 0]
    if not drawn:
        raise ValueError("no row has bytes and a KL to draw")
    logs: list[float] = [math.log10(row["kl"]) for row in drawn]
    sizes: list[float] = [row["bytes"] / 1e6 for row in drawn]
    left, right = min(logs) - 0.1, max(logs) + 0.1
    margin = 0.06 * (max(sizes) - min(sizes)) or 0.1
    low, high = min(sizes) - margin, max(sizes) + margin

    def to_x(kl: float) -> float:
        return _LEFT + (math.log10(kl) - left) / (right - left) * (WIDTH - _LEFT - _RIGHT)

    def to_y(size: float) -> float:
        return _TOP + (high - size / 1e6) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(WIDTH / 2, 24, title, anchor="middle", size=14),
        text((WIDTH - _RIGHT + _LEFT) / 2, HEIGHT - 14, "mean KL(float ‖ decoded), nats", anchor="middle"),
        text(_LEFT, _TOP - 8, "million bytes"),
    ]
    for kl in _decades(left, right):
        parts.append(grid_line(to_x(kl), _TOP, to_x(kl), HEIGHT - _BOTTOM))
        parts.append(text(to_x(kl), HEIGHT - _BOTTOM + 18, f"{kl:g}", anchor="middle"))
    for size in ticks(low, high):
        y = to_y(size * 1e6)
        parts.append(grid_line(_LEFT, y, WIDTH - _RIGHT, y))
        parts.append(text(_LEFT - 8, y + 4, f"{size:g}", anchor="end"))
    labels: list[float] = []
    for curve in dict.fromkeys(row["curve"] for row in drawn):
        points = sorted((row for row in drawn if row["curve"] == curve), key=lambda row: row["kl"])
        color = BIRDIE_COLOR if curve.startswith("birdie") else RIVAL_COLOR
        positions = [(to_x(row["kl"]), to_y(row["bytes"])) for row in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in positions]
        x, y = positions[-1]
        label = y + 4
        while any(abs(label - other) < LINE_HEIGHT for other in labels):
            label += 1
        labels.append(label)
        parts.append(text(x + 8, label, curve, color=color))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _decades(left: float, right: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten between 10^left and 10^right."""
    marks = [digit * 10.0**power for power in range(math.floor(left), math.ceil(right) + 1) for digit in (1, 2, 5)]
    return [mark for mark in marks if left <= math.log10(mark) <= right]
