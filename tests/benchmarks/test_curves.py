"""Curves of bytes against quality are interpolated on the logarithm; comparisons read them at equal quality."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import rate_distortion, rivals
from benchmarks.curves import bytes_at, frontier, ratios
from benchmarks.subjects import KEPT_OUT, Quality, Subject, tiny_subject


def row(curve: str, size: int | None, kl: float) -> dict[str, Any]:
    return rate_distortion.row(curve, curve, cast(int, size), Quality(kl, 0.0, 1 - kl, accuracy=0.9), 1.0, "1")


def test_bytes_are_interpolated_between_rows_that_no_other_beats() -> None:
    rows = [row("a", round(1000 - 100 * math.log2(kl / 0.01)), kl) for kl in (0.001, 0.01, 0.1)]
    assert bytes_at(rows, 0.02) == pytest.approx(900, abs=1)
    assert bytes_at(rows, 0.01) == 1000
    assert (bytes_at(rows, 0.0005), bytes_at(rows, 0.2)) == (None, None)
    rows = [row("a", 100, 0.01), row("a", 120, 0.02), row("a", 80, 0.02), row("a", 90, 0.015)]
    assert [point["bytes"] for point in frontier(rows)] == [100, 90, 80]


def test_a_curve_of_half_the_bytes_has_ratio_a_half() -> None:
    rival = [row("them", size, kl) for size, kl in ((1000, 0.005), (800, 0.02))]
    birdie = [row("birdie", size // 2, kl) for size, kl in ((1400, 0.0012), (1000, 0.005), (800, 0.02), (700, 0.05))]
    assert [point["ratio"] for point in ratios(birdie, rival)] == [0.5, 0.5]
    assert [point["ratio"] for point in ratios(birdie, rival, against="disagreement")] == [0.5, 0.5]
    (middle,) = ratios(birdie, rival, [0.01])
    assert (middle["ratio"], middle["rival_bytes"]) == (pytest.approx(0.5), 900)
    assert ratios(birdie, [row("them", 1000, 0.5)])[0]["ratio"] is None


def test_the_tuned_rival_is_compared_at_its_targets_and_others_at_their_points() -> None:
    rows = [row("birdie", 1000, 0.001), row("birdie", 600, 0.1), row("record stack", 900, 0.009)]
    rows += [row("record stack", 880, 0.011), row("NNCodec", 1200, 0.004), row("absent", None, 0.0)]
    lines = rate_distortion.comparison(rows, [0.01])
    kl = [line for line in lines if line["equal"] == "kl"]
    assert [(line["rival"], line["value"]) for line in kl] == [("record stack", 0.01), ("NNCodec", 0.004)]
    assert kl[0]["rival_bytes"] == pytest.approx(890, abs=1)
    networks: dict[str, list[float | None]] = {"a": [0.6, 0.8, None], "b": [0.75], "c": [0.3]}
    compared: dict[str, list[dict[str, Any]]] = {
        name: [{"of": "birdie", "rival": "r", "equal": "kl", "ratio": ratio} for ratio in values]
        for name, values in networks.items()
    }
    compared["b"].append({"of": "birdie", "rival": "r", "equal": "disagreement", "ratio": 0.1})
    line = {"of": "birdie", "rival": "r", "networks": 3, "worst": 0.75, "network": "b", "median": 0.7}
    assert rate_distortion.overview(compared) == [{**line, **dict.fromkeys(KEPT_OUT)}]


def test_birdies_rows_are_decoded_files() -> None:
    exact, coarse = rate_distortion.birdie_rows(
        tiny_subject(),
        [
            ("birdie", "exact", {"lossless": True, "effort": "fast", "calibration": None}),
            ("birdie", "coarse", {"scheme": "int4", "effort": "fast"}),
        ],
    )
    assert (exact["kl"], exact["agreement"]) == (0, 1)
    assert coarse["kl"] > 0
    assert coarse["bytes"] < exact["bytes"] / 2


def test_rows_of_rivals_are_cached_by_everything_they_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = tiny_subject(), list[str]()

    def rows(model: Subject, name: str = "a", version: str = "1") -> list[dict[str, object]]:
        cache = rate_distortion.Cache(tmp_path, model)
        return cache.rows(name, version, ["curves.py"], lambda: calls.append(name) or [{"bytes": len(calls)}])

    assert rows(model) == rows(model) == [{"bytes": 1}]
    assert len({json.dumps(rows(model)), json.dumps(rows(model, "b")), json.dumps(rows(model, version="2"))}) == 3
    assert rows(replace(model, key="other")) == [{"bytes": 4}]
    monkeypatch.setattr(rivals, "RIVALS", Path("nowhere"))
    (line,) = rate_distortion.rival_rows(model, rate_distortion.Cache(tmp_path, model), ["nncodec"], [])
    assert (line["version"], line["bytes"]) == ("not installed: make rivals", None)


def line(size: int, error: float, scheme: str = "birdie", agreement: float = 1.0) -> dict[str, Any]:
    return {"network": "x", "scheme": scheme, "bytes": size, "error": error, "agreement": agreement}
