"""Scoring an artifact from Python: requests override the recipe, all modes score the same targets, and settings without
effect, or that would overwrite a file, are errors before the work starts."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from birdie.artifact import saving
from birdie.errors import DataError
from birdie.golf.audit import rules
from birdie.golf.audit.scoring import batched_losses, check_adaptation, scorer_of
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare
from birdie.gpt.model import cache
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.model.rotary import Rotary
from birdie.gpt.run.evaluation import Evaluation, evaluate
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.gpt.score.modes import streaming
from birdie.gpt.score.modes.streaming import StreamingMode
from birdie.gpt.score.reference import reference_losses
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import EvaluationSettings, ValidationSettings
from birdie.gpt.train.settings import TrainSettings

BOS = 1
LENGTH = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=root))
    return next((root / "datasets").iterdir())


def recipe_of(data: Path, **model: Any) -> Recipe:
    tiny = {"vocab_size": 260, "num_layers": 2, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "bos_id": BOS}
    return Recipe(
        data=DataSettings(path=str(data), tokenizer="bytes"),
        model=GPTConfig(**(tiny | model)),
        train=TrainSettings(train_batch_tokens=256, train_seq_len=LENGTH, accumulation=1, compute_dtype="float32"),
        validation=ValidationSettings(max_tokens=400),
    )


def model_of(recipe: Recipe) -> GPT:
    torch.manual_seed(0)
    model = GPT(recipe.model).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def save(recipe: Recipe, path: Path, **changes: Any) -> Path:
    metadata = {"model": "gpt", "recipe": recipe.to_dict() | changes, "tokenizer": None}
    saving.save(model_of(recipe), path, lossless=True, effort="fast", metadata=metadata)
    return path


@pytest.fixture(scope="module")
def file(data: Path) -> Path:
    """A tiny GPT over bytes."""
    return save(recipe_of(data), data.parent / "model.birdie")


def scored(file: Path, settings: Any = None, *, progress: Any = None, **more: Any) -> Evaluation:
    return evaluate(file, EvaluationRequest(device="cpu", settings=settings, **more), progress=progress)


LORA = {"mode": "ttt-lora", "ttt_lora": {"rank": 2, "chunk": 8}}
MODES: dict[str, dict[str, Any]] = {
    "sliding": {"stride": 5},
    "documents": {"documents": True},
    "stream": {"mode": "streaming", "streaming": {"chunk": 8, "sinks": 4}},
    "stream in documents": {"mode": "streaming", "streaming": {"chunk": 8}, "documents": True},
    "exact": {"mode": "streaming", "streaming": {"exact": True}},
    "segments": {"mode": "streaming", "streaming": {"segments": 3}},
    "SGD in documents": {"mode": "ttt-sgd", "documents": True},
    "LoRA": LORA,
}


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
@pytest.mark.parametrize("tokens", [2, 3, LENGTH])
def test_a_text_shorter_than_a_window_is_scored_completely(file: Path, settings: dict[str, Any], tokens: int) -> None:
    assert scored(file, settings, max_tokens=tokens - 1).score.tokens == tokens - 1


@pytest.mark.parametrize("mode", ["windows", "ttt-sgd"])
def test_non_overlapping_windows_score_a_shorter_text_as_one_window(file: Path, mode: str) -> None:
    result = scored(file, {"mode": mode}, max_tokens=LENGTH - 2)
    assert result.score.tokens == LENGTH - 2
    assert result.score.val_loss == scored(file, {"stride": 1}, max_tokens=LENGTH - 2).score.val_loss


AUDITED = {
    "sliding": EvaluationSettings(stride=5),
    "stream": EvaluationSettings(mode="streaming", streaming=StreamingMode(chunk=8)),
    "stream in documents": EvaluationSettings(mode="streaming", streaming=StreamingMode(chunk=8), documents=True),
}


@pytest.mark.parametrize("settings", AUDITED.values(), ids=AUDITED)
def test_the_audit_probes_the_scorer_that_evaluation_batches(data: Path, settings: EvaluationSettings) -> None:
    """Quantized keys and values are quantized in both."""
    text = np.random.default_rng(0).integers(2, 250, 97).astype(np.uint16)
    text[[0, 20]] = BOS
    recipe = dataclasses.replace(recipe_of(data), evaluation=settings)
    model = model_of(recipe)
    losses = batched_losses(model, recipe, text)[1]
    np.testing.assert_allclose(losses, reference_losses(scorer_of(model, recipe)(), text), atol=3e-5)
    if settings.mode == "streaming":
        fine, coarse = (
            dataclasses.replace(settings, seq_len=96, streaming=dataclasses.replace(settings.streaming, kv_bits=bits))
            for bits in (0, 2)
        )
        recipes = (dataclasses.replace(recipe, evaluation=changed) for changed in (fine, coarse))
        one, other = (batched_losses(model, changed, text)[1] for changed in recipes)
        assert np.abs(one - other)[88:].max() > 1e-3


def test_the_audit_sees_a_rotary_base_that_reveals_where_a_document_ends(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(data, rope_dims=8, rope_train_seq_len=4)
    recipe = dataclasses.replace(recipe, evaluation=EvaluationSettings(mode="ttt-sgd", documents=True))
    text = np.random.default_rng(0).integers(2, 250, 97).astype(np.uint16)

    def verdicts() -> set[str]:
        findings = check_adaptation(model_of(recipe), recipe, text, "a model")
        return {finding.result for finding in findings if finding.rule == rules.CAUSAL}

    assert verdicts() == {"pass"}
    monkeypatch.setattr(Rotary, "base_for_length", lambda *_: nullcontext())
    assert verdicts() == {"fail"}


def test_segments_side_by_side_are_limited_by_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def recording(model: GPT, count: int, *more: Any, **named: Any) -> Any:
        rows.append(count)
        return Cache(model, count, *more, **named)

    monkeypatch.setattr(cache, "Cache", recording)
    settings: dict[str, Any] = {"mode": "streaming", "streaming": {"chunk": 8, "segments": 9}}
    unlimited = scored(file, settings).score.bpb
    assert max(rows) > 4
    rows.clear()
    limited = scored(file, settings | {"batch_seqs": 4}).score.bpb
    assert max(rows) == 4
    rows.clear()
    monkeypatch.setitem(streaming._CACHE_BYTES, "cpu", 1)
    single = scored(file, settings).score.bpb
    assert max(rows) == 1
    assert [limited, single] == pytest.approx([unlimited] * 2, abs=1e-6)


def test_text_outside_the_vocabulary_is_refused(data: Path, tmp_path: Path) -> None:
    path = save(recipe_of(data, vocab_size=100), tmp_path / "model.birdie")
    with pytest.raises(DataError, match="0 to 99"):
        scored(path)


def test_the_result_names_mode_method_and_settings(file: Path) -> None:
    multi_phase = {"mode": "ttt-multi-phase", "ttt_lora": LORA["ttt_lora"], "ttt_multi_phase": {"phases": 2}}
    result = scored(file, multi_phase)
    assert (result.dtype, result.device, result.mode.name) == ("float32", "cpu", "ttt-multi-phase")
    in_effect = result.settings_in_effect
    assert in_effect["ttt_lora"]["rank"] == 2
    assert in_effect["ttt_multi_phase"]["phases"] == 2
    assert "up to 2 phases" in result.method
    assert "no phase" in result.diagnostics  # all documents are in one batch
    assert sum(result.seconds.values()) > 0
    warm = scored(file, {"temperature": 0.9})
    assert "temperature 0.9" in warm.method
    assert "ttt_lora" not in warm.settings_in_effect
    assert warm.diagnostics == ""


def test_an_artifact_with_unknown_settings_of_evaluation_is_scored_by_the_defaults(
    file: Path, data: Path, tmp_path: Path
) -> None:
    """Settings of another version, or of a mode that is not registered."""
    for changes, name in (({"evaluation": {"mode": "mine"}}, "mine"), ({"sgd": {"lr": 0.1}}, "sgd")):
        result = scored(save(recipe_of(data), tmp_path / "model.birdie", **changes))
        assert result.score.bpb == scored(file).score.bpb
        assert name in result.warnings[-1]
