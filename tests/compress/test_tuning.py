"""Tuning: never worse than what it was given, never touches its inputs, and makes up for what quantization took."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress import tuning
from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate import tuned as by_parts
from birdie.compress.rate.search import Fit, fit_rest
from birdie.compress.rate.tuned import without_subnormals
from birdie.compress.tuning import Done, Tuner
from birdie.errors import BudgetError, ConfigError, DataError

pytestmark = pytest.mark.usefixtures("one_thread")

Batch = tuple[Tensor, Tensor]
REST = ("up.bias", "norm.weight", "norm.bias", "down.weight", "down.bias")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(24, 32), nn.BatchNorm1d(32)
        self.down = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.norm(self.up(x))))
        return out


def net() -> Net:
    torch.manual_seed(0)
    module = Net()
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
        for _ in range(50):
            module(torch.randn(64, 24) * 2)
    return module.eval()


def some_batches(number: int = 10, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(64, 24, generator=generator) * 2, torch.randint(0, 6, (64,), generator=generator))
        for _ in range(number)
    ]


def nats(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def after(questions: int) -> Done:
    """A training that is over after so many questions whether it is."""
    count = -1

    def done() -> float:
        nonlocal count
        count += 1
        return min(count / questions, 1.0)

    return done


def damaged(module: nn.Module) -> dict[str, Tensor]:
    """The weights with the first matrix rounded coarsely."""
    state = {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    return state | {"up.weight": (state["up.weight"] * 2).round() / 2}


def tuner(module: nn.Module, batches: list[Batch] | None = None, loss: Callable[..., Tensor] = nats) -> Tuner:
    batches = batches or some_batches()
    return Tuner(HeldOut(module, batches[-2:], loss), batches[:-2])


def trained(
    module: nn.Module,
    *,
    names: tuple[str, ...] = REST,
    batches: list[Batch] | None = None,
    loss: Callable[..., Tensor] = nats,
    state: Mapping[str, Tensor] | None = None,
    steps: int = 60,
) -> tuple[Tuner, float, float]:
    """Return the tuner, and the differences before and after it trained what is not damaged."""
    one = tuner(module, batches, loss)
    one.load(damaged(module) if state is None else state)
    return one, *one.train(names, after(steps))


def test_the_rest_makes_up_for_a_matrix_on_fresh_data_as_well() -> None:
    module = net()
    one, start, after = trained(module)
    assert after < 0.8 * start
    fresh = HeldOut(module, some_batches(seed=2), nats)
    assert fresh(damaged(module) | {name: one.value(name) for name in REST}) < 0.9 * fresh(damaged(module))
    assert torch.equal(one.value("up.weight"), damaged(module)["up.weight"])


def test_no_input_is_changed() -> None:
    module, batches = net().train(), some_batches()
    originals = {name: weight.clone() for name, weight in module.state_dict().items()}
    inputs = [x.clone() for x, _ in batches]
    trained(module, batches=batches)
    assert all(torch.equal(weight, originals[name]) for name, weight in module.state_dict().items())
    assert all(torch.equal(x, y) for (x, _), y in zip(batches, inputs, strict=True))
    assert module.training
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


@pytest.mark.parametrize("rate", [100.0, 0.003])
def test_what_is_worse_is_undone(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate that throws everything about, which trials lower, and from weights that cannot be better."""
    monkeypatch.setattr(tuning, "RATE", rate)
    module = net()
    one, start, after = trained(module, state=module.state_dict() if rate < 1 else None)
    assert after <= start
    if rate < 1:
        assert all(torch.equal(one.value(name), module.state_dict()[name]) for name in REST)


def test_what_took_sixteen_bits_still_does() -> None:
    """A bias on its way through zero would be kept as float32 for one subnormal value."""
    original = torch.tensor([1e-4, -1e-4, 0.0, 0.5, 0.3, 1.0])
    moved = torch.tensor([1e-6, -1e-7, 1e-9, 0.5, 0.3, 1.0])
    assert torch.equal(without_subnormals(moved, original)[:3], torch.zeros(3))
    assert torch.equal(without_subnormals(moved, original)[3:], moved[3:])
    assert torch.equal(without_subnormals(moved, moved), moved)


def test_two_runs_are_equal() -> None:
    first, second = (trained(net())[0] for _ in range(2))
    assert all(torch.equal(first.value(name), second.value(name)) for name in REST)


def test_zeros_of_a_matrix_stay_zeros_and_those_of_a_bias_move() -> None:
    module = net()
    with torch.no_grad():
        module.down.weight[:, ::3] = 0
        module.down.bias.zero_()
    one, start, after = trained(module)
    assert after < start
    assert torch.equal(one.value("down.weight") == 0, module.down.weight == 0)
    assert bool((one.value("down.bias") != 0).all())


def test_only_float_parameters_change() -> None:
    module = net()
    names = ("down.bias", "norm.running_mean", "norm.num_batches_tracked", "nothing")
    assert tuner(module).tunable(names) == ["down.bias"]
    one, start, after = trained(module, names=names)
    assert after < start
    assert torch.equal(one.value("up.bias"), module.up.bias)


def test_labels_are_not_looked_at() -> None:
    module, batches = net(), some_batches()
    plain, other = (trained(module, batches=some)[0] for some in (batches, [(x, 5 - y) for x, y in batches]))
    assert torch.equal(plain.value("down.bias"), other.value("down.bias"))


@pytest.mark.parametrize("loss", ["squares", "number"])
def test_losses_without_probabilities(loss: str) -> None:
    def squares(module: nn.Module, batch: Batch) -> Tensor:
        y = module(batch[0])
        return F.mse_loss(y, torch.zeros_like(y)) if loss == "squares" else y.square().mean()

    _, start, after = trained(net(), loss=squares)
    assert after < start


def test_what_cannot_be_tuned_stays_as_it_is() -> None:
    module, batches = net(), some_batches()
    with pytest.raises(DataError, match="needs batches"):
        Tuner(HeldOut(module, batches, nats), [])
    broken = {name: torch.full_like(weight, torch.nan) for name, weight in module.named_parameters()}
    assert trained(module, state=broken)[1:] == (math.inf, math.inf)
    ignored = [(x, torch.full_like(y, -100)) for x, y in batches[:-2]] + batches[-2:]  # batches without a target
    assert trained(module, batches=ignored)[0].steps == 0


@pytest.fixture(scope="module")
def calibrated() -> CalibrationResult:
    return birdie.calibrate(wide(), some_batches(40), nats)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 6))


@pytest.mark.parametrize("target", [{"bits": 1.6}, {"quality": 0.002}, {"scheme": "trellis:states=4"}], ids=str)
def test_a_tuned_file_meets_its_target_and_is_better(
    target: dict[str, object], calibrated: CalibrationResult, tmp_path: Path
) -> None:
    module = wide()
    plain = birdie.save(module, tmp_path / "plain", calibration=calibrated, **target)  # type: ignore[arg-type]
    tuned = birdie.save(module, tmp_path / "tuned", calibration=calibrated, tune=1, **target)  # type: ignore[arg-type]
    assert plain.untuned is None
    assert tuned.untuned == pytest.approx(plain.error, rel=1e-3)
    assert tuned.error is not None
    assert plain.error is not None
    if "quality" in target:
        assert tuned.error <= 0.002
        assert tuned.bytes <= plain.bytes
    else:
        assert tuned.error <= plain.error
    if "scheme" in target:
        assert tuned.error < plain.error
    if "bits" in target:
        assert tuned.budget is not None
        assert 0.97 * tuned.budget <= tuned.bytes <= tuned.budget  # the last matrix alone fills it
    measured = calibrated.measured()(birdie.load(tmp_path / "tuned"))
    assert measured == pytest.approx(tuned.error, rel=1e-4)


def test_what_may_be_chance_is_not_kept(calibrated: CalibrationResult, tmp_path: Path) -> None:
    """Eight targets are held out, on which one state in two is better by luck."""
    few = [(x[:4], y[:4]) for x, y in some_batches(2, seed=9)]
    measured = HeldOut(calibrated.measured().module, few, nats)
    known = replace(calibrated, held_out=measured)
    summary = birdie.save(wide(), tmp_path / "x", bits=3.0, calibration=known, tune=0.2)
    assert summary.error == pytest.approx(summary.untuned)
    losses = measured.nats(birdie.load(tmp_path / "x"))
    assert losses is not None
    assert len(losses) == 8
    assert float(losses.mean()) == pytest.approx(summary.error, rel=1e-4)


def test_rules_that_keep_every_bit_are_kept(calibrated: CalibrationResult, tmp_path: Path) -> None:
    module = wide()
    rules = [("2.bias", "lossless"), ("*", "trellis:states=4")]
    birdie.save(module, tmp_path / "x", calibration=calibrated, tune=0.7, scheme=rules)
    loaded = birdie.load(tmp_path / "x")
    assert torch.equal(loaded["2.bias"], module.state_dict()["2.bias"])
    assert not torch.equal(loaded["0.bias"], module.state_dict()["0.bias"].half().float())


def test_the_last_part_meets_the_budget_beside_a_rule_for_the_largest_matrix(
    calibrated: CalibrationResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def recorded(*arguments: Any) -> Fit:
        fit = fit_rest(*arguments)
        sizes.append(fit.bytes)
        return fit

    monkeypatch.setattr(by_parts, "fit_rest", recorded)
    rules = [("2.weight", "int4")]
    summary = birdie.save(wide(), tmp_path / "x", budget=14_000, calibration=calibrated, tune=0.3, scheme=rules)
    assert len(sizes) == 1
    assert max(summary.bytes, *sizes, 0) <= 14_000


def test_a_last_part_that_cannot_meet_the_budget_leaves_the_file_without_tuning(
    calibrated: CalibrationResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Fit:
        raise BudgetError("too small")

    monkeypatch.setattr(by_parts, "fit_rest", refuse)
    summary = birdie.save(wide(), tmp_path / "x", budget=14_000, calibration=calibrated, tune=0.2)
    assert summary.error == summary.untuned


def test_settings_that_make_no_sense(calibrated: CalibrationResult, tmp_path: Path) -> None:
    for seconds in (-1, float("nan"), float("inf"), "5 apples", True):
        with pytest.raises(ConfigError, match=r"number of seconds|not a duration"):
            birdie.save(wide(), tmp_path / "x", calibration=calibrated, tune=seconds)
    with pytest.raises(ConfigError, match="tune trains on inputs"):
        birdie.save(wide(), tmp_path / "x", bits=4, tune=1)
    for known in (replace(calibrated, files=[]), replace(calibrated, batches=())):
        with pytest.raises(ConfigError, match="tuning"):
            birdie.save(wide(), tmp_path / "x", bits=4, calibration=known, tune=1)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("layers", "options"), [(1, {"bits": 6}), (1, {"quality": 1e-3}), (3, {"bits": 6})])
def test_a_tuning_without_anything_to_train_says_so(layers: int, options: dict[str, Any]) -> None:
    """One matrix is encoded last, so nothing makes up for its errors."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(24, 24) for _ in range(layers)))
    data = [(x, y) for x, y in some_batches()]
    summary = birdie.save(module, BytesIO(), calibration=(module, data, nats), tune=0.1, effort="fast", **options)
    assert summary.nothing_to_tune == (layers == 1)
