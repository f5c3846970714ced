"""Checkpoints of a run are known by their names, in the order of their steps."""

from pathlib import Path

import pytest

from birdie.artifact.checkpoint_series import beside, is_series, name_of_link, series, split_checkpoint, step_of
from birdie.errors import ConfigError, WeightsError


def put(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / (f"{name}model.safetensors" if name.endswith("/") else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000080", 80),
        ("step-00000080-1", 80),
        ("checkpoint-500", 500),
        ("step_100.safetensors", 100),
        ("model_v2_step100.pt", 100),
        ("ckpt-200.pt", 200),
        ("epoch=3-step=1200.ckpt", 1200),
        ("global_step7", 7),
        ("iteration_12", 12),
        ("epoch3.pth", 3),
        ("layer_1.pt", None),
        ("model.safetensors", None),
        ("steps", None),
        ("step-" + "9" * 30, None),
    ],
)
def test_the_step_is_the_number_after_the_word(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_the_order_is_that_of_the_numbers(tmp_path: Path) -> None:
    put(tmp_path, "step-9/", "step-100/", "step-10/", "args.json", ".hidden", "runs/events", "run.birdie/step-9.birdie")
    assert is_series(tmp_path)
    assert [*series(tmp_path)] == [9, 10, 100]
    assert beside(tmp_path, series(tmp_path)) == ["args.json", "runs"]


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors", "checkpoint-500/", "checkpoint-1000/"),  # the folder of a model, with its checkpoints
        ("step-1/",),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("unet/", "vae/", "text_encoder_2/"),
        ("layer_1.pt", "layer_2.pt"),
        ("step-1/", "step-2/", "unet/"),
        ("config.json",),
        (),
    ],
)
def test_a_folder_of_one_model_is_no_series(names: tuple[str, ...], tmp_path: Path) -> None:
    assert not is_series(put(tmp_path, *names))


def test_any_last_number_serves_if_no_name_has_a_word(tmp_path: Path) -> None:
    assert [*series(put(tmp_path, "run2_10.pt", "run2_9.pt"))] == [9, 10]


def test_two_of_one_step_and_none_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoints"):
        series(put(tmp_path, "model.safetensors"))
    with pytest.raises(ConfigError, match=r"step_1\.pt .*of step 1"):
        series(put(tmp_path, "step_1.pt", "step_1.safetensors"))


def test_a_link_is_called_as_its_checkpoint() -> None:
    names = ["step-00000080", "step_100.safetensors", "v1.5-step-3", "x.PT"]
    assert [*map(name_of_link, names)] == ["step-00000080.birdie", "step_100.birdie", "v1.5-step-3.birdie", "x.birdie"]


def test_links_pipes_and_names_of_one_system_are_refused(tmp_path: Path) -> None:
    (put(tmp_path, "step-1/") / "step-1" / "link").symlink_to("model.safetensors")
    with pytest.raises(WeightsError, match="is a symbolic link"):
        split_checkpoint(tmp_path / "step-1")
    put(tmp_path, "step-2/a:b")
    with pytest.raises(WeightsError, match="not every system"):
        split_checkpoint(tmp_path / "step-2")
    (tmp_path / "step-3").mkdir()
    with pytest.raises(WeightsError, match="no file"):
        split_checkpoint(tmp_path / "step-3")
