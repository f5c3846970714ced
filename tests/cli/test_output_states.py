"""Every command that writes × every state of its target: nothing that birdie did not write is changed, moved or lost.

A command either refuses in one sentence and changes nothing, or writes what was asked for. With --overwrite it replaces
files of the names that it writes; files that it reads, and all that lies elsewhere, it never does.
"""

import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import birdie
import birdie.golf.packed_script
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.golf import submission
from birdie.golf.packed_script import PackedScript
from birdie.gpt.data.shards import write_shard

MINE = b"written by somebody else"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts of a few bytes: what is in them is not the subject, and to pack them takes seconds."""
    packed = PackedScript(b"#birdie 0\n", {}, ("torch",), True)
    monkeypatch.setattr(birdie.golf.packed_script, "pack", lambda *_: packed)
    monkeypatch.setattr(submission, "pack", lambda *_: packed)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of the commands: a model as a folder and as a .birdie file, a log, a text."""
    folder = tmp_path_factory.mktemp("written")
    model = folder / "hf"
    model.mkdir(parents=True)
    save_file({"w": torch.ones(4, 4)}, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text('{"model_type": "x", "architectures": ["X"]}')
    assert run(build_app, ["compress", str(model), "-o", str(folder / "m.birdie"), "--lossless"]) == 0
    (folder / "log.txt").write_text("step:1/2 train_loss:2.0 train_time:5ms\nstep:2/2 val_loss:2.0 val_bpb:1.2\n")
    (folder / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(400)))
    return folder


@pytest.fixture
def inputs(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "in")


class Snapshot:
    """Everything below a folder: kinds, contents, targets of links, without times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = dict(self._walk(folder))

    def _walk(self, folder: Path) -> Iterator[tuple[str, object]]:
        for path in sorted(folder.rglob("*")):
            mode = path.lstat().st_mode
            content: object = (
                str(path.readlink()) if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else None
            )
            yield path.relative_to(self.folder).as_posix(), (stat.S_IFMT(mode), content)

    def lost(self) -> list[str]:
        """Names that have gone or have other content now."""
        now = dict(self._walk(self.folder))
        return [name for name, entry in self.entries.items() if now.get(name) != entry]

    def new(self) -> list[str]:
        """Names that were not there."""
        return sorted(dict(self._walk(self.folder)).keys() - self.entries.keys())


# Commands whose output is a file: tokens, the suffix of the name, content of a file of the same kind, what they read.
FILES: dict[str, tuple[list[str], str, bytes, str]] = {
    "compress": (["compress", "{in}/hf"], "", b"\x89BRD\r\n\x1a\n", "hf/config.json"),
    "compress --lossless": (
        ["compress", "{in}/hf", "--lossless"],
        ".birdie",
        b"\x89BRD\r\n\x1a\n",
        "hf/model.safetensors",
    ),
    "decompress .safetensors": (["decompress", "{in}/m.birdie"], ".safetensors", b"\x02\0\0\0\0\0\0\0{}", "m.birdie"),
    "decompress .pt": (["decompress", "{in}/m.birdie"], ".pt", b"PK\x03\x04 old", "m.birdie"),
    "decompress .ptz": (["decompress", "{in}/m.birdie"], ".ptz", b"\x78\xda old", "m.birdie"),
    "report": (["report", "{in}/log.txt", "--no-samples"], ".html", b"<!doctype html>\nold", "log.txt"),
    "decoder": (["script", "--kind", "decoder"], ".py", b"#birdie 0.0.9 coding:L1", ""),
    "script": (["script", "baseline"], ".py", b"#birdie 0.0.9 coding:L1", ""),
}


def file_states(kind: bytes, inputs: Path, read: str, aside: Path) -> dict[str, Callable[[Path], object]]:
    """Name → function that prepares the target; `aside` is a folder of somebody's, in which nothing may change."""
    of_input: dict[str, Callable[[Path], object]] = {
        "hard link of an input": lambda target: target.hardlink_to(inputs / read),
        "link to an input": lambda target: target.symlink_to(inputs / read),
    }
    return (of_input if read else {}) | {
        "missing": lambda _: None,
        "in a new folder": lambda _: None,
        "empty": lambda target: target.touch(),
        "of the same kind": lambda target: target.write_bytes(kind),
        "another kind": lambda target: target.write_bytes(MINE),
        "another kind, same suffix": lambda target: target.write_bytes(b"\x80\x05" + MINE),
        "hard link": lambda target: target.hardlink_to(aside / "file"),
        "link to the same kind": lambda target: target.symlink_to(aside / "same kind"),
        "link to another kind": lambda target: target.symlink_to(aside / "file"),
        "link to nothing": lambda target: target.symlink_to(aside / "none"),
        "link to a folder": lambda target: target.symlink_to(aside),
        "circle of links": lambda target: target.symlink_to(target.name),
        "pipe": lambda target: os.mkfifo(target),
        "empty folder": lambda target: target.mkdir(),
        "folder with content": lambda target: shutil.copytree(aside, target),
    }


ACCEPTED = {"missing", "in a new folder", "empty", "of the same kind"}
ASKED = {
    "hard link",
    "another kind",
    "another kind, same suffix",
    "link to the same kind",
    "link to another kind",
    "link to nothing",
}
"""States that --overwrite accepts as well; a link then stands for its file."""


def daily_and_nightly(names: Iterable[str], full: str, few: set[str]) -> list[Any]:
    """Return parameters (name, states): None, which is all of them, for the name `full` and, at night, for the rest."""
    rest = [pytest.param(name, None, marks=pytest.mark.nightly) for name in names if name != full]
    return [pytest.param(name, None if name == full else few) for name in names] + rest


@pytest.mark.parametrize(
    ("name", "few"),
    daily_and_nightly(FILES, "compress", {"missing", "of the same kind", "another kind", "link to an input"}),
    ids=lambda value: value if isinstance(value, str) else "few" if value else "all",
)
def test_a_file_replaces_only_its_own_kind(
    name: str, few: set[str] | None, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, suffix, kind, read = FILES[name]
    aside = tmp_path / "aside"
    states = file_states(kind, inputs, read, aside)
    assert len(states) >= 15
    for state, overwrite in itertools.product(few & states.keys() if few else states, (False, True)):
        if "folder" in state and state != "in a new folder" and name.startswith("decompress"):
            continue  # a folder is an output of that command: see below
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        (aside / "file").write_bytes(MINE)
        (aside / "same kind").write_bytes(kind)
        work = tmp_path / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        target = work / "sub" / f"out{suffix}" if state == "in a new folder" else work / f"out{suffix}"
        states[state](target)
        (work / "thesis").write_bytes(MINE)
        untouched = Snapshot(tmp_path)
        command = [token.replace("{in}", str(inputs)) for token in tokens]
        code = run(build_app, [*command, "-o", str(target), *(["--overwrite"] if overwrite else []), "--json"])
        answer = json.loads(capsys.readouterr().out)
        case = f"{name}, {state}, overwrite {overwrite}: {answer}"
        accepted = state in ACCEPTED or (overwrite and state in ASKED)
        assert (code == 0) == accepted, case
        if not accepted:
            assert (untouched.lost(), untouched.new()) == ([], []), case
            assert answer["error"]["type"] in ("OutputError", "ConfigError"), case
            continue
        linked = {"link to the same kind": "aside/same kind", "link to another kind": "aside/file"}.get(state)
        allowed = {linked or target.relative_to(tmp_path).as_posix()}
        assert set(untouched.lost()) <= allowed, case
        written = {"link to nothing": aside / "none"}.get(state, tmp_path / (linked or target.relative_to(tmp_path)))
        assert written.read_bytes()[:2] == kind[:2] or name == "decompress .safetensors", case
        assert set(untouched.new()) <= {"work/sub", written.relative_to(tmp_path).as_posix()}, case


def earlier(command: str, inputs: Path, target: Path) -> None:
    """Write what the command wrote there in an earlier call."""
    tokens = [token.replace("{in}", str(inputs)) for token in FOLDERS[command]]
    assert run(build_app, [*tokens, "-o", str(target)]) == 0


FOLDERS: dict[str, list[str]] = {
    "decompress": ["decompress", "{in}/m.birdie"],
    "hub folder": ["hub", "folder", "{in}/m.birdie"],
    "hub pull": ["hub", "pull", "user/name"],
}


def folder_states(command: str, inputs: Path, aside: Path) -> dict[str, Callable[[Path], object]]:
    def with_file(name: str) -> Callable[[Path], object]:
        def prepare(target: Path) -> None:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(MINE)

        return prepare

    def with_link(name: str, to: Path) -> Callable[[Path], object]:
        def prepare(target: Path) -> None:
            target.mkdir()
            (target / name).symlink_to(to)

        return prepare

    def earlier_and_notes(target: Path) -> None:
        earlier(command, inputs, target)
        (target / "notes.txt").write_bytes(MINE)

    def with_input(target: Path) -> None:
        target.mkdir()
        (target / "model.birdie").hardlink_to(inputs / "m.birdie")

    return {
        "missing": lambda _: None,
        "in a new folder": lambda _: None,
        "empty": lambda target: target.mkdir(),
        "link to an empty folder": lambda target: target.symlink_to(aside / "empty"),
        "a file": lambda target: target.write_bytes(MINE),
        "an empty file": lambda target: target.touch(),
        "pipe": lambda target: os.mkfifo(target),
        "link to a file": lambda target: target.symlink_to(aside / "file"),
        "link to nothing": lambda target: target.symlink_to(aside / "none"),
        "foreign file": with_file("thesis.txt"),
        "repository": with_file(".git/config"),
        "checkpoints": with_file("checkpoint-500/optimizer.pt"),
        "link to a folder with content": lambda target: target.symlink_to(aside),
        "same name, a link": with_link("config.json", aside / "file"),
        "earlier result": lambda target: earlier(command, inputs, target),
        "earlier result and notes": earlier_and_notes,
        "the input is in it": with_input,
    }


NEW = {"missing", "in a new folder", "empty", "link to an empty folder"}
NO_FOLDER = {"a file", "an empty file", "pipe", "link to a file", "link to nothing"}


@pytest.mark.parametrize(
    ("name", "few"),
    daily_and_nightly(FOLDERS, "decompress", {"missing", "foreign file", "earlier result", "the input is in it"}),
    ids=lambda value: value if isinstance(value, str) else "few" if value else "all",
)
def test_a_folder_loses_nothing(
    name: str,
    few: set[str] | None,
    inputs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("birdie.hub.transfer.download", lambda *_: inputs / "hf")
    aside = tmp_path / "aside"
    states = folder_states(name, inputs, aside)
    assert len(states) >= 15
    for state, overwrite in itertools.product(few or states, (False, True)):
        for folder in (aside, tmp_path / "work"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        (aside / "file").write_bytes(MINE)
        (aside / "empty").mkdir()
        target = tmp_path / "work" / ("sub/out" if state == "in a new folder" else "out")
        states[state](target)
        untouched = Snapshot(tmp_path)
        command = [token.replace("{in}", str(inputs)) for token in FOLDERS[name]]
        capsys.readouterr()
        code = run(build_app, [*command, "-o", str(target), *(["--overwrite"] if overwrite else []), "--json"])
        answer = json.loads(capsys.readouterr().out)
        case = f"{name}, {state}, overwrite {overwrite}: {answer}"
        reads_it = state == "the input is in it" and name == "hub folder"
        is_own = state == "earlier result" and name == "decompress"  # all of it, by its marks
        accepted = state in NEW or is_own or (overwrite and state not in NO_FOLDER and not reads_it)
        assert (code == 0) == accepted, case
        if not accepted:
            assert (untouched.lost(), untouched.new()) == ([], []), case
            continue
        result = {"config.json", "model.safetensors", "model.birdie", "README.md"}
        root = (target.resolve() if target.is_symlink() else target).relative_to(tmp_path).as_posix()
        assert set(untouched.lost()) <= {f"{root}/{name}" for name in result}, case
        assert (tmp_path / root / "config.json").is_file(), case
        assert not (tmp_path / root / "config.json").is_symlink(), case
        stayed = [name for name in untouched.entries if name.startswith(f"{root}/") and name not in untouched.lost()]
        files = {name.removeprefix(f"{root}/") for name in stayed if (tmp_path / name).is_file()}
        assert set(answer["left"]) >= files - result, case


def own_folders(inputs: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Commands that keep a folder of results, which they go on with."""
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    for split in ("train", "val"):
        write_shard(data / f"x_{split}_000000.bin", torch.arange(200, dtype=torch.int32).numpy().astype("uint16"))
    (tmp_path / "sweep.toml").write_text('[sweep]\nrecipe = "baseline"\ntrials = 1\n[space]\n"train.seed" = [1]\n')
    return {
        "train": ["train", "--data.path", str(data), "--data.tokenizer", "bytes", "--folder"],
        "train --resume": ["train", "--data.path", str(data), "--data.tokenizer", "bytes", "--resume", "--folder"],
        "sweep": ["sweep", str(tmp_path / "sweep.toml"), "--folder"],
        "try": ["try", "because", "--set", "train.seed=1", "--recipe", "baseline", "--lab"],
        "prepare": ["prepare", str(inputs / "text.txt"), "--tokenizer", "bytes", "-o"],
        "submit": ["submit", "baseline", "--seeds", "1,2", "-o"],
    }


COMMANDS = ("train", "train --resume", "sweep", "try", "prepare", "submit")
THINGS = ("thesis.txt", "recipe.toml", "metrics.jsonl", "log.txt", "model.birdie", "runs")


@pytest.mark.parametrize(
    ("command", "thing"),
    [
        pytest.param(command, thing, marks=[] if command == "train" or thing == "runs" else pytest.mark.nightly)
        for command, thing in itertools.product(COMMANDS, THINGS)
    ],
)
def test_folders_of_results_are_begun_where_nothing_is(
    command: str, thing: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with somebody's files, also of the names that birdie uses, is refused before anything is read."""
    target = tmp_path / "out"
    folder = target / "datasets" / "text_byte260" if command == "prepare" else target
    folder.mkdir(parents=True)
    (folder / thing).mkdir() if thing == "runs" else (folder / thing).write_bytes(MINE)
    tokens = own_folders(inputs, tmp_path)[command]
    untouched = Snapshot(tmp_path)
    capsys.readouterr()
    assert run(build_app, [*tokens, str(target), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["type"] in ("OutputError", "ConfigError")
    assert (untouched.lost(), untouched.new()) == ([], [])
