"""Atomic writes: a target has its old or its new content, and only regular files are replaced."""

import gc
import itertools
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from birdie.errors import ConfigError, OutputError
from birdie.system import files, outputs
from birdie.system.regular import regular_file
from tests.kills import kill_at_each_call


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    files.write_bytes(target, b"old")
    with pytest.raises(ZeroDivisionError), files.atomic_path(target) as path:
        path.write_bytes(b"new"[: 1 // 0])
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def interrupted_at(number: int, work: Callable[[], object]) -> bool:
    """Call `work` with a Ctrl-C before or after one call of a function in C; return whether there were that many."""
    events = itertools.count()

    def interrupt(_: object, event: str, __: object) -> None:
        if event.startswith("c_") and next(events) == number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        work()
        sys.setprofile(None)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_ctrl_c_leaves_the_old_file_or_the_new_one_whenever_it_comes(stride: int, tmp_path: Path) -> None:
    target, number = tmp_path / "file", 0

    def write() -> None:
        with files.atomic_path(target, flush=False) as path:
            path.write_bytes(b"new")

    files.write_bytes(target, b"old")
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # files that were opened as it came
        while interrupted_at(number, write):
            assert list(tmp_path.iterdir()) == [target], number
            assert target.read_bytes() in (b"old", b"new")
            number += stride
        gc.collect()
    assert number > 100


def contents(folder: Path) -> dict[str, str]:
    """Name → text of the files below a folder; temporary ones would be among them."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write_folder(target: Path, text: str, **options: Any) -> None:
    """Write a folder whose file "sub/file" has a text, and whose other file is named by it."""
    with files.atomic_folder(target, **options) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text(text)
        (folder / text).write_text(text)
        assert options or not (target / text).exists()


def test_a_folder_appears_complete_where_nothing_was(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()  # empty: nothing can be lost
    for folder in (target, tmp_path / "more" / "new"):
        write_folder(folder, "a")
        assert contents(folder) == {"sub/file": "a", "a": "a"}
        with pytest.raises(OutputError, match="has content"):
            write_folder(folder, "b")
    with pytest.raises(ZeroDivisionError), files.atomic_folder(tmp_path / "failed") as path:
        (path / "newer").write_text("x" * (1 // 0))
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "more"}


def test_overwrite_replaces_files_of_the_same_names_and_nothing_else(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "folder"
    outside.write_text("mine")
    write_folder(target, "a")
    (target / "sub" / "notes").write_text("mine")
    (target / "b").symlink_to(outside)
    write_folder(target, "b", overwrite=True)
    assert contents(target) == {"sub/file": "b", "sub/notes": "mine", "a": "a", "b": "b"}
    assert outside.read_text() == "mine"
    for wrong in ("a folder for a file", "a link for a folder"):
        other = tmp_path / wrong
        (other / "c").mkdir(parents=True) if "file" in wrong else (other.mkdir(), (other / "sub").symlink_to(target))
        with pytest.raises(OutputError, match=r"folder|link"):
            write_folder(other, "c", overwrite=True)
        assert len(list(other.iterdir())) == 1, "all is checked before the first file is replaced"
    with pytest.raises(ConfigError, match="would destroy"):
        write_folder(target, "d", overwrite=True, inputs=[target / "sub" / "file"])
    assert contents(target)["sub/file"] == "b"


def test_replace_leaves_nothing_of_the_old_folder(tmp_path: Path) -> None:
    for name in ("folder", "old"):
        for text in ("a", "b"):
            write_folder(tmp_path / name, text, replace=True)
        assert contents(tmp_path / name) == {"sub/file": "b", "b": "b"}
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "old"}


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "link", tmp_path / "nowhere", tmp_path / "pipe", tmp_path, Path(os.devnull)):
        with pytest.raises(OutputError, match="cannot write"):
            files.write_bytes(target, b"x")
        with pytest.raises(OutputError, match="cannot write"):
            files.open_append(target)
    for target in (tmp_path / "link", tmp_path / "nowhere", tmp_path / "pipe", tmp_path / "real"):
        with pytest.raises(OutputError, match="cannot write"):
            write_folder(target, "x", overwrite=True, replace=True)
    assert (tmp_path / "real").read_bytes() == b"old"
    assert not (tmp_path / "none").exists()


def test_permissions_of_new_files_follow_the_umask_in_any_thread(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    threads = [threading.Thread(target=files.write_bytes, args=(tmp_path / str(number), b"x")) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with files.atomic_folder(tmp_path / "folder"):
        pass
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640, 0o750}


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o400, 0o664])
def test_an_existing_target_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    file.chmod(mode)
    folder.mkdir()
    folder.chmod(mode | 0o300)
    with files.atomic_path(file) as path:
        path.write_bytes(b"new")
        assert not path.parent.stat().st_mode & 0o077, "nobody else reads it before it has its permissions"
    with files.atomic_folder(folder) as path:
        (path / "new").touch()
    assert file.stat().st_mode & 0o777 == mode
    assert folder.stat().st_mode & 0o777 == mode | 0o300
    assert (file.stat().st_size, [path.name for path in folder.iterdir()]) == (3, ["new"])


def test_another_group_gets_no_more_than_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "chown", refuse)
    target = tmp_path / "target"
    target.touch()
    target.chmod(0o664)
    files.write_bytes(target, b"new")
    assert target.stat().st_mode & 0o777 == 0o664, "the group is the same"
    if os.getuid() == 0:
        monkeypatch.undo()
        os.chown(target, 0, 4242)
        monkeypatch.setattr(os, "chown", refuse)
        files.write_bytes(target, b"newer")
        assert target.stat().st_mode & 0o777 == 0o644


WRITER = """
import sys
from birdie.system import files, outputs
with files.atomic_path(sys.argv[1]) as path:
    path.write_bytes(b"partial")
    print(flush=True)
    sys.stdin.read()
"""


def test_temporary_files_of_the_living_are_kept_and_those_of_the_dead_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "slow")]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    writers[0].kill()
    writers[0].communicate()
    assert len(list(tmp_path.glob(".birdie-*.part"))) == 2
    files.write_bytes(tmp_path / "other", b"")
    assert len(list(tmp_path.glob(".birdie-*.part"))) == 1
    writers[1].communicate(b"")
    assert writers[1].returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "slow"]
    assert (tmp_path / "slow").read_bytes() == b"partial"


def test_nothing_of_others_is_taken_for_abandoned(tmp_path: Path) -> None:
    """A name proves nothing: links, files, and folders that were copied with their names and contents all stay."""
    thesis, folder, copied = tmp_path / "thesis", tmp_path / "folder", tmp_path / "copied"
    thesis.mkdir()
    (thesis / "chapter").write_text("mine")
    with files.temporary_folder(tmp_path) as temporary:
        (temporary / "old").symlink_to(thesis)
        (temporary / "file").write_text("x")
        shutil.copytree(temporary, folder / temporary.name, symlinks=True)
    (folder / ".birdie-link.part").symlink_to(thesis)
    (folder / f".birdie-{thesis.stat().st_ino}-link.part").symlink_to(thesis)
    (folder / ".birdie-file.part").write_text("mine")
    os.mkfifo(folder / ".birdie-1-pipe.part")
    (folder / ".birdie-abcdefgh.part" / "old").mkdir(parents=True)
    names = sorted(path.name for path in folder.rglob("*"))
    shutil.copytree(folder, copied, symlinks=True, ignore=shutil.ignore_patterns("*pipe*"))
    for one in (folder, copied):
        files.remove_abandoned(one)
        files.write_bytes(one / "new", b"")
    assert sorted(path.name for path in folder.rglob("*") if path.name != "new") == names
    assert len(list(copied.rglob("*"))) == len(names)
    assert contents(thesis) == {"chapter": "mine"}


def replace_file(folder: Path) -> None:
    files.write_bytes(folder / "file", b"new")


def new_folder(folder: Path) -> None:
    write_folder(folder / "target", "new")


def remove(folder: Path) -> None:
    files.remove_folder(folder / "target")


@pytest.mark.slow
def test_a_file_survives_a_kill_at_each_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    for _ in kill_at_each_call(replace_file, tmp_path):
        assert (tmp_path / "file").read_bytes() in (b"old", b"new")
        files.write_bytes(tmp_path / "file", b"old")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
@pytest.mark.parametrize("work", [new_folder, remove])
def test_a_folder_survives_a_kill_at_each_call(work: Callable[[Path], None], tmp_path: Path) -> None:
    target, complete = tmp_path / "target", {"sub/file": "new", "new": "new"}
    for _ in kill_at_each_call(work, tmp_path):
        assert contents(target) in ({}, complete), "a folder is complete or missing"
        files.remove_abandoned(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} <= {"target"}
        if target.exists() != (work is remove):
            files.remove_folder(target) if work is new_folder else new_folder(tmp_path)


def test_a_trusted_file_is_one_that_only_this_user_can_write(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    path.write_bytes(b"code")
    path.chmod(0o600)
    assert files.read_trusted(path) == b"code"
    path.chmod(0o622)
    with pytest.raises(PermissionError):
        files.read_trusted(path)
    path.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        files.read_trusted(path)


def test_an_output_is_no_input_under_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "input").write_bytes(b"x")
    (tmp_path / "link").symlink_to("input")
    (tmp_path / "chain").symlink_to("link")
    (tmp_path / "hard").hardlink_to(tmp_path / "input")
    (tmp_path / "aside").symlink_to("folder")
    monkeypatch.chdir(tmp_path)
    for name in ("input", "./input", "folder/../input", "aside/../input", "link", "chain", "hard"):
        for other in ("input", "chain", "hard"):
            with pytest.raises(ConfigError, match=f"{name} would destroy .*{other}"):
                outputs.require_output(name, [tmp_path / "unrelated", tmp_path / other], overwrite=True)
    with pytest.raises(ConfigError, match="would destroy"):  # a file that both names will create
        outputs.require_output("aside/new", [tmp_path / "folder" / "new"])
    assert outputs.require_output("aside/new", [tmp_path / "input", "new"]) == Path("aside/new")


def test_an_output_replaces_its_own_kind_and_nothing_else(tmp_path: Path) -> None:
    kind = outputs.Kind("a page", b"<html>")
    for name, text in (("page", "<html>…"), ("empty", ""), ("thesis", "mine")):
        (tmp_path / name).write_text(text)
        (tmp_path / f"link to {name}").symlink_to(tmp_path / name)
    for name in ("page", "empty", "none"):
        assert outputs.require_output(tmp_path / name, kind=kind) == tmp_path / name
    for name in ("thesis", "link to page", "link to thesis"):
        with pytest.raises(OutputError, match=r"overwrite|link"):
            outputs.require_output(tmp_path / name, kind=kind)
        path = outputs.require_output(tmp_path / name, kind=kind, overwrite=True)
        assert path == tmp_path / name.removeprefix("link to ")
    with pytest.raises(OutputError, match="exists"):
        outputs.require_output(tmp_path / "page")
    with pytest.raises(ConfigError, match="NUL"):
        outputs.require_output("a\0b")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to("pipe")
    assert regular_file(tmp_path / "link").read_bytes() == b"x"
    for path in (tmp_path / "pipe", tmp_path / "to pipe", tmp_path, Path(os.devnull), tmp_path / "none"):
        with pytest.raises(OSError, match=r"regular file|folder|No such file"):
            regular_file(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_trusted_file_may_belong_to_root_and_to_no_other_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernel"
    files.write_trusted(path, b"code", private=False)
    assert path.stat().st_mode & 0o777 == 0o644
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert files.read_trusted(path) == b"code"
    os.chown(path, 54321, -1)
    with pytest.raises(PermissionError):
        files.read_trusted(path)
    os.chown(path, 0, -1)
    os.chown(tmp_path, 54321, -1)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        files.read_trusted(path)
