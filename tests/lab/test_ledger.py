"""The ledger reads run folders and logs as they are, and says what is damaged."""

from pathlib import Path

import pytest

from birdie.errors import DataError
from birdie.lab.ledger import COLUMNS, find_logs, find_runs, find_runs_and_logs, read_log_run, read_run
from tests.golf.audit.audited_logs import baseline, later
from tests.lab.run_folders import write_run


def test_a_finished_run_has_all_columns(tmp_path: Path) -> None:
    columns = write_run(tmp_path / "one", 1.5, seed=7).columns
    assert tuple(columns) == COLUMNS
    assert columns == {
        "name": "one", "started": "2026-01-01T10:00:00+00:00", "state": "complete", "seed": 7, "steps": 4, "bytes": 900,
        "code_bytes": None, "bpb_float": 1.4, "bpb_artifact": 1.5, "train_seconds": 2.5,
    }  # fmt: skip


def test_a_run_that_stopped_has_what_it_logged(tmp_path: Path) -> None:
    record = write_run(tmp_path / "one", None)
    assert record.state == "begun"
    assert (record.columns["steps"], record.columns["bpb_float"], record.columns["train_seconds"]) == (2, 1.75, 0.9)
    assert record.columns["bpb_artifact"] is None
    assert [line["step"] for line in record.metrics] == [1]  # the second line was cut off
    (tmp_path / "one" / "checkpoints" / "step-2").mkdir(parents=True)
    assert record.state == "stopped"
    (tmp_path / "one" / "float.safetensors").touch()
    assert record.state == "trained"


def test_settings_have_their_full_names(tmp_path: Path) -> None:
    settings = write_run(tmp_path / "one").settings
    assert (settings["device"], settings["model.num_layers"], settings["train.seed"]) == ("cpu", 2, 1)


def test_runs_come_in_the_order_of_their_starts(tmp_path: Path) -> None:
    for name, started in (("a", "2026-01-02"), ("b/c", "2026-01-03"), ("d", "2026-01-01")):
        write_run(tmp_path / name, started=started)
    assert [record.name for record in find_runs(tmp_path)] == ["d", "a", "c"]
    assert [record.name for record in find_runs(tmp_path / "a")] == ["a"]


@pytest.mark.parametrize(
    ("log", "columns"),
    [
        (baseline(), (1337, 13_780, 15_815_847, 47_642, 1.2172, 600.038)),
        (later(), (0, 5041, 15_907_387, 37_155, 1.0610946, 595.637)),
    ],
    ids=["val_bpb:1.2", "val_bpb: 1.2"],
)
def test_a_log_of_the_challenge_is_a_run(log: str, columns: tuple[float, ...], tmp_path: Path) -> None:
    path = tmp_path / "train_seed42.log"
    path.write_text(log)
    record = read_log_run(path)
    assert record is not None
    values = record.columns
    assert (record.name, record.state, values["bpb_artifact"]) == ("train_seed42", "complete", record.parsed.final.bpb)  # type: ignore[union-attr]
    names = ("seed", "steps", "bytes", "code_bytes", "bpb_float", "train_seconds")
    assert tuple(values[name] for name in names) == columns
    assert [line["bpb"] for line in record.history] == [score.bpb for score in record.parsed.validations]
    assert record.history[0]["step"] == 0
    assert all({"step", "loss", "train_ms"} == line.keys() for line in record.metrics)


def test_logs_beside_runs_are_listed_and_those_of_runs_are_not(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "other.txt").write_text(baseline())
    (tmp_path / "logs" / "notes.txt").write_text("a train_time of note, and val_bpb in a word")
    assert [record.name for record in find_runs_and_logs(tmp_path)] == ["run", "other"]
    assert [record.name for record in find_runs_and_logs(tmp_path / "logs" / "other.txt")] == ["other"]
    assert list(find_logs(tmp_path / "logs" / "notes.txt")) == []


def test_what_holds_no_run_or_a_damaged_one_is_named(tmp_path: Path) -> None:
    for read in (find_runs_and_logs, read_run):
        with pytest.raises(DataError, match=str(tmp_path)):
            read(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("{")
    with pytest.raises(DataError, match=r"summary\.json"):
        find_runs_and_logs(tmp_path)


def test_recipe_above_runs_is_no_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "runs" / "one", tmp_path / "runs" / "two"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.toml").write_text("[train]\nseed = 7\n")
    assert [run.name for run in find_runs(tmp_path)] == ["one", "two"]
    assert [run.name for run in find_runs(tmp_path / "runs" / "one")] == ["one"]
