"""Curves of bytes against KL: what a coder takes at another's quality, and their picture.

KL falls fourfold where every weight gets one more bit, so bytes are close to linear in log KL: that is how a curve is
read between its points. It is not read beyond them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.plot import LINE, OURS, THEIRS, rule, text, ticks

Row = Mapping[str, Any]
WIDTH, HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 190, 44, 56


def frontier(rows: Sequence[Row], against: str = "kl") -> list[Row]:
    """The rows that none beats on both bytes and `against`, from fine to coarse."""
    best: list[Row] = []
    for row in sorted((row for row in rows if row["bytes"]), key=lambda row: (row[against], row["bytes"])):
        if not best or row["bytes"] < best[-1]["bytes"]:
            best.append(row)
    return best


def bytes_at(rows: Sequence[Row], value: float, against: str = "kl") -> float | None:
    """Bytes at `value` of `against`, linear in its logarithm between rows of the frontier; None beyond its ends."""
    points = [row for row in frontier(rows, against) if row[against] > 0]
    for low, high in itertools.pairwise(points):
        if low[against] <= value <= high[against]:
            first, last = math.log(low[against]), math.log(high[against])
            share = (math.log(value) - first) / (last - first)
            return float(low["bytes"] + share * (high["bytes"] - low["bytes"]))
    exact = [row["bytes"] for row in points if row[against] == value]
    return float(exact[0]) if exact else None


def ratios(
    ours: Sequence[Row], theirs: Sequence[Row], targets: Sequence[float] = (), against: str = "kl"
) -> list[dict[str, Any]]:
    """Our bytes over theirs at each of their own rows, or at each of `targets` on the curve of theirs.

    Args:
        ours: rows of one model, of which the frontier counts.
        theirs: rows of one rival on the same model.
        targets: values of `against`; without any, those of the rival's rows.
        against: "kl", or "disagreement", which is one minus the agreement.

    Returns:
        rows of rival, quality, its value, their bytes, ours, and the ratio; None where a curve does not reach.
    """
    ours, theirs = _disagreeing(ours), _disagreeing(theirs)
    if targets:
        name = theirs[0]["curve"] if theirs else ""
        asked = [(name, value, bytes_at(theirs, value, against)) for value in targets]
    else:
        asked = [(row["scheme"], row[against], float(row["bytes"])) for row in theirs]
    found = []
    for rival, value, size in asked:
        own = bytes_at(ours, value, against)
        found.append(
            {
                "rival": rival,
                "equal": against,
                "value": value,
                "rival_bytes": None if size is None else round(size),
                "birdie_bytes": None if own is None else round(own),
                "ratio": None if own is None or size is None else round(own / size, 4),
            }
        )
    return found


def _disagreeing(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "disagreement": 1 - row["agreement"]} for row in rows if row["bytes"]]


def svg(rows: Sequence[Row], title: str) -> str:
    """Bytes against KL of each `curve` in `rows`, the KL on a logarithmic axis; left is better, down is smaller.

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

    def across(kl: float) -> float:
        return _LEFT + (math.log10(kl) - left) / (right - left) * (WIDTH - _LEFT - _RIGHT)

    def down(size: float) -> float:
        return _TOP + (high - size / 1e6) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(WIDTH / 2, 24, title, anchor="middle", size=14),
        text((WIDTH - _RIGHT + _LEFT) / 2, HEIGHT - 14, "mean KL(float ‖ decoded), nats", anchor="middle"),
        text(_LEFT, _TOP - 8, "million bytes"),
    ]
    for kl in _decades(left, right):
        parts.append(rule(across(kl), _TOP, across(kl), HEIGHT - _BOTTOM))
        parts.append(text(across(kl), HEIGHT - _BOTTOM + 18, f"{kl:g}", anchor="middle"))
    for size in ticks(low, high):
        y = down(size * 1e6)
        parts.append(rule(_LEFT, y, WIDTH - _RIGHT, y))
        parts.append(text(_LEFT - 8, y + 4, f"{size:g}", anchor="end"))
    taken: list[float] = []
    for curve in dict.fromkeys(row["curve"] for row in drawn):
        points = sorted((row for row in drawn if row["curve"] == curve), key=lambda row: row["kl"])
        colour = OURS if curve.startswith("birdie") else THEIRS
        places = [(across(row["kl"]), down(row["bytes"])) for row in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
        x, y = places[-1]
        label = y + 4
        while any(abs(label - other) < LINE for other in taken):
            label += 1
        taken.append(label)
        parts.append(text(x + 8, label, curve, colour=colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _decades(left: float, right: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between 10^left and 10^right."""
    marks = [digit * 10.0**power for power in range(math.floor(left), math.ceil(right) + 1) for digit in (1, 2, 5)]
    return [mark for mark in marks if left <= math.log10(mark) <= right]
