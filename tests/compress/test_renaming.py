"""Names tell nothing about weights: a model whose tensors are called otherwise has the same bytes."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.gpt.model.gpt import GPT, GPTConfig

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def network() -> nn.Module:
    """Return an image network with batch norms, a recurrent layer and a linear one."""
    torch.manual_seed(0)
    parts = {
        "conv1": nn.Conv2d(3, 32, 3, bias=False),
        "bn1": nn.BatchNorm2d(32),
        "conv2": nn.Conv2d(32, 32, 3),
        "bn2": nn.BatchNorm2d(32, eps=1e-3),
        "lstm": nn.LSTM(32, 32),
        "fc": nn.Linear(32, 100),
    }
    model = nn.ModuleDict(parts)
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 1:
            nn.init.normal_(tensor)
            tensor.copy_(tensor.exp() if name.endswith("running_var") else tensor)
    return model


def language_model() -> nn.Module:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=320, num_layers=1, model_dim=64, num_heads=4, num_kv_heads=2))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.05)
    return model


def shared(*parts: str) -> Callable[[Path], dict[str, Tensor]]:
    return lambda data: read_state_dict(data.joinpath("weights", *parts))


SHARED = {
    "ResNet-20": shared("resnet_cifar10", "resnet20-12fca82f.th"),
    "Silero": shared("silero_vad", "silero_vad_16k.safetensors"),
    "GPT of 0.5 M weights": shared("parameter_golf", "nolanvild_128d_fp32.pt"),
}


def renamed(state: dict[str, Tensor], seed: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return name → random word, and the state dict under these words, in the same order."""
    rng = random.Random(seed)
    words: dict[str, str] = {}
    while len(words) < len(state):
        word = "".join(rng.choices(LETTERS, k=8))
        if word not in words.values():
            words[list(state)[len(words)]] = word
    return words, {words[name]: tensor for name, tensor in state.items()}


def require_equal_bytes(state: dict[str, Tensor], folder: Path, settings: dict[str, Any], seed: int = 0) -> None:
    words, other = renamed(state, seed)
    first = birdie.save(state, folder / "first.birdie", **settings)
    second = birdie.save(other, folder / "second.birdie", **settings)
    known = {row.name: (row.scheme, row.bytes, row.shape) for row in second.tensors}
    exact = {row.name for row in second.tensors if row.scheme == "lossless" and len(row.shape) == 1}
    for row in first.tensors:  # a vector of which no name tells that it is a bias or a norm may be exact
        assert words[row.name] in exact or (row.scheme, row.bytes, row.shape) == known[words[row.name]]
    decoded, again = birdie.load(folder / "first.birdie"), birdie.load(folder / "second.birdie")
    for name, word in words.items():
        assert torch.equal(state[name] if word in exact else decoded[name], again[word])


@pytest.mark.parametrize(("make", "settings"), [(network, {}), (language_model, {"scheme": "int6"})])
def test_other_names_change_no_byte_of_a_weight(
    make: Callable[[], nn.Module], settings: dict[str, Any], tmp_path: Path
) -> None:
    require_equal_bytes(make().state_dict(), tmp_path, settings)


@pytest.mark.nightly
@pytest.mark.parametrize("subject", SHARED)
def test_other_names_change_no_byte_of_networks_that_people_use(
    subject: str, shared_data: Path, tmp_path: Path
) -> None:
    require_equal_bytes(SHARED[subject](shared_data), tmp_path, {}, seed=1)


def test_other_names_take_the_same_precision_under_a_budget(tmp_path: Path) -> None:
    """Names count toward the budget, so a few bytes more of them are a few less of the weights."""
    state = language_model().state_dict()
    words, other = renamed(state, 2)
    first = birdie.save(state, tmp_path / "first.birdie", bits=4)
    second = birdie.save(other, tmp_path / "second.birdie", bits=4)
    known = {row.name: row.bytes for row in second.tensors}
    for row in first.tensors:
        assert known[words[row.name]] == pytest.approx(row.bytes, rel=0.02, abs=16)
