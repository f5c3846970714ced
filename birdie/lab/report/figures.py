"""Figures of the report: SVG by matplotlib.

Static SVG, because it needs no script, prints sharply, and stays small; an inlined plotting library would weigh more
than all else on the page. Letters are drawn as paths, so no text depends on a font of the reader's. Ink is
`currentColor`, so the figures follow the page into dark mode. The same data give the same bytes.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from birdie.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0b84c6", "#e07b00", "#12a07a", "#c9509a", "#8a6fe0", "#b8860b", "#d1453b", "#6b7a8c")
"""Colors of runs, in this order and again from the start; readable on light and dark paper."""
_INK = "#010203"  # replaced by currentColor
_SIZE = 4.4, 2.9  # inches: letters of 9 points remain readable on a phone, where a figure is 360 pixels wide
_Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: name, color and points (x, y)."""

    name: str
    color: str
    points: _Points


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar of parts: name of the row, and (part, value) pairs."""

    name: str
    parts: Sequence[tuple[str, float]]


def curves(lines: Sequence[Line], x_label: str, y_label: str, *, marks: bool = False) -> tuple[str, bool]:
    """Return curves, and whether they are cut off at the top, where only their first twentieths reach."""
    figure, axes = _axes(x_label, y_label)
    for line in lines:
        x, y = np.array(line.points, dtype=float).T
        axes.plot(x, y, color=line.color, linewidth=1.3, marker="o" if marks else None, markersize=3)
    points = [point for line in lines for point in line.points]
    late = [y for line in lines for x, y in line.points if x >= 0.95 * line.points[0][0] + 0.05 * line.points[-1][0]]
    low, high, top = min(y for _, y in points), max(late), max(y for _, y in points)
    cut = len(late) >= 10 and low < high < top - 0.2 * (top - low)
    axes.ticklabel_format(useOffset=False, style="plain")
    if cut:
        axes.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    return _svg(figure), cut


def scatter(points: Sequence[Line], x_label: str, y_label: str, limits: Sequence[tuple[str, float]]) -> str:
    """Return points with their names, and vertical lines for the limits (name, x)."""
    figure, axes = _axes(x_label, y_label)
    for line in points:
        x, y = np.array(line.points, dtype=float).T
        axes.plot(x, y, "o", color=line.color, markersize=6)
    for name, x in limits:
        axes.axvline(x, color=_INK, linewidth=1, linestyle="--")
        axes.annotate(
            f"{name} ",
            (x, 1),
            xycoords=("data", "axes fraction"),
            ha="right",
            va="top",
            rotation=90,
            color=_INK,
            size=8,
        )
    axes.margins(0.12)
    axes.ticklabel_format(useOffset=False, style="plain")
    return _svg(figure)


def stacked(bars: Sequence[Bar], x_label: str) -> tuple[str, list[str], list[str]]:
    """Return horizontal bars, and the names and colors of their parts for the legend."""
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))
    colors = [COLORS[index % len(COLORS)] for index in range(len(names))]
    figure, axes = _axes(x_label, "", height=0.75 + 0.38 * len(bars))
    for row, bar in enumerate(bars):
        left = 0.0
        for name, value in bar.parts:
            axes.barh(row, value, left=left, color=colors[names.index(name)], height=0.62)
            left += value
    axes.set_yticks(range(len(bars)), [_short(bar.name) for bar in bars])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return _svg(figure), names, colors


def columns(values: Sequence[tuple[str, float]], x_label: str, y_label: str, color: str) -> str:
    """Return vertical bars, one for each name; names are thinned out where they would touch."""
    figure, axes = _axes(x_label, y_label)
    axes.bar(range(len(values)), [value for _, value in values], color=color, width=0.75)
    step = max(1, -(-len(values) // 16))
    axes.set_xticks(range(0, len(values), step), [_short(name) for name, _ in values[::step]])
    axes.grid(axis="x", visible=False)
    return _svg(figure)


def histogram(symbols: NDArray[Any], shares: NDArray[Any], probabilities: NDArray[Any] | None, color: str) -> str:
    """Return the shares of integers as bars, and the probabilities of a coder as a line; both (symbols,)."""
    figure, axes = _axes("stored integer", "share of weights, %", height=2.4)
    width = float(np.diff(symbols).min()) if symbols.size > 1 else 1.0
    axes.bar(symbols, 100 * shares, color=color, width=width, linewidth=0)
    axes.locator_params(axis="x", integer=True)
    if probabilities is not None:
        axes.plot(symbols, 100 * probabilities, color=_INK, linewidth=1.1, drawstyle="steps-mid")
    return _svg(figure)


def _axes(x_label: str, y_label: str, height: float = _SIZE[1]) -> tuple[Any, "Axes"]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("matplotlib is not installed; pip install 'birdie-compress[lab]'") from error
    figure = Figure((_SIZE[0], height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label, color=_INK, fontsize=9)
    axes.set_ylabel(y_label, color=_INK, fontsize=9)
    axes.tick_params(colors=_INK, labelsize=8, length=3)
    axes.grid(color=_INK, alpha=0.13, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_INK)
        spine.set_alpha(0.4)
    return figure, axes


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "birdie"}):
        nothing = dict.fromkeys(("Date", "Creator", "Type", "Format"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns:xlink="[^"]*"| xmlns="[^"]*"', "", svg, count=2).replace("xlink:href", "href")
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)  # of groups; those of letters and marks, which are used, have no "_"
    return re.sub(r"(\d\d\.\d\d)\d+", r"\1", re.sub(r"\s*\n\s*", "\n", svg))


def _short(name: str, most: int = 16) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
