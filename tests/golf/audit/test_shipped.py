"""Bytes that ship: what lies in the folder and is read, nothing else."""

from pathlib import Path

import pytest

from birdie.golf.audit import rules
from birdie.golf.audit.rules import Finding
from birdie.golf.audit.shipped import STAT_BYTES, Shipped, check_size, listed_bytes, script_and_model, shipped
from birdie.lab.logs import TrainingLog, parse_log
from tests.golf.audit.audited_logs import baseline
from tests.golf.scripts import script_of


def ships(root: Path, **files: str | bytes) -> Shipped:
    """Write files, with __ for the dot in their names, and return what the folder ships."""
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (root / name.replace("__", ".")).write_bytes(data)
    script, model = script_and_model(root)
    assert script is not None
    return shipped(script, model)


def size(root: Path, *logs: TrainingLog) -> Finding:
    return check_size(ships(root), logs, root)


def test_what_the_script_reads_ships(tmp_path: Path) -> None:
    folder = ships(
        tmp_path,
        train_gpt__py='import os, caps\nfrom tilt import hint\nsource = open("kernel.cpp").read()\n',
        caps__py="from . import deeper\n",
        deeper__py="x = 1\n",
        tilt__py="def hint(): ...\n",
        kernel__cpp="int main() {}\n",
        prepare_data__py="y" * 1000,
        tokenizer__model="z" * 1000,
        **{"final_model.int8.ptz": b"w" * 500},
    )
    assert [path.name for path in folder.code] == ["caps.py", "deeper.py", "kernel.cpp", "tilt.py", "train_gpt.py"]
    assert folder.code_bytes == sum(len(path.read_bytes()) for path in folder.code)
    finding = size(tmp_path)
    assert finding.result == "pass"
    assert f"{folder.code_bytes + 500:,} of 16,000,000 bytes" in finding.evidence
    assert "4 helper files" in finding.evidence


def test_the_size_is_that_of_the_files(tmp_path: Path) -> None:
    ships(tmp_path, train_gpt__py="# a comment\nx = 1\n", model__birdie=b"m" * 16_000_000)
    log = parse_log(baseline(), "train.log")
    finding = size(tmp_path, log)
    assert (finding.result, "18 more than" in finding.evidence) == ("fail", True)
    (tmp_path / "model.birdie").unlink()
    assert "15,815,847" in size(tmp_path, log).evidence
    assert size(tmp_path).result == "unknown"


@pytest.mark.parametrize("hide", ["targets", "names", "deep"])
def test_data_in_names_and_targets_of_links_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hide: str) -> None:
    ships(tmp_path, train_gpt__py="x = 1\n", model__birdie=b"m" * 5000)
    monkeypatch.setattr(rules, "CAP_BYTES", 10_000)
    finding = size(tmp_path)
    assert (finding.result, "5,006 of 10,000 bytes" in finding.evidence) == ("pass", True)  # a few names are free
    inner = tmp_path.joinpath(*"abcdefgh") if hide == "deep" else tmp_path
    inner.mkdir(parents=True, exist_ok=True)
    for number in range(30):
        if hide == "names":
            (inner / f"{number:0>200}").touch()
        else:
            (inner / f"{number}").symlink_to("x" * 200)
    finding = size(tmp_path)
    assert (finding.result, "names, sizes and targets" in finding.evidence) == ("fail", True)


def test_what_is_read_without_opening_a_file_counts(tmp_path: Path) -> None:
    """Names and sizes of files and folders, and targets of links; not those of hidden folders and of Python."""
    folder = tmp_path / "submission"
    for name in ("folder", "__pycache__", ".git", "venv"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file.bin").touch()
    (folder / "venv" / "pyvenv.cfg").touch()
    (folder / "é").symlink_to("nowhere" * 10)
    (folder / "again.bin").hardlink_to(folder / "folder" / "file.bin")
    expected = sum(len(name) + STAT_BYTES for name in ("folder", "file.bin", "again.bin")) + len("é".encode()) + 70
    assert listed_bytes(folder) == expected
    (tmp_path / "link").symlink_to(folder)
    assert listed_bytes(tmp_path / "link") == expected


def test_birdies_sources_count_where_the_script_loads_them(tmp_path: Path) -> None:
    folder = ships(tmp_path, train_gpt__py="from birdie.artifact.container import Reader\n")
    assert folder.package_bytes > 10_000
    assert folder.code_bytes == folder.package_bytes + (tmp_path / "train_gpt.py").stat().st_size


def test_files_that_modules_of_a_packed_script_read_ship(tmp_path: Path) -> None:
    helper = 'source = open("kernel.cu").read()\n'
    folder = ships(tmp_path, train_gpt__py=script_of(["pass", "a.py", "x = 1", "b.py", helper]), kernel__cu="int x;")
    assert [path.name for path in folder.code] == ["kernel.cu", "train_gpt.py"]
    assert folder.code_bytes == sum(path.stat().st_size for path in folder.code)
