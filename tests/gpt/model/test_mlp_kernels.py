"""The Triton kernels of the fused MLP, under Triton's interpreter, equal eager code to float32 rounding."""

from typing import Any

import pytest

from tests.interpreted_kernels import run_interpreted
from tests.tiny_run import TinyBatches, tiny_model, tiny_settings, tiny_training


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    """Return the results of the MLP kernel."""
    return run_interpreted("model/mlp_kernels_interpreted.py")


@pytest.mark.parametrize("case", ["one tile", "several tiles"])
def test_the_fused_mlp_is_as_accurate_as_eager_float32(case: str, interpreted: dict[str, dict[str, Any]]) -> None:
    errors = interpreted[case]
    assert errors["kernel"] <= 2 * errors["eager"] + 1e-7


def test_a_model_with_fused_mlps_equals_the_eager_one_and_compiles_to_one_graph(
    interpreted: dict[str, dict[str, Any]],
) -> None:
    errors = interpreted["model"]
    assert errors["calls"] == 2
    assert max(errors["value"], errors["compiled value"]) < 2e-6
    assert max(errors["gradient"], errors["compiled gradient"]) < 1e-5
    assert set(interpreted["registered"].values()) == {"SUCCESS"}


def test_a_run_without_fused_mlps_reports_why_and_trains() -> None:
    lines: list[str] = []
    settings = tiny_settings(iterations=2, fused_mlp=True)
    requested = [step.loss for step in tiny_training(tiny_model(), TinyBatches(), settings, notify=lines.append)]
    plain = [step.loss for step in tiny_training(tiny_model(), TinyBatches(), tiny_settings(iterations=2))]
    assert requested == plain
    assert any("fused MLPs need CUDA" in line for line in lines)
