"""Probes of scorers: each cheat is caught by the rule it breaks, an honest scorer passes all of them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from birdie.golf.audit.probes import probe
from birdie.golf.audit.rules import CAUSAL, NORMALIZED, ONE_PASS, RUNS, Finding, Rule

VOCABULARY = 6
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 70)


def failed(findings: tuple[Finding, ...]) -> set[Rule]:
    return {finding.rule for finding in findings if finding.result == "fail"}


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
