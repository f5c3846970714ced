"""The benchmark of all architectures: sizes by rule, classes spread evenly, and one row for whatever becomes of one."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.architectures import Outcome, Subject, chosen, examine, examine_apart, page
from benchmarks.shrunken import Size, distinct, shrunken, sizes

BERT = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "pad_token_id": 0,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
}
SWIN = {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "image_size": 224, "patch_size": 4}


def test_widths_that_were_multiples_stay_multiples() -> None:
    settings = {**BERT, "vision_config": {"hidden_size": 1024, "projection_dim": 768, "image_size": 224}}
    size = sizes(settings)[0]
    small = shrunken(settings, size)
    assert (size.divisor, size.layers, size.pixels) == (32, 2, 32)
    assert small["hidden_size"] == small["vision_config"]["projection_dim"] == 24
    assert small["intermediate_size"] == 4 * small["hidden_size"]
    assert small["vision_config"] == {"hidden_size": 32, "projection_dim": 24, "image_size": 32}
    assert (small["num_attention_heads"], small["pad_token_id"], small["layer_norm_eps"]) == (6, 0, 1e-12)
    assert (small["vocab_size"], small["num_hidden_layers"]) == (256, 2)


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


def test_sizes_that_divide_heads_into_pairs_come_first() -> None:
    settings = {"hidden_size": 1664, "intermediate_size": 8192, "num_attention_heads": 16}
    small = shrunken(settings, sizes(settings)[0])
    assert small["hidden_size"] % small["num_attention_heads"] == 0
    assert small["hidden_size"] // small["num_attention_heads"] % 4 == 0


def test_layers_of_each_kind_and_layers_that_a_list_names_are_kept() -> None:
    hybrid = {"num_hidden_layers": 48, "layer_types": ["linear", "linear", "linear", "full"] * 12, "depth_ratio": 2}
    assert shrunken(hybrid, Size(1)) == {"num_hidden_layers": 2, "layer_types": ["linear", "full"], "depth_ratio": 2}
    assert shrunken(hybrid, Size(1, layers=0)) == hybrid
    small = shrunken({"num_hidden_layers": 12, "backbone_out_indices": [2, 5, 8, 11]}, Size(1))
    assert len(small["backbone_out_indices"]) == 4
    assert max(small["backbone_out_indices"]) < small["num_hidden_layers"] < 12
    small = shrunken({"num_hidden_layers": 12, "out_indices": [3, 6, 9, 12], "out_features": ["stage3"]}, Size(1))
    assert len(small["out_indices"]) == 4
    assert max(small["out_indices"]) <= small["num_hidden_layers"] < 12
    assert "out_features" not in small
    small = shrunken({"num_layers": 8, "moe_layers": list(range(1, 8)), "num_heads_per_layer": [4] * 8}, Size(1))
    assert small == {"num_layers": 2, "moe_layers": [1], "num_heads_per_layer": [4, 4]}


def test_stages_stay_and_their_layers_are_fewer_unless_a_list_names_some() -> None:
    pyramid = {"num_encoder_blocks": 4, "depths": [3, 4, 6, 3], "strides": [4, 2, 2, 2]}
    assert shrunken(pyramid, Size(1)) == {**pyramid, "depths": [2, 2, 2, 2]}
    named = {"blocks_per_stage": [1, 2, 7, 2], "global_attention_blocks": [5, 7, 9]}
    assert shrunken(named, Size(1)) == named


def test_variants_leave_different_settings_and_are_distinct() -> None:
    settings = {**BERT, "image_size": 224, "patch_size": 16}
    some = [small for _, small in distinct(settings)]
    assert len(some) == len({repr(small) for small in some})
    first = some[:6]
    assert {small["image_size"] for small in first} == {32, 224}
    assert {small["num_attention_heads"] for small in first} >= {6, 12}
    assert {small["num_hidden_layers"] for small in first} >= {2, 4}


def test_lists_of_sizes_are_shrunken_and_ids_stay_within_the_vocabulary() -> None:
    expected = {"embed_dim": 48, "depths": [2, 2, 2, 2], "num_heads": [3, 6, 12, 24], "image_size": 32, "patch_size": 4}
    assert shrunken(SWIN, Size(2)) == expected
    ids = shrunken({"image_token_id": 151655, "video_token_id": 151656, "vocab_size": 152064}, Size(16))
    assert len({ids["image_token_id"], ids["video_token_id"]}) == 2
    assert max(ids.values()) == ids["vocab_size"] == 256


def test_classes_are_chosen_by_name_and_spread_evenly() -> None:
    every = [Subject("transformers", f"kind{number}", f"Kind{number}Model") for number in range(30)]
    every += [Subject("peft", "LoraConfig", "LoraConfig")]
    assert [one.name for one in chosen(every, "kind1?", None)] == [f"Kind{number}Model" for number in range(10, 20)]
    assert chosen(every, "peft", 5) == every[-1:]
    spread = chosen(every, None, 4)
    assert (len(spread), spread[0], spread[-1]) == (4, every[0], every[-1])


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


@pytest.mark.nightly  # imports transformers
def test_a_class_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    outcome = examine(Subject("transformers", "bert", "NoSuchModel"), tmp_path)
    assert (outcome.buildable, "NoSuchModel" in outcome.reason) == (False, True)
