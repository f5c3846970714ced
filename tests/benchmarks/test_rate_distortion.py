"""The rate–distortion benchmark: rows are decoded files, rivals are cached by everything they depend on."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rate_distortion, rivals
from benchmarks.quality import Subject
from tests.benchmarks.small_gpt import row, subject


def test_the_tuned_rival_is_compared_at_its_targets_and_others_at_their_points() -> None:
    rows = [row("birdie", 1000, 0.001), row("birdie", 600, 0.1), row("record stack", 900, 0.009)]
    rows += [row("record stack", 880, 0.011), row("NNCodec", 1200, 0.004), row("absent", 0, 0.0) | {"bytes": None}]
    lines = rate_distortion.comparison(rows, [0.01])
    kl = [line for line in lines if line["equal"] == "kl"]
    assert [(line["rival"], line["value"]) for line in kl] == [("record stack", 0.01), ("NNCodec", 0.004)]
    assert kl[0]["rival_bytes"] == pytest.approx(890, abs=1)
    assert {line["equal"] for line in lines} == {"kl", "disagreement"}


def test_an_overview_names_the_worst_network_of_each_rival() -> None:
    def line(rival: str, ratio: float | None, equal: str = "kl") -> dict[str, Any]:
        return {"rival": rival, "equal": equal, "ratio": ratio}

    compared = {
        "a": [line("record stack", 0.6), line("record stack", 0.8), line("int6", None)],
        "b": [line("record stack", 0.75), line("record stack", 0.1, "disagreement")],
        "c": [line("record stack", 0.3)],
    }
    (overview,) = rate_distortion.overview(compared)
    assert overview == {"rival": "record stack", "networks": 3, "worst": 0.75, "of": "b", "median": 0.7}


def test_birdies_rows_are_decoded_files_and_have_the_pinned_keys() -> None:
    model = subject()
    settings: list[tuple[str, str, dict[str, Any]]] = [
        ("birdie", "exact", {"lossless": True, "coder": "fast", "calibration": None}),
        ("birdie", "coarse", {"scheme": "int4", "coder": "fast"}),
    ]
    exact, coarse = rate_distortion.birdie_rows(model, settings)
    assert (exact["kl"], exact["agreement"]) == (0, 1)
    assert coarse["kl"] > 0
    assert coarse["bytes"] < exact["bytes"] / 2
    pinned = {"scheme", "bytes", "bpb", "kl", "agreement", "accuracy", "encode_s"}
    assert pinned <= exact.keys()
    json.dumps([exact, coarse])


def test_a_rival_that_is_not_installed_says_so_and_has_no_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rivals, "RIVALS", Path("nowhere"))
    model = subject()
    (line,) = rate_distortion.rival_rows(model, rate_distortion.Cache(tmp_path, model), ["nncodec"], [])
    assert line["version"] == "not installed: make rivals"
    assert not line["bytes"]
    assert rate_distortion.comparison([line, row("birdie", 10, 0.1)], []) == []


def test_rows_of_rivals_are_cached_by_everything_they_depend_on(tmp_path: Path) -> None:
    model = subject()
    calls: list[str] = []

    def rows(model: Subject, name: str = "a", version: str = "1") -> list[dict[str, object]]:
        cache = rate_distortion.Cache(tmp_path, model)
        return cache.rows(name, version, ["curves.py"], lambda: calls.append(name) or [{"bytes": len(calls)}])

    assert rows(model) == rows(model) == [{"bytes": 1}]
    assert len({json.dumps(rows(model)), json.dumps(rows(model, "b")), json.dumps(rows(model, version="2"))}) == 3
    assert rows(replace(model, key="other")) == [{"bytes": 4}]


def test_unknown_rivals_are_refused() -> None:
    assert rate_distortion.rival_keys("record, nncodec") == ["record", "nncodec"]
    assert rate_distortion.rival_keys("none") == []
    with pytest.raises(argparse.ArgumentTypeError, match="zip"):
        rate_distortion.rival_keys("zip")
