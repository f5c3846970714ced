"""Tiny tensors of one kind are coded as one: smaller and faster, with the values that each would have alone."""

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.artifact import repack
from birdie.artifact.container import MEMBER, Entry, Reader, to_bytes
from birdie.compress.rate import groups
from birdie.compress.rate.assignment import Assignment, assign
from birdie.compress.rate.target import Target
from birdie.compress.state import ModelState
from birdie.errors import ArtifactError, BudgetError, ConfigError, WeightsError
from tests.artifact.states import same_bits

NUMBERS = torch.Generator().manual_seed(0)


def adapters(
    count: int = 70, shape: tuple[int, ...] = (16, 20), dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return tensors in two sizes, so that under a budget there are two groups, and something else."""
    parts = [torch.randn(shape, generator=NUMBERS) for _ in range(2 * count)]
    parts = [((part + 0.01 * part.sign()) * (1.0, 0.1)[i % 2]).to(dtype) for i, part in enumerate(parts)]
    state = {f"blocks.{i}.lora_{'ab'[i % 2]}.weight": part for i, part in enumerate(parts)}
    return state | {"head.weight": torch.randn(40, 64, generator=NUMBERS)}


MANY: dict[str, Callable[[], dict[str, Tensor]]] = {
    "matrices": lambda: adapters(33),
    "kernels": lambda: adapters(33, (8, 4, 3, 3)),
    "small matrices": lambda: adapters(33, (6, 10)),
    "vectors": lambda: adapters(33, (12,)),
    "halves": lambda: adapters(33, dtype=torch.bfloat16),
    "doubles": lambda: adapters(33, dtype=torch.float64),
    "counters": lambda: {f"layers.{i}.num_batches_tracked": torch.tensor(i) for i in range(70)},
    "complex": lambda: {f"modes.{i}": torch.randn(12, 16, dtype=torch.complex64, generator=NUMBERS) for i in range(65)},
    "two groups": lambda: adapters(64, (16, 16)),
}


def saved(state: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    birdie.save(state, file, **settings)
    return file.getvalue()


def alone(monkeypatch: pytest.MonkeyPatch, state: Any, **settings: Any) -> bytes:
    """Return a file without groups."""
    with monkeypatch.context() as patch:
        patch.setattr(groups, "LEAST", 1 << 20)
        return saved(state, **settings)


def members(file: bytes) -> dict[str, list[str]]:
    with Reader(file) as reader:
        return reader.groups


CASES: list[Any] = [
    *((kind, {}) for kind in ("kernels", "vectors", "counters", "complex")),
    ("doubles", {"lossless": True}),
    ("halves", {"scheme": "fp16"}),
    ("matrices", {"scheme": [("*", "int5")]}),
    *(
        pytest.param(kind, settings, marks=pytest.mark.nightly)
        for kind, settings in [
            *((kind, {}) for kind in ("matrices", "small matrices", "halves", "doubles")),
            ("matrices", {"lossless": True}),
            ("complex", {"scheme": [("*", "int5")]}),
            ("two groups", {"bits": 7}),
        ]
    ),
]


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
def test_values_are_those_that_each_tensor_would_have_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    state = MANY[kind]()
    file = saved(state, **settings)
    apart = alone(monkeypatch, state, **settings)
    assert members(file) or (kind, "lossless" in settings) == ("doubles", False)
    assert not members(apart)
    loaded, expected = birdie.load(file), birdie.load(apart)
    assert loaded.keys() == state.keys()
    if "bits" not in settings:
        assert len(file) <= len(apart)
        assert all(same_bits(loaded[name], tensor) for name, tensor in expected.items())
        return
    errors = [
        sum(float((tensors[name] - weight).abs().norm() / weight.abs().norm()) for name, weight in state.items())
        for tensors in (loaded, expected)
    ]
    assert errors[0] <= 1.02 * errors[1]
    assert len(file) <= sum(map(Tensor.numel, state.values())) * 7 / 8


def test_a_file_is_smaller_and_the_same_whatever_the_workers() -> None:
    state = adapters(64, (12, 14))
    file = saved(state, workers=1)
    assert file == saved(state, workers=3)
    assert sum(map(len, members(file).values())) == 128


def grouped(state: dict[str, Tensor], schemes: Any = None, target: Target | None = None) -> Assignment:
    return groups.group_tiny_tensors(assign(ModelState.of(state), schemes, target or Target()))


def test_a_group_has_one_scheme_and_one_scale() -> None:
    state = adapters()
    parts = grouped(state, [("*.lora_a.*", "int4"), ("*.lora_b.*", "int6")]).groups
    assert [{name.split(".")[2] for name in one.names} for one in parts.values()] == [{"lora_a"}, {"lora_b"}]
    parts = grouped(state, target=Target(bits=6)).groups
    assert all(len({name.split(".")[2] for name in one.names}) == 1 for one in parts.values())
    assert not grouped(state, [("*", "codebook:k=4")]).groups  # its levels are those of a tensor
    assert len(grouped(adapters(250)).groups) > 1  # one tensor can be read without the others


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(4, 40, generator=NUMBERS)) for _ in range(80))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x + scale.mean(0)
        return x


def test_checkpoints_keep_every_bit(tmp_path: Path) -> None:
    content = {"step": 3, "state": [{"exp_avg": torch.randn(4, generator=NUMBERS)} for _ in range(70)]}
    repack.save_object(content, tmp_path / "run.birdie")
    again = repack.load_object(tmp_path / "run.birdie")
    assert pickle.dumps(again["step"]) == pickle.dumps(3)
    assert all(same_bits(a["exp_avg"], b["exp_avg"]) for a, b in zip(again["state"], content["state"], strict=True))  # type: ignore[call-overload]


def test_errors_name_the_tensor() -> None:
    state = adapters()
    state["blocks.7.lora_b.weight"][3, 3] = torch.nan
    for settings in ({}, {"scheme": [("*", "int4")]}):
        with pytest.raises(WeightsError, match=r"'blocks\.7\.lora_b\.weight'"):
            saved(state, **settings)
    state["blocks.7.lora_b.weight"][3, 3] = 1e6
    with pytest.raises(WeightsError, match=r"'blocks\.7\.lora_b\.weight'"):
        saved(state, scheme="fp16")
    energies = {f"energies.{i}": torch.randn(200, generator=NUMBERS) for i in range(70)}
    with pytest.raises(BudgetError, match=r"'energies\.0' and 69 others"):
        saved(energies | {"weight": torch.randn(80, 80, generator=NUMBERS)}, budget=8000)


def group_of(count: int, **changes: Any) -> list[Entry]:
    with Reader(saved({f"t{i}": torch.arange(3.0) + i for i in range(70)}, lossless=True)) as reader:
        entries = [reader.read(name) for name in reader.entries]
    group, *parts = sorted(entries, key=lambda entry: entry.kind == MEMBER)
    return [group, *(replace(entry, params=(), **changes) for entry in parts[:count])]


@pytest.mark.parametrize(
    ("count", "changes"),
    [(69, {}), (70, {"shape": (1, 2)}), (70, {"dtype": 9}), (35, {"shape": (3, 3)})],
    ids=["one is missing", "another shape", "another dtype", "too long"],
)
def test_members_that_do_not_make_up_a_group_are_refused(count: int, changes: dict[str, Any]) -> None:
    assert len(members(to_bytes(group_of(70)))["\0group0"]) == 70
    with pytest.raises(ArtifactError, match="group0"):
        Reader(to_bytes(group_of(count, **changes)))
    with pytest.raises(ConfigError, match="points to"):
        to_bytes(group_of(70, target="t0"))
