"""Probes of scorers: each cheat is caught by the rule it breaks, honest scorers pass all of them."""

import importlib.util
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.golf.audit.deadline import Deadline, OutOfTimeError
from birdie.golf.audit.probes import Losses, probe, probe_losses
from birdie.golf.audit.rules import CAUSAL, NORMALIZED, ONE_PASS, RUNS, Finding, Rule
from birdie.runtime.callbacks import no_progress
from tests.golf.audit.scripts import ILLEGAL, LEGAL, Script

VOCABULARY = 6
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 70)


def failed(findings: tuple[Finding, ...]) -> set[Rule]:
    return {finding.rule for finding in findings if finding.result == "fail"}


def module_of(script: Script) -> ModuleType:
    """Import one of the corpus' scripts."""
    spec = importlib.util.spec_from_file_location(script.path.stem, script.path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def probed(script: Script) -> tuple[Finding, ...]:
    module = module_of(script)
    tokens = np.random.default_rng(1).integers(0, module.VOCABULARY, 67)
    if hasattr(module, "score"):
        return probe_losses(module.score, module.VOCABULARY, tokens, positions=10)
    return probe(module.scorer, module.VOCABULARY, tokens, positions=10)


@pytest.mark.parametrize(
    "script", [script for script in ILLEGAL if set(script.probed) & {"causal", "normalised"}], ids=str
)
def test_illegal_scorers_are_caught(script: Script) -> None:
    assert {rule.name for rule in failed(probed(script))} >= set(script.probed)


@pytest.mark.parametrize("script", [script for script in LEGAL if script.callable], ids=str)
def test_legal_scorers_pass(script: Script) -> None:
    findings = probed(script)
    assert {finding.rule for finding in findings} == {CAUSAL, NORMALIZED, ONE_PASS}
    assert {finding.result for finding in findings} == {"pass"}


def counting(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    counts, nats = np.ones(VOCABULARY), []
    for token in tokens[1:]:
        nats.append(-math.log(counts[token] / counts.sum()))
        counts[token] += 1
    return np.array(nats)


def leaking(tokens: NDArray[np.int64], after: int) -> NDArray[np.float64]:
    """Return losses that depend, at each multiple of 16, on one token of the next chunk."""
    nats = counting(tokens)
    for position in range(15, len(nats) - after, 16):
        nats[position] += 0.01 * tokens[position + 1 + after]
    return nats


class Remembering:
    """Scores better what it scored in the last call."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}

    def __call__(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        p = np.array([0.5 if self.last.get(i) == token else 0.1 for i, token in enumerate(tokens)])
        self.last = dict(enumerate(tokens.tolist()))
        nats: NDArray[np.float64] = -np.log(p[1:])
        return nats


@pytest.mark.parametrize(
    ("score", "rule"),
    [
        (lambda tokens: leaking(tokens, 1), CAUSAL),
        (lambda tokens: leaking(tokens, 5), CAUSAL),
        (lambda tokens: counting(tokens) - 0.01, NORMALIZED),
        (lambda tokens: counting(tokens) + 0.01, NORMALIZED),
        (lambda tokens: counting(tokens)[:-1], ONE_PASS),
        (lambda tokens: counting(tokens) * np.nan, ONE_PASS),
        (lambda tokens: counting(tokens) - 9, NORMALIZED),
        (lambda tokens: counting(tokens) + np.random.random(), ONE_PASS),
        (Remembering(), ONE_PASS),
        (lambda tokens: tokens[len(tokens)], RUNS),
    ],
)
def test_each_cheat_breaks_its_rule(score: Losses, rule: Rule) -> None:
    assert rule in failed(probe_losses(score, VOCABULARY, TOKENS))


def test_large_vocabularies_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birdie.golf.audit.probes.EXACT", 4)
    monkeypatch.setattr("birdie.golf.audit.probes.SAMPLED", 4)
    sums = {finding.rule: finding for finding in probe_losses(counting, VOCABULARY, TOKENS)}[NORMALIZED]
    assert sums.result == "unknown"
    assert "4 of 6" in sums.evidence
    assert NORMALIZED in failed(probe_losses(lambda tokens: counting(tokens) * 0.3, VOCABULARY, TOKENS))


class Counting:
    shared = torch.ones(VOCABULARY)

    def __init__(self) -> None:
        self.counts = torch.ones(VOCABULARY)

    def predict(self) -> Tensor:
        return (self.counts / self.counts.sum()).log()

    def reveal(self, token: int) -> None:
        self.counts[token] += 1


class Shared(Counting):
    """Knows the tokens that other scorers were shown."""

    def __init__(self) -> None:
        self.counts = self.shared


class Changing(Counting):
    def predict(self) -> Tensor:
        self.counts[0] += 1
        return super().predict()


class WrongShape(Counting):
    def predict(self) -> Tensor:
        return torch.zeros(1)


class Unnormalized(Counting):
    def predict(self) -> Tensor:
        return super().predict() + 0.1


@pytest.mark.parametrize(
    ("scorer", "rules"),
    [
        (Counting, set()),
        (Shared, {CAUSAL, ONE_PASS}),
        (Changing, {RUNS}),
        (WrongShape, {NORMALIZED}),
        (Unnormalized, {NORMALIZED}),
    ],
)
def test_scorers_under_the_contract(scorer: type[Counting], rules: set[Rule]) -> None:
    assert failed(probe(scorer, VOCABULARY, TOKENS)) == rules


def test_a_probe_that_is_out_of_time_accuses_nobody() -> None:
    module = next(module for module in map(module_of, LEGAL) if hasattr(module, "scorer"))
    tokens = np.random.default_rng(1).integers(0, module.VOCABULARY, 67)
    with pytest.raises(OutOfTimeError):
        probe(module.scorer, module.VOCABULARY, tokens, progress=Deadline(-1).watch(no_progress))
