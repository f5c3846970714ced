"""Images calibrate the Hugging Face folder of a classifier, whose weights have other names on disk than in memory."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import birdie
from birdie.artifact.checkpoint import open_checkpoint
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress.small_tensors import is_worth_coarsening
from birdie.errors import ConfigError, DataError
from birdie.hub.calibration import IMAGES, calibrate_on_images, images_in
from tests.deep_folders import deep_folder

transformers = pytest.importorskip("transformers", minversion="5.0")
pil = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for index in range(30):
        (root / f"class{index % 3}").mkdir(exist_ok=True)
        pixels = generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)
        pil.fromarray(pixels).save(root / f"class{index % 3}" / f"{index}.png")
    (root / "labels.csv").write_text("nothing to see")
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "vit"
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    vit = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        for weight in vit.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    vit.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_every_matrix_on_disk_is_calibrated(model: Path, images: Path, tmp_path: Path) -> None:
    state = open_checkpoint(model).content
    assert "vit.encoder.layer.1.attention.attention.query.weight" in state  # in the model it has another name
    steps: list[tuple[float, float | None]] = []
    result = calibrate_on_images(
        model, state, images_in(images), progress=lambda done, total: steps.append((done, total))
    )
    assert steps[-1][0] == steps[-1][1] == 24
    matrices = {name for name, tensor in state.items() if is_worth_coarsening(tensor) and "position" not in name}
    assert matrices <= result.sensitivities.keys() <= state.keys()
    assert result.held_out is not None
    assert result.held_out(state) == pytest.approx(0, abs=1e-9)
    calibrated = birdie.save(state, tmp_path / "m.birdie", bits=4, calibration=result, coder="fast").error
    birdie.save(state, tmp_path / "plain.birdie", bits=4, coder="fast")
    assert calibrated is not None
    assert calibrated < result.held_out(birdie.load(tmp_path / "plain.birdie"))


def test_the_command_calibrates_on_a_folder_of_images(model: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    command = ["compress", str(model), "-o", str(tmp_path / "m.birdie"), "--bits", "5", "--coder", "fast"]
    assert run(build_app, [*command, "--calibrate", str(images)]) == 0
    assert birdie.inspect(tmp_path / "m.birdie").bits_per_weight <= 5
    (tmp_path / "empty").mkdir()
    assert run(build_app, [*command, "--calibrate", str(tmp_path / "empty")]) == 1
    assert "empty" in capsys.readouterr().err


def test_images_are_mixed_and_limited(images: Path, tmp_path: Path) -> None:
    paths = images_in(images)
    assert sorted(paths) == sorted(images.rglob("*.png"))
    assert paths == images_in(images)
    assert {path.parent.name for path in paths[:8]} == {"class0", "class1", "class2"}
    for index in range(IMAGES + 100):
        (tmp_path / f"{index:04d}.jpg").touch()
    assert len(images_in(tmp_path)) == IMAGES
    assert images_in(tmp_path / "nothing") == []
    with deep_folder(tmp_path / "deep") as folder:
        (folder / "0.jpg").touch()
        assert images_in(folder) == [folder / "0.jpg"]


def test_an_image_that_cannot_be_read_is_one_sentence(model: Path, images: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG but no more")
    state = open_checkpoint(model).content
    with pytest.raises(DataError, match=r"broken\.png"):
        calibrate_on_images(model, state, [*images_in(images), tmp_path / "broken.png"])
    with pytest.raises(DataError, match="1 images"):
        calibrate_on_images(model, state, images_in(images)[:1])


def test_a_folder_without_image_processor_is_one_sentence(model: Path, images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="image processor"):
        calibrate_on_images(folder, open_checkpoint(folder).content, images_in(images))
