"""Folder → file → from_pretrained: the outputs are those of the decoded file, for every kind of model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import write_model
from birdie.cli import main
from birdie.errors import BirdieError, ConfigError
from birdie.hub.folder import write_birdie_folder
from tests.hub.models import SMALL, TRANSFORMERS, outputs, write

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
LOSSLESS, INT6 = ["--lossless"], ["--scheme", "int6", "--calibrate", "none"]
DAILY = {("llama, tied", "--lossless"), ("mixtral", "--lossless"), ("gpt_oss", "--scheme")}
CASES = [
    pytest.param(
        *(name, flags),
        marks=() if (name, flags[0]) in DAILY else pytest.mark.nightly,
        id=f"{name} {flags[0]}",
    )
    for name, flags in [
        *((name, LOSSLESS) for name in TRANSFORMERS),
        *((name, INT6) for name in ("llama, tied", "gpt2", "mixtral", "gpt_oss")),
    ]
]


def compress(folder: Path, *flags: str) -> Path:
    file = folder.with_suffix(".birdie")
    with pytest.raises(SystemExit) as ended:
        main(["compress", str(folder), "-o", str(file), "--effort", "fast", *flags])
    assert not ended.value.code
    return file


@pytest.mark.parametrize(("name", "flags"), CASES)
def test_a_folder_becomes_a_model_again(name: str, flags: list[str], tmp_path: Path) -> None:
    model = write(name, tmp_path / "model")
    file = compress(tmp_path / "model", *flags)
    loaded = birdie.from_pretrained(file)
    assert type(loaded) is type(model)
    assert loaded.dtype is torch.bfloat16
    if flags == LOSSLESS:
        assert torch.equal(outputs(loaded, name), outputs(model, name))
    state = birdie.load(file)
    same = [name for name, tensor in loaded.state_dict().items() if name in state and torch.equal(tensor, state[name])]
    renamed = name in ("vit", "mixtral")  # by transformers, which also stacks the experts of Mixtral
    assert len(same) >= (1 if renamed else 0.8 * len(state))
    if not renamed:
        lazy = birdie.from_pretrained(file, lazy=True)
        assert torch.equal(outputs(lazy, name), outputs(loaded, name))


@pytest.mark.parametrize("name", ["llama, tied", pytest.param("vit", marks=pytest.mark.nightly)])
def test_transformers_loads_a_birdie_folder(name: str, tmp_path: Path) -> None:
    model = write(name, tmp_path / "model")
    file = compress(tmp_path / "model", "--lossless")
    with pytest.raises(SystemExit):
        main(["hub", "folder", str(file), "-o", str(tmp_path / "folder")])
    card = (tmp_path / "folder" / "README.md").read_text()
    assert f"| bytes | {file.stat().st_size:,} |" in card
    from birdie.hub import register

    register()
    register()
    loaded = type(model).from_pretrained(tmp_path / "folder")
    assert torch.equal(outputs(loaded, name), outputs(model, name))
    assert not hasattr(loaded.config, "quantization_config")
    loaded.save_pretrained(tmp_path / "plain")  # an ordinary model from now on
    assert torch.equal(outputs(type(model).from_pretrained(tmp_path / "plain"), name), outputs(model, name))
    assert torch.equal(outputs(birdie.from_pretrained(tmp_path / "folder"), name), outputs(model, name))


def test_an_adapter_finds_its_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = write("llama", tmp_path / "base")
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False,
        base_model_name_or_path=str(tmp_path / "base"),
    )  # fmt: skip
    adapted = peft.get_peft_model(model, settings).eval()
    adapted.save_pretrained(tmp_path / "lora")
    file = compress(tmp_path / "lora", "--lossless")
    assert file.stat().st_size < 5_000
    expected = outputs(adapted, "llama")
    assert torch.equal(outputs(birdie.from_pretrained(file), "llama"), expected)
    base = type(model).from_pretrained(tmp_path / "base")
    assert torch.equal(outputs(birdie.from_pretrained(file, base=base), "llama"), expected)


@pytest.mark.nightly
def test_models_and_pipelines_of_diffusers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    down, up = ("DownBlock2D",) * 2, ("UpBlock2D",) * 2
    model = diffusers.UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(32, 32), down_block_types=down, up_block_types=up,
        norm_num_groups=8,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "unet")
    diffusers.DDPMPipeline(model, diffusers.DDPMScheduler()).save_pretrained(tmp_path / "ddpm")
    for folder in ("unet", "ddpm"):
        loaded = birdie.from_pretrained(compress(tmp_path / folder, "--lossless"))
        state = (loaded if folder == "unet" else loaded.unet).state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def saved(path: Path, config: Any, file: str = "config.json") -> Path:
    write_model({"w": torch.ones(4, 4)}, path / "x.birdie", files={file: json.dumps(config).encode()})
    return path / "x.birdie"


def difference(folder: Path) -> Path:
    """Return a file of differences of a folder."""
    weights, config = {"w": torch.randn(30, 30)}, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    files = {"config.json": json.dumps(config).encode()}
    write_model({"w": weights["w"] + 1e-4}, folder / "x.birdie", SaveOptions(lossless=True, base=weights), files=files)
    return folder / "x.birdie"


@pytest.mark.parametrize("flags", [("--lossless",), ("--bits", "1", "--calibrate", "none")], ids=str)
def test_a_fine_tune_is_a_model_again_given_its_base(flags: tuple[str, ...], tmp_path: Path) -> None:
    base = write("llama, tied", tmp_path / "base")
    for weight in base.parameters():
        weight.data += 0.01 * torch.randn_like(weight) * weight.std()
    base.save_pretrained(tmp_path / "model")
    file = compress(tmp_path / "model", "--base", str(tmp_path / "base"), *flags)
    loaded = birdie.from_pretrained(file, base=tmp_path / "base")
    state = birdie.load(file, base=tmp_path / "base")
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items() if name in state)
    if flags == ("--lossless",):
        assert torch.equal(outputs(loaded, "llama, tied"), outputs(base, "llama, tied"))
    with pytest.raises(ConfigError, match="leave lazy out"):
        birdie.from_pretrained(file, base=tmp_path / "base", lazy=True)
    summary = write_birdie_folder(file, tmp_path / "folder")
    text = (tmp_path / "folder" / "README.md").read_text()
    assert summary.base == "base"
    assert "deltas to | `base`" in text
    assert 'base="PATH"' in text
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {"README.md", "model.birdie"}
    write_birdie_folder(file, tmp_path / "complete", base=tmp_path / "base")
    for name in summary.base_files:
        assert (tmp_path / "complete" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    again = birdie.from_pretrained(tmp_path / "folder", base=tmp_path / "base")
    assert torch.equal(outputs(again, "llama, tied"), outputs(loaded, "llama, tied"))


def test_matrices_that_are_nearly_equal_need_no_base(tmp_path: Path) -> None:
    model = write("llama, tied", tmp_path / "model")
    weights = dict(model.named_parameters())
    up, gate = (weights[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("up", "gate"))
    up.data = gate.data + 1e-4 * torch.randn_like(gate)
    model.save_pretrained(tmp_path / "model")
    file = compress(tmp_path / "model", "--lossless")
    assert any(row.scheme == "delta" for row in birdie.inspect(file).tensors)
    assert torch.equal(outputs(birdie.from_pretrained(file), "llama, tied"), outputs(model, "llama, tied"))
    write_birdie_folder(file, tmp_path / "folder")
    again = birdie.from_pretrained(tmp_path / "folder")
    assert torch.equal(outputs(again, "llama, tied"), outputs(model, "llama, tied"))


MISTAKES: list[tuple[Any, str]] = [
    (lambda path: path / "missing.birdie", "cannot open"),
    (lambda path: path, "has no model.birdie"),
    (lambda path: difference(path), "holds deltas to another checkpoint; give that as base"),
    (lambda path: saved(path, {}), "keeps no configuration"),
    (lambda path: saved(path, {"model_type": "x", "architectures": ["NoSuchModel"]}), "has no model NoSuchModel"),
    (
        lambda path: saved(path, {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL}),
        "and the file holds 16",
    ),
    (lambda path: saved(path, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}), "and the file holds 16"),
    (lambda path: saved(path, ["a list"]), "not a JSON object"),
    (
        lambda path: saved(path, {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}),
        "cannot load",
    ),
    (lambda path: saved(path, {"_class_name": "NoSuchPipeline"}), "NoSuchPipeline"),
    (lambda path: saved(path, {"architecture": "resnet18"}), "timm, which is not installed"),
    (lambda path: saved(path, {"peft_type": "LORA", "r": 1}, "adapter_config.json"), "give base=model"),
]


@pytest.mark.parametrize(("make", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_what_cannot_be_built_is_one_sentence(make: Any, words: str, tmp_path: Path) -> None:
    for library in ("transformers", "diffusers", "peft"):
        pytest.importorskip(library)
    with pytest.raises(BirdieError, match=words) as raised:
        birdie.from_pretrained(make(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_file_without_one_of_the_weights_is_one_sentence(tmp_path: Path) -> None:
    state = write("llama", tmp_path / "model").state_dict()
    del state[name := "model.layers.0.mlp.up_proj.weight"]
    config = (tmp_path / "model" / "config.json").read_bytes()
    file = tmp_path / "x.birdie"
    write_model(state, file, SaveOptions(lossless=True), files={"config.json": config})
    for lazy, words in (
        (False, f"the file lacks 1 of the weights of LlamaForCausalLM, {name}"),
        (True, f"missing: {name}"),
    ):
        with pytest.raises(BirdieError, match=re.escape(words)) as raised:
            birdie.from_pretrained(file, lazy=lazy)
        assert "\n" not in str(raised.value)


def test_lazy_loading_is_for_transformers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave lazy out"):
        birdie.from_pretrained(saved(tmp_path, {"_class_name": "UNet2DModel"}), lazy=True)
