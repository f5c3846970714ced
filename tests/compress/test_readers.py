"""Every reader returns the same values, however a tensor is stored: in a stack, a group, two planes or as a copy."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import birdie
from birdie.artifact.container import Reader
from birdie.artifact.safetensors_export import to_safetensors
from birdie.lab.report.sizes import sizes_of
from birdie.standalone import decoder
from tests.artifact.states import decode_tensor, same_bits
from tests.compress.rate.test_groups import Adapter, adapters
from tests.compress.test_complex import Network
from tests.compress.test_stacks import NAME, Experts, experts
from tests.nightly import mostly_nightly


def tied_and_copied() -> dict[str, Tensor]:
    weight = torch.randn(64, 48)
    return {"embed": weight, "head": weight, "copy": weight.clone(), "other": torch.randn(40, 64)}


STATES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "stacks": lambda: {NAME: experts(), "position": torch.randn(1, 40, 64)},
    "groups": lambda: adapters(64, (8, 8)) | {"again": (weight := torch.randn(8, 8)), "tied": weight},
    "complex": lambda: Network().state_dict(),
    "ties and copies": tied_and_copied,
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    mostly_nightly(
        itertools.product(STATES, ({}, {"bits": 6.0})), [*((kind, {}) for kind in STATES), ("stacks", {"bits": 6.0})]
    ),
    ids=str,
)
def test_every_reader_returns_the_same_values(kind: str, settings: dict[str, float], tmp_path: Path) -> None:
    state, path = STATES[kind](), tmp_path / "model.birdie"
    summary = birdie.save(state, path, **settings)  # type: ignore[arg-type]
    expected = birdie.load(path)
    assert {row.name for row in summary.tensors} == expected.keys() == state.keys()
    to_safetensors(path, tmp_path / "model.safetensors")
    some = list(state)[::7] + list(state)[-1:]
    for tensors in (
        load_file(tmp_path / "model.safetensors"),
        decoder.load(path),
        birdie.load(path, names=some),
        {name: decode_tensor(path, name) for name in some},
    ):
        assert tensors
        assert all(same_bits(tensor, expected[name]) for name, tensor in tensors.items())
    with Reader(path) as reader:
        assert sum(row.bytes for row in birdie.inspect(path).tensors) + reader.header_bytes == reader.size
    if kind != "complex":  # the table of sizes counts elements, the summary two numbers for each
        assert sum(size.weights for size in sizes_of(path).tensors) == summary.weights


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "stacks": (Experts, (4, 64)),
    "groups": (Adapter, (2, 40)),
    "complex": (Network, (2, 1, 32)),
}


@pytest.mark.parametrize("kind", MODULES)
def test_modules_load_eagerly_and_lazily_and_are_quantized_in_place(kind: str, tmp_path: Path) -> None:
    build, shape = MODULES[kind]
    module, x = build().eval(), torch.randn(shape)
    birdie.save(module, tmp_path / "x.birdie")
    eager, lazy = (birdie.load(tmp_path / "x.birdie", into=build(), lazy=lazy).eval() for lazy in (False, True))
    birdie.quantize_(module)
    for other in (lazy, copy.deepcopy(eager), module):
        assert torch.equal(other(x), eager(x))
