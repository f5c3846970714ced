"""The recipe's evaluation under probes: every mode equals its scorer, and adaptation that cheats is caught."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from birdie.golf.audit import scoring as audited
from birdie.golf.audit.folder_audit import audit
from birdie.golf.audit.rules import CAUSAL, SCORE_FIRST
from birdie.golf.audit.scoring import CachedWindows
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run.recipe_settings import DataSettings
from birdie.gpt.score.ledger import Ledger
from birdie.gpt.score.mode import NgramSettings, Scoring, TrainingReport
from birdie.gpt.score.modes.streaming import StreamingMode
from birdie.gpt.score.modes.ttt_sgd import SGDMode
from birdie.gpt.score.reference import WindowScorer
from birdie.gpt.score.sgd import SGDTrainer
from birdie.gpt.score.window_losses import score_windows, windows_of
from tests.golf.audit.submissions import save_artifact
from tests.nightly import mostly_nightly


@pytest.fixture
def text(data: Path) -> DataSettings:
    return DataSettings(path=str(data), tokenizer="bytes")


@pytest.mark.parametrize(
    ("evaluation", "window"),
    [
        ({"documents": True, "stride": 5}, "24"),
        ({"mode": "streaming", "streaming": StreamingMode(7, 2, segments=3)}, "context 24 and 2 sinks"),
        *(
            pytest.param(evaluation, window, marks=pytest.mark.nightly)
            for evaluation, window in [
                ({"stride": 8}, "24"),
                ({"mode": "streaming", "streaming": StreamingMode(exact=True)}, "context 24"),
                ({"seq_len": 4096}, "windows of 60"),
                ({"stride": 11, "ngram": NgramSettings(enabled=True)}, "24"),
            ]
        ),
    ],
)
def test_every_mode_is_compared_with_its_scorer(
    text: DataSettings, tmp_path: Path, evaluation: dict[str, Any], window: str
) -> None:
    report = audit(save_artifact(tmp_path / "model.birdie", text, **evaluation), tokens=60)
    assert not report.failed
    (finding,) = [finding for finding in report.of(CAUSAL) if finding.check == "batch"]
    assert window in finding.evidence


def test_a_batched_score_that_is_not_the_scorers_fails(
    text: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if `birdie evaluate` read other tokens than the scorer was shown."""

    class Shifted(CachedWindows):
        def reveal(self, token: int) -> None:
            super().reveal((token + 1) % 260)

    monkeypatch.setattr(audited, "CachedWindows", Shifted)
    report = audit(save_artifact(tmp_path / "model.birdie", text), tokens=8)
    assert "fail" in {finding.result for finding in report.of(CAUSAL) if finding.check == "batch"}


@pytest.mark.parametrize(("stride", "bos_id"), [(12, None), (5, None), (3, 1)])
def test_cached_windows_predict_what_windows_predict(stride: int, bos_id: int | None) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=30, num_layers=2, model_dim=32, num_heads=2, num_kv_heads=1)).eval()
    cached = CachedWindows(model, 12, stride, bos_id=bos_id, temperature=1.5)
    plain = WindowScorer(model, 12, stride, bos_id=bos_id, temperature=1.5)
    draw = np.random.default_rng(stride)
    for token in draw.integers(0, 30, 50).tolist():
        for scorer in (cached, plain):
            scorer.reveal(token)
        if draw.random() < 0.7:  # not every prediction is asked for
            assert torch.allclose(cached.predict(), plain.predict(), atol=2e-5)
            assert torch.equal(cached.predict(), cached.predict())


@pytest.mark.parametrize("mode", mostly_nightly(["ttt-sgd", "ttt-lora", "ttt-multi-phase"], ["ttt-lora"]))
def test_learning_after_scoring_passes(text: DataSettings, tmp_path: Path, mode: str) -> None:
    report = audit(save_artifact(tmp_path / "model.birdie", text, mode=mode), tokens=120)
    assert not report.failed, report.findings
    (ledger,) = [finding for finding in report.of(SCORE_FIRST) if finding.check == "ledger"]
    assert (ledger.result, f"{mode}: 72 targets" in ledger.evidence) == ("pass", True)
    (causal,) = [finding for finding in report.of(CAUSAL) if finding.check == "perturbation"]
    assert causal.result == ("unknown" if mode == "ttt-multi-phase" else "pass")


def test_learning_before_scoring_fails(text: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer that learns from each chunk before it scores it, and hides that from the ledger."""

    def cheat(settings: SGDMode, scoring: Scoring) -> Any:
        tokens, trainer = scoring.tokens, SGDTrainer(scoring.model, settings)
        hidden = Ledger(len(tokens) - 1)
        hidden.score(0, len(tokens) - 1)
        trainer.train(tokens, [(0, len(tokens) - 1)], hidden, length=scoring.length, factor=50.0)
        yield from score_windows(scoring, windows_of(scoring))
        trainer.restore()
        return TrainingReport(0.0, 1, trainer.steps, trainer.tokens, "")

    monkeypatch.setattr(SGDMode, "score", cheat)
    report = audit(save_artifact(tmp_path / "model.birdie", text, mode="ttt-sgd"), tokens=120)
    assert [finding.check for finding in report.of(CAUSAL) if finding.result == "fail"] == ["perturbation"]


def test_learning_that_the_ledger_refuses_fails(
    text: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def early(_settings: SGDMode, scoring: Scoring) -> None:
        scoring.ledger.learn((0, len(scoring.tokens) - 1))

    monkeypatch.setattr(SGDMode, "score", early)
    report = audit(save_artifact(tmp_path / "model.birdie", text, mode="ttt-sgd"), tokens=60)
    assert report.result(SCORE_FIRST) == "fail"
