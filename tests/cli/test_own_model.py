"""`birdie compress --model --data`: a model of one's own is calibrated by its own code, which the user names."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from birdie.cli import build_app
from birdie.cli.console import run

CODE = """
import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        yield torch.randn(16, 32, generator=generator), torch.zeros(16, dtype=torch.long)


def loss(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1], reduction="sum")


def broken():
    raise RuntimeError("no disk")


number = 3
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget imported code, and the folders that became importable."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = {*sys.modules}
    yield
    for name in {*sys.modules} - known:
        if (getattr(sys.modules[name], "__file__", None) or "").endswith("own_net.py"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_net.py").write_text(CODE)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    np.savez(tmp_path / "x.npz", inputs=np.random.default_rng(0).normal(size=(96, 32)))
    return tmp_path


def compressed(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = run(build_app, ["compress", str(folder / "net.pt"), "-o", str(folder / "x.birdie"), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("data", ["batches and a loss", "batches alone", "a file"])
def test_a_model_of_ones_own_is_calibrated(data: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = f"{folder / 'own_net.py'}:"
    flags_of_data = [str(folder / "x.npz")] if data == "a file" else [code + "batches"]
    flags_of_data += ["--loss", code + "loss"] if data == "batches and a loss" else []
    status, answer = compressed(folder, capsys, "--budget", "1.5kB", "--model", code + "Net", "--data", *flags_of_data)
    assert status == 0
    assert answer["bytes"] <= 1_500
    assert answer["control"]["errors"]["calibrated"] > 0
    status, answer = compressed(folder, capsys, "--quality", "0.1", "--model", code + "Net", "--data", *flags_of_data)
    assert status == 0
    assert 0 < answer["error"] <= 0.1


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--model", "own_net.py:none", "--data", "x.npz"], "has no none"),
        (["--model", "own_net.py:number", "--data", "x.npz"], "failed"),
        (["--model", "own_net.py:batches", "--data", "x.npz"], "has to return a module"),
        (["--model", "own_net.py", "--data", "x.npz"], "FILE.py:NAME"),
        (["--model", "no_such_package:make", "--data", "x.npz"], "cannot be imported"),
        (["--model", "own_net.py:Net", "--data", "own_net.py:broken"], "no disk"),
        (["--model", "own_net.py:Net", "--data", "photos"], "neither"),
        (["--model", "own_net.py:Net"], "add --data"),
        (["--data", "x.npz"], "add --model"),
        (["--model", "own_net.py:Net", "--data", "net.pt.npz"], "no arrays"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    flags: list[str], part: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    status, answer = compressed(folder, capsys, "--bits", "4", *flags)
    assert status == 1
    assert part in answer["error"]["message"]
    assert not (folder / "x.birdie").exists()
