"""The benchmark of all architectures: sizes by rule, classes spread evenly, and one row for whatever becomes of one."""

from pathlib import Path

import pytest

from benchmarks.architectures import Outcome, Subject, chosen, examine, examine_apart, page
from benchmarks.shrunken import shrunken, sizes

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
    divisor, layers, heads = sizes(settings)[0]
    small = shrunken(settings, divisor, layers)
    assert (divisor, layers, heads) == (32, 2, 0)
    assert small["hidden_size"] == small["vision_config"]["projection_dim"] == 24
    assert small["intermediate_size"] == 4 * small["hidden_size"]
    assert small["vision_config"] == {"hidden_size": 32, "projection_dim": 24, "image_size": 32}
    assert (small["num_attention_heads"], small["pad_token_id"], small["layer_norm_eps"]) == (12, 0, 1e-12)
    assert (small["vocab_size"], small["num_hidden_layers"]) == (256, 2)


def test_lists_of_sizes_are_shrunken_and_ids_stay_within_the_vocabulary() -> None:
    small = shrunken(SWIN, 2, 2)
    assert small == {
        "embed_dim": 48,
        "depths": [2, 2, 2, 2],
        "num_heads": [3, 6, 12, 24],
        "image_size": 32,
        "patch_size": 4,
    }
    mixed = {"num_hidden_layers": 6, "layer_types": ["a", "b"] * 3, "num_heads": [3, 6, 12, 24], "names": ["a"] * 4}
    assert shrunken(mixed, 2, 2, 4) == {
        "num_hidden_layers": 2,
        "layer_types": ["a", "b"],
        "num_heads": [3, 4, 4, 4],
        "names": ["a"] * 4,
    }
    ids = shrunken({"image_token_id": 151655, "video_token_id": 151656, "vocab_size": 152064}, 16, 2)
    assert len({ids["image_token_id"], ids["video_token_id"]}) == 2
    assert max(ids.values()) == ids["vocab_size"] == 256


def test_classes_are_chosen_by_name_and_spread_evenly() -> None:
    every = [Subject("transformers", f"kind{number}", f"Kind{number}Model") for number in range(30)]
    every += [Subject("peft", "LoraConfig", "LoraConfig")]
    assert [one.name for one in chosen(every, "kind1?", None)] == [f"Kind{number}Model" for number in range(10, 20)]
    assert chosen(every, "peft", 5) == every[-1:]
    spread = chosen(every, None, 4)
    assert (len(spread), spread[0], spread[-1]) == (4, every[0], every[-1])


def test_the_page_names_each_class_that_falls_short_with_its_reason() -> None:
    outcomes = [
        Outcome("transformers", "a", "AModel", True, True, True, True, 1000, 3.0),
        Outcome("transformers", "b", "BModel", True, True, False, False, 1000, 9.0, "not calibrated: no | inputs"),
        Outcome("peft", "c", "CConfig", True, False, False, False, 1000, 1.0, "compress fails: reason"),
        Outcome("diffusers", "d", "DModel", reason="cannot be made small: needs another library"),
    ]
    text = page(outcomes)
    assert "| transformers | 2 | 100.0% | 1 | 50.0% | 9 s |" in text
    assert "| all | 3 | 66.7% | 1 | 33.3% | 9 s |" in text
    assert "| CConfig | compress fails: reason |" in text
    assert "| BModel | not calibrated: no   inputs |" in text
    assert "| DModel | needs another library |" in text
    assert "AModel" not in text


def test_a_class_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    outcome = examine(Subject("transformers", "bert", "NoSuchModel"), tmp_path)
    assert not outcome.buildable
    assert "NoSuchModel" in outcome.reason


@pytest.mark.nightly  # compresses a model in a process of its own
@pytest.mark.parametrize(
    "subject", [("transformers", "mixtral", "MixtralForCausalLM"), ("peft", "LoraConfig", "LoraConfig")]
)
def test_a_model_comes_back(subject: tuple[str, str, str]) -> None:
    pytest.importorskip(subject[0])
    outcome = examine_apart(Subject(*subject))
    assert (outcome.buildable, outcome.back, outcome.reason if outcome.library == "transformers" else "") == (
        True,
        True,
        "",
    )
    assert outcome.calibrated == (outcome.library == "transformers")
