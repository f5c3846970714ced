"""ONNX files on the command line: the plain commands, what they say, and their errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")

from birdie.cli import build_app
from birdie.cli.console import run
from tests.onnx import zoo

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return what runs a command with --json and returns its answer; `code` is the exit code that is expected."""
    monkeypatch.chdir(tmp_path)

    def call(*tokens: object, code: int = 0) -> dict[str, Any]:
        assert run(build_app, [*map(str, tokens), "--json"]) == code
        answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return answer

    return call


@pytest.mark.parametrize("external", [False, True])
def test_compress_and_decompress(external: bool, ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = zoo.write("opset 17", tmp_path / "in", external=external)
    originals = sorted(one.read_bytes() for one in path.parent.iterdir())
    answer = ask("compress", path, "-o", "a.birdie", "--lossless", "--effort", "fast")
    assert answer["input_bytes"] == answer["file_bytes"] == sum(map(len, originals))
    assert "opset ai.onnx 17, by zoo: 4 nodes, x → y" in ask("inspect", "a.birdie")["onnx"]
    assert ask("decompress", "a.birdie", "-o", "out/other.onnx")["left_out"] == []
    assert sorted(one.read_bytes() for one in (tmp_path / "out").iterdir()) == originals
    assert (tmp_path / "out" / "other.onnx").is_file()
    ask("decompress", "a.birdie", "-o", "folder/")
    assert sorted(one.name for one in (tmp_path / "folder").iterdir()) == ["net.onnx", "net.weights"][: 1 + external]
    assert ask("decompress", "a.birdie", "-o", "a.safetensors")["left_out"] == ["the graph"]
    assert run(build_app, ["inspect", "a.birdie"]) == 0
    assert "by zoo: 4 nodes" in capsys.readouterr().out


def test_budgets_forecasts_and_bases(ask: Ask, tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path / "in")
    assert ask("compress", path, "-o", "a.birdie", "--budget", 3000, "--calibrate", "none")["bytes"] <= 3000
    forecast = ask("compress", path, "--dry-run", "--budget", 3000)["forecasts"][0]
    assert forecast["bytes"] <= 3000
    ask("compress", path, "-o", "b.birdie", "--base", "a.birdie", "--lossless")
    ask("decompress", "b.birdie", "-o", "b.onnx", "--base", "a.birdie")
    assert (tmp_path / "b.onnx").read_bytes() == path.read_bytes()


def test_inputs_are_made_up_or_those_of_a_file(ask: Ask, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    path = zoo.write("opset 17", tmp_path / "in")
    answer = ask("compress", path, "-o", "a.birdie", "--budget", 3000, "--effort", "fast")
    assert "made-up inputs" in answer["calibration"]
    assert answer["control"]["errors"].keys() >= {"calibrated", "assumed"}
    np.savez(tmp_path / "inputs.npz", x=np.random.default_rng(0).normal(size=(20, 1, zoo.WIDTH)).astype(np.float32))
    answer = ask("compress", path, "-o", "a.birdie", "--budget", 3000, "--calibrate", "inputs.npz", "--effort", "fast")
    assert (answer["calibration"], answer["bytes"] <= 3000) == (None, True)
    assert answer["control"]["errors"].keys() >= {"calibrated", "assumed"}
    (tmp_path / "text.txt").write_text("no arrays")
    error = ask("compress", path, "-o", "b.birdie", "--budget", 3000, "--calibrate", "text.txt", code=1)["error"]
    assert (error["type"], ".npz" in error["message"]) == ("ConfigError", True)


def test_errors_are_sentences(ask: Ask, tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path / "in", external=True)
    for flags in (["--key", "model"], ["--weights-only"]):
        error = ask("compress", path, "-o", "a.birdie", *flags, code=1)["error"]
        assert (error["type"], flags[0] in error["message"]) == ("ConfigError", True)
    ask("compress", path, "-o", "a.birdie")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "net.weights").write_bytes(b"the user's")
    error = ask("decompress", "a.birdie", "-o", "out/net.onnx", code=1)["error"]
    assert (error["type"], "net.weights" in error["message"]) == ("OutputError", True)
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["net.weights"]
    (path.parent / "net.weights").unlink()
    error = ask("compress", path, "-o", "b.birdie", code=1)["error"]
    assert (error["type"], "net.weights" in error["message"]) == ("WeightsError", True)
    (tmp_path / "damaged.onnx").write_bytes(path.read_bytes()[:-5])
    assert ask("compress", "damaged.onnx", "-o", "b.birdie", code=1)["error"]["type"] == "WeightsError"
