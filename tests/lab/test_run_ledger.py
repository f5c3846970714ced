"""The ledger reads run folders and logs as they are, and says what is damaged."""

import os
from pathlib import Path

import pytest

from birdie.errors import DataError
from birdie.lab.run_ledger import COLUMNS, find_runs, find_runs_and_logs, read_log_run, read_run
from tests.golf.audit.audited_logs import baseline
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


def test_runs_come_in_the_order_of_their_starts(tmp_path: Path) -> None:
    for name, started in (("a", "2026-01-02"), ("b/c", "2026-01-03"), ("d", "2026-01-01")):
        write_run(tmp_path / name, started=started)
    assert [record.name for record in find_runs(tmp_path)] == ["d", "a", "c"]
    assert [record.name for record in find_runs(tmp_path / "a")] == ["a"]


def test_a_log_of_the_challenge_is_a_run(tmp_path: Path) -> None:
    path, columns = tmp_path / "train_seed42.log", (1337, 13_780, 15_815_847, 47_642, 1.2172, 600.038)
    path.write_text(baseline())
    record = read_log_run(path)
    assert record is not None
    values = record.columns
    assert (record.name, record.state, values["bpb_artifact"]) == ("train_seed42", "complete", record.parsed.final.bpb)  # type: ignore[union-attr]
    names = ("seed", "steps", "bytes", "code_bytes", "bpb_float", "train_seconds")
    assert tuple(values[name] for name in names) == columns
    assert [line["bpb"] for line in record.history] == [score.bpb for score in record.parsed.validations]
    assert record.history[0]["step"] == 0
    assert all({"step", "loss", "train_ms"} == line.keys() for line in record.metrics)


def test_what_holds_no_run_or_a_damaged_one_is_named(tmp_path: Path) -> None:
    for read in (find_runs_and_logs, read_run):
        with pytest.raises(DataError, match=str(tmp_path)):
            read(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("{")
    with pytest.raises(DataError, match=r"summary\.json"):
        list(find_runs(tmp_path))
    with pytest.raises(DataError, match=r"summary\.json"):
        read_run(tmp_path / "run")


DAMAGE: dict[str, tuple[str, bytes | None]] = {
    "cut TOML": ("recipe.toml", b"[train"),
    "deep TOML": ("recipe.toml", b"a = " + b"[" * 9000),
    "deep tables": ("recipe.toml", b".".join([b"a"] * 9000) + b" = 1"),
    "a recipe that is not UTF-8": ("recipe.toml", b"\xff"),
    "a recipe with a value for a table": ("recipe.toml", b"train = 3"),
    "a seed of text": ("recipe.toml", b"[train]\nseed = 'x'"),
    "an endless number": ("recipe.toml", b"[train]\niterations = 1" + b"0" * 400),
    "a pipe for a recipe": ("recipe.toml", None),
    "cut JSON": ("summary.json", b'{"bytes": 90'),
    "deep JSON": ("summary.json", b"[" * 100_000),
    "a list": ("summary.json", b"[]"),
    "null": ("summary.json", b"null"),
    "NUL": ("summary.json", b"\0\0"),
    "bytes of text": ("summary.json", b'{"bytes": "many"}'),
    "endless bytes": ("summary.json", b'{"bytes": 1' + b"0" * 400 + b"}"),
    "an evaluation that is a list": ("summary.json", b'{"evaluation": [1]}'),
    "bpb of text": ("summary.json", b'{"evaluation_asked": {"bpb": "1.2"}}'),
    "a pipe for a summary": ("summary.json", None),
    "starts of numbers": ("environment.json", b'{"starts": [1]}'),
    "starts in an object": ("environment.json", b'{"starts": {"a": 1}}'),
    "a log that is a number": ("environment.json", b'{"log": 7}'),
    "a commit in a list": ("environment.json", b'{"commit": []}'),
}


def put(path: Path, content: bytes | None) -> None:
    """Replace a file; None: by a named pipe."""
    path.unlink()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_run_is_listed_with_its_reason_and_hides_no_other(case: str, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_run(tmp_path / name)
    name, content = DAMAGE[case]
    put(tmp_path / "b" / name, content)
    records = {record.name: record for record in find_runs_and_logs(tmp_path)}
    assert records.keys() == {"a", "b", "c"}
    damaged = records.pop("b")
    assert damaged.state == "damaged"
    (problem,) = damaged.problems
    assert str(tmp_path / "b" / name) in problem
    assert "\n" not in problem
    assert all((record.state, record.problems) == ("complete", ()) for record in records.values())
    assert all(isinstance(value, int | float | str | None) for value in damaged.columns.values())
    with pytest.raises(DataError, match=name):
        read_run(tmp_path / "b")
