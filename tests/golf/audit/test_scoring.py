"""The recipe's evaluation under probes: every mode equals its scorer, and adaptation that cheats is caught."""

from pathlib import Path
from typing import Any

import pytest

from birdie.golf.audit import scoring as audited
from birdie.golf.audit.folder_audit import audit
from birdie.golf.audit.rules import CAUSAL, SCORE_FIRST
from birdie.golf.audit.scoring import CachedWindows
from birdie.gpt.run.recipe_settings import DataSettings
from birdie.gpt.score.ledger import Ledger
from birdie.gpt.score.mode import NgramSettings, Scoring, TrainingReport
from birdie.gpt.score.modes.streaming import StreamingMode
from birdie.gpt.score.modes.ttt_sgd import SGDMode
from birdie.gpt.score.sgd import SGDTrainer
from birdie.gpt.score.window_losses import score_windows, windows_of
from tests.golf.audit.submissions import save_artifact


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
