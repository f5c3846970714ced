"""Checkpoints of a run are known by their names, in the order of their steps, or by what is in them."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from birdie.chain.checkpoint_series import (
    beside,
    is_series,
    series,
    split_checkpoint,
    step_of,
    without_number,
)
from birdie.checkpoints.checkpoint import open_checkpoint
from birdie.checkpoints.checkpoint_facts import step_inside, step_key
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


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Weights of one network that has moved a little."""
    first, move = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    return {
        "net.weight": torch.randn(12, 8, generator=first) + 1e-3 * torch.randn(12, 8, generator=move),
        "net.bias": torch.zeros(12),
    }


def torch_file(folder: Path, name: str, seed: int, **facts: Any) -> None:
    torch.save({"model": weights(seed), **facts}, folder / name)


def trainer_folder(folder: Path, name: str, step: int) -> None:
    (folder / name).mkdir()
    save_file(weights(step), folder / name / "model.safetensors")
    (folder / name / "trainer_state.json").write_text(json.dumps({"epoch": step / 7, "global_step": step}))


def lightning(folder: Path) -> None:
    for epoch, step in ((0, 100), (1, 200)):
        torch_file(folder, f"epoch={epoch}-step={step}.ckpt", step, epoch=epoch, global_step=step)
    torch_file(folder, "last.ckpt", 250, epoch=1, global_step=250)
    torch_file(folder, "last-v1.ckpt", 150, epoch=0, global_step=150)


def detectron(folder: Path) -> None:
    for step in (4999, 9999):
        torch_file(folder, f"model_{step:07}.pth", step, iteration=step, optimizer={"state": {}, "param_groups": [{}]})
    torch_file(folder, "model_final.pth", 3, iteration=12_000)
    (folder / "last_checkpoint").write_text("model_final.pth")


def epochs_from_zero(folder: Path) -> None:
    for epoch in (1, 2, 10):
        torch_file(folder, f"epoch_{epoch:03}.pt", epoch, epoch=epoch - 1, done=torch.tensor(50.0 * epoch))
    torch_file(folder, "latest.pth", 11, epoch=10)


def one_of_each(folder: Path) -> None:
    torch_file(folder, "step_100.pt", 1, trainer={"counters": [7, 100]})
    torch_file(folder, "checkpoint.pt", 2, trainer={"counters": [8, 130]})


def links_to_numbers(folder: Path) -> None:
    for step in (10, 20):
        torch_file(folder, f"step_{step}.pt", step)
    (folder / "best.pt").symlink_to("step_10.pt")
    os.link(folder / "step_20.pt", folder / "last.pt")


def state_alone(folder: Path) -> None:
    for step in (1, 2):
        torch_file(folder, f"step_{step}.pt", step)
    torch.save(weights(1), folder / "best.bin")


def headers(folder: Path) -> None:
    for step in (10, 20):
        save_file(weights(step), folder / f"step_{step}.safetensors", {"ss_steps": f"{step}"})
    save_file(weights(3), folder / "model.safetensors", {"ss_steps": "30"})


def trainer(folder: Path) -> None:
    for step in (500, 1000):
        trainer_folder(folder, f"checkpoint-{step}", step)
    trainer_folder(folder, "checkpoint-last", 1100)


def folders_and_a_file(folder: Path) -> None:
    for step in (1, 2):
        trainer_folder(folder, f"step-{step}", step)
    save_file(weights(2), folder / "model.safetensors")


@pytest.mark.parametrize(
    ("write", "steps"),
    [
        (lightning, {"last-v1.ckpt": 150, "last.ckpt": 250}),
        (detectron, {"model_final.pth": 12_000}),
        (epochs_from_zero, {"latest.pth": 11}),
        (one_of_each, {"checkpoint.pt": 130}),
        (links_to_numbers, {"best.pt": 10, "last.pt": 20}),
        (state_alone, {"best.bin": 1}),
        (headers, {"model.safetensors": 30}),
        (trainer, {"checkpoint-last": 1100}),
        (folders_and_a_file, {"model.safetensors": 2}),
    ],
)
def test_a_checkpoint_without_a_number_has_the_step_that_is_in_it(
    write: Callable[[Path], None], steps: dict[str, int], tmp_path: Path
) -> None:
    write(tmp_path)
    assert is_series(tmp_path)
    checkpoints = series(tmp_path)
    assert {path.name: step for path, step in without_number(tmp_path, checkpoints).items()} == steps
    assert not {path.name for path in checkpoints.values()} & steps.keys()
    with pytest.raises(ConfigError, match=r"no checkpoint in .* matches"):
        series(tmp_path, ["none*"])
    assert without_number(tmp_path, checkpoints, [*steps]) == {}


def test_what_tells_no_step_or_is_another_network_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        torch_file(tmp_path, f"step_{step}.pt", step)
    (tmp_path / "args.json").write_text("{}")
    torch.save({"state": {0: {"exp_avg": torch.ones(12, 8)}}, "param_groups": []}, tmp_path / "optimizer.pt")
    torch.save({"a": torch.zeros(3), "rng": torch.zeros(9, dtype=torch.uint8)}, tmp_path / "rng_state.pth")
    assert without_number(tmp_path, series(tmp_path)) == {}
    torch_file(tmp_path, "average.pt", 7)
    for strict in (True, False):
        with pytest.raises(ConfigError, match=r"average\.pt .* does not tell its step; .*--skip average\.pt"):
            without_number(tmp_path, series(tmp_path), strict=strict)
    (tmp_path / "average.pt").unlink()
    torch.save({"critic.weight": torch.ones(4, 4)}, tmp_path / "critic.pt")
    assert is_series(tmp_path)
    with pytest.raises(ConfigError, match=r"critic\.pt holds another network than step_1\.pt"):
        without_number(tmp_path, series(tmp_path))
    assert without_number(tmp_path, series(tmp_path), strict=False) == {}


@given(
    steps=st.lists(st.integers(0, 10**6), min_size=2, max_size=6, unique=True),
    ahead=st.integers(-3, 10**6),
    factor=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_the_number_that_is_the_step_or_grows_with_it_is_its_key(
    steps: list[int], ahead: int, factor: int, seed: int
) -> None:
    noise = {"seed": seed, "nested/size": 12}
    grown = {step: {**noise, "nested/count": factor * step + ahead} for step in steps}
    assert step_key(grown) == "nested/count"
    assert step_key({step: {**numbers, "deep/er/it": step} for step, numbers in grown.items()}) in (
        ["deep/er/it", "nested/count"] if (factor, ahead) == (1, 0) else ["deep/er/it"]
    )
    assert step_key(dict.fromkeys(steps, noise)) is None


def test_a_damaged_file_is_named_and_one_of_another_kind_is_left_out(tmp_path: Path) -> None:
    for step in (1, 2):
        torch_file(tmp_path, f"step_{step}.pt", step)
    (tmp_path / "args.pkl").write_bytes(pickle.dumps({"lr": 0.1}))
    (tmp_path / "train.bin").write_bytes(bytes(range(256)))
    assert without_number(tmp_path, series(tmp_path)) == {}
    (tmp_path / "last.pt").write_bytes((tmp_path / "step_2.pt").read_bytes()[:900])
    with pytest.raises(ConfigError, match=r"last\.pt does not tell its step, as it cannot be read"):
        without_number(tmp_path, series(tmp_path))


def test_a_step_between_two_others_is_in_proportion(tmp_path: Path) -> None:
    for epoch, samples in ((1, 1000), (2, 2000), (4, 4000)):
        torch_file(tmp_path, f"epoch_{epoch}.pt", epoch, samples=samples)
    torch_file(tmp_path, "best.pt", 3, samples=3100)
    torch_file(tmp_path, "last.pt", 5, samples=6000)
    steps = [step_inside(tmp_path / name, series(tmp_path)) for name in ("best.pt", "last.pt")]
    assert steps == [3, 6]


def copies_of(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for seed, name in enumerate(names):
            (folder / name).parent.mkdir(exist_ok=True)
            torch_file(folder, name, seed)

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (copies_of("best.pt", "last.pt"), r"best\.pt and last\.pt of .*--skip$"),
        (copies_of("model.pt", "ema.pth"), "same names and shapes"),
        (copies_of("model_1.pt", "model_2.pt"), "--full-every 10"),
        (copies_of("a/0001.pt", "a/0002.pt"), "--full-every 10"),
    ],
)
def test_copies_of_one_network_are_no_model(write: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    assert not is_series(tmp_path)
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("names", [("layer_1.pt", "layer_2.pt"), ("controlnet/model.pt", "controlnet_2/model.pt")])
def test_networks_that_are_alike_may_be_parts_of_a_model(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({"weight": torch.randn(16, 16)}, tmp_path / name)
    assert not is_series(tmp_path)
    assert len(open_checkpoint(tmp_path).content) == 2


def test_the_folder_of_a_model_may_have_its_checkpoints_in_it(tmp_path: Path) -> None:
    for step in (500, 1000):
        trainer_folder(tmp_path, f"checkpoint-{step}", step)
    save_file(weights(1000), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert not is_series(tmp_path)
    assert open_checkpoint(tmp_path).content.keys() == weights(0).keys()
    assert without_number(tmp_path, series(tmp_path)) == {tmp_path / "model.safetensors": 1000}
