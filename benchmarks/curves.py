"""Curves of bytes against quality: the bytes of a coder at another coder's quality, and charts.

One more bit per weight divides the KL by four, so bytes are nearly linear in log KL: that is how a curve is
interpolated between its points. It is not extrapolated.
"""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Curve = Sequence[tuple[float, float]]


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


def quality_chart(rows: Sequence[Row], title: str) -> bytes:
    """Return the chart of bytes against KL of each `curve` in `rows` as SVG."""
    drawn = [row for row in rows if row["bytes"] and row["kl"] and row["kl"] > 0]
    curves = {
        name: sorted((row["kl"], row["bytes"] / 1e6) for row in drawn if row["curve"] == name)
        for name in dict.fromkeys(row["curve"] for row in drawn)
    }
    return _chart(curves, title, "mean KL(float ‖ decoded), nats", "million bytes")


def speed_chart(rows: Sequence[Row], title: str) -> bytes:
    """Return the chart of bits against decoding speed of each `codec` in `rows` as SVG."""
    points = {
        row["codec"]: [(row["symbols"] / row["decode_s"] / 1e6, 8 * row["bytes"] / row["symbols"])]
        for row in rows
        if row["bytes"] and row["decode_s"]
    }
    return _chart(points, title, "decodes, million symbols a second", "bits a symbol")


def _chart(curves: Mapping[str, Curve], title: str, across: str, up: str) -> bytes:
    """Return a chart with a logarithmic axis across and a label at the last point of each curve.

    Raises:
        ValueError: there is no point to draw.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not any(curves.values()):
        raise ValueError("no row has the numbers to draw")
    figure = Figure((8, 4.8), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        color = "#c2410c" if name.startswith("birdie") else "#475569"
        axes.plot(*zip(*points, strict=True), "o-", color=color, gid=name)
        axes.annotate(name, points[-1], (6, 0), textcoords="offset points", va="center", color=color)
    axes.set(title=title, xlabel=across, ylabel=up, xscale="log")
    axes.margins(x=0.2)
    axes.grid(color="#e2e8f0")
    text = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "birdie"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
