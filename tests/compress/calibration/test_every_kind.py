"""Laws of every kind of calibration: with gradients, with files, by forward passes, by outputs alone."""

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.compress.calibration.result import CalibrationResult
from birdie.errors import ConfigError, DataError, WeightsError
from tests.compress.networks import FEATURES, LABELS, batches, classify, divergence, mlp
from tests.nightly import mostly_nightly

Loss = Callable[[nn.Module, Any], Tensor]


def by_forward_passes(model: nn.Module, data: Any, loss: Loss) -> CalibrationResult:
    return CalibrationResult.of(model.state_dict(), (model, data, loss), gradients=False)


def by_outputs(model: nn.Module, data: Any, _: Loss) -> CalibrationResult:
    return birdie.calibrate(model, example_inputs=[x for x, _ in data])


KINDS: dict[str, Callable[[nn.Module, Any, Loss], CalibrationResult]] = {
    "with gradients": birdie.calibrate,
    "with files": lambda model, data, loss: birdie.calibrate(model, data, loss, offload=True),
    "by forward passes": by_forward_passes,
    "by outputs": by_outputs,
}
OF_A_LOSS = [kind for kind in KINDS if kind != "by outputs"]
WITH_GRADIENTS = OF_A_LOSS[:2]


def normalized() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 48), nn.BatchNorm1d(48), nn.Dropout(0.5), nn.ReLU(), nn.Linear(48, LABELS)
    return nn.Sequential(*layers)


def assert_same(one: CalibrationResult, other: CalibrationResult) -> None:
    assert one.sensitivities.keys() == other.sensitivities.keys()
    for name, known in other.sensitivities.items():
        for part in ("hessian", "row_fisher", "output"):
            expected, measured = getattr(known, part), getattr(one.sensitivities[name], part)
            assert (measured is None) == (expected is None)
            assert expected is None or torch.equal(measured, expected), (name, part)


def fingerprint(module: nn.Module) -> list[Any]:
    """Return all of a module that a calibration could change."""
    return [
        {name: tensor.tolist() for name, tensor in module.state_dict().items()},
        [(part.training, list(part.__dict__), len(part._forward_hooks)) for part in module.modules()],
        [
            (weight.requires_grad, None if weight.grad is None else weight.grad.tolist())
            for weight in module.parameters()
        ],
    ]


def failing(module: nn.Module, batch: Any) -> Tensor:
    module(batch[0])
    raise ZeroDivisionError


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_comes_twice_and_nothing_of_the_caller_changes(kind: str) -> None:
    """Whatever was drawn before; frozen weights are looked at too; also where the loss fails."""
    model, data = normalized().train(), batches(4)
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[4].weight.grad = torch.ones(LABELS, 48)
    original = fingerprint(model)
    torch.manual_seed(5)
    generator = torch.get_rng_state()
    first = KINDS[kind](model, data, classify)
    assert torch.equal(torch.get_rng_state(), generator)
    assert fingerprint(model) == original
    torch.rand(3)
    with torch.no_grad():
        assert_same(KINDS[kind](model, data, classify), first)
        assert not torch.is_grad_enabled()
    assert first.sensitivities.keys() == {"0.weight", "4.weight"}
    if kind in OF_A_LOSS:
        with pytest.raises(ZeroDivisionError):
            KINDS[kind](model, data, failing)
        assert fingerprint(model) == original


@pytest.fixture(scope="module")
def uncalibrated(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the divergence of a file of four bits a weight that knows no data."""
    path = tmp_path_factory.mktemp("uncalibrated") / "x.birdie"
    birdie.save(mlp(), path, bits=4)
    return divergence(mlp(), path, batches(4, seed=5))


@pytest.mark.parametrize("kind", KINDS)
def test_it_buys_quality_at_the_same_bytes(kind: str, uncalibrated: float, tmp_path: Path) -> None:
    model = mlp()
    known = KINDS[kind](model, batches(10), classify)
    summary = birdie.save(model, tmp_path / "x.birdie", bits=4, calibration=known)
    assert summary.budget is not None
    assert summary.bytes <= summary.budget
    assert divergence(model, tmp_path / "x.birdie", batches(4, seed=5)) < 0.7 * uncalibrated


PARTS = ("call", "weights", "batches")


def of_inference(part: str, where: str) -> torch.inference_mode:
    return torch.inference_mode(where in (part, "everything"))


@pytest.mark.parametrize("kind", WITH_GRADIENTS)
@pytest.mark.parametrize("where", ["everything", *(pytest.param(part, marks=pytest.mark.nightly) for part in PARTS)])
def test_inference_mode_changes_nothing(where: str, kind: str) -> None:
    with of_inference("weights", where):
        model = normalized().requires_grad_(False)
    with of_inference("batches", where):
        data = batches(4)
    parameters = dict(model.named_parameters())
    with of_inference("call", where):
        result = KINDS[kind](model, data, classify)
        birdie.save(model, io.BytesIO(), calibration=result)
    assert all(weight is parameters[name] for name, weight in model.named_parameters())
    assert_same(result, KINDS[kind](normalized(), batches(4), classify))


@pytest.mark.parametrize("kind", WITH_GRADIENTS)
def test_a_criterion_is_as_good_as_its_function(kind: str) -> None:
    data = batches(5)
    known = KINDS[kind](normalized(), data, nn.CrossEntropyLoss())
    assert_same(known, KINDS[kind](normalized(), data, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])))


@pytest.mark.parametrize("offload", [False, True])
def test_progress_counts_batches(offload: bool) -> None:
    seen: list[tuple[float, float | None]] = []
    birdie.calibrate(normalized(), batches(5), classify, offload=offload, progress=lambda *done: seen.append(done))
    assert seen == [(done, 4) for done in range(1, 5)]


def spoilt(value: float) -> nn.Sequential:
    model = normalized()
    with torch.no_grad():
        model.get_parameter("0.weight")[3, 2] = value
    return model


def on(value: float) -> list[Any]:
    return [(torch.full((4, FEATURES), value), torch.zeros(4, dtype=torch.long))] * 3


def unreached(model: nn.Module, _: Any) -> Tensor:
    return model.get_parameter("0.bias").sum()


REFUSED: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], type[Exception], str]] = {
    "no batches": (lambda: (normalized(), [], classify), DataError, "no calibration batches"),
    "no number": (lambda: (normalized(), batches(4), lambda model, batch: model(batch[0])), ConfigError, "number"),
    "no gradient": (lambda: (normalized(), batches(4), lambda _, batch: batch[0].sum()), ConfigError, "weights|matri"),
    "a bias alone": (lambda: (normalized(), batches(4), unreached), ConfigError, "uses none of"),
    "no matrices": (lambda: (nn.LayerNorm(FEATURES), batches(4), classify), ConfigError, "has no matrices"),
    "inputs of NaN": (lambda: (normalized(), on(torch.nan), classify), DataError, "NaN"),
    "a weight of NaN": (lambda: (spoilt(torch.nan), batches(4), classify), WeightsError, r"'0\.weight'"),
    "an infinite weight": (lambda: (spoilt(torch.inf), batches(4), classify), WeightsError, r"'0\.weight'"),
    "batches that are no pairs": (
        lambda: (normalized(), [x for x, _ in batches(4)], nn.CrossEntropyLoss()),
        ConfigError,
        r"CrossEntropyLoss takes \(inputs, targets\)",
    ),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    mostly_nightly(
        itertools.product(OF_A_LOSS, REFUSED),
        [*((OF_A_LOSS[0], case) for case in REFUSED), ("with files", "inputs of NaN")],
    ),
)
def test_what_cannot_be_calibrated_is_refused(kind: str, case: str) -> None:
    subject, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        KINDS[kind](*subject())
