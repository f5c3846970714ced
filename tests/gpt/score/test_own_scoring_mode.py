"""The mode of examples/own_scoring_mode.py, defined outside birdie, keeps the rules and works in requests and flags."""

import dataclasses
import json
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from birdie.artifact.saving import save
from birdie.cli import evaluate as command
from birdie.errors import ConfigError, RuleError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run.evaluation import evaluate
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.gpt.score.accumulator import Text
from birdie.gpt.score.evaluator import score
from birdie.gpt.score.ledger import Ledger
from birdie.gpt.score.mode import NgramSettings, Scoring, ScoringMode
from birdie.gpt.score.ngram import NgramScorer
from birdie.gpt.score.reference import WindowScorer, reference_losses
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import MODES, EvaluationSettings, register
from birdie.gpt.train.settings import TrainSettings
from tests.device import DEVICE
from tests.forked import run_python

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "own_scoring_mode.py"
LENGTH = 8


@pytest.fixture(scope="module")
def mode_class() -> Iterator[Any]:
    """The mode of the example, registered as long as these tests run."""
    spec = spec_from_file_location("own_scoring_mode", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.OnlineTemperature
    del MODES["online-temperature"]


def tiny_gpt(vocab_size: int = 20) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=vocab_size, num_layers=1, model_dim=8, num_heads=1, num_kv_heads=1)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model


def random_text(length: int = 61) -> np.ndarray:
    return np.random.default_rng(0).integers(2, 20, length).astype(np.uint16)


def score_text(mode: ScoringMode, tokens: np.ndarray, **settings: Any) -> np.ndarray:
    """Return the loss of each target, after the evaluator checked that each was scored once."""
    text, shared = Text(tokens, np.ones(len(tokens), np.uint16), 1), EvaluationSettings(seq_len=LENGTH, **settings)
    losses = score(tiny_gpt(), text, shared, mode, train_seq_len=len(tokens), device=DEVICE, keep_losses=True).losses
    assert losses is not None
    return losses


class OnlineTemperatureScorer:
    """Reference of the mode, token by token."""

    def __init__(self, model: GPT, spread: float, ledger: Ledger) -> None:
        self.temperatures = [float(np.exp(spread * factor)) for factor in (0, -1, -0.5, 0.5, 1)]
        self.scorers = [WindowScorer(model, LENGTH, LENGTH, temperature=t) for t in self.temperatures]
        self.nats, self.window = np.zeros(len(self.scorers)), np.zeros(len(self.scorers))
        self.ledger, self.revealed = ledger, 0

    def predict(self) -> Tensor:
        return self.scorers[int(self.nats.argmin())].predict()

    def reveal(self, token: int) -> None:
        if self.revealed:
            self.window -= [float(scorer.predict()[token]) for scorer in self.scorers]
            if self.revealed % LENGTH == 0:
                self.ledger.learn((self.revealed - LENGTH, self.revealed))
                self.nats += self.window
                self.window[:] = 0
        for scorer in self.scorers:
            scorer.reveal(token)
        self.revealed += 1


@pytest.mark.parametrize("ngram", [False, True])
def test_it_equals_a_reference_scorer_that_keeps_the_rules(mode_class: Any, ngram: bool) -> None:
    """The text ends within a window; `reference_losses` refuses a scorer that learns too early."""
    tokens = np.tile(random_text(21), 3)[:61]
    settings = NgramSettings(enabled=ngram, table_bits=8)
    ledger = Ledger(len(tokens) - 1)
    scorer = OnlineTemperatureScorer(tiny_gpt(), 0.4, ledger)
    expected = reference_losses(NgramScorer(scorer, settings) if ngram else scorer, tokens, ledger=ledger)
    np.testing.assert_allclose(score_text(mode_class(0.4), tokens, ngram=settings), expected, atol=1e-5)
    assert scorer.nats.argmin() != 0  # another temperature than 1 was used


def test_without_spread_it_equals_windows(mode_class: Any) -> None:
    tokens = random_text()
    expected = reference_losses(WindowScorer(tiny_gpt(), LENGTH, LENGTH), tokens)
    np.testing.assert_allclose(score_text(mode_class(0.0), tokens), expected, atol=1e-5)


def test_later_tokens_change_no_loss(mode_class: Any) -> None:
    tokens = random_text(41)
    losses = score_text(mode_class(), tokens)
    for changed in (1, 20, 31, 40):
        other = tokens.copy()
        other[changed:] = 21 - tokens[changed:]
        losses_of_other = score_text(mode_class(), other)
        np.testing.assert_allclose(losses[: changed - 1], losses_of_other[: changed - 1], atol=1e-6)
        assert losses[changed - 1] != losses_of_other[changed - 1]


def test_a_version_that_learns_before_it_scores_is_refused(mode_class: Any) -> None:
    class TooEarly(mode_class):  # type: ignore[misc]
        def score(self, scoring: Scoring) -> Any:
            scoring.ledger.learn((0, LENGTH))
            return super().score(scoring)

    with pytest.raises(RuleError, match="target 0 "):
        score_text(TooEarly(), random_text())


def test_it_has_a_name_a_table_and_flags(mode_class: Any) -> None:
    changes = {"mode": "online-temperature", "online_temperature": {"spread": 0.3}}
    settings, mode = EvaluationRequest(settings=changes).resolve(EvaluationSettings())
    assert mode == mode_class(0.3)
    assert settings.in_effect(mode)["online_temperature"] == {"spread": 0.3}
    assert EvaluationSettings(mode="online-temperature").scoring_mode == mode_class()
    with pytest.raises(ConfigError, match=r"stride .* mode online-temperature"):
        EvaluationRequest(settings=changes | {"stride": 4}).resolve(EvaluationSettings())
    with pytest.raises(ConfigError, match="'online-temperature'"):
        register(dataclasses.make_dataclass("Other", [], bases=(mode_class,), frozen=True))
    flags = command.optional_fields(EvaluationSettings)
    table: Any = next(flag for flag in dataclasses.fields(flags) if flag.name == "online_temperature").type
    assert [flag.name for flag in dataclasses.fields(table.__args__[0])] == ["spread"]
    parsed = flags(mode="online-temperature", online_temperature=table.__args__[0](spread=0.3))
    assert command.explicit(parsed) == changes


def test_a_request_takes_it_unregistered(mode_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MODES, "online-temperature")
    settings, mode = EvaluationRequest(mode=mode_class(0.3)).resolve(EvaluationSettings())
    assert settings.in_effect(mode)["online_temperature"] == {"spread": 0.3}
    with pytest.raises(ConfigError, match="online-temperature"):
        EvaluationRequest(settings={"mode": "online-temperature"}).resolve(EvaluationSettings())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A tiny GPT over bytes."""
    list(prepare(file_corpus([EXAMPLE]), tokenizer="bytes", root=tmp_path))
    recipe = Recipe(
        data=DataSettings(path=str(next((tmp_path / "datasets").iterdir())), tokenizer="bytes"),
        model=GPTConfig(vocab_size=260, num_layers=1, model_dim=8, num_heads=1, num_kv_heads=1),
        train=TrainSettings(train_batch_tokens=256, train_seq_len=32, accumulation=1, compute_dtype="float32"),
    )
    metadata = {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": None}
    save(tiny_gpt(260), tmp_path / "model.birdie", lossless=True, effort="fast", metadata=metadata)
    return tmp_path / "model.birdie"


SETTINGS = {"mode": "online-temperature", "online_temperature": {"spread": 0.3}}


@pytest.mark.usefixtures("mode_class")
def test_evaluate_scores_an_artifact_by_it(file: Path) -> None:
    windows, result = (evaluate(file, EvaluationRequest(device="cpu", settings=s)) for s in ({}, SETTINGS))
    assert result.score.tokens == windows.score.tokens
    assert result.score.bpb < windows.score.bpb
    assert result.settings_in_effect["online_temperature"] == {"spread": 0.3}


@pytest.mark.slow
def test_the_command_line_lists_it_and_scores_by_it(mode_class: Any, file: Path) -> None:
    def birdie(*tokens: str) -> str:
        done = run_python(str(EXAMPLE), "evaluate", *tokens)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert mode_class.summary()[:40] in birdie("--help-all")
    flags = ("--mode", "online-temperature", "--online-temperature.spread", "0.3", "--device", "cpu", "--json")
    printed = json.loads(birdie(str(file), *flags))
    assert printed["bpb"] == evaluate(file, EvaluationRequest(device="cpu", settings=SETTINGS)).score.bpb
    assert printed["mode"] == "online-temperature"
