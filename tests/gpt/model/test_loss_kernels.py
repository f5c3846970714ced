"""The Triton kernel of the fused loss, under Triton's interpreter, equals the eager loss to float32 rounding."""

from typing import Any

import pytest

from tests.interpreted_kernels import run_interpreted


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    """Return the results of the loss kernel."""
    return run_interpreted("model/loss_kernels_interpreted.py")


@pytest.mark.parametrize("case", ["one block", "several blocks", "beyond a float's exponential", "bfloat16"])
def test_the_kernel_is_as_accurate_as_eager_float32(case: str, interpreted: dict[str, dict[str, Any]]) -> None:
    errors = interpreted[case]
    assert errors["dtype"] == "torch.float32"
    assert errors["value"] <= 4 * errors["eager value"] + 1e-6
    assert errors["gradient"] <= (2**-7 if case == "bfloat16" else 2 * errors["eager gradient"] + 1e-6)


def test_a_model_with_the_kernel_equals_the_eager_one_and_compiles(interpreted: dict[str, dict[str, Any]]) -> None:
    errors = interpreted["model"]
    assert errors["value"] < 2e-6
    assert errors["gradient"] < 1e-5
    assert errors["compiled value"] < 1e-6
    assert errors["compiled gradient"] < 1e-5


def test_the_operation_passes_torchs_checks(interpreted: dict[str, dict[str, Any]]) -> None:
    assert set(interpreted["registered"].values()) == {"SUCCESS"}
