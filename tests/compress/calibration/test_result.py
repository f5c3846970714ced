"""Laws of calibrated compression: quality is met and judged on other data, budgets as ever, the function unchanged."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.search import TINY
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.state import EncodedState
from birdie.errors import BudgetError, ConfigError, DataError, WeightsError

Batch = tuple[Tensor, Tensor]
LABELS = 10


class Declared(nn.Sequential):
    """A network that declares that its hidden units may be sorted."""

    def symmetries(self) -> Any:
        """Return the units of both hidden layers."""
        return [((f"{i}.weight", 0, 1), (f"{i}.bias", 0, 1), (f"{i + 2}.weight", 1, 1)) for i in (0, 2)]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = Declared(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, LABELS))
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(2.5)  # so that its predictions differ, as those of a trained one do
    return net


def batches(count: int = 10, size: int = 64, seed: int = 1) -> list[Batch]:
    """Inputs that live in few dimensions, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(-torch.arange(64) / 8.0)
    return [
        (torch.randn(size, 64, generator=generator) * scale, torch.randint(0, LABELS, (size,), generator=generator))
        for _ in range(count)
    ]


def loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def measured(model: nn.Module, path: Path, data: list[Batch]) -> float:
    """KL of the decoded file in a module of its own, by plain arithmetic."""
    decoded = birdie.load(path, into=network(9))
    total, count = 0.0, 0
    with torch.no_grad():
        for x, _ in data:
            p, q = (F.log_softmax(net(x).double(), -1) for net in (model, decoded))
            total, count = total + float((p.exp() * (p - q)).sum()), count + len(x)
    return total / count


def test_a_quality_is_met_on_data_held_back_and_nearly_used_up(tmp_path: Path) -> None:
    model, data = network(), batches()
    birdie.save(model, tmp_path / "x.birdie", quality=0.01, calibration=(model, data, loss))
    held_back = data[-2:]
    assert 0.8 * 0.01 < measured(model, tmp_path / "x.birdie", held_back) <= 0.01 * (1 + 1e-4)


def test_a_better_quality_takes_more_bytes(tmp_path: Path) -> None:
    model = network()
    known = CalibrationResult.of(model.state_dict(), (model, batches(), loss))
    sizes = [birdie.save(model, tmp_path / f"{q}", quality=q, calibration=known).bytes for q in (0.001, 0.01, 0.1)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_calibration_buys_quality_at_the_same_bytes(tmp_path: Path) -> None:
    model, data = network(), batches(20)
    blind, known = tmp_path / "blind.birdie", tmp_path / "known.birdie"
    birdie.save(model, blind, bits=3)
    birdie.save(model, known, bits=3, calibration=(model, data, loss))
    fresh = batches(4, seed=5)
    assert known.stat().st_size <= blind.stat().st_size + TINY
    assert measured(model, known, fresh) < 0.5 * measured(model, blind, fresh)


def test_refit_gains_on_data_it_has_not_seen_at_next_to_no_bytes(tmp_path: Path) -> None:
    model = network()
    known = CalibrationResult.of(model.state_dict(), (model, batches(20), loss))
    plain, tuned = tmp_path / "plain.birdie", tmp_path / "tuned.birdie"
    birdie.save(model, plain, scheme="ternary", calibration=known)
    birdie.save(model, tuned, scheme="ternary", calibration=replace(known, refit=40))
    assert tuned.stat().st_size < 1.02 * plain.stat().st_size
    fresh = batches(8, seed=5)
    assert measured(model, tuned, fresh) < 0.8 * measured(model, plain, fresh)


def test_refit_keeps_the_budget(tmp_path: Path) -> None:
    model = network()
    known = CalibrationResult.of(model.state_dict(), (model, batches(), loss))
    budget = birdie.save(model, tmp_path / "x", bits=1.5, calibration=replace(known, refit=10)).budget
    assert budget is not None
    assert 0.97 * budget < (tmp_path / "x").stat().st_size <= budget


def test_refit_makes_a_quality_no_dearer(tmp_path: Path) -> None:
    model = network()
    known = CalibrationResult.of(model.state_dict(), (model, batches(20), loss))
    results = [replace(known, refit=steps) for steps in (0, 40)]
    sizes = [birdie.save(model, tmp_path / "x", quality=0.05, calibration=result).bytes for result in results]
    assert sizes[1] < sizes[0]


def test_an_encoding_is_measured_once() -> None:
    net, calls = network(), 0

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(module(batch[0]), batch[1])

    calibration = CalibrationResult(net.state_dict(), {}, HeldOut(net, batches(2), loss))
    first, second = (
        EncodedState({name: Lossless().encode(name, value * factor) for name, value in net.state_dict().items()}, {})
        for factor in (1.0, 1.1)
    )
    expected = calibration.divergence(first), calibration.divergence(second)
    calls = 0
    assert (calibration.divergence(first), calibration.divergence(second)) == expected
    assert calls == 0
    assert expected[0] < expected[1]


@pytest.mark.parametrize("refit", [-1, 1.5])
def test_refit_takes_a_number_of_steps(refit: float) -> None:
    with pytest.raises(ConfigError, match=f"{refit}.* number of steps"):
        birdie.calibrate(network(), batches(), loss, refit=refit)  # type: ignore[arg-type]


def test_the_same_bytes_twice_and_nothing_of_the_caller_changes(tmp_path: Path) -> None:
    model, data = network(), batches()
    model.train()
    originals = {name: weight.clone() for name, weight in model.state_dict().items()}
    files = []
    for name in ("a", "b"):
        birdie.save(model, tmp_path / name, bits=4, calibration=(model, iter(data), loss))
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    assert model.training
    assert all(torch.equal(weight, originals[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_sorted_units_leave_the_function_as_it_was() -> None:
    model = network()
    known = CalibrationResult.of(model.state_dict(), (model, batches(), loss))
    moved = network(3)
    moved.load_state_dict(known.state)
    assert not torch.equal(known.state["0.weight"], model.state_dict()["0.weight"])
    x = batches()[0][0]
    torch.testing.assert_close(moved(x), model(x))
    assert HeldOut(model, batches(2), loss)(known.state) < 1e-6


def test_units_stay_where_they_are_when_told_to() -> None:
    model = network()
    known = CalibrationResult.of(model.state_dict(), (model, batches(), loss), symmetries=False)
    assert all(torch.equal(known.state[name], weight) for name, weight in model.state_dict().items())


def test_schemes_by_hand_are_calibrated_too(tmp_path: Path) -> None:
    model, data = network(), batches()
    plain, known = tmp_path / "plain.birdie", tmp_path / "known.birdie"
    rules = [("*.weight", "trellis:states=4,sigma=0.8")]
    birdie.save(model, plain, scheme=rules)
    birdie.save(model, known, scheme=rules, calibration=(model, data, loss))
    assert {row.scheme for row in birdie.inspect(known).tensors if row.name.endswith("weight")} == {"trellis"}
    assert measured(model, known, data) < 0.8 * measured(model, plain, data)


def test_schemes_by_hand_are_calibrated_beside_a_budget_too(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "x.birdie"
    known = CalibrationResult.of(model.state_dict(), (model, batches(), loss))
    rules = [("2.weight", "gptq:bits=4,clip_sigmas=3")]
    birdie.save(model, path, scheme=rules, calibration=known)
    alone = birdie.load(path)["2.weight"]
    birdie.save(model, path, scheme=rules, calibration=known, bits=4)
    assert torch.equal(birdie.load(path)["2.weight"], alone)
    birdie.save(model, path, scheme=rules)
    assert not torch.equal(birdie.load(path)["2.weight"], alone)


@pytest.mark.parametrize(
    ("calibration", "error"),
    [
        (lambda model: (model, [], loss), DataError),
        (lambda model: (model, batches()), ConfigError),
        (lambda _: ("model", batches(), loss), ConfigError),
        (lambda _: (nn.Sequential(nn.Linear(4, 4)), batches(), loss), WeightsError),
        (lambda model: (model, batches(), lambda *_: torch.zeros(())), ConfigError),
        (lambda model: (model, [(torch.full((4, 64), torch.nan), torch.zeros(4).long())], loss), DataError),
    ],
)
def test_calibration_that_cannot_be_is_refused(calibration, error, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = network()
    with pytest.raises(error):
        birdie.save(model, tmp_path / "x.birdie", bits=4, calibration=calibration(model))
    assert not list(tmp_path.iterdir())


def test_a_quality_judged_by_predictions_of_nan_says_so(tmp_path: Path) -> None:
    model, data = network(), batches()
    data[-1][0][0, 0] = float("nan")
    with pytest.raises(DataError, match="NaN on held-out batches"):
        birdie.save(model, tmp_path / "x", quality=0.1, calibration=(model, data, loss))
    assert not list(tmp_path.iterdir())


def test_classes_that_are_ruled_out_cost_no_divergence() -> None:
    """Logits of minus infinity: p log p of what cannot be is 0, not NaN."""
    model, data = network(), batches(1)
    mask = torch.zeros(LABELS)
    mask[-3:] = float("-inf")

    def masked(module: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(module(batch[0]) + mask, batch[1].clamp_max(LABELS - 4), reduction="sum")

    judge = HeldOut(model, data, masked)
    assert judge(model.state_dict()) == 0
    other = judge(network(1).state_dict())
    with torch.no_grad():
        p, q = (F.log_softmax(net(data[0][0])[:, :-3].double(), -1) for net in (model, network(1)))
    assert other == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)


def test_a_quality_needs_calibration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calibration"):
        birdie.save(network(), tmp_path / "x", quality=0.1)
    assert not list(tmp_path.iterdir())


def squared_error(module: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(module(batch[0]), F.one_hot(batch[1], LABELS).float())


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    return (ours - theirs).square().sum() / (ours - ours.mean()).square().sum()


def binary(module: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(module(batch[0]), F.one_hot(batch[1], LABELS).float())


def binary_kl(ours: Tensor, theirs: Tensor) -> Tensor:
    p, q = torch.sigmoid(ours), torch.sigmoid(theirs)
    return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()


def energy(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch[0]).square().mean()  # type: ignore[no-any-return]


def change_of_energy(ours: Tensor, theirs: Tensor) -> Tensor:
    first, second = (side.view(2, -1).square().mean(1) for side in (ours, theirs))  # two batches
    return (first - second).abs().sum() / first.sum()


@pytest.mark.parametrize(
    ("call", "by_hand"), [(squared_error, relative_error), (binary, binary_kl), (energy, change_of_energy)]
)
def test_a_quality_has_a_meaning_for_any_loss(
    call: Callable[[nn.Module, Batch], Tensor], by_hand: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    model, data = network(), batches()
    birdie.save(model, tmp_path / "x.birdie", quality=0.01, calibration=(model, data, call))
    decoded = birdie.load(tmp_path / "x.birdie", into=network(9))
    x = torch.cat([batch[0] for batch in data[-2:]])
    with torch.no_grad():
        difference = float(by_hand(model(x).double(), decoded(x).double()))
    assert difference <= 0.01 * (1 + 1e-4)
    if call is not energy:  # errors of both signs cancel in the energy, so it is not monotone in the scales
        assert difference > 0.5 * 0.01


def test_refit_needs_no_cross_entropy(tmp_path: Path) -> None:
    model = network()
    known = CalibrationResult.of(model.state_dict(), (model, batches(20), squared_error))
    assert known.held_out is not None
    results = []
    for steps in (0, 40):
        birdie.save(model, tmp_path / "x", scheme="ternary", calibration=replace(known, refit=steps))
        results.append(known.held_out(birdie.load(tmp_path / "x")))
    assert results[1] < results[0]


def test_a_loss_of_no_single_number_has_no_quality(tmp_path: Path) -> None:
    model = network()
    several = (model, batches(), lambda module, batch: module(batch[0]))
    with pytest.raises(ConfigError, match="one number"):
        birdie.save(model, tmp_path / "x", quality=0.1, calibration=several)
    assert not list(tmp_path.iterdir())


def test_wide_layers_in_blocks_keep_most_of_the_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = network(), batches(20)
    fresh, results = batches(4, seed=5), []
    for columns in (0, 32, 128):
        monkeypatch.setattr("birdie.compress.calibration.sensitivity.MAX_COLUMNS", columns)
        calibration = (model, data, loss) if columns else None
        birdie.save(model, tmp_path / "x", bits=3, calibration=calibration)
        results.append(measured(model, tmp_path / "x", fresh))
    none, blocks, dense = results
    assert dense < 1.02 * blocks  # equal but for noise here
    assert blocks < 0.7 * none


def test_two_examples_are_no_worse_than_none(tmp_path: Path) -> None:
    """A Hessian of two examples has 62 directions without any weight, which other data have."""
    model, none, few = network(), tmp_path / "none.birdie", tmp_path / "few.birdie"
    birdie.save(model, none, bits=4)
    birdie.save(model, few, bits=4, calibration=(model, batches(1, size=2), loss))
    fresh = batches(4, seed=5)
    assert measured(model, few, fresh) < 1.25 * measured(model, none, fresh)


def test_a_quality_that_what_is_pinned_has_spoilt_is_refused(tmp_path: Path) -> None:
    model = network()
    rules = [("0.weight", "ternary")]
    with pytest.raises(BudgetError, match="cannot be met"):
        birdie.save(model, tmp_path / "x", quality=1e-9, scheme=rules, calibration=(model, batches(), loss))
    assert not list(tmp_path.iterdir())
