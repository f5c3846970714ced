"""Atomic writes: a target has its old or its new content, and only regular files are replaced."""

import os
import threading
from pathlib import Path

import pytest

from birdie.errors import ConfigError, OutputError
from birdie.runtime import files
from birdie.runtime.reading import require_regular


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    files.write_bytes(target, b"old")
    with pytest.raises(ZeroDivisionError), files.atomic_path(target) as path:
        path.write_bytes(b"new"[: 1 // 0])
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_replaced_as_a_unit(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    for text in ("old", "new"):
        with files.atomic_folder(target) as folder:
            (folder / text).write_text(text)
            assert not (target / text).exists()
    assert [path.name for path in target.iterdir()] == ["new"]
    with pytest.raises(ZeroDivisionError), files.atomic_folder(target) as folder:
        (folder / "newer").write_text("x" * (1 // 0))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_link_is_followed_and_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        with pytest.raises(OutputError, match="cannot write"):
            files.write_bytes(target, b"x")


def test_permissions_follow_the_umask_in_any_thread(tmp_path: Path) -> None:
    threads = [threading.Thread(target=files.write_bytes, args=(tmp_path / str(number), b"x")) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~files.UMASK}


@pytest.mark.parametrize("folder", ["/proc/nowhere", os.devnull + "/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(folder: str) -> None:
    with pytest.raises(OutputError, match=folder):
        files.require_writable(folder)


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


@pytest.mark.parametrize("name", ["nope/", "folder", "folder/", "nope/.", "nope/..", "folder/pipe"])
def test_an_output_has_the_name_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "pipe")
    with pytest.raises(OutputError, match="cannot write"):
        files.require_output(f"{tmp_path}/{name}")
    for empty in ("", ".", ".."):
        with pytest.raises(OutputError, match="cannot write"):
            files.require_output(empty)


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
                files.require_output(name, [tmp_path / "unrelated", tmp_path / other])
    with pytest.raises(ConfigError, match="would destroy"):  # a file that both names will create
        files.require_output("aside/new", [tmp_path / "folder" / "new"])
    assert files.require_output("aside/new", [tmp_path / "input", "new"]) == Path("aside/new")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to("pipe")
    assert require_regular(tmp_path / "link").read_bytes() == b"x"
    for path in (tmp_path / "pipe", tmp_path / "to pipe", tmp_path, Path(os.devnull), tmp_path / "none"):
        with pytest.raises(OSError, match=r"regular file|folder|No such file"):
            require_regular(path)
