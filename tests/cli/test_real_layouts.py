"""Fifteen layouts of checkpoints that people have, each made by a small module of its kind, back into that module.

The outputs are bit for bit those of the module with the decoded weights, as torch's own `load_state_dict` loads them,
and every file and every entry of a dict is compressed, kept, or named as left out.
"""

import argparse
import functools
import json
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import birdie
from birdie.checkpoints.nested import tensor_bytes
from birdie.cli import main
from tests.cli.layout_models import (
    Clip,
    Detector,
    Discriminator,
    Generator,
    LitClassifier,
    Normalizer,
    Perceptron,
    Policy,
    Rwkv,
    SuperResolution,
    Translator,
    Vocoder,
    adam,
    adapted,
    bert,
    output,
    seeded,
    t5,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the libraries
State = dict[str, Tensor]
Kind = Callable[[], Any]


@dataclass(frozen=True)
class Part:
    """A module that gets tensors of a .birdie file.

    Attributes:
        kind: makes the module.
        restore: makes it from what `birdie decompress` writes; None: by `load_state_dict`.
        prefix: of its names in the file.
        accept: takes a state dict.
    """

    kind: Kind
    restore: Callable[[Path], Any] | None = None
    prefix: str = ""
    accept: Callable[[Any, State], Any] = nn.Module.load_state_dict

    def names(self, state: Mapping[str, Tensor]) -> list[str]:
        """The names that belong to it, without the prefix."""
        names = [name.removeprefix(self.prefix) for name in state if name.startswith(self.prefix)]
        return [name for name in names if "/" not in name]

    def with_weights(self, state: Mapping[str, Tensor]) -> Any:
        """The module as torch loads a state dict into it."""
        module = seeded(self.kind, seed=9)
        self.accept(module, {name: state[self.prefix + name] for name in self.names(state)})
        return module


@dataclass(frozen=True)
class Layout:
    """A checkpoint in a layout.

    Attributes:
        write: makes the checkpoint in a folder and returns its path.
        parts: modules that get its weights.
        flags: of the command.
        taken: the dicts that the last line names.
        others: those that it names for --key.
    """

    write: Callable[[Path], Path]
    parts: tuple[Part, ...]
    flags: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def one_file(name: str, content: Callable[[], Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save(content(), folder / name)
        return folder / name

    return write


def texts(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"file": name}), encoding="utf-8")


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def detector() -> Any:
    model = seeded(Detector)
    return {
        "meta": {"epoch": 12, "CLASSES": ("cat", "dog"), "config": "model = dict(type='RetinaNet')"},
        "state_dict": model.state_dict(),
        "ema_state_dict": {"steps": torch.tensor(7)} | prefixed("module.", seeded(Detector, 1).state_dict()),
        "optimizer": adam(model),
        "param_schedulers": [{"last_step": 12, "_last_lr": [0.01]}],
    }


def super_resolution() -> Any:
    return {"params": seeded(SuperResolution).state_dict(), "params_ema": seeded(SuperResolution, 1).state_dict()}


def lightning() -> Any:
    model = seeded(LitClassifier)
    return {
        "epoch": 4, "global_step": 500, "pytorch-lightning_version": "2.4.0",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_loop.batch_progress": {"total": {"ready": 500}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.31)}},
        "optimizer_states": [adam(model)], "lr_schedulers": [{"last_epoch": 4}],
        "hparams_name": "kwargs", "hyper_parameters": {"lr": 1e-3, "class_weights": torch.rand(10)},
    }  # fmt: skip


def timm() -> Any:
    model = seeded(Detector)
    return {
        "epoch": 30, "arch": "resnet", "version": 2, "metric": 71.3, "args": argparse.Namespace(lr=0.1, opt="sgd"),
        "state_dict": prefixed("module.", model.state_dict()),
        "state_dict_ema": seeded(Detector, 1).state_dict(),
        "optimizer": adam(model), "amp_scaler": {"scale": 65536.0},
    }  # fmt: skip


def fairseq() -> Any:
    model = seeded(Translator)
    return {
        "args": None, "cfg": {"_name": None, "model": {"arch": "transformer", "dropout": 0.1}},
        "model": model.state_dict(), "criterion": {},
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "num_updates": 100}],
        "task_state": {}, "extra_state": {"train_iterator": {"epoch": 2}, "best": 4.1},
        "last_optimizer_state": adam(model),
    }  # fmt: skip


def gan() -> Any:
    generator, discriminator = seeded(Generator), seeded(Discriminator)
    return {
        "g": generator.state_dict(), "d": discriminator.state_dict(), "g_ema": seeded(Generator, 1).state_dict(),
        "g_optim": adam(generator), "d_optim": adam(discriminator), "ada_aug_p": torch.tensor(0.2), "args": {"size": 4},
    }  # fmt: skip


def vocoder() -> Any:
    """The names are those of weight norm before it was a parametrization."""
    state = {}
    for name, tensor in seeded(Vocoder).state_dict().items():
        old = name.replace("parametrizations.weight.original0", "weight_g")
        state[old.replace("parametrizations.weight.original1", "weight_v")] = tensor
    return {"generator": state}


def diffusion() -> Any:
    model, average = seeded(SuperResolution), seeded(SuperResolution, 1)
    return {
        "step": 1000, "model": model.state_dict(), "opt": adam(model), "scaler": None, "version": "2.1",
        "ema": prefixed("online_model.", model.state_dict()) | prefixed("ema_model.", average.state_dict())
        | {"initted": torch.tensor(True), "step": torch.tensor(1000)},
    }  # fmt: skip


def shadow_parameters() -> Any:
    model = seeded(SuperResolution)
    averages = [parameter.detach() / 2 for parameter in model.parameters()]
    return {
        "optimizer": adam(model), "model": prefixed("module.", model.state_dict()), "step": 1000,
        "ema": {"decay": 0.999, "num_updates": 1000, "shadow_params": averages, "collected_params": None},
    }  # fmt: skip


def agent() -> Any:
    policy = seeded(Policy)
    return {
        "policy": policy.state_dict(), "policy.optimizer": adam(policy), "obs_rms": seeded(Normalizer).state_dict(),
        "num_timesteps": 100_000, "pytorch_variables": None, "rng": torch.get_rng_state(),
    }  # fmt: skip


def saved(kind: Kind, folder: Path) -> None:
    model: Any = seeded(kind)
    model.save_pretrained(folder)


def timm_folder(folder: Path) -> Path:
    texts(folder, "config.json", "README.md")
    state = seeded(Detector).state_dict()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def sentence_transformers(folder: Path) -> Path:
    saved(bert, folder)
    texts(folder, "modules.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json", "2_Dense/config.json")
    save_file(seeded(Perceptron).state_dict(), folder / "2_Dense" / "model.safetensors", {"format": "pt"})
    return folder


def adapter(folder: Path) -> Path:
    saved(adapted, folder)
    return folder


def speech(folder: Path) -> Path:
    texts(folder, "hyperparams.yaml", "preprocessor_config.json", "label_encoder.txt", "tokenizer/vocab.json")
    texts(folder, "acoustic/config.json", "example1.wav")
    save_file(seeded(Perceptron).state_dict(), folder / "acoustic" / "model.safetensors", {"format": "pt"})
    torch.save(seeded(Policy).state_dict(), folder / "embedding_model.ckpt")
    torch.save({"model": seeded(Discriminator).state_dict(), "epoch": 3}, folder / "classifier.ckpt")
    statistics = {"count": 5, "glob_mean": torch.rand(12), "glob_std": torch.rand(12), "spk_dict_mean": {}}
    torch.save(statistics, folder / "mean_var_norm_emb.ckpt")
    return folder


def open_clip(folder: Path) -> Path:
    texts(folder, "open_clip_config.json", "tokenizer.json", "merges.txt")
    torch.save(seeded(Clip).state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder


def transformers_folder(folder: Path) -> Path:
    saved(t5, folder)
    texts(folder, "spiece.model", "tokenizer_config.json")
    return folder


def from_library(kind: Kind) -> Callable[[Path], Any]:
    return lambda folder: type(kind()).from_pretrained(folder)


def from_file(kind: Kind, name: str, *keys: str) -> Callable[[Path], Any]:
    """Read a file of a folder, where the weights are below some keys, as its program does."""

    def restore(folder: Path) -> Any:
        module, path = kind(), folder / name
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        module.load_state_dict(functools.reduce(operator.getitem, keys, content))
        return module

    return restore


def adapter_from(folder: Path) -> Any:
    peft = pytest.importorskip("peft")
    return peft.PeftModel.from_pretrained(adapted().unload(), folder)


def accept_without_ties(module: Any, state: State) -> None:
    """Safetensors of transformers have tied weights once, and `from_pretrained` ties them again."""
    assert not module.load_state_dict(state, strict=False).unexpected_keys


def accept_adapter(module: Any, state: State) -> None:
    pytest.importorskip("peft").set_peft_model_state_dict(module, state)


LAYOUTS = {
    "detector": Layout(
        one_file("epoch_12.pth", detector), (Part(Detector),), (), ("state_dict",), ("ema_state_dict",)
    ),
    "super-resolution": Layout(
        one_file("net_g_latest.pth", super_resolution), (Part(SuperResolution),), (), ("params_ema",), ("params",)
    ),
    "Lightning": Layout(
        one_file("epoch=4-step=500.ckpt", lightning),
        (Part(LitClassifier), Part(Perceptron, prefix="model.")), (), ("state_dict",),
        ("callbacks", "hyper_parameters"),
    ),
    "timm": Layout(
        one_file("model_best.pth.tar", timm), (Part(Detector),), ("--weights-only", "--key", "state_dict_ema"),
        ("state_dict_ema",), ("state_dict",),
    ),
    "timm folder": Layout(timm_folder, (Part(Detector, from_file(Detector, "model.safetensors")),)),
    "fairseq": Layout(one_file("checkpoint_best.pt", fairseq), (Part(Translator),), (), ("model",)),
    "GAN": Layout(
        one_file("550000.pt", gan), (Part(Generator, prefix="g_ema."), Part(Discriminator, prefix="d.")),
        ("--key", "g_ema", "--key", "d"), ("g_ema", "d"), ("g",),
    ),
    "vocoder": Layout(one_file("g_02500000", vocoder), (Part(Vocoder),), (), ("generator",)),
    "diffusion EMA": Layout(
        one_file("model-10.pt", diffusion), (Part(SuperResolution, prefix="ema_model."),), ("--key", "ema"), ("ema",),
        ("model",),
    ),
    "diffusion EMA in a list": Layout(
        one_file("checkpoint.pth", shadow_parameters), (Part(SuperResolution),), (), ("model",), ("ema",)
    ),
    "RL agent": Layout(
        one_file("agent.pt", agent), (Part(Policy, prefix="policy."), Part(Normalizer, prefix="obs_rms.")),
        ("--key", "policy", "--key", "obs_rms"), ("policy", "obs_rms"),
    ),
    "sentence-transformers": Layout(
        sentence_transformers,
        (
            Part(bert, from_library(bert)),
            Part(Perceptron, from_file(Perceptron, "2_Dense/model.safetensors"), "2_Dense/"),
        ),
    ),
    "adapter": Layout(adapter, (Part(adapted, adapter_from, accept=accept_adapter),)),
    "speech pipeline": Layout(
        speech,
        (
            Part(Perceptron, from_file(Perceptron, "acoustic/model.safetensors"), "acoustic/"),
            Part(Discriminator, from_file(Discriminator, "classifier.ckpt", "model")),
            Part(Policy, from_file(Policy, "embedding_model.ckpt"), "embedding_model.ckpt/"),
        ),
        taken=("classifier.ckpt: model",),
    ),
    "open_clip": Layout(open_clip, (Part(Clip, from_file(Clip, "open_clip_model.safetensors")),)),
    "RWKV": Layout(one_file("RWKV-4-Pile.pth", lambda: OrderedDict(seeded(Rwkv).state_dict())), (Part(Rwkv),)),
    "T5": Layout(transformers_folder, (Part(t5, from_library(t5), accept=accept_without_ties),)),
}  # fmt: skip


def run(*tokens: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(token) for token in tokens])
    assert not ended.value.code


def entries(content: Any, at: str = "") -> list[str]:
    """Paths of all that a checkpoint holds: what is neither a dict nor a list, or is an empty one."""
    items = content.items() if isinstance(content, Mapping) else enumerate(content)
    paths = []
    for key, item in items:
        path = f"{at}/{key}" if at else str(key)
        nested = isinstance(item, Mapping | list | tuple) and len(item)
        paths += entries(item, path) if nested else [path]
    return paths


def require_all_entries_named(path: Path, answer: Mapping[str, Any]) -> None:
    """Every entry is in a dict that was taken, or in what was dropped; and so are all bytes of tensors."""
    content = torch.load(path, weights_only=False)
    named = [*(key.replace(".", "/") if key not in content else key for key in answer["taken"]), *answer["dropped"]]
    if answer["taken"]:
        assert all(any(f"{entry}/".startswith(f"{name}/") for name in named) for entry in entries(content))
    assert answer["input_bytes"] + sum(answer["dropped"].values()) == tensor_bytes(content)


def require_all_files_named(folder: Path, answer: Mapping[str, Any]) -> None:
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    sizes = {name: left["bytes"] for name, left in answer["left_out"].items() if ": " not in name}
    accounted = answer["compressed"] | answer["files"] | sizes
    assert accounted == files


OF_LIBRARIES = ("sentence-transformers", "adapter", "T5")
"""Layouts of transformers and peft, which take seconds to import: tests/hub loads theirs daily."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.nightly] * (name in OF_LIBRARIES)) for name in LAYOUTS]
)
def test_a_layout_comes_back_into_the_module_that_made_it(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = LAYOUTS[layout]
    (tmp_path / "in").mkdir()
    path = about.write(tmp_path / "in")
    file = tmp_path / "x.birdie"
    capsys.readouterr()
    run("compress", path, "-o", file, "--effort", "fast", "--json", *about.flags)
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["taken"]) == set(about.taken)
    assert set(answer["others"]) == set(about.others)
    if path.is_dir():
        require_all_files_named(path, answer)
    else:
        require_all_entries_named(path, answer)
    back = tmp_path / ("out" if path.is_dir() else "out.pt")
    run("decompress", file, "-o", back)
    large = [tensor for tensor in birdie.inspect(file).tensors if math.prod(tensor.shape) >= 1000]
    assert not [tensor.name for tensor in large if tensor.scheme == "lossless"]
    decoded = birdie.load(file)
    for part in about.parts:
        expected = output(part.with_weights(decoded))
        assert expected.isfinite().all()
        restored = (
            part.with_weights(torch.load(back, weights_only=True)) if part.restore is None else part.restore(back)
        )
        assert torch.equal(output(restored), expected)
        if part.accept is not accept_adapter:
            for lazy in (False, True):
                module = seeded(part.kind, seed=8)
                birdie.load(file, into=module, lazy=lazy, prefix=part.prefix, names=part.names(decoded))
                assert torch.equal(output(module), expected)
