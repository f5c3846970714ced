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
from safetensors.torch import load_file, save_file

import birdie
import birdie.cli.script
from birdie.artifact.container import Reader
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError, BirdieError, ConfigError, DataError
from birdie.gpt.data.dataset import DatasetInfo
from birdie.gpt.data.shards import read_shard, write_shard
from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.gpt.run.recipe_file import read_recipe_file
from birdie.gpt.score.package import read_package
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
    ("source", "flag"), [("model", "--lossless"), (f"model/{INDEX}", "--weights-only"), ("aside", "--effort=fast")]
)
def test_compress_replaces_no_file_of_a_checkpoint(
    refused: Callable[..., str], tmp_path: Path, source: str, flag: str
) -> None:
    for output in OUTPUTS:
        message = refused("compress", tmp_path / source, "-o", tmp_path / output, flag, kind="ConfigError")
        assert "would destroy" in message


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


FILES = (
    "x.ckpt",
    "pytorch_model.bin",
    "x.th",
    "x.pth.tar",
    "x.PT",
    "x.pth",
    "epoch=3-val_loss=0.25.ckpt",
    "new/er/x.bin",
)
FOLDERS = ("Qwen2.5-0.5B", "model.v2", "a.b/c.d/", "x.ckpt/", "plain", "Phi-3.5", "new.folder/v1.2.3")


@pytest.fixture
def ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, Any]]]:
    monkeypatch.chdir(tmp_path)

    def call(*tokens: object) -> tuple[int, dict[str, Any]]:
        code = run(build_app, [*map(str, tokens), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def kept_folder(tmp_path: Path) -> dict[str, torch.Tensor]:
    """hf.birdie, from a model folder with a configuration, and one.birdie, from a checkpoint with a step."""
    state, folder = {"w.weight": torch.randn(16, 16)}, tmp_path / "hf"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    torch.save({"model": state, "step": 3}, tmp_path / "one.ckpt")
    for source in ("hf", "one.ckpt"):
        tokens = [
            "compress",
            str(tmp_path / source),
            "-o",
            str(tmp_path / f"{Path(source).stem}.birdie"),
            "--lossless",
        ]
        assert run(build_app, [*tokens, "--json"]) == 0
    return state


@pytest.mark.parametrize("source", ["hf", "one"])
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_the_name_and_the_content_tell_file_from_folder(
    source: str,
    name: str,
    ask: Callable[..., tuple[int, dict[str, Any]]],
    kept_folder: dict[str, torch.Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    code, answer = ask("decompress", f"{source}.birdie", "-o", name)
    path, is_file = tmp_path / name, name in FILES
    assert (code, path.is_file(), path.is_dir()) == (0, is_file, not is_file)
    if source == "one":  # an object is never without its step
        content = torch.load(path if is_file else path / "model.pt", weights_only=True)
        assert content["step"] == 3
        state = content["model"]
    else:
        state = torch.load(path, weights_only=True) if is_file else load_file(path / "model.safetensors")
        assert (path / "config.json").exists() != is_file
    assert torch.equal(state["w.weight"], kept_folder["w.weight"])
    assert answer["left_out"] == (["config.json"] if is_file and source == "hf" else [])
    assert answer["written"] == ("file" if is_file or source == "one" else "folder")
    assert run(build_app, ["decompress", f"{source}.birdie", "-o", name, "--overwrite"]) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert ("as a folder" in lines) == (answer["written"] == "folder")
    assert ("left out: config.json" in lines) == (is_file and source == "hf")


def test_a_link_of_a_chain_is_written_under_any_name_of_its_kind(
    ask: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    for step in (20, 60):
        torch.save({"step": step, "w": torch.randn(40, 16)}, tmp_path / f"run/step_{step}.pt")
    assert ask("compress", "run", "-o", "chain/")[0] == 0
    for name in ("s60.pt", "s60.ckpt", "s60.bin"):
        assert ask("decompress", "chain", "--step", 60, "-o", name)[1]["written"] == "file"
        assert (tmp_path / name).read_bytes() == (tmp_path / "run/step_60.pt").read_bytes()
    assert ask("decompress", "chain", "--step", 60, "-o", "folder.v1/")[0] == 0
    assert (tmp_path / "folder.v1/step_60.pt").read_bytes() == (tmp_path / "run/step_60.pt").read_bytes()
    code, answer = ask("decompress", "chain", "--step", 60, "-o", "s60.safetensors")
    assert (code, answer["left_out"]) == (0, ["all that is no tensor"])
    code, answer = ask("decompress", "chain", "--step", 60, "-o", "s60.ptz")
    assert (code, "bit for bit" in answer["error"]["message"]) == (1, True)


def test_named_tensors_alone_are_written(
    tmp_path: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    state = {"head.weight": tensor, "head.bias": torch.ones(2), "tied": tensor, "body.weight": torch.zeros(4, 4)}
    file = tmp_path / "x.birdie"
    birdie.save(state, file, lossless=True)
    for name in ("part.safetensors", "part.pt"):
        command = ["decompress", str(file), "-o", str(tmp_path / name), "--only", "head.*", "--only", "tied"]
        assert run(build_app, command) == 0
        part = load_file(tmp_path / name) if name.endswith("safetensors") else torch.load(tmp_path / name)
        assert part.keys() == {"head.weight", "head.bias", "tied"}
        assert all(torch.equal(part[name], state[name]) for name in part)
    capsys.readouterr()
    assert "one file" in refused("decompress", file, "-o", tmp_path / "folder", "--only", "tied", kind="ConfigError")
    refused("decompress", file, "-o", tmp_path / "y.pt", "--only", "tail.*", kind="ArtifactError")
