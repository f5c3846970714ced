"""Encoding all tensors of a file: a tie is one tensor under either name, and a refinement is kept only where it is
better."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.assignment import Assignment
from birdie.compress.rate.encoding import Encoder
from birdie.compress.rate.fit import fit, prefer_lower_error
from birdie.compress.rate.jobs import jobs_of
from birdie.compress.rate.search import Fit
from birdie.compress.rate.target import Target
from birdie.compress.registry import parse_spec
from birdie.compress.scheme import Sensitivity
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.state import EncodedState

CORRELATED = torch.eye(64) + 10  # Hessian of inputs that go together, so that errors can be fed back


def encode(
    tensors: Mapping[str, Tensor],
    calibration: CalibrationResult | None,
    *,
    spec: str = "fp16",
) -> EncodedState:
    settled = dict.fromkeys(tensors, parse_spec(spec))
    assignment = Assignment(tensors, {"tied": "first"}, settled, small={})
    return fit(assignment, Target(), encoder(), calibration).encoded


def encoder() -> Encoder:
    return Encoder("fast", workers=1, keeps_integers=True)


def matrix() -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["first", "tied"])
def test_a_sensitivity_measured_under_either_name_of_a_tie_is_used(name: str) -> None:
    weight = matrix()

    def weighted_error(calibration: CalibrationResult | None) -> float:
        encoded = encode({"first": weight}, calibration, spec="gptq:bits=4,clip_sigmas=6")
        error = encoded.decode()["tied"] - weight
        return float(torch.trace(error @ CORRELATED @ error.T))

    calibrated = CalibrationResult({"first": weight}, {name: Sensitivity(CORRELATED, torch.ones(64))})
    uncalibrated = CalibrationResult({"first": weight}, {})
    assert weighted_error(calibrated) < 0.5 * weighted_error(uncalibrated)
    assert weighted_error(uncalibrated) == weighted_error(None)


@dataclass(slots=True)
class Measured(CalibrationResult):
    """A calibration with held-out data, on which the error of a value is its distance from `best`."""

    best: float = 0.0

    def divergence(self, encoded: EncodedState) -> float:
        return abs(float(encoded.decode()["first"]) - self.best)


class ByExponent(Encoder):
    """Encoder of one tensor, which holds the exponent, in a file of a size."""

    def encode(self, jobs: Any, exponent: float) -> dict[str, Any]:  # noqa: ARG002
        return {"first": Lossless().encode("first", torch.tensor([exponent]))}


@pytest.mark.parametrize(("best", "coarser"), [(-8.0, False), (0.0, True)])
def test_a_smaller_file_is_kept_where_the_found_one_is_out_of_line(
    best: float, coarser: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def kept(exponent: float, calibration: CalibrationResult, size: int = 99) -> float:
        """Return the exponent that is kept."""
        tensors = {"first": torch.tensor([0.0])}
        jobs = replace(jobs_of(Assignment(tensors, {}, {}, {"first": Lossless()})), coarsest=0.0)
        encoder = ByExponent("fast", lambda _: size)
        result = Fit(jobs.state(encoder.encode(jobs.searched, exponent)), 100, 2.0**exponent)
        better = prefer_lower_error(jobs, result, encoder, calibration)
        assert (better is result) == (better.fuller is None)
        return float(better.encoded.decode()["first"])

    model = nn.Linear(2, 2)
    calibration = Measured({}, {}, HeldOut(model, [], lambda *_: torch.zeros(())), best=best)
    with caplog.at_level("INFO", "birdie"):
        assert (kept(-3.0, calibration) > -3.0) == coarser
    assert ("out of line" in caplog.text) == coarser
    assert kept(-3.0, replace(calibration, held_out=None)) == -3.0
    assert kept(0.0, calibration) == 0.0  # there is nothing coarser
    assert kept(-3.0, calibration, size=101) == -3.0  # what was result fits only because a part of it is coarser still
