"""The audit of folders and scripts, as a user meets it: results, JSON, table, exit codes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.golf.audit.folder_audit import audit
from birdie.golf.audit.rules import CAUSAL, RULES, RUNS, SEEDS, SIZE, TRAIN_TIME
from tests.golf.audit.audited_logs import baseline
from tests.golf.audit.submissions import write_submission

Ask = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run `birdie audit PATH … --json`; returns exit code, the JSON object, stderr."""

    def call(*arguments: object) -> tuple[int, dict[str, Any], str]:
        code = run(build_app, ["audit", *map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        (line,) = out.splitlines()
        return code, json.loads(line), err

    return call


def test_the_json_of_an_artifact(ask: Ask, run_folder: Path) -> None:
    code, answer, _ = ask(run_folder / "model.birdie", "--tokens", 60)
    assert (code, answer["kind"]) == (0, "artifact")
    passed = {name for name, verdict in answer["verdicts"].items() if verdict == "pass"}
    assert passed >= {"causal", "score-first", "one-pass", "no-overlap", "byte-count", "size", "runs"}
    assert answer.keys() == {"path", "kind", "verdicts", "findings"}
    assert list(answer["verdicts"]) == [rule.name for rule in RULES]
    assert set(answer["verdicts"].values()) <= {"pass", "unknown"}
    for finding in answer["findings"]:
        assert finding.keys() == {"rule", "verdict", "evidence", "by", "path", "line"}
        assert finding["verdict"] in ("pass", "fail", "unknown")


def test_a_run_folder_is_audited_with_its_artifact(run_folder: Path) -> None:
    report = audit(run_folder, tokens=8)
    assert (report.kind, report.result(TRAIN_TIME), report.result(CAUSAL)) == ("folder", "pass", "pass")
    assert not report.failed


def test_a_folder_without_fault_breaks_nothing(ask: Ask, tmp_path: Path) -> None:
    code, answer, _ = ask(write_submission(tmp_path / "record"))
    broken = [finding for finding in answer["findings"] if finding["verdict"] == "fail"]
    assert (code, broken) == (0, [])
    for name in ("seeds", "size", "train-time", "eval-time", "whole-split", "byte-count"):
        assert answer["verdicts"][name] == "pass", name
    assert answer["verdicts"]["causal"] == "unknown"


def test_each_fault_of_a_folder_fails_its_rule(ask: Ask, tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "record", bytes_total=16_500_000, seeds=[1337, 42])
    (folder / "train_seed7.log").write_text(baseline(seed=7, loss=2.0725, train_ms=700_000, code=137))
    (folder / "logs").mkdir()
    (folder / "logs" / "more.txt").write_text(baseline(seed=8, bpb=1.0))
    code, answer, err = ask(folder)
    assert (code, err) == (1, "")
    failed = {name for name, verdict in answer["verdicts"].items() if verdict == "fail"}
    assert failed == {"seeds", "size", "train-time", "byte-count"}
    lines = {
        (finding["rule"], Path(finding["path"]).name, finding["line"])
        for finding in answer["findings"]
        if finding["path"]
    }
    assert {("train-time", "train_seed7.log", 19), ("byte-count", "more.txt", 28)} <= lines


def test_the_table_shows_results_and_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_submission(tmp_path / "record")
    (folder / "train_seed7.log").write_text(baseline(seed=7, loss=2.0725, train_ms=700_000, code=137))
    assert run(build_app, ["audit", str(folder)]) == 1
    out = capsys.readouterr().out
    for text in ("✗ fail", "? unknown", "train_seed7.log:19", "broken: train-time"):
        assert text in out, text
    assert all(rule.name in out for rule in RULES)


def test_a_track_without_a_cap(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "record", track="non-record-unlimited-compute-16mb")
    (folder / "train_seed7.log").write_text(baseline(seed=7, loss=2.0725, train_ms=7_000_000, code=137))
    assert audit(folder).result(TRAIN_TIME) == "unknown"


def test_files_of_the_wrong_form_do_not_end_an_audit(tmp_path: Path) -> None:
    folder = write_submission(tmp_path / "record")
    for broken in ("[" * 10_000, '{"step": 1}\n', "\ud800"):
        (folder / "history.jsonl").write_bytes(broken.encode("utf-8", "surrogatepass"))
        assert any(finding.check == "history" for finding in audit(folder).of(TRAIN_TIME))
    for broken in ("[" * 1_000_001, "{", "[]", '{"seeds": 3, "val_bpb": "low", "bytes_total": null, "track": 4}'):
        (folder / "submission.json").write_text(broken)
        assert audit(folder).result(SEEDS) == ("pass" if "seeds" in broken else "fail")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_text_of_any_encoding_that_says_so_is_read(tmp_path: Path, encoding: str) -> None:
    """PowerShell's `>` writes UTF-16."""
    folder = write_submission(tmp_path / "record")
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    for path in (*folder.glob("*.log"), folder / "submission.json"):
        path.write_bytes((mark * (path.suffix != ".json") + path.read_text().replace("\n", "\r\n")).encode(encoding))
    report = audit(folder)
    for rule in (SEEDS, SIZE, TRAIN_TIME):
        assert report.result(rule) == "pass", rule


@pytest.mark.parametrize("content", [baseline().encode("utf-16-le"), bytes(range(256)) * 99, b"\0" * 999])
def test_what_is_no_text_is_not_read_and_this_is_said(tmp_path: Path, content: bytes) -> None:
    folder = write_submission(tmp_path / "record")
    (folder / "train_seed7.log").write_bytes(content)
    unread = [finding for finding in audit(folder).of(SEEDS) if "is not text" in finding.evidence]
    assert [(Path(finding.path or "").name, finding.result) for finding in unread] == [("train_seed7.log", "unknown")]


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    report = audit(script)
    assert report.kind == "script"
    assert not (tmp_path / "ran").exists()
    assert (report.result(RUNS), report.result(SIZE)) == ("unknown", "unknown")


@pytest.mark.parametrize("name", ["none", "empty", "README.md"])
def test_what_cannot_be_audited_is_an_error(ask: Ask, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text("# nothing\n")
    code, answer, _ = ask(tmp_path / name)
    assert (code, answer["error"]["type"]) == (1, "ConfigError")
    assert str(tmp_path / name) in answer["error"]["message"]


@pytest.mark.parametrize("name", ["train_gpt.py", "model.birdie", "anything"])
def test_a_pipe_or_a_device_is_not_opened(ask: Ask, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for kind, make in (("named pipe", os.mkfifo), ("device", lambda path: path.symlink_to("/dev/zero"))):
        make(path)
        code, answer, _ = ask(path, "--run")
        assert (code, answer["error"]["type"]) == (1, "DataError")
        assert f"{name} is a {kind}" in answer["error"]["message"]
        path.unlink()
