"""Curves of bytes against KL are interpolated on the logarithm, and the chart has every curve."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.curves import bytes_at, frontier, ratios, svg
from tests.benchmarks.small_gpt import row


def test_bytes_are_interpolated_on_the_logarithm_of_kl() -> None:
    rows = [row("a", round(1000 - 100 * math.log2(kl / 0.01)), kl) for kl in (0.001, 0.01, 0.1)]
    assert bytes_at(rows, 0.02) == pytest.approx(900, abs=1)
    assert bytes_at(rows, 0.01) == 1000
    assert bytes_at(rows, 0.0005) is None
    assert bytes_at(rows, 0.2) is None


def test_rows_that_another_row_beats_are_not_on_the_frontier() -> None:
    rows = [row("a", 100, 0.01), row("a", 120, 0.02), row("a", 80, 0.02), row("a", 90, 0.015)]
    assert [point["bytes"] for point in frontier(rows)] == [100, 90, 80]
    assert bytes_at(rows, 0.02) == 80


def test_a_curve_of_half_the_bytes_has_ratio_a_half() -> None:
    rival = [row("them", size, kl) for size, kl in ((1000, 0.005), (800, 0.02))]
    birdie = [row("birdie", size // 2, kl) for size, kl in ((1400, 0.0012), (1000, 0.005), (800, 0.02), (700, 0.05))]
    assert [point["ratio"] for point in ratios(birdie, rival)] == [0.5, 0.5]
    (middle,) = ratios(birdie, rival, [0.01])
    assert middle["ratio"] == pytest.approx(0.5)
    assert middle["rival_bytes"] == 900
    assert ratios(birdie, [row("them", 1000, 0.5)])[0]["ratio"] is None
    assert [point["ratio"] for point in ratios(birdie, rival, against="disagreement")] == [0.5, 0.5]


def test_the_chart_has_every_curve() -> None:
    rows = [row("birdie", 1000, 0.001), row("birdie", 600, 0.1), row("<rival>", 900, 0.01)]
    root = ElementTree.fromstring(svg(rows, "a title"))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert {"birdie", "<rival>", "a title", "0.01"} <= set(texts)
    assert len(circles) == 3
    assert float(circles[1].get("cx", 0)) > float(circles[0].get("cx", 0))  # the coarser file is further right
    assert float(circles[1].get("cy", 0)) > float(circles[0].get("cy", 0))  # the smaller file is lower
    with pytest.raises(ValueError, match="no row"):
        svg([row("a", 0, 0.1)], "nothing")
