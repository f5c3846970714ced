"""The benchmark of scale: models have the promised size, and every method that is installed is measured."""

import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks import scale
from tests.forked import run_python


@pytest.mark.parametrize(("size", "weights"), [("10M", 1e7), ("50M", 5e7), ("200M", 2e8), ("1B", 1e9)])
def test_models_have_about_the_weights_that_their_name_says(size: str, weights: float) -> None:
    assert scale.count(scale.SIZES[size]) == pytest.approx(weights, rel=0.15)


def test_every_method_is_measured_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_forked(command: list[str], *, cwd: Path, **_: object) -> "subprocess.CompletedProcess[str]":
        return run_python(*command[1:], folder=cwd)

    monkeypatch.setattr("benchmarks.scale.subprocess.run", run_forked)
    monkeypatch.setitem(scale.SIZES, "10M", (1, 128, 256))
    rows = list(scale.measured(tmp_path, ["10M"], list(scale.METHODS), 4.0, None))
    state = load_file(tmp_path / "10M.safetensors")
    by_method = {row["method"]: row for row in rows}
    assert {row["weights"] for row in rows} == {sum(weight.numel() for weight in state.values())}
    fast, lossless = by_method["birdie fast"], by_method["birdie lossless"]
    assert fast["bits"] <= 4
    assert lossless["error"] == 0 < fast["error"] < 0.2
