"""Probes of scorers: each cheat is caught by the rule it breaks, honest scorers pass all of them."""

import importlib.util
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.golf.audit.probes import Losses, probe, probe_losses
from birdie.golf.audit.rules import CAUSAL, NORMALISED, ONE_PASS, RUNS, Finding, worst
from tests.golf.audit.scripts import ILLEGAL, LEGAL, Script

VOCABULARY = 6
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 70)


def verdicts(findings: tuple[Finding, ...]) -> dict[str, str]:
    names = {each.rule.name for each in findings}
    return {name: worst(each.verdict for each in findings if each.rule.name == name) for name in names}


def failed(findings: tuple[Finding, ...]) -> set[str]:
    return {each.rule.name for each in findings if each.verdict == "fail"}


def loaded(script: Script) -> ModuleType:
    """One of our own scripts, imported."""
    spec = importlib.util.spec_from_file_location(script.path.stem, script.path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def findings(script: Script) -> tuple[Finding, ...]:
    module = loaded(script)
    tokens = np.random.default_rng(1).integers(0, module.VOCABULARY, 67)
    if hasattr(module, "score"):
        return probe_losses(module.score, module.VOCABULARY, tokens, positions=10)
    return probe(module.scorer, module.VOCABULARY, tokens, positions=10)


PROBED = [each for each in ILLEGAL if set(each.probed) & {"causal", "normalised"}]


@pytest.mark.parametrize("script", PROBED, ids=lambda each: each.path.stem)
def test_illegal_scorers_are_caught(script: Script) -> None:
    assert failed(findings(script)) >= set(script.probed)


@pytest.mark.parametrize("script", [each for each in LEGAL if each.callable], ids=lambda each: each.path.stem)
def test_legal_scorers_pass(script: Script) -> None:
    assert verdicts(findings(script)) == {"causal": "pass", "normalised": "pass", "one-pass": "pass"}


def counting(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    counts, nats = np.ones(VOCABULARY), []
    for token in tokens[1:]:
        nats.append(-math.log(counts[token] / counts.sum()))
        counts[token] += 1
    return np.array(nats)


def leaking(tokens: NDArray[np.int64], after: int) -> NDArray[np.float64]:
    """Sees, from each multiple of 16 on, one token of the chunk after it."""
    nats = counting(tokens)
    for at in range(15, len(nats) - after, 16):
        nats[at] += 0.01 * tokens[at + 1 + after]
    return nats


class Kept:
    """Remembers what it scored the last time."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def __call__(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        p = np.array([0.5 if self.seen.get(i) == t else 0.1 for i, t in enumerate(tokens)])
        self.seen = dict(enumerate(tokens.tolist()))
        return -np.log(p[1:])


@pytest.mark.parametrize(
    ("score", "rule"),
    [
        (lambda tokens: leaking(tokens, 1), CAUSAL),
        (lambda tokens: leaking(tokens, 5), CAUSAL),
        (lambda tokens: counting(tokens) - 0.01, NORMALISED),
        (lambda tokens: counting(tokens) + 0.01, NORMALISED),
        (lambda tokens: counting(tokens)[:-1], ONE_PASS),
        (lambda tokens: counting(tokens) * np.nan, ONE_PASS),
        (lambda tokens: counting(tokens) - 9, NORMALISED),
        (lambda tokens: counting(tokens) + np.random.random(), ONE_PASS),
        (Kept(), ONE_PASS),
        (lambda tokens: tokens[len(tokens)], RUNS),
    ],
)
def test_each_cheat_breaks_its_rule(score: Losses, rule: object) -> None:
    assert rule in {each.rule for each in probe_losses(score, VOCABULARY, TOKENS) if each.verdict == "fail"}


def test_large_vocabularies_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birdie.golf.audit.probes.EXACT", 4)
    monkeypatch.setattr("birdie.golf.audit.probes.SAMPLED", 4)
    of = {each.rule: each for each in probe_losses(counting, VOCABULARY, TOKENS)}
    assert of[NORMALISED].verdict == "unknown"
    assert "4 of 6" in of[NORMALISED].evidence
    greedy = probe_losses(lambda tokens: counting(tokens) * 0.3, VOCABULARY, TOKENS)
    assert NORMALISED in {each.rule for each in greedy if each.verdict == "fail"}


class Counting:
    shared = torch.ones(VOCABULARY)

    def __init__(self) -> None:
        self.counts = torch.ones(VOCABULARY)

    def predict(self) -> Tensor:
        return (self.counts / self.counts.sum()).log()

    def reveal(self, token: int) -> None:
        self.counts[token] += 1


class Shared(Counting):
    """What one was shown, the next one knows."""

    def __init__(self) -> None:
        self.counts = self.shared


class Moody(Counting):
    def predict(self) -> Tensor:
        self.counts[0] += 1
        return super().predict()


class Wide(Counting):
    def predict(self) -> Tensor:
        return torch.zeros(1)


class Loud(Counting):
    def predict(self) -> Tensor:
        return super().predict() + 0.1


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (Counting, set()),
        (Shared, {"causal", "one-pass"}),
        (Moody, {"runs"}),
        (Wide, {"normalised"}),
        (Loud, {"normalised"}),
    ],
)
def test_scorers_under_the_contract(make: type[Counting], rules: set[str]) -> None:
    assert failed(probe(make, VOCABULARY, TOKENS)) == rules
