"""A contest gives all the same bytes and says what came of it."""

import json
import os
from pathlib import Path

import pytest

from benchmarks import contest


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("BIRDIE_DATA"), reason="BIRDIE_DATA is unset")
def test_all_get_the_size_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contest, "VALIDATION_BYTES", 20_000)
    recipes = ["baseline:smoke", "10l_mixed_precision:smoke"]
    monkeypatch.setattr("sys.argv", ["contest", *recipes, "--json", "--folder", str(tmp_path)])
    contest.main()
    first, second = json.loads(capsys.readouterr().out)["rows"]
    assert [first["recipe"], second["recipe"]] == recipes
    assert first["steps"] == second["steps"] == 4
    assert first["bytes"] * 0.99 < second["bytes"] <= first["bytes"]
    assert first["text_bytes"] == second["text_bytes"]
    assert second["less"] == pytest.approx(1 - second["bpb_artifact"] / first["bpb_artifact"])
