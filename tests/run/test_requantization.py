"""Training on what the trellis stores: the file has its budget and equals the model in memory, and loses less."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.qat.trained import TrainedWeight, parametrized, plain
from birdie.compress.state import plain_state
from birdie.errors import BudgetError, ConfigError, DataError, WeightsError
from birdie.run import fine_tuning
from birdie.run.fine_tuning import FineTuneStep, fine_tune

Batch = tuple[Tensor, Tensor]


class Sorted(nn.Sequential):
    """A network that declares that its hidden units may be sorted: at a bit a weight that counts."""

    def symmetries(self) -> Any:
        """Return the units of both hidden layers."""
        return [((f"{i}.weight", 0, 1), (f"{i}.bias", 0, 1), (f"{i + 2}.weight", 1, 1)) for i in (0, 2)]


def network(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return Sorted(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def data(count: int = 512) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 20, generator=generator)
    return x, (x[:, :10] + 0.5 * x[:, 10:].roll(1, 1)).argmax(1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tune(model: nn.Module, **settings: Any) -> list[FineTuneStep]:
    return list(fine_tune(model, [data()], loss, rate=3e-3, **settings))


@pytest.mark.parametrize("budget", [2_600, 4_000])
def test_the_file_is_just_under_its_budget_and_holds_the_model(budget: int, tmp_path: Path) -> None:
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


def test_at_a_bit_a_weight_it_loses_less_than_quantization_afterwards(tmp_path: Path) -> None:
    budget, (x, y) = 3_500, data(2048)
    batches = list(zip(x.split(256), y.split(256), strict=True))
    trained, afterwards = network(128), network(128)
    list(fine_tune(trained, batches, loss, steps=100, rate=3e-3, budget=budget))
    list(fine_tune(afterwards, batches, loss, steps=100, rate=3e-3))
    birdie.save(trained, tmp_path / "trained.birdie")
    birdie.save(afterwards, tmp_path / "afterwards.birdie", budget=budget, calibration=(afterwards, batches, loss))
    losses = [
        float(loss(birdie.load(tmp_path / f"{name}.birdie", into=network(128)), (x, y)).detach())
        for name in ("trained", "afterwards")
    ]
    assert losses[0] < 0.75 * losses[1]


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
        next(parametrized(model, TrainedWeight)).original.add_(0.1)
    with pytest.raises(WeightsError, match=r"'0\.weight'"):
        birdie.save(model, tmp_path / "x.birdie")
    assert birdie.save(plain(model), tmp_path / "x.birdie", budget=3_000).bytes <= 3_000


def test_spectral_training_begins_with_plain_parameters() -> None:
    model = network()
    tune(model, steps=2, budget=3_000)
    with pytest.raises(ConfigError, match="plain"):
        birdie.spectral(model)
    birdie.spectral(plain(model))


@pytest.mark.parametrize("target", [{"budget": 0}, {"budget": -5}, {"bits": 0.0}, {"bits": float("nan")}])
def test_absurd_targets_are_errors(target: dict[str, Any]) -> None:
    with pytest.raises((BudgetError, ConfigError)):
        fine_tune(network(), [data()], loss, steps=3, **target)


def test_weights_that_are_nan_are_an_error() -> None:
    model = network()
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    with pytest.raises((DataError, WeightsError), match=r"finite|NaN"):
        fine_tune(model, [data()], loss, steps=3, budget=3_000)


def test_a_model_can_be_tuned_to_a_smaller_budget(tmp_path: Path) -> None:
    model = network()
    for budget in (4_000, 2_600):
        tune(model, steps=14, budget=budget)
        assert birdie.save(model, tmp_path / "x.birdie").bytes <= budget


def test_what_cannot_be_reached_is_an_error_before_the_first_step() -> None:
    model = network()
    original = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(BudgetError, match="budget"):
        fine_tune(model, [data()], loss, steps=10, budget=100)
    with pytest.raises(ConfigError, match="losslessly"):
        fine_tune(model, [data()], loss, steps=10, budget=1_000_000)
    assert model.state_dict().keys() == original.keys()
    assert all(torch.equal(weight, original[name]) for name, weight in model.state_dict().items())


def test_a_loss_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fine_tuning, "_FIRST", 2)
    x, y = data()
    batches = [(x, y)] * 4 + [(torch.full_like(x, torch.nan), y)]
    with pytest.raises(DataError, match="the loss of step 3 is not finite"):
        list(fine_tune(network(), batches, loss, steps=9, budget=3_000))


def test_batches_that_end_with_the_training_are_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last calibration takes batches of the last steps, so a long training is not lost at its end."""
    monkeypatch.setattr(fine_tuning, "_FIRST", 2)
    monkeypatch.setattr(fine_tuning, "_LAST", 4)
    model, once = network(), iter([data()] * (2 + 6))
    assert len(list(fine_tune(model, once, loss, steps=6, budget=3_000))) == 6
    assert birdie.save(model, tmp_path / "x.birdie").bytes <= 3_000
