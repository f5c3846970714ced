"""Locks: one holder at a time, whose name the others learn; never stale; nothing of the user's is touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from birdie.errors import ConfigError
from birdie.system import files
from birdie.system.locks import is_held, locked_folder, open_locked

HOLD = """
import sys
from pathlib import Path
from birdie.system.locks import locked_folder
with locked_folder(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lock_of_a_folder_has_one_holder_and_a_process_that_was_killed_has_none(tmp_path: Path) -> None:
    lines: list[str] = []
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with (
            pytest.raises(ConfigError, match=f"in use by process {process.pid} on .* since 2"),
            locked_folder(tmp_path, lines.append),
        ):
            pass
        process.kill()
    with locked_folder(tmp_path, lines.append), pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on"):
        locked_folder(tmp_path, lines.append).__enter__()
    assert list(tmp_path.iterdir()) == []
    assert lines == []


def test_a_lock_that_a_killed_process_left_does_not_count(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with locked_folder(tmp_path, print):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("thing", ["link", "chain", "pipe", "folder", "text", "hard"])
@pytest.mark.parametrize("name", [".lock", ".lock.holder"])
def test_what_has_the_name_of_a_lock_is_not_touched(name: str, thing: str, tmp_path: Path) -> None:
    lock, mine = tmp_path / "run" / name, tmp_path / "mine"
    lock.parent.mkdir()
    mine.write_text("process of writing a thesis" if thing == "hard" else "mine")
    if thing == "pipe":
        os.mkfifo(lock)
    elif thing == "folder":
        lock.mkdir()
    elif thing == "hard":
        lock.hardlink_to(mine)
    elif thing == "text":
        lock.write_text("mine")
    else:
        lock.symlink_to(mine if thing == "link" else tmp_path / "none")
    if name == ".lock":
        with pytest.raises(ConfigError, match=r"\.lock"), locked_folder(lock.parent, print):
            pass
    else:
        with locked_folder(lock.parent, print):
            pass
    if not (thing == "hard" and name == ".lock.holder"):  # a second name may go, its file may not
        assert (lock.is_symlink(), lock.is_dir()) == (thing in ("link", "chain"), thing == "folder")
    assert mine.read_text() == ("process of writing a thesis" if thing == "hard" else "mine")
    assert thing != "text" or lock.read_text() == "mine"
    assert not (tmp_path / "none").exists()


def test_a_lock_on_a_file_that_was_removed_counts_for_nothing(tmp_path: Path) -> None:
    first = open_locked(tmp_path / "lock")
    (tmp_path / "lock").unlink()
    assert not is_held(tmp_path / "lock")
    second = open_locked(tmp_path / "lock")
    os.close(first)
    with pytest.raises(BlockingIOError):
        open_locked(tmp_path / "lock")
    assert is_held(tmp_path / "lock")
    os.close(second)
    assert not is_held(tmp_path / "lock")


def test_without_locks_the_work_goes_on_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("filelock.lock_descriptor", refuse)
    lines: list[str] = []
    with locked_folder(tmp_path, lines.append):
        files.write_bytes(tmp_path / "file", b"new")
        with files.temporary_folder(tmp_path):
            files.remove_abandoned(tmp_path)
            assert len(list(tmp_path.glob(".birdie-*.part"))) == 1, "nobody knows whether its process lives"
    assert len(lines) == 1
    assert "cannot be locked" in lines[0]
