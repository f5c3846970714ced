"""Tuning: never worse than what it was given, never touches its inputs, and finds what quantization took away."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress import tuning
from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.registry import decode
from birdie.compress.scheme import Blocks, Encoded
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.tuning import Tuned, Tuner, as_stored, has_gains, smaller, with_gains_of_rows
from birdie.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("one_thread")

Batch = tuple[Tensor, Tensor]
SMALL = ("up.bias", "norm.weight", "norm.bias", "down.bias")


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


def encoded_matrices(module: nn.Module, sigma: float = 0.8) -> dict[str, Encoded]:
    state = module.state_dict()
    return {name: Trellis(4, sigma).encode(name, weight) for name, weight in state.items() if weight.ndim == 2}


def decoded(module: nn.Module, encoded: dict[str, Encoded]) -> dict[str, Tensor]:
    """The matrices from paths, all else from 16 bits."""
    state = module.state_dict()
    return {
        name: decode(encoded[name]) if name in encoded else as_stored(weight, weight) for name, weight in state.items()
    }


def tune(
    module: nn.Module,
    encoded: dict[str, Encoded],
    *,
    names: tuple[str, ...] = SMALL,
    batches: list[Batch] | None = None,
    loss: Callable[..., Tensor] = nats,
    seconds: int = 120,
) -> Tuned:
    """Tune by a clock that goes on by a second whenever it is asked: about half as many steps."""
    batches = batches or some_batches()
    held_out, clock = HeldOut(module, batches[-2:], loss), count()
    tuner = Tuner(held_out, batches[:-2])
    return tuner.run(decoded(module, encoded), encoded, names, seconds, clock=lambda: float(next(clock)))


def result(module: nn.Module, encoded: dict[str, Encoded], tuned: Tuned) -> dict[str, Tensor]:
    """Return what a file holds of a tuned model."""
    matrices = {name: decode(with_gains_of_rows(encoded[name], gains)) for name, gains in tuned.gains.items()}
    return decoded(module, encoded) | matrices | dict(tuned.tensors)


def test_a_tuned_model_is_nearer_to_the_float_model_and_its_error_is_that_of_the_file() -> None:
    module = net()
    encoded = encoded_matrices(module)
    tuned = tune(module, encoded)
    assert tuned.divergence < 0.9 * tuned.untuned
    measure = HeldOut(module, some_batches()[-2:], nats)
    assert measure(decoded(module, encoded)) == pytest.approx(tuned.untuned, rel=1e-6)
    assert measure(result(module, encoded, tuned)) == pytest.approx(tuned.divergence, rel=1e-6)
    fresh = HeldOut(module, some_batches(seed=2), nats)
    assert fresh(result(module, encoded, tuned)) < fresh(decoded(module, encoded))


def test_gains_find_the_factors_of_rows() -> None:
    module = net()
    encoded = encoded_matrices(module, 0.02)
    for name, one in encoded.items():
        numbers, scales = one.streams
        wrong = scales + np.arange(len(scales))[:, None] % 3 - 1  # up to a sixteenth of an octave
        encoded[name] = replace(one, streams=(numbers, wrong))
    tuned = tune(module, encoded, names=(), seconds=800)
    assert tuned.divergence < 0.2 * tuned.untuned


def test_no_input_is_changed() -> None:
    module, batches = net().train(), some_batches()
    encoded = encoded_matrices(module)
    originals = {name: weight.clone() for name, weight in module.state_dict().items()}
    inputs = [x.clone() for x, _ in batches]
    tune(module, encoded, batches=batches)
    assert all(torch.equal(weight, originals[name]) for name, weight in module.state_dict().items())
    assert all(torch.equal(x, y) for (x, _), y in zip(batches, inputs, strict=True))
    assert module.training
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


def test_what_is_worse_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that throws everything about: training goes back three times, and ends."""
    monkeypatch.setattr(tuning, "RATE", 50.0)
    module = net()
    tuned = tune(module, encoded_matrices(module, 0.05), seconds=10_000)
    assert (dict(tuned.gains), dict(tuned.tensors), tuned.steps) == ({}, {}, 0)
    assert tuned.divergence == tuned.untuned


def test_what_took_sixteen_bits_still_does() -> None:
    """A bias on its way through zero would be kept as float32 for one subnormal value."""
    original = torch.tensor([1e-4, -1e-4, 0.0, 0.5, 0.3, 1.0])
    moved = torch.tensor([1e-6, -1e-7, 1e-9, 0.5, 0.3, 1.0])
    assert torch.equal(as_stored(moved, original), as_stored(moved, original).half().float())
    assert torch.equal(as_stored(moved, original)[:3], torch.zeros(3))
    assert torch.equal(as_stored(moved, moved), moved)


def test_two_runs_are_equal() -> None:
    module = net()
    first, second = (tune(module, encoded_matrices(module), seconds=40) for _ in range(2))
    assert torch.equal(first.tensors["down.bias"], second.tensors["down.bias"])
    assert all(np.array_equal(first.gains[name], second.gains[name]) for name in first.gains)


def test_only_float_parameters_that_the_loss_uses_change() -> None:
    module = net()
    module.spare = nn.Linear(3, 4)
    module.other = nn.Module()
    module.other.bias = module.down.bias
    names = ("down.bias", "other.bias", "spare.bias", "norm.running_mean", "norm.num_batches_tracked")
    tuned = tune(module, encoded_matrices(module), names=names).tensors
    assert tuned.keys() == {"down.bias", "other.bias", "spare.bias"}
    assert torch.equal(tuned["down.bias"], tuned["other.bias"])
    assert not torch.equal(tuned["down.bias"], module.down.bias)
    assert torch.equal(tuned["spare.bias"], as_stored(module.spare.bias.detach(), module.spare.bias.detach()))


def test_labels_are_not_looked_at() -> None:
    module = net()
    encoded, batches = encoded_matrices(module), some_batches()
    plain, other = (tune(module, encoded, batches=some) for some in (batches, [(x, 5 - y) for x, y in batches]))
    assert torch.equal(plain.tensors["down.bias"], other.tensors["down.bias"])


def test_batches_may_be_made_in_inference_mode() -> None:
    module = net()
    with torch.inference_mode():
        batches = some_batches()
    assert tune(module, encoded_matrices(module), batches=batches).divergence == pytest.approx(
        tune(module, encoded_matrices(module)).divergence
    )


@pytest.mark.parametrize("loss", ["squares", "number"])
def test_losses_without_probabilities(loss: str) -> None:
    def squares(module: nn.Module, batch: Batch) -> Tensor:
        y = module(batch[0])
        return F.mse_loss(y, torch.zeros_like(y)) if loss == "squares" else y.square().mean()

    module = net()
    tuned = tune(module, encoded_matrices(module), loss=squares)
    assert tuned.divergence < tuned.untuned


class Together(nn.Module):
    """Its outputs depend on all elements of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x - x.mean(0))
        return out


def test_batches_are_cut_where_that_changes_no_prediction() -> None:
    batches = some_batches()
    assert len(smaller(batches, HeldOut(net(), batches, nats))) == tuning.PARTS * len(batches)
    assert len(smaller(batches, HeldOut(Together(), batches, nats))) == len(batches)
    mixed = [(x, torch.zeros(3)) for x, _ in batches]
    assert len(smaller(mixed, HeldOut(net(), batches, nats))) == len(batches)


def test_which_tensors_have_gains() -> None:
    weight = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
    complete = Trellis(8).encode("w", weight)
    parts = tuple(Trellis(8).encode("w", weight[rows]) for rows in (slice(0, 15), slice(15, 40)))
    cut = Blocks.of((40, 20), torch.float32, parts)
    gains = np.linspace(0.9, 1.1, 40)
    for encoded in (complete, cut):
        assert has_gains(encoded)
        expected = decode(encoded) * torch.from_numpy(2 ** (np.rint(np.log2(gains) * 128) / 128)).float()[:, None]
        assert torch.allclose(decode(with_gains_of_rows(encoded, gains)), expected, rtol=1e-6)
    assert with_gains_of_rows(complete, np.ones(40)).streams == complete.streams
    assert not has_gains(birdie.schemes.Grid(bits=4).encode("w", weight))


def test_what_cannot_be_tuned_stays_as_it_is() -> None:
    module, batches = net(), some_batches()
    held_out = HeldOut(module, batches, nats)
    with pytest.raises(DataError, match="needs batches"):
        Tuner(held_out, [])
    broken = {name: torch.full_like(weight, torch.nan) for name, weight in module.named_parameters()}
    assert Tuner(held_out, batches).run(broken, {}, SMALL, 1) == Tuned({}, {}, math.inf, math.inf, 0)
    ignored = [(x, torch.full_like(y, -100)) for x, y in batches]  # batches without a target
    assert Tuner(held_out, ignored).run(module.state_dict(), {}, SMALL, 1).steps == 0


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
    tuned = birdie.save(module, tmp_path / "tuned", calibration=calibrated, tune=3, **target)  # type: ignore[arg-type]
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
        assert 0.99 * tuned.budget <= tuned.bytes <= tuned.budget
    measured = calibrated.measured()(birdie.load(tmp_path / "tuned"))
    assert measured == pytest.approx(tuned.error, rel=1e-4)


def test_what_may_be_chance_is_not_kept(calibrated: CalibrationResult, tmp_path: Path) -> None:
    """Eight targets are held out, on which one state in two is better by luck."""
    few = [(x[:4], y[:4]) for x, y in some_batches(2, seed=9)]
    measured = HeldOut(calibrated.measured().module, few, nats)
    known = replace(calibrated, held_out=measured)
    summary = birdie.save(wide(), tmp_path / "x", bits=3.0, calibration=known, tune=0.5)
    assert summary.error == pytest.approx(summary.untuned)
    losses = measured.nats(birdie.load(tmp_path / "x"))
    assert losses is not None
    assert len(losses) == 8
    assert float(losses.mean()) == pytest.approx(summary.error, rel=1e-4)


def test_rules_that_keep_every_bit_are_kept(calibrated: CalibrationResult, tmp_path: Path) -> None:
    module = wide()
    rules = [("2.bias", "lossless"), ("*", "trellis:states=4")]
    birdie.save(module, tmp_path / "x", calibration=calibrated, tune=2, scheme=rules)
    loaded = birdie.load(tmp_path / "x")
    assert torch.equal(loaded["2.bias"], module.state_dict()["2.bias"])
    assert not torch.equal(loaded["0.bias"], module.state_dict()["0.bias"].half().float())


def test_settings_that_make_no_sense(calibrated: CalibrationResult, tmp_path: Path) -> None:
    for seconds in (-1, float("nan"), float("inf"), "5min", True):
        with pytest.raises(ConfigError, match="number of seconds"):
            birdie.save(wide(), tmp_path / "x", calibration=calibrated, tune=seconds)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tune trains on inputs"):
        birdie.save(wide(), tmp_path / "x", bits=4, tune=1)
    for known in (replace(calibrated, files=[]), replace(calibrated, batches=())):
        with pytest.raises(ConfigError, match="tuning"):
            birdie.save(wide(), tmp_path / "x", bits=4, calibration=known, tune=1)
    assert not (tmp_path / "x").exists()
