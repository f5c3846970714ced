"""Tensors come back in the order of the state dict, which is a field of the metadata and changes nothing else."""

import json
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetModel

import birdie
from birdie.artifact import container
from birdie.artifact.container import Reader
from birdie.checkpoints.order import in_order
from birdie.checkpoints.stored_order import order_of
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError

PARTS = st.one_of(
    st.sampled_from(["weight", "bias", "", "0", "00", "1", "01", "2", "10", "é", "日", "\U0001d6d1", "a1"])
)
NAMES = st.lists(
    st.one_of(
        st.text(st.sampled_from("ab.019/_-é^]\\\n"), max_size=6),
        st.lists(PARTS, min_size=1, max_size=4).map(".".join),
        st.lists(PARTS, min_size=1, max_size=3).map("/".join),
    ),
    unique=True,
    max_size=30,
)


@settings(max_examples=200)
@given(NAMES, st.randoms(use_true_random=False))
def test_any_names_in_any_order_come_back(names: list[str], random: Any) -> None:
    field = json.loads(json.dumps(order_of(names)))
    random.shuffle(shuffled := [*names])
    assert in_order(shuffled, field, "the file") == names


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES.filter(bool), st.sampled_from(["default", "lossless", "object", "budget"]), st.data())
def test_a_file_keeps_the_order(tmp_path: Path, names: list[str], mode: str, data: st.DataObject) -> None:
    """Also of names that share one tensor."""
    pool = [torch.full((2, 3), float(i)) for i in range(3)]
    state = {name: data.draw(st.sampled_from([torch.tensor([[1.5]]), *pool])) for name in names}
    path = tmp_path / "x.birdie"
    if mode == "object":
        birdie.save_object({"model": state}, path)
        assert [*birdie.load_object(path)["model"]] == names
    else:
        birdie.save(state, path, lossless=mode == "lossless", budget=20_000 if mode == "budget" else None)
        assert [*birdie.load(path)] == [*birdie.load_object(path)] == names
        assert [tensor.name for tensor in birdie.inspect(path).tensors] == names
        shuffled = [name for name in reversed(names) if len(name) % 2]
        if shuffled:
            assert [*birdie.load(path, names=shuffled)] == [name for name in names if name in shuffled]
    with Reader(path) as reader:
        assert list(reader.names) == sorted(reader.names, key=str.encode)


def many_layers() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)) for _ in range(12)]
    return nn.Sequential(*layers, nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))


@pytest.mark.parametrize("flags", [[], ["--lossless"], ["--lossless", "--weights-only"], ["--budget", "20kB"]], ids=str)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ""])
def test_the_commands_keep_the_order(flags: list[str], suffix: str, tmp_path: Path) -> None:
    state = many_layers().state_dict()
    torch.save(state, tmp_path / "a.pt")
    for command in (
        ["compress", str(tmp_path / "a.pt"), "-o", str(tmp_path / "a.birdie"), *flags],
        ["decompress", str(tmp_path / "a.birdie"), "-o", str(tmp_path / f"b{suffix}")],
    ):
        assert run(build_app, command) == 0
    if suffix == ".pt":
        back = torch.load(tmp_path / "b.pt")
    else:
        back = load_file(tmp_path / (f"b{suffix}" if suffix else "b/model.safetensors"))
    assert [*back] == [*state]


def test_a_module_can_be_filled_by_position(tmp_path: Path) -> None:
    model = many_layers()
    birdie.save(model, tmp_path / "x.birdie", lossless=True)
    back = birdie.load(tmp_path / "x.birdie")
    fresh = many_layers()
    fresh.load_state_dict(dict(zip(fresh.state_dict(), back.values(), strict=True)))
    assert all(torch.equal(tensor, back[name]) for name, tensor in fresh.state_dict().items())
    assert [*birdie.compress_weights(model)] == [*model.state_dict()]


def test_differences_to_a_base_keep_the_order_of_their_own_state_dict(tmp_path: Path) -> None:
    state = {f"{layer}.{kind}": torch.randn(8, 8) for layer in (0, 2, 10, 1) for kind in ("w", "b")}
    base = dict(reversed(state.items()))
    birdie.save(
        {name: tensor + 0.01 for name, tensor in state.items()}, tmp_path / "x.birdie", base=base, lossless=True
    )
    assert [*birdie.load(tmp_path / "x.birdie", base=base)] == [*state]


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": torch.ones(2), "amax": torch.zeros(1), "step": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_extra_states_and_versions_stand_where_they_stood(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Sequential(WithExtra(3, 3), nn.BatchNorm1d(3)) for _ in range(11)])
    birdie.save(model, tmp_path / "x.birdie")
    back = birdie.load(tmp_path / "x.birdie")
    assert [*back] == [*model.state_dict()]
    assert (
        [*vars(back)["_metadata"]] == [*vars(model.state_dict())["_metadata"]] if hasattr(back, "_metadata") else True
    )
    assert [*back["10.0._extra_state"]] == ["scale", "amax", "step"]


def test_weights_that_are_trained_in_another_form_stand_in_their_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    birdie.spectral(model)
    birdie.save(model, tmp_path / "x.birdie")
    assert [name.partition(".")[0] for name in birdie.load(tmp_path / "x.birdie")] == ["0", "0", "1", "1"]


def entries(path: Path) -> tuple[dict[str, Any], list[container.Entry]]:
    with Reader(path) as reader:
        return reader.fields, [reader.read(name) for name in reader.entries]


def test_only_the_field_depends_on_the_order(tmp_path: Path) -> None:
    state = {f"{layer}.{kind}": torch.randn(8, 8) for layer in range(12) for kind in ("w", "b")}
    by_text = {name: state[name] for name in sorted(state)}
    by_number = {name: state[name] for layer in range(12) for name in (f"{layer}.b", f"{layer}.w")}
    read = {}
    for name, tensors in {"text": by_text, "number": by_number, "own": state, "again": OrderedDict(state)}.items():
        birdie.save(tensors, tmp_path / f"{name}.birdie")
        read[name] = entries(tmp_path / f"{name}.birdie")
    assert all(content == read["text"][1] for _, content in read.values())
    assert [fields.get("order") for fields, _ in read.values()] == [None, [""], [".", [], [1]], [".", [], [1]]]
    assert (tmp_path / "own.birdie").read_bytes() == (tmp_path / "again.birdie").read_bytes()


def test_a_file_without_the_field_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    """As all files of earlier versions."""
    birdie.save({f"{layer}.w": torch.ones(2, 2) for layer in range(12)}, tmp_path / "x.birdie", lossless=True)
    with Reader(tmp_path / "x.birdie") as reader:
        container.write(tmp_path / "y.birdie", [reader.read(name) for name in reader.entries])
        expected = sorted(f"{layer}.w" for layer in range(12))
    assert [*birdie.load(tmp_path / "y.birdie")] == expected
    assert [tensor.name for tensor in birdie.inspect(tmp_path / "y.birdie").tensors] == expected


def of_gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=12, vocab_size=50, n_positions=8))


def of_resnet() -> Any:
    return ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[8, 8, 8, 8], depths=[3, 4, 6, 3]))


@pytest.mark.parametrize("build", [of_gpt2, of_resnet])
def test_real_models_cost_some_tens_of_bytes(build: Any, tmp_path: Path) -> None:
    state: dict[str, Tensor] = build().state_dict()
    for path, tensors in ("saved", state), ("sorted", dict(sorted(state.items()))):
        birdie.save(tensors, tmp_path / path)
    saved, text = ((tmp_path / name).stat().st_size for name in ("saved", "sorted"))
    assert [*birdie.load(tmp_path / "saved")] == [*state]
    assert saved - text < 60


HOSTILE: list[Any] = [
    None,
    True,
    7,
    "x",
    {},
    [],
    [1],
    [None],
    ["." * 9],
    [".", 1],
    [".", ["1"]],
    [".", [True]],
    [".", [0.5]],
    [".", [2]],
    [".", [-2]],
    [".", [0, 1]],
    [".", [1 << 70]],
    [".", [0] * 1000],
    [".", [], []],
    ["", [3]],
    ["", [0, 0, 1]],
]


@pytest.mark.parametrize("order", HOSTILE, ids=lambda order: json.dumps(order)[:20])
def test_hostile_orders_are_refused(order: Any, tmp_path: Path) -> None:
    birdie.save({"a.w": torch.ones(2, 2), "b": torch.ones(3)}, tmp_path / "x.birdie")
    with Reader(tmp_path / "x.birdie") as reader:
        content = [reader.read(name) for name in reader.names]
    container.write(tmp_path / "y.birdie", content, json.dumps({"order": order}).encode())
    for read in birdie.load, birdie.load_object, birdie.inspect:
        with pytest.raises(ArtifactError, match="order"):
            read(tmp_path / "y.birdie")


@settings(max_examples=100)
@given(
    NAMES, st.recursive(st.none() | st.integers(-3, 40) | st.text(max_size=2), lambda one: st.lists(one, max_size=4))
)
def test_any_field_is_an_order_or_refused(names: list[str], field: Any) -> None:
    with suppress(ArtifactError):
        assert sorted(in_order(names, field, "the file")) == sorted(names)
