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
    first, second, *_ = json.loads(capsys.readouterr().out)["rows"]
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

        def row(self, size: str, budget: int | None) -> dict[str, object]:
            bpb = (4 + turns.count("1") / 3) / float(self.name)
            return {"recipe": self.name, "size": size, "bytes": budget or 1000, "bpb_artifact": bpb}

    monkeypatch.setattr(contest, "Contestant", Clock)
    monkeypatch.setattr(contest, "Texts", lambda *_, **__: None)
    monkeypatch.setattr(contest, "recipe_of", lambda *_: None)
    arguments = ["--seeds", "2", "--sizes", "own,500B"]
    monkeypatch.setattr("sys.argv", ["contest", "1", "2", *arguments, "--json", "--folder", str(tmp_path)])
    contest.main()
    assert turns == 2 * ["1", "2", "1", "1", "2", "1"]
    *rows, first, _, second, other = json.loads(capsys.readouterr().out)["rows"]
    assert [row["bytes"] for row in rows] == 2 * [1000, 1000, 500, 500]
    assert [row["less"] for row in rows] == 4 * [0, 0.5]
    assert first["recipe"] == second["recipe"] == "1"
    assert first["bpb_artifact"] == pytest.approx(6)  # of 4 + 4 / 3 and 4 + 8 / 3
    assert first["bpb_artifact ±"] == pytest.approx(2 / 3)
    assert (other["size"], other["recipe"], other["less"], other["less ±"]) == ("500B", "2", 0.5, 0)
