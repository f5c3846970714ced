"""Laws of calibrated compression: quality is met and judged on other data, budgets as ever, the function unchanged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.calibration.held_out import HeldOut
from birdie.errors import BudgetError, ConfigError, DataError, WeightsError
from tests.compress.networks import LABELS, Batch, batches, classify, mlp
from tests.nightly import mostly_nightly

Loss = Callable[[nn.Module, Batch], Tensor]


def squared_error(module: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(module(batch[0]), F.one_hot(batch[1], LABELS).float())


def binary(module: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(module(batch[0]), F.one_hot(batch[1], LABELS).float())


def energy(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch[0]).square().mean()  # type: ignore[no-any-return]


def kl(ours: Tensor, theirs: Tensor) -> Tensor:
    p, q = (side.log_softmax(-1) for side in (ours, theirs))
    return (p.exp() * (p - q)).sum(-1).mean()


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    return (ours - theirs).square().sum() / (ours - ours.mean()).square().sum()


def binary_kl(ours: Tensor, theirs: Tensor) -> Tensor:
    p, q = torch.sigmoid(ours), torch.sigmoid(theirs)
    return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()


def change_of_energy(ours: Tensor, theirs: Tensor) -> Tensor:
    first, second = (side.view(2, -1).square().mean(1) for side in (ours, theirs))  # two batches
    return (first - second).abs().sum() / first.sum()


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    mostly_nightly(
        [(classify, kl), (squared_error, relative_error), (binary, binary_kl), (energy, change_of_energy)],
        [(classify, kl), (energy, change_of_energy)],
    ),
)
def test_a_quality_is_met_on_data_held_back_and_nearly_used_up(
    loss: Loss, by_hand: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    """In the measure of the loss, whichever that is; a worse quality takes fewer bytes."""
    model, data = mlp(), batches()
    known = birdie.calibrate(model, data, loss)
    summary = birdie.save(model, tmp_path / "x.birdie", quality=0.01, calibration=known)
    if loss is classify:
        worse = birdie.save(model, tmp_path / "worse.birdie", quality=0.1, calibration=known)
        assert worse.bytes < summary.bytes
    decoded, x = birdie.load(tmp_path / "x.birdie", into=mlp(9)), torch.cat([batch[0] for batch in data[-2:]])
    with torch.no_grad():
        difference = float(by_hand(model(x).double(), decoded(x).double()))
    assert difference <= 0.01 * (1 + 1e-4)
    if loss is not energy:  # errors of both signs cancel in the energy, so it is not monotone in the scales
        assert difference > 0.5 * 0.01


def test_sorted_units_leave_the_function_as_it_was() -> None:
    model, moved = mlp(), mlp(3)
    known = birdie.calibrate(model, batches(), classify)
    moved.load_state_dict(known.state)
    assert not torch.equal(known.state["0.weight"], model.state_dict()["0.weight"])
    x = batches()[0][0]
    torch.testing.assert_close(moved(x), model(x))
    assert HeldOut(model, batches(2), classify)(known.state) < 1e-6
    unsorted = birdie.calibrate(model, batches(), classify, symmetries=False).state
    assert all(torch.equal(unsorted[name], weight) for name, weight in model.state_dict().items())


def test_schemes_by_hand_are_calibrated_beside_a_budget_too(tmp_path: Path) -> None:
    model, path = mlp(), tmp_path / "x.birdie"
    known = birdie.calibrate(model, batches(), classify)
    rules = [("2.weight", "gptq:bits=4,clip_sigmas=3")]
    settings: list[dict[str, Any]] = [{"calibration": known}, {"calibration": known, "bits": 4}, {}]
    stored = []
    for more in settings:
        birdie.save(model, path, scheme=rules, **more)
        stored.append(birdie.load(path)["2.weight"])
    assert torch.equal(stored[0], stored[1])
    assert not torch.equal(stored[0], stored[2])


def with_nan(data: list[Batch]) -> list[Batch]:
    data[-1][0][0, 0] = float("nan")
    return data


REFUSED: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], type[Exception], str]] = {
    "no data": (lambda model: {"calibration": (model, [], classify)}, DataError, "batches"),
    "no loss": (lambda model: {"calibration": (model, batches())}, ConfigError, "loss"),
    "no module": (lambda _: {"calibration": ("model", batches(), classify)}, ConfigError, "module"),
    "another module": (
        lambda _: {"calibration": (nn.Sequential(nn.Linear(4, 4)), batches(), classify)},
        WeightsError,
        "weight",
    ),
    "a quality without data": (lambda _: {"quality": 0.1}, ConfigError, "calibration"),
    "a quality of several numbers": (
        lambda model: {"quality": 0.1, "calibration": (model, batches(), lambda net, batch: net(batch[0]))},
        ConfigError,
        "one number",
    ),
    "a quality of NaN": (
        lambda model: {"quality": 0.1, "calibration": (model, with_nan(batches()), classify)},
        DataError,
        "NaN on held-out batches",
    ),
    "a quality that a rule has spoilt": (
        lambda model: {
            "quality": 1e-9,
            "scheme": [("0.weight", "ternary")],
            "calibration": (model, batches(), classify),
        },
        BudgetError,
        "cannot be met",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved_is_refused_and_leaves_no_file(case: str, tmp_path: Path) -> None:
    model, (settings, error, words) = mlp(), REFUSED[case]
    with pytest.raises(error, match=words):
        birdie.save(model, tmp_path / "x.birdie", **settings(model))
    assert not list(tmp_path.iterdir())
