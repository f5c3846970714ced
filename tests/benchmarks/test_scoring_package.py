"""The benchmark of scoring packages: eager mode is always measured; the other rows say if there is no compiler."""

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scoring_package
from birdie.score import windows


def test_without_a_compiler_only_eager_mode_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_this_process(options: argparse.Namespace, folder: str, what: str, *ways: str) -> dict[str, Any]:
        options.folder, options.ways, options.way = Path(folder), ways, ways[0]
        return scoring_package.start(options) if what == "start" else scoring_package.speed(options)

    monkeypatch.setattr(scoring_package, "_worker", in_this_process)
    monkeypatch.setitem(windows._MAX_INPUTS, "cpu", 64)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    options = argparse.Namespace(length=32, tokens=128, seconds=0.0, dtype="float32", device="cpu", seed=0)
    eager, *others = scoring_package.measure(options)
    assert (eager["way"], eager["ratio"], eager["difference"]) == ("eager", 1.0, 0.0)
    assert eager["turns"] >= 3
    assert eager["tokens_per_s"] > 0
    assert others == [{"way": way, "skipped": "no C++ compiler"} for way in ("torch.compile", "package")]
