"""Laws of a plan: a tie is one tensor under either name, and refit and recalibration are taken only where
they are better."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from birdie.compress.rate.plan import Plan
from torch import Tensor

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.registry import decode, parse_spec
from birdie.compress.scheme import Encoded, Sensitivity


def plan(
    known: CalibrationResult | None,
    *,
    quality: float | None = None,
    recalibrate: bool = False,
    refit: int = 0,
    spec: str = "fp16",
) -> Plan:
    scheme = parse_spec(spec)
    return Plan(
        default=scheme,
        pinned={},
        ties={"tied": "first"},
        known=known,
        budget=None,
        quality=quality,
        recalibrate=recalibrate,
        refit=refit,
        lossless=False,
        plain=False,
        workers=1,
    )


def size(encoded: Mapping[str, Encoded]) -> int:
    return sum(stream.nbytes for each in encoded.values() for stream in each.streams)


@pytest.mark.parametrize("name", ["first", "tied"])
def test_what_is_known_of_either_name_of_a_tie_counts(name: str) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    hessian = torch.eye(64) + 10  # inputs that go together, so that errors can be fed on
    known = CalibrationResult({"first": weight}, {name: Sensitivity(hessian, torch.ones(64))})

    def error(known: CalibrationResult | None) -> float:
        encoded = plan(known, spec="gptq:bits=4,clip_sigmas=6").encode({"first": weight}, size)["first"]
        miss = decode(encoded) - weight
        return float(torch.trace(miss @ hessian @ miss.T))

    unknown = CalibrationResult({"first": weight}, {})
    assert error(known) < 0.5 * error(unknown)
    assert error(unknown) == error(None)


@dataclass(slots=True)
class Foretold(CalibrationResult):
    """Knows that `better` is what the float model predicts as."""

    better: float = 0.0

    def refitted(self, _: object, ties: Mapping[str, str], steps: int, workers: int | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        assert (ties, workers) == ({"tied": "first"}, 1)
        assert steps == 7
        return {"first": torch.ones(4)}

    def divergence(self, encoded: Mapping[str, Encoded]) -> float:
        return float((decode(encoded["first"]) - self.better).abs().max())


@pytest.mark.parametrize("better", [0.0, 1.0])
def test_refit_stands_where_it_is_nearer_to_the_float_model(better: float) -> None:
    state = {"first": torch.zeros(4), "other": torch.full((3,), 0.5)}
    encoded = plan(Foretold(dict(state), {}, better=better), refit=7).encode(state, size)
    assert decode(encoded["first"]).tolist() == [better] * 4
    assert torch.equal(decode(encoded["other"]), state["other"])
    assert decode(plan(Foretold(dict(state), {}, better=better)).encode(state, size)["first"]).tolist() == [0.0] * 4


@dataclass(slots=True)
class Recalled(CalibrationResult):
    """Learns from a quantized model that inputs go together; what it then writes is `apart` from the float model."""

    apart: float = 0.0

    def recalibrated(self, _: object, ties: Mapping[str, str], workers: int | None = None) -> CalibrationResult:  # type: ignore[override]
        assert (ties, workers) == ({"tied": "first"}, 1)
        return CalibrationResult(self.state, {"first": Sensitivity(torch.eye(64) + 10, torch.ones(64))})

    def divergence(self, encoded: Mapping[str, Encoded]) -> float:
        blind = plan(None, spec="gptq:bits=4,clip_sigmas=6").encode(self.state, size)
        return 1.0 if torch.equal(decode(encoded["first"]), decode(blind["first"])) else self.apart


@pytest.mark.parametrize("apart", [0.5, 1.0, 2.0])
def test_recalibration_stands_where_it_is_nearer_to_the_float_model(apart: float) -> None:
    state = {"first": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    told = CalibrationResult(state, {"first": Sensitivity(torch.eye(64) + 10, torch.ones(64))})
    blind, knowing = (plan(known, spec="gptq:bits=4,clip_sigmas=6").encode(state, size) for known in (None, told))
    found = plan(Recalled(state, {}, apart=apart), spec="gptq:bits=4,clip_sigmas=6", recalibrate=True).encode(
        state, size
    )
    assert torch.equal(decode(found["first"]), decode((knowing if apart < 1 else blind)["first"]))
