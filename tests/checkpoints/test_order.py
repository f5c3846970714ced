"""Tensors come back in the order of the state dict, which is a field of the metadata and changes nothing else."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

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


def entries(path: Path) -> tuple[dict[str, Any], list[container.Entry]]:
    with Reader(path) as reader:
        return reader.fields, [reader.read(name) for name in reader.entries]


def test_a_file_without_the_field_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    """As all files of earlier versions."""
    birdie.save({f"{layer}.w": torch.ones(2, 2) for layer in range(12)}, tmp_path / "x.birdie", lossless=True)
    with Reader(tmp_path / "x.birdie") as reader:
        container.write(tmp_path / "y.birdie", [reader.read(name) for name in reader.entries])
        expected = sorted(f"{layer}.w" for layer in range(12))
    assert [*birdie.load(tmp_path / "y.birdie")] == expected
    assert [tensor.name for tensor in birdie.inspect(tmp_path / "y.birdie").tensors] == expected


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
