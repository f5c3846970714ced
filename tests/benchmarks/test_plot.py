"""The chart of coders is valid SVG with a circle and a label for every measured coder."""

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from benchmarks.plot import svg


def test_the_plot_is_svg_with_every_measured_coder() -> None:
    lines: list[dict[str, Any]] = [
        {"codec": "birdie max", "bytes": 1000, "decode_s": 0.5, "symbols": 2000},
        {"codec": "a <rival> & co", "bytes": 1100, "decode_s": 2.0, "symbols": 2000},
        {"codec": "absent", "bytes": None, "decode_s": None, "symbols": 2000},
    ]
    root = ElementTree.fromstring(svg(lines, "a title"))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 2
    assert {"birdie max", "a <rival> & co", "a title"} <= set(texts)
    assert float(circles[1].get("cx", 0)) > float(circles[0].get("cx", 0))  # the faster coder is further right
    assert float(circles[1].get("cy", 0)) > float(circles[0].get("cy", 0))  # the smaller file is lower
    with pytest.raises(ValueError, match="no row"):
        svg(lines[2:], "nothing")
