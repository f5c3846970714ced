"""`birdie compress --model --data`: a model of one's own is calibrated by its own code, which the user names."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import birdie
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress.calibration.image_files import pixels_of
from birdie.errors import DataError

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


class Images(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))


class OneSize(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 16, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


class OfBatch(nn.Module):
    def __init__(self):
        super().__init__()
        for name, part in Net().named_children():
            self.add_module(name, part)

    def forward(self, batch):
        return self.get_submodule("2")(self.get_submodule("0")(batch["x"]).relu())


def dicts():
    return [{"x": x} for x, _ in batches()]


def loader():
    return torch.utils.data.DataLoader(torch.randn(96, 32), batch_size=16)


def nearness(net):
    torch.manual_seed(0)
    exact = [tensor for tensor in torch.load(FILE, weights_only=True).values()]
    error = sum(float((a - b).square().sum()) for a, b in zip(net.state_dict().values(), exact))
    return -error


calls = []


def stopped(net):
    calls.append(net)
    if len(calls) > 2:
        raise KeyboardInterrupt
    return nearness(net)


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
    (tmp_path / "own_net.py").write_text(CODE + f"\nFILE = {str(tmp_path / 'net.pt')!r}\n")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    (tmp_path / "broken.npz").write_bytes(b"PK but no more")
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


@pytest.mark.parametrize("data", ["x.safetensors", "x.pt", "pair.pt", "own_net.py:loader"])
def test_files_and_loaders_give_the_same_inputs_as_arrays(
    data: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    x = torch.from_numpy(np.load(folder / "x.npz")["inputs"]).float()
    torch.save(x, "x.pt")
    torch.save((x, torch.zeros(len(x))), "pair.pt")
    save_file({"x": x}, "x.safetensors")
    flags = ["--bits", "3", "--model", "own_net.py:Net", "--data"]
    assert compressed(folder, capsys, *flags, "x.npz")[0] == 0
    expected = (folder / "x.birdie").read_bytes()
    status, answer = compressed(folder, capsys, *flags, data)
    assert status == 0
    assert answer["control"]["errors"]["calibrated"] > 0
    assert data.endswith("loader") or (folder / "x.birdie").read_bytes() == expected


@pytest.mark.parametrize("model", ["Net", "OfBatch"])
def test_dicts_are_arguments_or_one(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = f"{folder / 'own_net.py'}:"
    if model == "Net":
        (folder / "own_net.py").write_text(CODE.replace('{"x": x}', '{"input": x}'))
    status, answer = compressed(folder, capsys, "--bits", "3", "--model", code + model, "--data", code + "dicts")
    assert status == 0
    assert answer["control"]["errors"]["calibrated"] > 0


@pytest.fixture
def images(folder: Path) -> Path:
    """A folder of images of one size, and in another one of two sizes."""
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for name, edges in (("one", [12] * 8), ("two", [10, 20] * 4)):
        (folder / name).mkdir()
        for index, edge in enumerate(edges):
            values = random.integers(256, size=(edge, edge, 3), dtype=np.uint8)
            image.fromarray(values).save(folder / name / f"{index}.png")
    for name, net in (("Images", nn.Conv2d(3, 16, 3)), ("OneSize", nn.Conv2d(1, 16, 4, stride=4))):
        last = nn.Linear(256 if name == "Images" else 144, 10)
        numbers = ("0", "4") if name == "Images" else ("0", "3")
        parts = zip(numbers, (net, last), strict=True)
        state = {f"{number}.{key}": value for number, part in parts for key, value in part.state_dict().items()}
        torch.save(state, folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize(
    ("model", "data", "flags", "text"),
    [
        ("Images", "one", [], "3×12×12, values"),
        ("Images", "one", ["--image-size", "8x10"], "3×8×10, resized"),
        ("Images", "two", ["--image-size", "16"], "3×16×16, resized"),
        ("OneSize", "one", [], "1×12×12, values"),
        ("OneSize", "two", [], "1×12×12, resized"),
    ],
)
def test_a_folder_of_images_calibrates_at_a_size_that_is_said(
    model: str, data: str, flags: list[str], text: str, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (images / f"{model}.pt").replace(images / "net.pt")
    code = ["--model", f"{images / 'own_net.py'}:{model}", "--data", str(images / data)]
    status, answer = compressed(images, capsys, "--bits", "4", *code, *flags)
    assert status == 0
    assert text in answer["calibration"]
    assert answer["control"]["errors"]["calibrated"] > 0


def test_images_of_several_sizes_need_one(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (images / "Images.pt").replace(images / "net.pt")
    code = ["--model", f"{images / 'own_net.py'}:Images", "--data", str(images / "two")]
    status, answer = compressed(images, capsys, "--bits", "4", *code)
    assert status == 1
    assert "--image-size" in answer["error"]["message"]
    (images / "own_net.py").write_text(CODE.replace("Conv2d(3, 16, 3)", "Conv2d(5, 16, 3)"))
    del sys.modules["own_net"]
    status, answer = compressed(images, capsys, "--bits", "4", *code)
    assert status == 1
    assert "5 channels" in answer["error"]["message"]


@pytest.mark.parametrize("data", [[], pytest.param(["--data", "x.npz"], marks=pytest.mark.nightly)])
def test_the_smallest_file_that_holds_a_metric_is_written(
    data: list[str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code = ["--model", "own_net.py:Net", *data]
    metric = ["--metric", "own_net.py:nearness", "--folder", "kept"]
    status, answer = compressed(folder, capsys, *code, *metric, "--at-least", "-0.2")
    assert status == 0
    measured = answer["curve"]["smallest"]
    assert answer["bytes"] == measured["bytes"] == (folder / "x.birdie").stat().st_size
    assert measured["value"] >= -0.2
    written = (folder / "x.birdie").read_bytes()
    assert compressed(folder, capsys, "--budget", str(measured["budget"]), *(code if data else []))[0] == 0
    assert (folder / "x.birdie").read_bytes() == written
    net = birdie.load(written)
    exact = torch.load(folder / "net.pt", weights_only=True)
    error = sum(float((net[name] - tensor).square().sum()) for name, tensor in exact.items())
    assert -error == pytest.approx(measured["value"], rel=1e-4)
    sizes = ["--sizes", str(measured["budget"]), "--json"]
    assert run(build_app, ["curve", str(folder / "net.pt"), *code, *metric, *sizes]) == 0
    assert json.loads(capsys.readouterr().out)["points"] == [measured]
    status, answer = compressed(folder, capsys, *code, *metric, "--at-least", "1e-9")
    assert status == 1
    assert "at_least" in answer["error"]["message"]


@pytest.mark.parametrize("kept", [True, False])
def test_after_ctrl_c_it_is_said_what_is_kept(
    kept: bool, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code = ["--model", "own_net.py:Net", "--metric", "own_net.py:stopped", *(["--folder", "kept"] if kept else [])]
    assert run(build_app, ["curve", "net.pt", *code]) == 130
    assert ("kept in kept" in capsys.readouterr().err) == kept == (folder / "kept").exists()


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
        (["--model", "own_net.py:Net", "--data", "photos.pt"], "does not exist"),
        (["--model", "own_net.py:Net", "--data", "net.pt"], r"0.weight (64, 32)"),
        (["--model", "own_net.py:Net", "--data", "x.npz", "--image-size", "8"], "folder of images"),
        (["--calibrate", "own_net.py:batches"], "--data"),
        (["--calibrate", "x.npz"], "example_inputs"),
        (["--tune", "1s"], "example_inputs"),
        (["--model", "own_net.py:Net"], "add --data"),
        (["--data", "x.npz"], "add --model"),
        (["--model", "own_net.py:Net", "--data", "broken.npz"], "no arrays"),
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


def test_images_of_sixteen_bits_have_their_brightness(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    image.fromarray(ramp).save(tmp_path / "a.png")
    pixels = pixels_of([tmp_path / "a.png"], 1, (8, 8))[0, 0].numpy()
    assert np.abs(pixels - ramp / 65535).max() < 1 / 255
    image.fromarray(ramp.astype(np.float32)).save(tmp_path / "b.tif")
    with pytest.raises(DataError, match=r"b\.tif"):
        pixels_of([tmp_path / "b.tif"], 1, (8, 8))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["curve", "net.pt", "--sizes", "12kB,many"], "many"),
        (["curve", "net.pt", "--sizes", "12kB", "--at-least", "1"], "two searches"),
        (["sample", "x.birdie", "--temperature", "-1"], "temperature is -1"),
        (["sample", "x.birdie", "--top-k", "0"], "top_k is 0"),
        (["compress", "", "-o", "x.birdie"], "empty"),
        (["compress", "a.pt", "b.pt", "-o", "x.birdie"], "'b.pt'"),
        (["compress", "net.pt", "-o", "~/x.birdie"], "~"),
    ],
    ids=str,
)
def test_flags_are_checked_before_anything_is_read(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(4, 4)}, "net.pt")
    of_curve = ["--model", "nothing.py:make", "--metric", "nothing.py:f"] if flags[0] == "curve" else []
    assert run(build_app, [*flags, *of_curve]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt"]
