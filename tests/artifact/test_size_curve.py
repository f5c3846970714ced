"""A curve measures files of several sizes by a metric of one's own, and finds the smallest that holds a value."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import birdie
from birdie.errors import BudgetError, ConfigError


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))


@pytest.fixture(scope="module")
def exact(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def nearness(module: nn.Module, exact: list[torch.Tensor]) -> float:
    """Return the decibels of the weights over their error, as a metric that falls with the size."""
    pairs = list(zip(module.state_dict().values(), exact, strict=True))
    error = sum(float((a - b).square().sum()) for a, b in pairs)
    return 10 * math.log10(sum(float(b.square().sum()) for _, b in pairs) / max(error, 1e-12))


def test_every_size_is_measured_from_its_file(model: nn.Module, exact: list[torch.Tensor], tmp_path: Path) -> None:
    original = copy.deepcopy(model.state_dict())
    result = birdie.curve(model, lambda module: nearness(module, exact), sizes=[3_000, "4kB", 8_000], effort="fast")
    assert [point.budget for point in result.points] == [3_000, 4_000, 8_000]
    values = [point.value for point in result.points]
    assert values == sorted(values)
    for point in result.points:
        assert birdie.save(model, tmp_path / "x.birdie", budget=point.budget).bytes == point.bytes <= point.budget
        decoded = birdie.load(tmp_path / "x.birdie", into=copy.deepcopy(model))
        assert nearness(decoded, exact) == point.value
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in original.items())
    assert result.smallest is None
    assert len(str(result).splitlines()) == 1 + len(result.points) + 1
    assert json.loads(json.dumps(result.to_json()))["points"][0]["bytes"] == result.points[0].bytes


@pytest.mark.parametrize("at_least", [15, 22])
def test_a_search_finds_what_all_sizes_tell(model: nn.Module, exact: list[torch.Tensor], at_least: float) -> None:
    calls = list[float]()

    def metric(module: nn.Module) -> float:
        calls.append(nearness(module, exact))
        return calls[-1]

    result = birdie.curve(model, metric, at_least=at_least)
    assert result.smallest is not None
    assert result.smallest.value >= at_least
    assert len(calls) <= 15
    below = int(result.smallest.budget / 1.04)
    near = birdie.curve(model, lambda module: nearness(module, exact), sizes=[below])
    assert near.points[0].value < at_least


def test_what_was_measured_is_not_measured_again(model: nn.Module, exact: list[torch.Tensor], tmp_path: Path) -> None:
    calls = list[nn.Module]()

    def metric(module: nn.Module) -> float:
        calls.append(module)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return nearness(module, exact)

    with pytest.raises(KeyboardInterrupt):
        birdie.curve(model, metric, sizes=[3_000, 4_000], folder=tmp_path / "curve")
    again = birdie.curve(model, metric, sizes=[3_000, 4_000], folder=tmp_path / "curve")
    assert len(calls) == 5  # the float model and the second file; the first is known
    assert again == birdie.curve(model, lambda module: nearness(module, exact), sizes=[3_000, 4_000])


def test_what_cannot_be_is_one_sentence(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two searches"):
        birdie.curve(model, lambda _: 1.0, sizes=[1_000], at_least=1)
    with pytest.raises(ConfigError, match="float model has 1 by"):
        birdie.curve(model, lambda _: 1.0, at_least=2)
    with pytest.raises(ConfigError, match="not a number"):
        birdie.curve(model, lambda _: math.nan, sizes=[8_000])
    with pytest.raises(ConfigError, match="the metric failed"):
        birdie.curve(model, lambda _: [], sizes=[8_000])  # type: ignore[arg-type, return-value]
    with pytest.raises(BudgetError, match="larger sizes"):
        birdie.curve(model, lambda _: 1.0, sizes=[10])
    with pytest.raises(ConfigError, match="not a module"):
        birdie.curve(dict(model.state_dict()), lambda _: 1.0)  # type: ignore[arg-type]
    (tmp_path / "measured.json").write_text("[]")
    with pytest.raises(ConfigError, match="another folder"):
        birdie.curve(model, lambda _: 1.0, sizes=[8_000], folder=tmp_path)


def test_a_plot_is_an_image(model: nn.Module, exact: list[torch.Tensor], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `lab` is not installed")
    result = birdie.curve(model, lambda module: nearness(module, exact), sizes=[3_000, 8_000])
    result.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
