"""The folder of a model is calibrated on made-up inputs by itself: of every kind, and under the names on disk."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import birdie
from birdie.artifact import coded_file
from birdie.checkpoints.checkpoint import open_checkpoint
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress.calibration import synthetic
from birdie.compress.rate.fit import fit
from birdie.compress.small_tensors import is_worth_coarsening
from birdie.errors import ConfigError
from birdie.hub import made_up
from birdie.hub.made_up import calibrate_without_data
from tests.hub.models import write
from tests.nightly import mostly_nightly

transformers = pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


@pytest.fixture(autouse=True)
def few_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TOKENS": 640, "IMAGES": 20, "SOUNDS": 10, "_LEAST": 20}.items():
        monkeypatch.setattr(made_up, name, value)
    monkeypatch.setattr(synthetic, "STEPS", 2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write("llama", folder)
    return folder


def compress(folder: Path, file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str | None:
    """Compress a folder to 5 bits per weight and return what is said of its calibration."""
    command = ["compress", str(folder), "-o", str(file), "--bits", "5", "--effort", "fast", "--json", *flags]
    capsys.readouterr()
    assert run(build_app, command) == 0
    note: str | None = json.loads(capsys.readouterr().out)["calibration"]
    return note


NAMES = ("llama", "bert", "t5", "vit", "whisper", "gpt_oss", "mamba")


@pytest.mark.parametrize("name", mostly_nightly(NAMES, ("vit", "whisper")))
def test_every_kind_of_model_takes_its_inputs(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    state = open_checkpoint(tmp_path).content
    steps: list[tuple[float, float | None]] = []
    result, _ = calibrate_without_data(tmp_path, state, progress=lambda *step: steps.append(step))
    assert steps[-1][0] == steps[-1][1]
    assert result.synthetic
    assert result.sensitivities.keys() <= state.keys()
    matrices = {key for key, tensor in state.items() if is_worth_coarsening(tensor)}
    # Mamba and stacks of experts multiply by these without torch.nn.functional.
    other = ("position", "conv1d", "A_log", "dt_proj", "experts")
    assert all(any(part in key for part in other) for key in matrices - result.sensitivities.keys())
    assert result.held_out is not None
    assert result.held_out(state) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("modified by an inplace operation\nat version 2"),
        pytest.param(KeyError("x"), marks=pytest.mark.nightly),
    ],
)
def test_a_model_that_fails_on_made_up_inputs_is_compressed_without(
    error: Exception, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its code raises: nobody asked for this calibration."""
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", Mock(side_effect=error))
    note = compress(llama, tmp_path / "m.birdie", capsys)
    assert note is not None
    assert note.startswith("not calibrated: ")
    assert "\n" not in note
    assert len(birdie.load(tmp_path / "m.birdie")) == len(open_checkpoint(llama).content)


def test_what_fails_only_as_the_file_is_made_is_one_line_too(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, errors = fit, [RuntimeError("a foreign forward")]

    def failing_once(*arguments: Any, **settings: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*arguments, **settings)

    monkeypatch.setattr(coded_file, "fit", failing_once)
    assert compress(llama, tmp_path / "m.birdie", capsys) == "not calibrated: RuntimeError: a foreign forward"
    assert len(birdie.load(tmp_path / "m.birdie")) == len(open_checkpoint(llama).content)


def require_calibrated_or_named(pipeline: Path, part: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Compress a pipeline of the part in its folder "denoiser" and of one whose class is unknown."""
    shutil.copytree(pipeline / "denoiser", pipeline / "other")
    config = json.loads((pipeline / "other" / "config.json").read_text())
    named = {"_class_name": "NoSuchModel", "architectures": ["NoSuchModel"]}
    (pipeline / "other" / "config.json").write_text(
        json.dumps({**config, **{key: named[key] for key in named.keys() & config}})
    )
    parts = {"denoiser": part, "other": [part[0], "NoSuchModel"]}
    (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "DDPMPipeline", **parts}))
    note = compress(pipeline, pipeline.with_suffix(".birdie"), capsys)
    assert note is not None
    assert note.startswith("calibrated on made-up inputs")
    assert f"; not calibrated: other ({part[0]} has no" in note
    assert "denoiser" not in note


def test_parts_of_a_pipeline_are_calibrated_or_named(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama, tmp_path / "pipeline" / "denoiser")
    require_calibrated_or_named(tmp_path / "pipeline", ["transformers", "LlamaForCausalLM"], capsys)


@pytest.mark.nightly
def test_models_of_diffusers_are_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8,), norm_num_groups=4,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
    )  # fmt: skip
    unet.save_pretrained(tmp_path / "pipeline" / "denoiser")
    require_calibrated_or_named(tmp_path / "pipeline", ["diffusers", "UNet2DModel"], capsys)


@pytest.mark.nightly
def test_the_error_on_other_tokens_falls_at_equal_bytes(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes, errors = [], []
    ids = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(7))
    for flags in ([], ["--calibrate", "none"]):
        notes.append(compress(llama, tmp_path / "m.birdie", capsys, *flags))
        model, decoded = (
            transformers.LlamaForCausalLM.from_pretrained(llama),
            birdie.from_pretrained(tmp_path / "m.birdie"),
        )
        with torch.no_grad():
            errors.append((model(ids).logits - decoded(ids).logits).square().mean())
    assert errors[0] < 0.8 * errors[1]
    assert "made-up inputs" in str(notes[0])
    assert notes[1] is None


def test_a_key_that_interrupts_is_no_failure_of_made_up_inputs(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", Mock(side_effect=KeyboardInterrupt))
    assert run(build_app, ["compress", str(llama), "-o", str(tmp_path / "m.birdie"), "--bits", "6"]) != 0
    assert not (tmp_path / "m.birdie").exists()


def test_a_model_too_large_for_the_memory_is_one_sentence(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up, "free_memory", lambda: 1_000_000)
    with pytest.raises(ConfigError, match=r"0\.0 GB"):
        calibrate_without_data(llama, open_checkpoint(llama).content)
