"""Refit by parts: every matrix is in one part, exponents keep their meaning, and what is fixed stays as it is."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.assignment import assign
from birdie.compress.rate.encoding import Coder
from birdie.compress.rate.jobs import Jobs, jobs_of
from birdie.compress.rate.parts import PARTS, parts_of, refit_by_parts, tunable
from birdie.compress.rate.target import Target
from birdie.compress.state import EncodedState, ModelState


def jobs(rows: list[int], scheme: str | None = None) -> Jobs:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {f"{i}": torch.randn(count, 64, generator=generator) for i, count in enumerate(rows)}
    tensors |= {"norm": torch.ones(64), "steps": torch.tensor(3)}
    target = Target(bits=4) if scheme is None else Target()
    return jobs_of(assign(ModelState.of(tensors), scheme, target), workers=1)


@given(rows=st.lists(st.integers(64, 400), min_size=1, max_size=30))
@settings(max_examples=20)
def test_parts_are_consecutive_and_of_about_equal_size(rows: list[int]) -> None:
    order = [f"{i}" for i in range(len(rows))]
    parts = parts_of(jobs(rows), order)
    assert [name for part in parts for name in part] == order
    assert len(parts) <= PARTS
    sizes = [sum(rows[int(name)] for name in part) for part in parts]
    assert max(sizes) <= sum(rows) / PARTS + max(rows)


def test_a_model_without_matrices_is_one_empty_part() -> None:
    assert parts_of(jobs([]), []) == [[]]


def encode(jobs: Jobs) -> EncodedState:
    return jobs.state(Coder("fast", workers=1).code([*jobs.by_name.values()], -2.0))


@pytest.mark.parametrize("scheme", [None, "int4"])
def test_what_is_fixed_is_encoded_as_at_first_and_is_not_tuned(scheme: str | None) -> None:
    first = jobs([80, 90, 100], scheme)
    encoded = encode(first)
    fixed = {name: encoded.tensors[name] for name in ("0", "1")}
    rest = first.continued(fixed, {"2": first.by_name["2"].tensor + 1})  # type: ignore[arg-type]
    assert tunable(rest) == ["2", "norm"]
    again = encode(rest)
    assert list(again.tensors) == list(encoded.tensors)
    old, new = encoded.decode(), again.decode()
    assert all(torch.equal(old[name], new[name]) for name in ("0", "1", "norm", "steps"))
    assert (new["2"] - old["2"]).mean().item() == pytest.approx(1, abs=0.1)


def test_each_part_is_tuned_to_all_that_are_encoded_before_it() -> None:
    seen: list[list[str]] = []

    class Recording(CalibrationResult):
        def refitted(
            self, decoded: Any, names: Any, steps: int, *, measurements: int | None = None
        ) -> dict[str, Tensor]:
            assert (steps, measurements) == (5, 2)
            seen.append(list(names))
            return {name: decoded[name] + 1 for name in names}

    rest = refit_by_parts(jobs([512] * 3), -2.0, Coder("fast", workers=1), Recording({}, {}, refit=5))
    assert seen == [["1", "2", "norm"], ["2", "norm"]]
    assert rest.by_name["norm"].tensor.tolist() == [3.0] * 64
    assert rest.fixed.keys() == {"0", "1"}
