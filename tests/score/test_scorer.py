"""The contract: whole distributions before tokens, each target scored once, learned from only after."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import RuleError
from birdie.score.ledger import Ledger
from birdie.score.scorer import referee

VOCABULARY = 5


class Counting:
    """Predicts by how often tokens came so far, each once more: adaptive, and legal."""

    def __init__(self) -> None:
        self.counts = torch.ones(VOCABULARY)

    def predict(self) -> Tensor:
        return (self.counts / self.counts.sum()).log()

    def reveal(self, token: int) -> None:
        self.counts[token] += 1


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60))
def test_a_scorer_gets_what_it_said(tokens: list[int]) -> None:
    counts, expected = np.ones(VOCABULARY), []
    for place, token in enumerate(tokens):
        if place:
            expected.append(-np.log(counts[token] / counts.sum()))
        counts[token] += 1
    assert referee(Counting(), np.array(tokens)) == pytest.approx(np.array(expected), abs=1e-6)


class Saying(Counting):
    def __init__(self, said: Tensor) -> None:
        self.said = said

    def predict(self) -> Tensor:
        return self.said

    def reveal(self, token: int) -> None:
        pass


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (torch.zeros(VOCABULARY), "sum to 5, not to 1"),
        (torch.full((VOCABULARY,), -10.0), "not to 1"),
        (torch.full((VOCABULARY,), torch.nan), "not to 1"),
        (torch.tensor(-1.6), "every token of the vocabulary"),
        (torch.zeros(1), "outside the 1 that were predicted"),
    ],
)
def test_what_is_no_distribution_is_refused(said: Tensor, why: str) -> None:
    with pytest.raises(RuleError, match=why):
        referee(Saying(said), np.array([0, 3]))


def test_a_target_is_scored_once() -> None:
    ledger = Ledger(10)
    ledger.score(0, 6)
    with pytest.raises(RuleError, match="target 5 is scored a second time"):
        ledger.score(5, 8)
    with pytest.raises(RuleError, match="4 of 10 targets were never scored, the first is 6"):
        ledger.close()
    ledger.score(6, 10)
    ledger.close()


def test_learning_comes_after_scoring() -> None:
    ledger = Ledger(10)
    ledger.score(0, 6)
    ledger.learn((0, 3), (2, 6))
    assert (ledger.learned, ledger.steps) == (7, 1)
    with pytest.raises(RuleError, match="learn from target 6 before it is scored"):
        ledger.learn((0, 2), (4, 8))


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_places_are_those_of_the_stream(first: int, stop: int) -> None:
    ledger = Ledger(10)
    with pytest.raises(IndexError, match="not among 10"):
        ledger.score(first, stop)
    with pytest.raises(IndexError, match="not among 10"):
        ledger.learn((first, stop))


def test_the_ledger_shows_what_was_seen_and_lets_nobody_change_it() -> None:
    ledger = Ledger(4)
    ledger.score(1, 3)
    assert ledger.seen.tolist() == [False, True, True, False]
    with pytest.raises(ValueError, match="read-only"):
        ledger.seen[0] = True
