"""Requests and settings: what is given outranks the recipe, what the mode does not read is refused, modes are found by
name, and a mode of another package needs its own file alone."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch
from cyclopts import Parameter

from birdie.cli import evaluate as command
from birdie.errors import ConfigError
from birdie.model.gpt import GPT, GPTConfig
from birdie.score.accumulator import Accumulator
from birdie.score.evaluator import score
from birdie.score.mode import Scoring, ScoringMode, TrainingReport
from birdie.score.ngram import NgramSettings
from birdie.score.reference import WindowScorer, reference_losses
from birdie.score.request import EvaluationRequest
from birdie.score.settings import MODES, EvaluationSettings, register
from birdie.score.streaming import StreamingMode
from birdie.score.ttt.lora import LoRAMode
from birdie.score.ttt.sgd import SGDMode
from birdie.score.windows import hints_at, ids_and_targets, losses_of_logits, non_overlapping


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"resume": True}, "state"),
    ],
)
def test_requests_out_of_range_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EvaluationRequest(**change)


def test_a_state_needs_a_mode_that_has_one() -> None:
    request = EvaluationRequest(state=Path("state"))
    with pytest.raises(ConfigError, match=r"mode windows .* ttt-sgd"):
        request.resolve(EvaluationSettings())
    request.resolve(EvaluationSettings(mode="ttt-lora"))


@dataclass(frozen=True, slots=True)
class FlattenedMode(ScoringMode):
    """Score windows with a share of the uniform distribution mixed in."""

    name: ClassVar[str] = "flattened"
    ngram_bias: ClassVar[bool] = True

    share: Annotated[float, Parameter(help="Share of the uniform distribution.")] = 0.1

    def score(self, scoring: Scoring) -> TrainingReport | None:
        for window in non_overlapping(len(scoring.tokens) - 1, scoring.length).groups(1):
            ids, targets = ids_and_targets(scoring.tokens, window.begins, scoring.length, scoring.device)
            with torch.inference_mode():
                p = scoring.model(ids).softmax(-1)
            mixed = torch.log((1 - self.share) * p + self.share / p.shape[-1])
            hints = hints_at(scoring.sink.hint_tokens, window.begins, scoring.length)
            scoring.sink.add(window.firsts, *losses_of_logits(mixed, targets, hints))

    def describe(self, scoring: Scoring) -> str:
        return f"windows of {scoring.length:,}, {self.share:g} of them uniform"


@pytest.fixture
def flattened() -> Iterator[type[FlattenedMode]]:
    yield register(FlattenedMode)
    del MODES["flattened"]


def scoring_of(tokens: np.ndarray) -> Scoring:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=20, num_layers=1, model_dim=8, num_heads=1, num_kv_heads=1)).eval()
    accumulator = Accumulator(tokens, np.ones(len(tokens), np.uint16), 1, keep_losses=True)
    return Scoring(model, tokens, accumulator, 8, 1, torch.device("cpu"), EvaluationSettings())


def test_a_mode_of_another_package_scores_without_being_registered() -> None:
    tokens = np.random.default_rng(0).integers(2, 20, 41).astype(np.uint16)
    settings, mode = EvaluationRequest(mode=FlattenedMode(share=1.0)).resolve(EvaluationSettings())
    scoring = scoring_of(tokens)
    assert score(mode, scoring)[0].val_loss == pytest.approx(np.log(20))
    assert settings.in_effect(mode)["flattened"] == {"share": 1.0}
    scoring = scoring_of(tokens)
    score(FlattenedMode(share=0.0), scoring)
    expected = reference_losses(WindowScorer(scoring.model, 8, 8), tokens)
    np.testing.assert_allclose(scoring.accumulator.losses, expected, atol=1e-5)


def test_a_registered_mode_has_a_name_a_table_and_flags(flattened: type[FlattenedMode]) -> None:
    changes = {"mode": "flattened", "flattened": {"share": 0.5}}
    _, mode = EvaluationRequest(settings=changes).resolve(EvaluationSettings())
    assert mode == flattened(0.5)
    assert EvaluationSettings(mode="flattened").scoring_mode == flattened()
    with pytest.raises(ConfigError, match=r"stride .* mode flattened"):
        EvaluationRequest(settings=changes | {"stride": 8}).resolve(EvaluationSettings())
    with pytest.raises(ConfigError, match="'flattened'"):
        register(dataclasses.make_dataclass("Other", [], bases=(FlattenedMode,), frozen=True))
    flags = command.optional_fields(EvaluationSettings)
    table = next(flag for flag in dataclasses.fields(flags) if flag.name == "flattened").type
    assert [flag.name for flag in dataclasses.fields(table.__args__[0])] == ["share"]
    parsed = flags(mode="flattened", flattened=table.__args__[0](share=0.5))
    assert command.explicit(parsed) == changes
