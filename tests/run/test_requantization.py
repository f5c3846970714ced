"""Training on what the trellis stores: the file has its budget and equals the model in memory, and loses less."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.registry import decode
from birdie.compress.schemes.trellis import Trellis, rescaled
from birdie.compress.state import plain_state
from birdie.compress.trained import plain, trained_weights
from birdie.errors import BudgetError, ConfigError, DataError, WeightsError
from birdie.run import requantization
from birdie.run.fine_tuning import FineTuneStep, fine_tune

Batch = tuple[Tensor, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def data(count: int = 512) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 20, generator=generator)
    return x, (x[:, :10] + 0.5 * x[:, 10:].roll(1, 1)).argmax(1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tune(model: nn.Module, **settings: Any) -> list[FineTuneStep]:
    return list(fine_tune(model, [data()], loss, rate=3e-3, **settings))


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("budget", [2_600, 4_000])
def test_the_file_is_just_under_its_budget_and_holds_the_model(
    budget: int, gains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requantization, "_GAINS_SHARE", float(gains))  # else they take too much of so small a file
    model = network()
    steps = tune(model, steps=60, budget=budget)
    size = birdie.save(model, tmp_path / "x.birdie").bytes
    assert 0.9 * budget <= size <= budget
    assert [step.number for step in steps] == list(range(1, 61))
    assert steps[-1].bytes == size
    assert steps[-1].loss < steps[0].loss
    decoded = birdie.load(tmp_path / "x.birdie")
    assert all(torch.equal(decoded[name], weight) for name, weight in plain_state(model).items())
    x, _ = data()
    assert torch.equal(birdie.load(tmp_path / "x.birdie", into=network())(x), model(x))


def test_training_tells_how_far_weights_are_from_the_file_and_what_changed() -> None:
    steps = tune(network(), steps=30, budget=2_600)
    errors, changes = zip(*((step.error, step.changed) for step in steps), strict=True)
    assert all(error is not None and 0 < error < 1 for error in errors)
    assert changes[0] == 1.0  # nothing was encoded before
    assert changes[12] is not None
    assert 0 < changes[12] < 1


def test_bits_per_weight_are_of_the_complete_file(tmp_path: Path) -> None:
    model = network()
    tune(model, steps=20, bits=4.0)
    assert birdie.save(model, tmp_path / "x.birdie").bits_per_weight <= 4.0


def test_it_loses_less_than_quantization_afterwards(tmp_path: Path) -> None:
    budget, batch = 2_600, data()
    trained, afterwards = network(), network()
    tune(trained, steps=150, budget=budget)
    tune(afterwards, steps=150)
    birdie.save(trained, tmp_path / "trained.birdie")
    calibration = CalibrationResult.of(afterwards.state_dict(), (afterwards, [batch], loss))
    birdie.save(afterwards, tmp_path / "afterwards.birdie", budget=budget, calibration=calibration)
    losses = [
        float(loss(birdie.load(tmp_path / f"{name}.birdie", into=network()), batch).detach())
        for name in ("trained", "afterwards")
    ]
    assert losses[0] < 0.8 * losses[1]


class Tied(nn.Module):
    """Two layers that share a weight, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 24)
        self.recurrent = nn.LSTM(24, 24, batch_first=True)
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token."""
        logits: Tensor = self.head(self.recurrent(self.table(ids))[0])
        return logits


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_tied_and_recurrent_weights_stay_what_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    names = sorted(model.state_dict())
    ids = torch.arange(64).view(4, 16) % 32
    list(fine_tune(model, [ids], next_token_loss, steps=14, budget=2_400))
    assert birdie.save(model, tmp_path / "x.birdie").bytes <= 2_400
    logits = model(ids)
    plain(model)
    assert sorted(model.state_dict()) == names
    assert model.head.weight is model.table.weight
    assert torch.equal(model(ids), logits)
    assert torch.equal(birdie.load(tmp_path / "x.birdie", into=Tied())(ids), logits)


def test_copies_are_saved_alike(tmp_path: Path) -> None:
    model = network()
    tune(model, steps=14, budget=3_000)
    birdie.save(model, tmp_path / "a.birdie")
    birdie.save(copy.deepcopy(model), tmp_path / "b.birdie")
    assert (tmp_path / "a.birdie").read_bytes() == (tmp_path / "b.birdie").read_bytes()


def test_weights_that_moved_afterwards_are_not_saved_by_mistake(tmp_path: Path) -> None:
    model = network()
    tune(model, steps=14, budget=3_000)
    with torch.no_grad():
        next(trained_weights(model)).latent.add_(0.1)
    with pytest.raises(WeightsError, match=r"'0\.weight'"):
        birdie.save(model, tmp_path / "x.birdie")
    assert birdie.save(plain(model), tmp_path / "x.birdie", budget=3_000).bytes <= 3_000


def test_a_model_can_be_tuned_to_a_smaller_budget(tmp_path: Path) -> None:
    model = network()
    for budget in (4_000, 2_600):
        tune(model, steps=14, budget=budget)
        assert birdie.save(model, tmp_path / "x.birdie").bytes <= budget


def test_what_cannot_be_reached_is_an_error_before_the_first_step() -> None:
    model = network()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(BudgetError, match="budget"):
        fine_tune(model, [data()], loss, steps=10, budget=100)
    with pytest.raises(ConfigError, match="losslessly"):
        fine_tune(model, [data()], loss, steps=10, budget=1_000_000)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    x, y = data()
    batches = [(x, y)] * 18 + [(torch.full_like(x, torch.nan), y)]
    with pytest.raises(DataError, match="the loss of step 3 is not finite"):
        list(fine_tune(network(), batches, loss, steps=9, budget=3_000))


@pytest.mark.parametrize("resolution", [4, 16])
def test_gains_of_rows_and_columns_become_scales(resolution: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator)
    encoded = Trellis(states=8, sigma=0.5).encode("w", weight)
    octaves = np.round(np.linspace(-1, 1, 24) * resolution) / resolution
    moved = decode(rescaled(encoded, octaves, np.zeros(40), resolution))
    expected = decode(encoded) * torch.from_numpy(2.0**octaves).float()[:, None]
    assert torch.allclose(moved, expected, rtol=1e-6)
    assert torch.equal(decode(rescaled(encoded, np.zeros(24), np.zeros(40), resolution)), decode(encoded))
