"""Files beside the weights come back; hidden ones only into a new folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.artifact import container, kept_files
from birdie.artifact import metadata as file_metadata
from birdie.artifact.container import Reader
from birdie.artifact.folders import write_folder
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import write_model
from birdie.chain.chain_folder import Chain
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError, ConfigError
from birdie.hub.folder import write_birdie_folder
from birdie.system.files import atomic_folder
from birdie.system.names import is_hidden

FILES = {"config.json": b'{"hidden_size": 64}', "tokenizer/vocab.json": b"a" * 5000, "LICENSE": "Lizenz ü".encode()}


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}


def read(path: Path) -> dict[str, bytes]:
    with Reader(path) as reader:
        return kept_files.read(reader)


def test_files_come_back_and_tensors_do_not_change(tmp_path: Path) -> None:
    plain, kept = tmp_path / "plain.birdie", tmp_path / "kept.birdie"
    birdie.save(state(), plain)
    summary = write_model(state(), kept, files=FILES)
    assert read(kept) == FILES
    assert read(plain) == {}
    assert torch.equal(birdie.load(kept)["w"], birdie.load(plain)["w"])
    assert list(birdie.load(kept)) == ["w"]
    assert summary.files == {name: len(content) for name, content in FILES.items()}
    assert birdie.inspect(plain).files == {}
    with Reader(kept) as reader:
        assert sum(reader.table().values()) + reader.header_bytes == reader.size
    assert 0 < summary.file_bytes < 200


def test_they_count_against_a_budget(tmp_path: Path) -> None:
    noise = {"noise.txt": torch.randint(0, 256, (3000,), dtype=torch.uint8).numpy().tobytes()}
    summary = write_model(state(), tmp_path / "x.birdie", SaveOptions(budget=5000), files=noise)
    assert 4900 <= summary.bytes <= 5000
    assert summary.file_bytes >= 3000
    with pytest.raises(birdie.BudgetError):
        write_model(state(), tmp_path / "y.birdie", SaveOptions(budget=3000), files=noise)


def test_no_file_has_the_name_of_the_folder_of_another(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a/b/c"):
        write_model(state(), tmp_path / "x.birdie", files={"a/b": b"", "a/b/c": b""})
    with pytest.raises(ArtifactError, match="list of files"):
        kept_files.listed({"files": {"a": 0, "a/b": 0}}, "x")


@pytest.mark.parametrize(
    "files", [{"a": 5, "b": 3}, {"a": 7}, {"a": 1 << 40}, {"b": 6}, [], {"a": True}, {"b": 3, "a": 3}]
)
def test_a_damaged_list_is_refused(files: Any) -> None:
    entry = kept_files.entry_of({"a": b"abc", "b": b"def"})
    metadata = json.dumps({"files": files}).encode()
    with Reader(container.to_bytes([entry], metadata)) as reader:
        if files == {"b": 6}:
            assert kept_files.read(reader) == {"b": b"abcdef"}
            return
        with pytest.raises(ArtifactError):
            kept_files.read(reader)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    entry = kept_files.entry_of({"a": bytes(1 << 20)})
    with Reader(container.to_bytes([entry], file_metadata.to_bytes(files={"a": 1 << 20}))) as reader:
        with pytest.raises(ArtifactError, match="--max-size"):
            kept_files.read(reader, 1 << 19)
        assert len(kept_files.read(reader)["a"]) == 1 << 20


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
