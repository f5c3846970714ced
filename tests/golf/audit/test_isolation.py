"""The copy, the filter and the control groups of a sandbox, on any machine."""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from birdie.errors import DataError
from birdie.golf.audit import limits, seccomp, snapshot
from birdie.golf.audit.deadline import Deadline
from birdie.golf.audit.limits import Cgroup, Limits
from birdie.golf.audit.snapshot import Snapshot
from tests.deep_folders import deep_folder


def script(folder: Path) -> Path:
    path = folder / "train_gpt.py"
    path.touch()
    return path


@pytest.mark.parametrize("kind", ["named pipe", "socket", "folder", "device"])
def test_a_script_that_is_no_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "train_gpt.py"
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "named pipe":
            os.mkfifo(path)
        elif kind == "socket":
            server.bind(str(path))
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
        with pytest.raises(DataError, match=f"train_gpt.py is a {kind}"):
            Snapshot(path, tmp_path / "copy")


def test_a_snapshot_has_regular_files_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "submission"
    for name in ("data", "__pycache__", ".git", "venv"):
        (source / name).mkdir(parents=True)
        (source / name / "file.bin").write_bytes(b"x" * 10)
    (source / "venv" / "pyvenv.cfg").touch()
    os.mkfifo(source / "pipe")
    (source / "zero").symlink_to("/dev/zero")
    (source / "large.bin").write_bytes(b"x" * 1000)
    (source / "small.bin").write_bytes(b"x" * 20)
    path = script(source)
    monkeypatch.setattr(snapshot, "MAX_BYTES", 500)
    copy = Snapshot(path, tmp_path / "copy")
    assert copy.files == {"data/file.bin": 10, "small.bin": 20}
    assert copy.left == 2  # the pipe and the large file
    assert (tmp_path / "copy" / "zero").readlink() == Path("/dev/zero")
    assert copy.opened() == {}
    (tmp_path / "copy" / "data" / "file.bin").read_bytes()
    (tmp_path / "copy" / "data" / "file.bin").read_bytes()
    assert copy.opened() == {"data/file.bin": 10}
    copy.close()


def test_a_snapshot_has_a_limited_number_of_files(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_FILES", 3)
    for number in range(9):
        (tmp_path / f"{number}.bin").touch()
    copy = Snapshot(script(tmp_path), tmp_path_factory.mktemp("snapshot") / "copy")
    assert (len(copy.files), copy.left) == (3, 6)
    copy.close()


def test_what_is_read_without_opening_a_file_counts(tmp_path: Path) -> None:
    """Names and sizes of files and folders, targets of links; a copy has nothing else that could hold data."""
    source = tmp_path / "submission"
    (source / "folder").mkdir(parents=True)
    (source / "folder" / "é").symlink_to("nowhere" * 10)
    (source / ".hidden").mkdir()
    path = script(source)
    with (source / "sparse.bin").open("wb") as file:
        file.truncate(100_000)
    (source / "again.bin").hardlink_to(source / "sparse.bin")
    os.utime(source / "sparse.bin", (1, 1))
    with contextlib.suppress(OSError):  # not every file system has them
        os.setxattr(source / "sparse.bin", "user.data", b"x" * 100)
    copy = Snapshot(path, tmp_path / "copy")
    copy.close()
    expected = sum(len(name) + snapshot.STAT_BYTES for name in ("train_gpt.py", "folder", "sparse.bin", "again.bin"))
    assert copy.listed == expected + 2 + 70
    (tmp_path / "link").symlink_to(source)
    assert (
        copy.listed == snapshot.listed_bytes(source, Deadline()) == snapshot.listed_bytes(tmp_path / "link", Deadline())
    )
    assert copy.files == {"again.bin": 100_000, "sparse.bin": 100_000}  # of hard links each, and with its holes
    copied = copy.folder / "sparse.bin"
    assert (os.listxattr(copied), copied.stat().st_nlink, copied.stat().st_mtime > 1) == ([], 1, True)


@pytest.mark.parametrize("depth", [65, 1300])
def test_folders_nested_too_deeply_are_one_sentence(tmp_path: Path, depth: int) -> None:
    with deep_folder(tmp_path / "deep", depth) as folder:
        path = script(folder)
        with pytest.raises(DataError, match="has folders nested more than 64 deep"):
            Snapshot(path, tmp_path / "copy")


def test_the_filter_knows_two_architectures() -> None:
    programs = [seccomp.program(machine) for machine in ("x86_64", "aarch64")]
    assert all(program is not None and len(program) % 8 == 0 for program in programs)
    assert programs[0] != programs[1]
    assert seccomp.program("riscv64") is None


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_of_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """The files that are written and read, in plain folders."""
    folders = {controller: tmp_path / (controller if version == 1 else "both") for controller in ("memory", "pids")}
    monkeypatch.setattr(limits, "_possible", lambda: iter([(version, folders["memory"], folders["pids"])]))
    most = Limits(memory=1000, processes=7, scratch=24, files=1)
    group = Cgroup.of((12, 13), most)
    assert group is not None
    assert (folders["memory"] / ("memory.limit_in_bytes" if version == 1 else "memory.max")).read_text() == "1024"
    assert (folders["pids"] / "pids.max").read_text() == "7"
    assert all((folder / "cgroup.procs").read_text() == "13" for folder in folders.values())
    assert group.exceeded(most) == ""
    (folders["pids"] / "pids.events").write_text("max 1\n")
    assert "7 processes" in group.exceeded(most)
    events = "memory.oom_control" if version == 1 else "memory.events"
    (folders["memory"] / events).write_text("low 0\noom_kill 2\n")
    assert "1,000 bytes" in group.exceeded(most)
