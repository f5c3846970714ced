"""Hidden files of somebody's file: written into a new folder, left out and named in a folder that has content."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.artifact.folders import write_folder
from birdie.artifact.saving import write_model
from birdie.chain.chain_folder import Chain
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.hub.folder import write_birdie_folder
from birdie.system.files import atomic_folder
from birdie.system.names import is_hidden, is_name

HIDDEN = (".bashrc", ".env", ".gitattributes", ".ssh/authorized_keys", "sub/.config/autostart/x.desktop", "a/b/.c")
PLAIN = ("LICENSE", "config.json", "sub/vocab.txt", "v1.0/a.b")
Door = Callable[[Path, Path], dict[str, Any]]


def by_python(file: Path, target: Path) -> dict[str, Any]:
    names: list[str] = []
    write_folder(file, target, overwrite=True, hidden=names.extend)
    return {"left_out": names}


def of_the_hub(file: Path, target: Path) -> dict[str, Any]:
    names: list[str] = []
    write_birdie_folder(file, target, overwrite=True, hidden=names.extend)
    return {"left_out": names}


def by_command(*words: str) -> Door:
    def door(file: Path, target: Path) -> dict[str, Any]:
        assert run(build_app, [*words, str(file), "-o", str(target), "--overwrite", "--json"]) == 0
        return {}

    return door


DOORS = {
    "write_folder": by_python,
    "write_birdie_folder": of_the_hub,
    "decompress": by_command("decompress"),
    "hub folder": by_command("hub", "folder"),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.birdie"
    kept = dict.fromkeys((*HIDDEN, *PLAIN), b"theirs") | {"config.json": b"{}"}
    write_model({"w": torch.ones(2, 2)}, path, files=kept)
    return path


def test_a_name_is_hidden_if_any_part_of_it_is() -> None:
    assert all(map(is_name, (*HIDDEN, *PLAIN)))
    assert [name for name in (*HIDDEN, *PLAIN) if is_hidden(name)] == list(HIDDEN)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("content", ["nothing", "an empty folder", "a file", "hidden files"])
def test_hidden_files_are_written_into_a_new_folder_only(
    door: str, content: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, mine = tmp_path / "target", {"notes.txt": b"mine"}
    if content == "hidden files":
        mine |= {".bashrc": b"mine", ".ssh/authorized_keys": b"mine", "LICENSE": b"mine"}
    if content != "nothing":
        target.mkdir()
    if content in ("a file", "hidden files"):
        for name, data in mine.items():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(data)
    capsys.readouterr()
    answer = DOORS[door](file, target) or json.loads(capsys.readouterr().out)
    written = contents(target)
    assert written["LICENSE"] == written["v1.0/a.b"] == b"theirs"
    if content in ("nothing", "an empty folder"):
        assert answer["left_out"] == []
        assert all(written[name] == b"theirs" for name in HIDDEN)
    else:
        assert sorted(answer["left_out"]) == sorted(HIDDEN)
        assert {name: data for name, data in written.items() if is_hidden(name)} == {
            name: data for name, data in mine.items() if is_hidden(name)
        }


def test_what_birdie_wrote_alone_is_replaced_with_its_hidden_files(file: Path, tmp_path: Path) -> None:
    for _ in range(2):
        write_folder(file, tmp_path / "target")
        assert set(HIDDEN) <= contents(tmp_path / "target").keys()


@pytest.mark.parametrize(
    "about",
    [
        {"weights": {"": [".ssh", "authorized_keys"]}},
        {"weights": {"": ".bashrc"}},
        {"weights": {"": "m"}, "shards": {"": {"files": [".bashrc"], "of": []}}},
        {"weights": {"": "m"}, "shards": {"": {"files": ["a/.b/c"], "of": []}}},
    ],
)
def test_weights_with_hidden_names_are_left_out_as_well(about: dict[str, Any], tmp_path: Path) -> None:
    birdie.save({"w": torch.ones(2, 2)}, tmp_path / "x.birdie", metadata=about)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "notes").write_bytes(b"mine")
    names: list[str] = []
    write_folder(tmp_path / "x.birdie", tmp_path / "target", overwrite=True, hidden=names.extend)
    assert contents(tmp_path / "target") == {"notes": b"mine"}
    assert len(names) == 1
    assert is_hidden(names[0])


def test_python_hears_of_it_in_the_log(file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes").write_bytes(b"mine")
    with caplog.at_level(logging.WARNING, "birdie"):
        write_folder(file, tmp_path, overwrite=True)
    assert all(name in caplog.text for name in HIDDEN)


def test_the_command_names_them(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "notes").write_bytes(b"mine")
    capsys.readouterr()
    assert run(build_app, ["decompress", str(file), "-o", f"{tmp_path / 'target'}/", "--overwrite"]) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert "left out: .bashrc, .env" in lines
    assert "only into a new folder" in lines


def test_names_of_the_caller_are_all_written(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"mine")
    with atomic_folder(tmp_path, overwrite=True) as folder:
        (folder / ".settings").write_bytes(b"new")
    assert (tmp_path / ".settings").read_bytes() == b"new"


def test_a_checkpoint_of_a_chain_has_its_hidden_files_in_a_new_folder_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "run" / "step-1"
    for name in (*HIDDEN, *PLAIN):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(name)
    [*Chain(tmp_path / "c").extend({1: checkpoint})]
    tokens = ["decompress", str(tmp_path / "c"), "--step", "1", "--overwrite", "--json", "-o"]
    assert run(build_app, [*tokens, f"{tmp_path}/new/"]) == 0
    assert contents(tmp_path / "new") == contents(checkpoint)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine").write_text("mine")
    capsys.readouterr()
    assert run(build_app, [*tokens, f"{tmp_path}/old/"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["left_out"]) == sorted(HIDDEN)
    assert contents(tmp_path / "old") == {"mine": b"mine", **{name: name.encode() for name in PLAIN}}
