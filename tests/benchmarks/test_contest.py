"""The comparison of recipes gives all of them the same bytes, and the next turn to the run that is behind."""

import json
from pathlib import Path

import pytest

from benchmarks import contest


@pytest.mark.nightly  # prepares the text and trains two recipes
def test_all_recipes_get_the_bytes_of_the_first(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BIRDIE_DATA", str(shared_data))
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


def test_the_run_whose_clock_is_behind_trains_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[str] = []

    class Clock:
        """A contestant without training: its steps take as many milliseconds as its name says."""

        def __init__(self, name: str, _recipe: object, _folder: Path) -> None:
            self.name, self.clock_ms, self.finished = name, 0.0, False

        def advance(self) -> None:
            turns.append(self.name)
            self.clock_ms += float(self.name)
            self.finished = self.clock_ms >= 4

        def row(self, budget: int | None) -> dict[str, object]:
            return {"recipe": self.name, "bytes": budget or 1000, "bpb_artifact": 4 / float(self.name)}

    monkeypatch.setattr(contest, "Contestant", Clock)
    monkeypatch.setattr(contest, "Texts", lambda *_: None)
    monkeypatch.setattr(contest, "recipe_of", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["contest", "1", "2", "--json", "--folder", str(tmp_path)])
    contest.main()
    assert turns == ["1", "2", "1", "1", "2", "1"]
    first, second = json.loads(capsys.readouterr().out)["rows"]
    assert (first["less"], second["less"], second["bytes"]) == (0, 0.5, 1000)
