"""Probes of scorers: each cheat is caught by the rule it breaks, honest scorers pass all of them."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.golf.audit.probes import Losses, probe, probe_losses
from birdie.golf.audit.rules import CAUSAL, NORMALIZED, ONE_PASS, RUNS, Finding, Rule

VOCABULARY = 6
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 70)
TABLE = np.random.default_rng(1).random((VOCABULARY, VOCABULARY)) + 0.1
Nats = NDArray[np.float64]


def failed(findings: tuple[Finding, ...]) -> set[Rule]:
    return {finding.rule for finding in findings if finding.result == "fail"}


def bigram(tokens: NDArray[np.int64], table: NDArray[np.float64] = TABLE) -> Nats:
    """A fixed model."""
    nats: Nats = -np.log((table / table.sum(-1, keepdims=True))[tokens[:-1], tokens[1:]])
    return nats


def counting(tokens: NDArray[np.int64]) -> Nats:
    """Counts each token after it was scored."""
    counts, nats = np.ones(VOCABULARY), []
    for token in tokens[1:]:
        nats.append(-math.log(counts[token] / counts.sum()))
        counts[token] += 1
    return np.array(nats)


def chunked(tokens: NDArray[np.int64], *, score_first: bool = True) -> Nats:
    """Test-time training: a bias on the logits learns from chunks of 16, each scored before; or after, as a cheat."""
    bias, nats = np.zeros(VOCABULARY), []
    for begin in range(1, len(tokens), 16):
        chunk = tokens[begin : begin + 16]
        wanted = np.bincount(chunk, minlength=VOCABULARY) / len(chunk)
        tuned = bias + 2.0 * (wanted - np.exp(bias - np.logaddexp.reduce(bias)))
        used = bias if score_first else tuned
        nats.append(np.logaddexp.reduce(used) - used[chunk])
        bias = tuned
    return np.concatenate(nats)


def tuned_before(tokens: NDArray[np.int64]) -> Nats:
    """Learns from each chunk before it is scored."""
    return chunked(tokens, score_first=False)


def two_passes(tokens: NDArray[np.int64]) -> Nats:
    """Fills a cache with all tokens and scores them with it afterwards."""
    counts = np.full((VOCABULARY, VOCABULARY), 0.1)
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    return bigram(tokens, counts)


def best_of_two(tokens: NDArray[np.int64]) -> Nats:
    """Keeps the smaller loss of two models, token by token."""
    return np.minimum(bigram(tokens), bigram(tokens, TABLE.T))


def gated(tokens: NDArray[np.int64]) -> Nats:
    """Raises the probability where the guess is the target, and takes nothing off elsewhere."""
    p = np.exp(-counting(tokens))
    nats: Nats = -np.log(np.where(tokens[:-1] == tokens[1:], p + (1 - p) * 0.5, p))
    return nats


def looks_ahead(tokens: NDArray[np.int64], after: int) -> Nats:
    """Losses that depend, at each multiple of 16, on one token of the next chunk."""
    nats = counting(tokens)
    for position in range(15, len(nats) - after, 16):
        nats[position] += 0.01 * tokens[position + 1 + after]
    return nats


class Remembering:
    """Scores better what it scored in the last call."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}

    def __call__(self, tokens: NDArray[np.int64]) -> Nats:
        p = np.array([0.5 if self.last.get(i) == token else 0.1 for i, token in enumerate(tokens)])
        self.last = dict(enumerate(tokens.tolist()))
        nats: Nats = -np.log(p[1:])
        return nats


@pytest.mark.parametrize("score", [bigram, counting, chunked])
def test_honest_scorers_pass(score: Losses) -> None:
    findings = probe_losses(score, VOCABULARY, TOKENS)
    assert {finding.rule for finding in findings} == {CAUSAL, NORMALIZED, ONE_PASS}
    assert {finding.result for finding in findings} == {"pass"}


@pytest.mark.parametrize(
    ("score", "rule"),
    [
        (tuned_before, CAUSAL),
        (two_passes, CAUSAL),
        (lambda tokens: looks_ahead(tokens, 1), CAUSAL),
        (lambda tokens: looks_ahead(tokens, 5), CAUSAL),
        (best_of_two, NORMALIZED),
        (gated, NORMALIZED),
        (lambda tokens: counting(tokens) - 0.01, NORMALIZED),
        (lambda tokens: counting(tokens) + 0.01, NORMALIZED),
        (lambda tokens: counting(tokens) - 9, NORMALIZED),
        (lambda tokens: counting(tokens)[:-1], ONE_PASS),
        (lambda tokens: counting(tokens) * np.nan, ONE_PASS),
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


def changing(scorer: Counting) -> Tensor:
    scorer.counts[0] += 1
    return Counting.predict(scorer)


def predicting(predict: Callable[[Counting], Tensor]) -> type[Counting]:
    return type("Scorer", (Counting,), {"predict": predict})


@pytest.mark.parametrize(
    ("scorer", "rules"),
    [
        (Counting, set()),
        (Shared, {CAUSAL, ONE_PASS}),
        (predicting(changing), {RUNS}),
        (predicting(lambda _: torch.zeros(1)), {NORMALIZED}),
        (predicting(lambda scorer: Counting.predict(scorer) + 0.1), {NORMALIZED}),
    ],
)
def test_scorers_under_the_contract(scorer: Callable[[], Counting], rules: set[Rule]) -> None:
    assert failed(probe(scorer, VOCABULARY, TOKENS)) == rules
