"""The reference evaluator: whole distributions before tokens, and nothing else is scored."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import RuleError
from birdie.gpt.score.reference import reference_losses

VOCABULARY = 5


class CountingScorer:
    """Predicts by how often tokens came so far, each once more: adaptive, and legal."""

    def __init__(self) -> None:
        self.counts = torch.ones(VOCABULARY)

    def predict(self) -> Tensor:
        return (self.counts / self.counts.sum()).log()

    def reveal(self, token: int) -> None:
        self.counts[token] += 1


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60))
def test_the_loss_is_what_the_scorer_predicted(tokens: list[int]) -> None:
    counts, expected = np.ones(VOCABULARY), []
    for position, token in enumerate(tokens):
        if position:
            expected.append(-np.log(counts[token] / counts.sum()))
        counts[token] += 1
    assert reference_losses(CountingScorer(), np.array(tokens)) == pytest.approx(np.array(expected), abs=1e-6)


class FixedScorer(CountingScorer):
    def __init__(self, prediction: Tensor) -> None:
        self.prediction = prediction

    def predict(self) -> Tensor:
        return self.prediction

    def reveal(self, token: int) -> None:
        pass


@pytest.mark.parametrize(
    ("prediction", "reason"),
    [
        (torch.zeros(VOCABULARY), "sum to 5,"),
        (torch.full((VOCABULARY,), -10.0), "not to 1"),
        (torch.full((VOCABULARY,), torch.nan), "not to 1"),
        (torch.tensor(-1.6), r"shape \(\)"),
        (torch.zeros(1), "token 3, outside the 1 "),
    ],
)
def test_a_prediction_that_is_no_distribution_is_refused(prediction: Tensor, reason: str) -> None:
    with pytest.raises(RuleError, match=reason):
        reference_losses(FixedScorer(prediction), np.array([0, 3]))
