"""Requests and settings: a change outranks the recipe, a setting that the mode does not read is refused, and modes are
known by name. `test_own_scoring_mode` has a mode of another package."""

import dataclasses
from typing import Any

import pytest

from birdie.errors import ConfigError
from birdie.gpt.score.mode import NgramSettings
from birdie.gpt.score.modes.streaming import StreamingMode
from birdie.gpt.score.modes.ttt_lora import LoRAMode
from birdie.gpt.score.modes.ttt_sgd import SGDMode
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import MODES, EvaluationSettings


def test_these_modes_ship_each_with_a_summary() -> None:
    assert list(MODES) == ["windows", "streaming", "ttt-sgd", "ttt-lora", "ttt-multi-phase"]
    for name, mode in MODES.items():
        assert mode.name == name
        assert mode.summary().startswith("Score ")
        assert EvaluationSettings(mode=name).scoring_mode == mode()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stride": -1}, "stride is -1"),
        ({"stride": 65, "seq_len": 64}, r"stride 65 .* 64"),
        ({"temperature": 0.0}, r"temperature is 0\.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"budget_seconds": float("inf")}, "budget_seconds"),
        ({"mode": "ttt-sdg"}, "did you mean ttt-sgd"),
        ({"mode": "adam"}, "windows, streaming, ttt-sgd"),
        ({"mode": "ttt-lora", "temperature": 0.9}, r"ttt-lora .* temperature 0\.9"),
        ({"mode": "ttt-multi-phase", "ngram": NgramSettings(enabled=True)}, "mode ttt-multi-phase"),
        ({"mode": "ttt-lora", "seq_len": 40}, r"48 tokens .* 40"),
        ({"mode": "ttt-multi-phase", "seq_len": 40}, r"48 tokens .* 40"),
        ({"mode": "streaming", "seq_len": 64, "streaming": StreamingMode(chunk=64, sinks=1)}, r"1 sinks .* 64"),
        ({"mode": "streaming", "seq_len": 9, "documents": True, "streaming": StreamingMode(segments=2)}, "segments"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EvaluationSettings(**change)


def test_a_recipe_may_hold_settings_of_several_modes() -> None:
    """Settings of the other modes are ignored, so that a flag can switch the mode."""
    recipe = EvaluationSettings(stride=8, streaming=StreamingMode(sinks=4), ttt_lora=LoRAMode(rank=8))
    for mode in MODES:
        settings, _ = EvaluationRequest(settings={"mode": mode}).resolve(recipe)
        assert settings == dataclasses.replace(recipe, mode=mode)
    assert recipe.in_effect() == EvaluationSettings(stride=8).in_effect()
    assert "stride" not in dataclasses.replace(recipe, mode="streaming").in_effect()
    assert dataclasses.replace(recipe, mode="ttt-multi-phase").in_effect()["ttt_lora"]["rank"] == 8


def test_changes_outrank_the_recipe_and_the_rest_stays() -> None:
    recipe = EvaluationSettings(mode="ttt-sgd", stride=8, ttt_sgd=SGDMode(lr=0.1, epochs=5))
    settings, mode = EvaluationRequest(settings={"ttt_sgd": {"lr": 0.2}}).resolve(recipe)
    assert settings == dataclasses.replace(recipe, ttt_sgd=SGDMode(lr=0.2, epochs=5))
    assert mode == settings.ttt_sgd
    assert EvaluationRequest().resolve(recipe)[0] == recipe
    streaming = EvaluationSettings(mode="streaming")
    assert EvaluationRequest(settings=streaming).resolve(recipe) == (streaming, streaming.streaming)
    assert EvaluationRequest(mode=LoRAMode(rank=4)).resolve(recipe)[1] == LoRAMode(rank=4)


@pytest.mark.parametrize(
    ("changes", "name", "mode"),
    [
        ({"streaming": {"chunk": 16}}, "streaming", "windows"),
        ({"ttt_sgd": {"lr": 1.0}}, "ttt_sgd", "windows"),
        ({"mode": "streaming", "stride": 8}, "stride", "streaming"),
        ({"mode": "ttt-lora", "stride": 8}, "stride", "ttt-lora"),
        ({"mode": "ttt-lora", "ttt_multi_phase": {"phases": 1}}, "ttt_multi_phase", "ttt-lora"),
        ({"mode": "ttt-lora", "documents": True, "batch_seqs": 2}, "documents and batch_seqs", "ttt-lora"),
        ({"mode": "ttt-sgd", "streaming": {"sinks": 2}}, "streaming", "ttt-sgd"),
    ],
)
def test_a_setting_without_a_part_in_the_mode_is_refused(changes: dict[str, Any], name: str, mode: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .* mode {mode};"):
        EvaluationRequest(settings=changes).resolve(EvaluationSettings())


def test_a_value_that_asks_for_nothing_may_be_given_to_any_mode() -> None:
    changes = {"mode": "ttt-lora", "stride": 0, "documents": False}
    EvaluationRequest(settings=changes).resolve(EvaluationSettings())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strid": 8}, "did you mean stride"),
        ({"adapt": "sgd"}, "'adapt'"),
        ({"mode": "ttt-sgd", "ttt_sgd": {"rate": 1}}, r"ttt_sgd has no setting 'rate'; .*lr"),
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EvaluationRequest(settings=changes).resolve(EvaluationSettings())
