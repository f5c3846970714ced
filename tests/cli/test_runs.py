"""The list of runs, reports and events, and texts that are prepared."""

import json
import os
import sys
from pathlib import Path

import pytest

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.cli.tensorboard_events import Board
from birdie.errors import ConfigError
from birdie.gpt.run.events import Validated
from birdie.gpt.score.accumulator import Score
from birdie.gpt.train.loop import Step
from tests.lab.run_folders import write_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A sound run whose name is not UTF-8, one with damaged curves, a damaged one, and one with a pipe."""
    write_run(tmp_path / os.fsdecode(b"caf\xe9\x1b"))
    write_run(tmp_path / "curves")
    (tmp_path / "curves" / "metrics.jsonl").write_bytes(b"\xff\n")
    write_run(tmp_path / "cut")
    (tmp_path / "cut" / "recipe.toml").write_text("[trai")
    write_run(tmp_path / "pipe")
    (tmp_path / "pipe" / "environment.json").unlink()
    os.mkfifo(tmp_path / "pipe" / "environment.json")
    return tmp_path


def test_the_list_has_all_runs_and_says_what_is_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["runs", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "4 runs" in shown
    assert "curves: " in shown
    assert "metrics.jsonl is damaged from line 1 on" in shown
    assert "recipe.toml is damaged" in shown
    assert "environment.json is a named pipe" in shown
    assert "\x1b" not in shown
    assert run(build_app, ["runs", str(root), "--json", "--curves"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert sorted(record["state"] for record in runs) == ["complete", "complete", "damaged", "damaged"]
    assert sorted(len(record["damage"]) for record in runs) == [0, 1, 1, 1]
    assert sum("history" in record for record in runs) == 4


def test_a_condition_that_compares_nothing_is_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["runs", str(root), "--where", "started>soon"]) == 1
    assert "'soon' cannot be compared" in capsys.readouterr().err
    assert run(build_app, ["runs", str(root), "--where", "started>2025-12-31", "bytes<140kB", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 3


@pytest.mark.slow
def test_a_report_leaves_damaged_runs_out_and_says_so(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert run(build_app, ["report", str(root), "-o", str(page), "--no-samples"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.endswith("the run is left out") for line in lines) == 2
    assert "caf\\udce9\\x1b" in page.read_text()
    assert run(build_app, ["report", str(root / "cut"), "-o", str(page)]) == 1
    assert "all these runs are damaged" in capsys.readouterr().err


def step(number: int) -> Step:
    return Step(number, 5.0 / number, 100.0 * number, 0.5, 0.9, 64, 1.0, number == 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_events_are_those_of_the_run(tmp_path: Path) -> None:
    board = Board(tmp_path)
    for number in range(1, 4):
        board.record(step(number))
    board.record(Validated(3, 300.0, Score(1.5, 3.0, 10, 20, 1, 0.1, 0.2)))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss_nats")]
    assert losses == [(1, 5.0), (2, 2.5), (3, pytest.approx(5 / 3))]
    assert [(event.step, event.value) for event in events.Scalars("validation/bpb")] == [(3, 1.5)]


def test_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="tensorboard is not installed"):
        Board(tmp_path)


@pytest.mark.parametrize("pieces", ["0", "-5", "260", "65537"])
def test_a_vocabulary_of_an_impossible_size_is_refused(
    pieces: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one line\nand another\n" * 9)
    assert run(build_app, ["prepare", str(text), "--vocab-size", pieces, "-o", str(tmp_path / "data"), "--json"]) == 1
    assert f"a vocabulary of {int(pieces):,} is not possible" in capsys.readouterr().out
