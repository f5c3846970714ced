"""The benchmark of all architectures: sizes by rule, classes spread evenly, and one row for whatever becomes of one."""

from typing import Any

import pytest

from benchmarks.architectures import Outcome, Subject, examine_apart, page
from benchmarks.shrunken import Size, shrunken


@pytest.mark.parametrize("heads", [4, 1, 0])
@pytest.mark.parametrize("divisor", [32, 16, 4, 1])
def test_heads_times_their_size_stay_the_width_and_sections_follow_that_size(divisor: int, heads: int) -> None:
    settings: dict[str, Any] = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    settings["rope_parameters"] = {"mrope_section": [16, 24, 24]}
    small = shrunken(settings, Size(divisor, heads=heads))
    assert small["num_attention_heads"] * small["head_dim"] == small["hidden_size"] == 4096 // divisor
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert sum(small["rope_parameters"]["mrope_section"]) == small["head_dim"] // 2
    assert small["num_attention_heads"] >= heads
    assert small["num_attention_heads"] == 32 or heads
    axes = shrunken({"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}, Size(16))
    assert sum(axes["axes_dims_rope"]) == axes["attention_head_dim"]
    assert not any(one % 2 for one in axes["axes_dims_rope"])


def test_the_page_counts_the_classes_that_fall_short_by_reason() -> None:
    outcomes = [
        Outcome("transformers", "a", "AModel", True, True, True, True, 1000, 3.0),
        Outcome(
            "transformers", "b", "BModel", True, True, False, False, 1000, 9.0, "not calibrated: nothing is known of x"
        ),
        Outcome("peft", "c", "CConfig", True, False, False, False, 1000, 1.0, "compress fails: reason"),
        Outcome("diffusers", "d", "DModel", reason="ImportError: it requires the timm library"),
    ]
    text = page(outcomes)
    assert "| transformers | 2 | 100.0% | 1 | 50.0% | 9 s |" in text
    assert "| all | 3 | 66.7% | 1 | 33.3% | 9 s |" in text
    assert "| not back | other errors | 1 | CConfig |" in text
    assert (
        "| back, not calibrated | its forward function has arguments of which nothing is known | 1 | BModel |" in text
    )
    assert "| it needs timm, which was not installed | 1 | DModel |" in text
    assert "AModel" not in text


@pytest.mark.nightly  # compresses a model in a process of its own
@pytest.mark.parametrize(
    "subject", [("transformers", "mixtral", "MixtralForCausalLM"), ("peft", "LoraConfig", "LoraConfig")]
)
def test_a_model_comes_back(subject: tuple[str, str, str]) -> None:
    pytest.importorskip(subject[0])
    outcome = examine_apart(Subject(*subject))
    assert (outcome.buildable, outcome.back) == (True, True), outcome.reason
    assert outcome.calibrated == (outcome.library == "transformers")
