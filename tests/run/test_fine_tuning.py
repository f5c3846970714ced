"""Laws of training to a size: the file is just under its budget, it is the model in memory, errors are clear."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.spectral.wrap import wrapped
from birdie.errors import BudgetError, ConfigError, DataError
from birdie.run import fine_tuning as finetune
from birdie.run.fine_tuning import FineTuneStep, fine_tune
from tests.compress.spectral.test_wrap import data, mlp

Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tuned(model: nn.Module, **settings: object) -> list[FineTuneStep]:
    return list(fine_tune(model, [data()], loss, rate=3e-3, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [700, 1_000])
def test_the_file_is_just_under_its_budget(budget: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model)
    steps = tuned(model, steps=120, budget=budget)
    size = birdie.save(model, tmp_path / "x.birdie").bytes
    assert 0.95 * budget <= size <= budget
    assert steps[-1].bytes == size
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert 120 <= len(steps) <= 1.4 * 120
    assert steps[-1].loss < steps[0].loss


def test_the_model_in_memory_is_the_one_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model, transform="identity")
    tuned(model, steps=60, bits=3.0)
    birdie.save(model, tmp_path / "x.birdie")
    x, _ = data()
    assert torch.equal(birdie.load(tmp_path / "x.birdie", into=mlp())(x), model(x))


def test_bits_are_a_target_too() -> None:
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model)
    steps = tuned(model, steps=120, bits=2.5)
    assert float(birdie.quantization_loss(model).detach()) == pytest.approx(2.5, rel=0.1)
    assert all(step.bytes is None for step in steps)


class Uneven(nn.Module):
    """Two layers side by side, one of which counts a hundred times as much."""

    def __init__(self) -> None:
        super().__init__()
        self.quiet, self.loud = nn.Linear(20, 16), nn.Linear(20, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.quiet(x) + 100 * self.loud(x)
        return out


def test_what_matters_more_starts_with_finer_steps() -> None:
    torch.manual_seed(0)
    model = Uneven()
    birdie.spectral(model, transform="identity")
    next(fine_tune(model, [data()], loss, steps=1, bits=8.0, network_rate=1e-9))
    quiet, loud = (float(each.weight.steps()[0].detach()) for each in wrapped(model))
    assert quiet / loud == pytest.approx(100, rel=0.2)


def test_seeds_start_and_end_alike(tmp_path: Path) -> None:
    """Ten files within 5 % of one another, from ten starts within 1 %."""
    starts, sizes = [], []
    for seed in range(10):
        torch.manual_seed(seed)
        model = mlp()
        birdie.spectral(model, transform="dct")
        starts.append(float(birdie.quantization_loss(model).detach()))
        tuned(model, steps=60, budget=800)
        sizes.append(birdie.save(model, tmp_path / "x.birdie").bytes)
    for values, share in ((starts, 0.01), (sizes, 0.05)):
        middle = sum(values) / len(values)
        assert all(abs(value - middle) < share * middle for value in values), values


def test_without_a_target_it_is_plain_training() -> None:
    torch.manual_seed(0)
    model, same = mlp(), mlp()
    same.load_state_dict(model.state_dict())
    steps = tuned(model, steps=20)
    optimizer = torch.optim.Adam(same.parameters(), lr=3e-3)
    loss(same, data()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    first = loss(same, data())
    assert steps[1].loss == pytest.approx(float(first.detach()))
    assert steps[0].bits is steps[0].weight is steps[0].bytes is None


def test_a_model_that_was_loaded_goes_on_at_its_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model)
    tuned(model, steps=100, budget=1_000)
    birdie.save(model, tmp_path / "x.birdie")
    second = birdie.load(tmp_path / "x.birdie", into=mlp())
    birdie.spectral(second)
    tuned(second, steps=100, budget=900)
    assert birdie.save(second, tmp_path / "y.birdie").bytes <= 900


def test_what_cannot_be_is_refused() -> None:
    model = mlp()
    with pytest.raises(ConfigError, match="nothing in the model is spectral"):
        fine_tune(model, [data()], loss, steps=5, bits=2)
    birdie.spectral(model)
    with pytest.raises(ConfigError, match="two targets"):
        fine_tune(model, [data()], loss, steps=5, bits=2, budget=2)
    with pytest.raises(ConfigError, match="above zero"):
        fine_tune(model, [data()], loss, steps=0, bits=2)
    with pytest.raises(ConfigError, match="not a whole number"):
        fine_tune(model, [data()], loss, steps=5, budget="16MB")  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="leaves nothing"):
        fine_tune(model, [data()], loss, steps=5, budget=100)


def test_a_size_that_is_not_reached_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    birdie.spectral(model)
    monkeypatch.setattr(finetune, "_measure", lambda *_: None)
    monkeypatch.setattr(finetune, "at_bits", lambda *_, **__: None)  # steps stay where control has them
    with pytest.raises(BudgetError, match=r"after 2 steps the file has .* give more steps or bytes"):
        list(fine_tune(model, [data()], loss, steps=1, budget=600))


def test_batches_that_end_are_told() -> None:
    def once() -> Iterator[Batch]:
        yield data()

    with pytest.raises(DataError, match="no more batches"):
        list(fine_tune(mlp(), once(), loss, steps=2))


def test_a_loss_that_is_not_finite_is_told_and_leaves_the_weights() -> None:
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model)
    x, y = data()
    good, bad = (x, y), (torch.full_like(x, torch.nan), y)
    steps = fine_tune(model, [good, good, bad], loss, steps=9, bits=3.0, measured=False)
    with pytest.raises(DataError, match="the loss of step 3 is not finite"):
        list(steps)
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


def test_the_network_is_given_back_when_training_ends_or_is_left() -> None:
    torch.manual_seed(0)
    model = mlp()
    birdie.spectral(model)
    offset = next(wrapped(model)).weight.quantizer.offset
    steps = fine_tune(model, [data()], loss, steps=9, bits=3.0)
    for step in steps:
        if step.number == 3:
            break
    assert offset.grad is not None
    assert not bool(offset.grad)
    steps.close()  # type: ignore[attr-defined]
    model.zero_grad()
    birdie.quantization_loss(model).backward()  # type: ignore[no-untyped-call]
    assert bool(offset.grad)
