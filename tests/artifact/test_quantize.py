"""Laws of quantization in place: the values of a file, in the same module, without a file."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.errors import BudgetError, ConfigError, WeightsError
from tests.nightly import mostly_nightly


class Tied(nn.Module):
    """A head tied to its embedding, a norm with running statistics, a mask and a counter."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 48)
        self.layers = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 48))
        self.norm = nn.BatchNorm1d(48)
        self.head = nn.Linear(48, 96, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def symmetries(self) -> Any:
        """Return the hidden units of the layers."""
        return [(("layers.0.weight", 0, 1), ("layers.0.bias", 0, 1), ("layers.2.weight", 1, 1))]

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.layers(self.embedding(ids))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def loss(module: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(module(ids), torch.zeros_like(ids), reduction="sum")


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (64,), generator=generator) for _ in range(10)]


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def require_same(one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"bits": 4}, torch.bfloat16),
        pytest.param({}, torch.float64, marks=pytest.mark.nightly),
        pytest.param({"scheme": "int4"}, torch.float16, marks=pytest.mark.nightly),
        pytest.param({"bits": 4, "effort": "max"}, torch.float32, marks=pytest.mark.nightly),
        ({"scheme": [("layers.*", "ternary")], "budget": 9_000}, torch.float32),
    ],
    ids=str,
)
def test_values_are_those_of_save_and_load(settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = seeded(Tied).to(dtype)
    expected = copy.deepcopy(model)
    saved = birdie.save(expected, tmp_path / "m.birdie", **settings)
    birdie.load(tmp_path / "m.birdie", into=expected)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    summary = birdie.quantize_(model, **settings)
    require_same(model, expected)
    assert (summary.bytes, summary.tensors, summary.weights) == (saved.bytes, saved.tensors, saved.weights)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert [path.name for path in tmp_path.iterdir()] == ["m.birdie"]


@pytest.mark.parametrize("settings", mostly_nightly([{"bits": 4}, {"quality": 0.01}], [{"quality": 0.01}]), ids=str)
def test_calibration_sorts_units_of_the_complete_module(settings: dict[str, Any], tmp_path: Path) -> None:
    model, other = seeded(Tied), seeded(Tied)
    saved = birdie.save(other, tmp_path / "m.birdie", calibration=(other, batches(), loss), **settings)
    birdie.load(tmp_path / "m.birdie", into=other)
    summary = birdie.quantize_(model, calibration=(model, batches(), loss), **settings)
    require_same(model, other)
    assert summary.error == saved.error
    assert summary.bytes == saved.bytes


def test_sorted_units_leave_the_function_as_it_is() -> None:
    model = seeded(Tied).eval()
    ids = batches()[0]
    logits, bias = model(ids), model.get_parameter("layers.0.bias").detach().clone()
    birdie.quantize_(model, scheme=[("*", "lossless")], calibration=(model, batches(), loss))
    assert not torch.equal(model.get_parameter("layers.0.bias"), bias)  # units moved
    torch.testing.assert_close(model(ids), logits)


def test_a_wrapped_module_is_quantized_inside() -> None:
    model, other = seeded(Tied), seeded(Tied)
    birdie.quantize_(nn.DataParallel(model), scheme="int4")
    birdie.quantize_(other, scheme="int4")
    require_same(model, other)


def test_weights_trained_by_spectral_stay_wrapped(tmp_path: Path) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    birdie.spectral(model)
    other = copy.deepcopy(model)
    birdie.save(other, tmp_path / "m.birdie")
    birdie.load(tmp_path / "m.birdie", into=other)
    birdie.quantize_(model)
    require_same(model, other)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"budget": 10}, BudgetError),
        ({"quality": 0.1}, ConfigError),
        ({"scheme": "int99"}, ConfigError),
        ({"bits": 4, "budget": 5}, ConfigError),
    ],
    ids=str,
)
def test_an_error_leaves_the_module_unchanged(settings: dict[str, Any], error: type[Exception]) -> None:
    model = seeded(Tied)
    kept = state(model)
    with pytest.raises(error):
        birdie.quantize_(model, **settings)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_only_finite_modules_are_quantized() -> None:
    with pytest.raises(ConfigError, match="dict"):
        birdie.quantize_({"w": torch.ones(64, 64)})  # type: ignore[arg-type]
    model = seeded(lambda: nn.Linear(64, 64))
    with torch.no_grad():
        model.get_parameter("weight")[0, 0] = torch.nan
    with pytest.raises(WeightsError, match="weight"):
        birdie.quantize_(model)


def test_save_writes_the_same_bytes_into_a_buffer(tmp_path: Path) -> None:
    model, buffer = seeded(Tied), io.BytesIO()
    summary = birdie.save(model, buffer)
    saved = birdie.save(model, tmp_path / "m.birdie")
    assert buffer.getvalue() == (tmp_path / "m.birdie").read_bytes()
    assert (summary.bytes, summary.tensors) == (saved.bytes, saved.tensors)
    with pytest.raises(ConfigError, match=f"{summary.bytes:,}"):
        birdie.save(model, buffer)
