"""Fine-tuning to a size: the file is just under its budget and equals the model in memory; errors name the cause."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.errors import BudgetError, ConfigError, DataError
from birdie.small import fine_tuning
from birdie.small.fine_tuning import FineTuneStep, fine_tune
from tests.artifact.states import same_bits
from tests.small.spectral.test_wrap import data, mlp

Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tune(model: nn.Module, **settings: Any) -> list[FineTuneStep]:
    return list(fine_tune(model, [data()], loss, rate=3e-3, **settings))


def test_the_file_is_just_under_its_budget(tmp_path: Path) -> None:
    budget = 800
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model)
    steps = tune(model, steps=60, budget=budget)
    size = birdie.save(model, tmp_path / "x.birdie").bytes
    assert 0.9 * budget <= size <= budget  # float32 vectors are a large part of a file this small
    assert steps[-1].bytes == size
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert 60 <= len(steps) <= 1.4 * 60
    assert steps[-1].loss < steps[0].loss


def test_the_file_holds_the_model_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model, transform="identity")
    tune(model, steps=20, bits=3.0)
    birdie.save(model, tmp_path / "x.birdie")
    x, _ = data()
    assert torch.equal(birdie.load(tmp_path / "x.birdie", into=mlp())(x), model(x))


class Masked(nn.Module):
    """An MLP with buffers that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("mask", torch.full((80, 80), -torch.inf).triu(1))
        self.register_buffer("extremes", torch.tensor([torch.inf, 0.1, torch.nan]))
        self.register_buffer("scratch", torch.full((3,), torch.nan), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the layers."""
        logits: Tensor = self.layers(x)
        return logits


@pytest.mark.parametrize("spectral", [True, False])
def test_buffers_are_left_as_they_are_also_if_they_are_not_finite(spectral: bool, tmp_path: Path) -> None:
    model = Masked()
    original = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if spectral:
        birdie.spectral(model)
    tune(model, steps=4, bits=8)
    birdie.save(model, tmp_path / "x.birdie", effort="fast")
    loaded = birdie.load(tmp_path / "x.birdie")
    buffers = dict(model.named_buffers())
    for name, buffer in original.items():
        assert same_bits(buffers[name], buffer)
        assert name == "scratch" or same_bits(loaded[name], buffer)
    assert "scratch" not in loaded


def test_bits_per_weight_can_be_the_target() -> None:
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model)
    steps = tune(model, steps=60, bits=2.5)
    assert float(birdie.quantization_loss(model).detach()) == pytest.approx(2.5, rel=0.1)
    assert all(step.bytes is None for step in steps)


def test_fine_tuning_without_a_target_is_plain_training() -> None:
    torch.manual_seed(0)
    model, reference = mlp(), mlp()
    reference.load_state_dict(model.state_dict())
    steps = tune(model, steps=20)
    optimizer = torch.optim.Adam(reference.parameters(), lr=3e-3 / 5)  # warm-up of five steps
    loss(reference, data()).backward()
    optimizer.step()
    second = loss(reference, data())
    assert steps[1].loss == pytest.approx(float(second.detach()))
    assert steps[0].bits is steps[0].weight is steps[0].bytes is None


def test_a_loaded_model_can_be_tuned_to_a_smaller_budget(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model)
    tune(model, steps=30, budget=1_000)
    birdie.save(model, tmp_path / "x.birdie")
    second = birdie.load(tmp_path / "x.birdie", into=mlp())
    birdie.spectral(second)
    tune(second, steps=30, budget=900)
    assert birdie.save(second, tmp_path / "y.birdie").bytes <= 900


def test_contradictory_settings_are_errors() -> None:
    model = mlp()
    birdie.spectral(model)
    with pytest.raises(ConfigError, match="two targets"):
        fine_tune(model, [data()], loss, steps=5, bits=2, budget=2)
    with pytest.raises(ConfigError, match="above zero"):
        fine_tune(model, [data()], loss, steps=0, bits=2)
    with pytest.raises(ConfigError, match="not a size"):
        fine_tune(model, [data()], loss, steps=5, budget="16 apples")
    with pytest.raises(BudgetError, match="leaves nothing"):
        fine_tune(model, [data()], loss, steps=5, budget=100)


def test_a_budget_that_is_not_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    birdie.spectral(model)
    monkeypatch.setattr(fine_tuning, "_set_scales", lambda *_: None)
    monkeypatch.setattr(fine_tuning, "at_bits", lambda *_, **__: None)  # scales stay as the control sets them
    with pytest.raises(BudgetError, match=r"after 2 steps the file has .* give more steps or bytes"):
        list(fine_tune(model, [data()], loss, steps=1, budget=600))


def test_batches_that_cannot_restart_are_an_error() -> None:
    def once() -> Iterator[Batch]:
        yield data()

    with pytest.raises(DataError, match="no more batches"):
        list(fine_tune(mlp(), once(), loss, steps=2))


def test_a_loss_that_is_not_finite_is_an_error_and_does_not_change_the_weights() -> None:
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model)
    x, y = data()
    good, bad = (x, y), (torch.full_like(x, torch.nan), y)
    steps = fine_tune(model, [good, good, bad], loss, steps=9, bits=3.0, measured=False)
    with pytest.raises(DataError, match="the loss of step 3 is not finite"):
        list(steps)
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
