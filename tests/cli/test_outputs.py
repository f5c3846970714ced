"""Outputs of commands: no command replaces a file that it reads, or takes the name of a folder for that of a file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import birdie
import birdie.cli.script
from birdie.artifact.container import Reader
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.data.dataset import DatasetInfo
from birdie.data.shards import read_shard, write_shard
from birdie.data.tokenizer import load_tokenizer
from birdie.errors import ArtifactError, BirdieError, ConfigError, DataError
from birdie.run.recipe_file import read_recipe_file
from birdie.score.package import read_package
from tests.pipes import waiting_fails

INDEX = "model.safetensors.index.json"


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail and change no file; return its message."""

    def call(*tokens: object, kind: str) -> str:
        files = contents(tmp_path)
        code = run(build_app, [*map(str, tokens), "--json"])
        error: dict[str, Any] = json.loads(capsys.readouterr().out)["error"]
        assert (code, error["type"]) == (1, kind), error
        assert contents(tmp_path) == files
        message: str = error["message"]
        return message

    return call


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, links included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A Hugging Face folder of two shards, and links to its files."""
    folder = tmp_path / "model"
    folder.mkdir()
    torch.manual_seed(0)
    for name in ("a", "b"):
        save_file({name: torch.randn(64, 32)}, folder / f"{name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in "ab"}}))
    (tmp_path / "link").symlink_to("model/b.safetensors")
    (tmp_path / "hard").hardlink_to(folder / "b.safetensors")
    (tmp_path / "index").hardlink_to(folder / INDEX)
    (tmp_path / "aside").symlink_to("model")
    return folder


OUTPUTS = ("model/a.safetensors", f"model/{INDEX}", "aside/b.safetensors", "link", "hard", "index")


@pytest.mark.usefixtures("shards")
@pytest.mark.parametrize(
    ("source", "flag"), [("model", "--lossless"), (f"model/{INDEX}", "--weights-only"), ("aside", "--coder=fast")]
)
def test_compress_replaces_no_file_of_a_checkpoint(
    refused: Callable[..., str], tmp_path: Path, source: str, flag: str
) -> None:
    for output in OUTPUTS:
        message = refused("compress", tmp_path / source, "-o", tmp_path / output, flag, kind="ConfigError")
        assert "would destroy" in message


@pytest.mark.parametrize("kind", ["pt", "ptz", "safetensors"])
def test_compress_and_decompress_do_not_replace_their_file(
    refused: Callable[..., str], tmp_path: Path, kind: str
) -> None:
    """A .birdie file may have any name, and so may its links."""
    source, artifact = tmp_path / f"input.{kind}", tmp_path / f"m.{kind}"
    state = {"a": torch.randn(64, 32)}
    save_file(state, source) if kind == "safetensors" else torch.save(state, source)
    birdie.save(state, artifact)
    for command, file in (("compress", source), ("decompress", artifact)):
        (link := tmp_path / f"{command} link.{kind}").symlink_to(file)
        (hard := tmp_path / f"{command} hard.{kind}").hardlink_to(file)
        for output in (file, link, hard, tmp_path / ".." / tmp_path.name / file.name):
            assert "would destroy" in refused(command, file, "-o", output, kind="ConfigError")
            assert "would destroy" in refused(command, link, "-o", output, kind="ConfigError")


def test_compress_replaces_no_file_of_its_calibration(
    refused: Callable[..., str], shards: Path, tmp_path: Path
) -> None:
    """The recipe, the tokenizer, the shards and their totals are read as well."""
    data, run_folder = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    run_folder.mkdir()
    for split in ("train", "val"):
        write_shard(data / f"x_{split}_0.bin", np.arange(200, dtype=np.uint16))
    (tmp_path / "pieces.model").write_bytes(b"a model")
    text = f"[data]\npath = {str(data)!r}\ntokenizer = {str(tmp_path / 'pieces.model')!r}\n"
    (run_folder / "recipe.toml").write_text(text)
    for output in ("run/recipe.toml", "pieces.model", "data/x_train_0.bin", "data/x_val_0.bin", "data/dataset.json"):
        for calibrate in (run_folder, run_folder / "recipe.toml"):
            tokens = ("compress", shards, "-o", tmp_path / output, "--calibrate", calibrate)
            assert "would destroy" in refused(*tokens, kind="ConfigError")


def test_the_decoder_replaces_no_source(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    source = tmp_path / "package" / "inner" / "module.py"
    source.write_text("x = 1")
    monkeypatch.setattr(birdie.cli.script, "PACKAGE", tmp_path / "package")
    assert "would destroy" in refused("script", "--kind", "decoder", "-o", source, kind="ConfigError")


def test_train_replaces_no_recipe_that_somebody_wrote(refused: Callable[..., str], tmp_path: Path) -> None:
    """A run writes recipe.toml into its folder; without the comments of the one that it was started with."""
    (tmp_path / "recipe.toml").write_text(f"# my notes\n[data]\npath = {str(tmp_path / 'none')!r}\n")
    tokens = ("train", tmp_path / "recipe.toml", "--folder", tmp_path)
    assert "recipe.toml" in refused(*tokens, kind="OutputError")
    assert "recipe.toml" in refused(*tokens, "--resume", kind="OutputError")
    (tmp_path / "checkpoints").mkdir()  # then the recipe is the run's own
    (tmp_path / "environment.json").write_text("{}")
    assert "none does not exist" in refused(*tokens, "--resume", kind="DataError")


def test_prepare_replaces_no_folder_with_its_text(
    refused: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("\n".join(f"line {i} of {i * i}" for i in range(500)))
    assert run(build_app, ["prepare", str(text), "--tokenizer", "bytes", "-o", str(tmp_path), "--json"]) == 0
    folder = Path(json.loads(capsys.readouterr().out)["folder"])
    shutil.copy(text, folder / "text.bin")
    (tmp_path / "link").symlink_to(folder / "text.bin")
    for source in (folder / "text.bin", tmp_path / "link", text):
        tokens = ("prepare", source, "--tokenizer", "bytes", "-o", tmp_path)
        assert "did not prepare" in refused(*tokens, kind="OutputError")


@pytest.mark.parametrize(
    "tokens",
    [
        ["compress", "{tmp}/w.safetensors", "-o"],
        ["script", "--kind", "pair", "-o"],
        ["script", "baseline", "-o"],
        ["evaluate", "{tmp}/m.birdie", "--package"],
    ],
    ids=lambda tokens: f"{tokens[0]} {tokens[-1]}",
)
def test_a_folder_is_no_output_of_any_command(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "to folder").symlink_to("folder")
    save_file({"a": torch.zeros(4, 4)}, tmp_path / "w.safetensors")
    birdie.save({"a": torch.zeros(4, 4)}, tmp_path / "m.birdie")
    for name in ("nope/", "nope/.", "folder", "folder/", "to folder", ""):
        message = refused(*(token.format(tmp=tmp_path) for token in tokens), name, kind="OutputError")
        assert "folder; give the name of a file" in message
    assert not (tmp_path / "nope").exists()


def test_save_takes_no_name_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(birdie.errors.OutputError, match="name of a folder"):
        birdie.save({"a": torch.zeros(4, 4)}, f"{tmp_path}/nope/")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (Reader, ArtifactError),
        (birdie.load, ArtifactError),
        (birdie.inspect, ArtifactError),
        (load_tokenizer, DataError),
        (read_shard, DataError),
        (read_recipe_file, ConfigError),
        (lambda path: read_package(path, {}), ConfigError),
        (lambda path: DatasetInfo.read(path.parent), DataError),
    ],
)
def test_no_reader_waits_for_a_pipe(tmp_path: Path, read: Callable[[Path], object], error: type[BirdieError]) -> None:
    """All of them open one name, that of the totals of a data set."""
    path = tmp_path / "dataset.json"
    os.mkfifo(path)
    with waiting_fails(), pytest.raises(error):
        read(path)
