"""A tilted prediction is a distribution, known before its token; the fast form is the contract's, to rounding."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import RuleError
from birdie.score.ledger import Ledger
from birdie.score.ngram import Hints, TiltSettings, hints
from birdie.score.scorer import referee
from birdie.score.tilt import Tilted, tilt, tilted

VOCABULARY = 11
FIXED, LEARNED = TiltSettings(orders=(3, 2, 1), beta=2.0, table_bits=12), TiltSettings(orders=(3, 2, 1), table_bits=12)


@cache
def table(seed: int = 0) -> Tensor:
    return torch.log_softmax(2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)), 1)


class Bigram:
    """Predicts from the token before alone."""

    def __init__(self) -> None:
        self.last = 0

    def predict(self) -> Tensor:
        return table()[self.last]

    def reveal(self, token: int) -> None:
        self.last = token


def text(length: int, seed: int = 0) -> np.ndarray:
    """Phrases that come again, and noise."""
    generator = np.random.default_rng(seed)
    phrases = generator.integers(0, VOCABULARY, (5, 12))
    parts = [phrases[generator.integers(5)] if generator.random() < 0.7 else generator.integers(0, VOCABULARY, 4)]
    while sum(map(len, parts)) < length:
        parts.append(
            phrases[generator.integers(5)] if generator.random() < 0.7 else generator.integers(0, VOCABULARY, 4)
        )
    return np.concatenate(parts)[:length]


def fast(tokens: np.ndarray, settings: TiltSettings) -> np.ndarray:
    inputs, targets = tokens[:-1], tokens[1:]
    found = hints(inputs, settings)
    logp = table().numpy()[inputs]
    places = np.arange(len(inputs))
    return tilt(-logp[places, targets], logp[places, np.maximum(found.tokens, 0)], found, targets, settings)


@pytest.mark.parametrize("settings", [FIXED, LEARNED], ids=["fixed", "learned"])
def test_the_fast_form_is_the_contracts(settings: TiltSettings) -> None:
    tokens = text(1500)
    assert fast(tokens, settings) == pytest.approx(referee(Tilted(Bigram(), settings), tokens), abs=1e-5)


@pytest.mark.parametrize("settings", [FIXED, LEARNED], ids=["fixed", "learned"])
def test_predictions_are_distributions_and_do_not_change_with_asking(settings: TiltSettings) -> None:
    scorer, moved = Tilted(Bigram(), settings), 0
    for token in text(400).tolist():
        scorer.reveal(token)
        predicted = scorer.predict()
        assert float(torch.logsumexp(predicted.double(), 0)) == pytest.approx(0, abs=1e-6)
        assert torch.equal(predicted, scorer.predict())
        moved += not torch.equal(predicted, table()[token])
    assert moved > 200


@given(st.integers(0, 10_000), st.floats(-8, 8), st.integers(-1, VOCABULARY - 1))
def test_losses_of_all_tokens_are_a_distributions(seed: int, beta: float, hint: int) -> None:
    """What looks at the target, as the first form of #1420 did, pays the normaliser only where it gains."""
    logp = table(seed % 7)[seed % VOCABULARY].double().numpy()
    every = np.arange(VOCABULARY)
    known = np.full(VOCABULARY, logp[hint])
    losses = tilted(-logp, known, np.full(VOCABULARY, hint), every, beta)
    assert float(np.logaddexp.reduce(-losses)) == pytest.approx(0, abs=1e-6)


def test_strength_zero_changes_nothing() -> None:
    tokens, settings = text(300), TiltSettings(orders=(2, 1), beta=0.0, table_bits=12)
    plain = -table().numpy()[tokens[:-1], tokens[1:]].astype(np.float64)
    assert (fast(tokens, settings) == plain).all()
    assert (referee(Tilted(Bigram(), settings), tokens) == plain).all()


def test_where_nothing_is_known_nothing_changes() -> None:
    nats, none = np.array([1.0, 2.0]), np.array([-1, -1])
    nowhere = Hints(none.astype(np.int32), np.zeros(2, np.int32))
    for settings in (FIXED, LEARNED):
        assert tilt(nats, np.zeros(2), nowhere, np.array([0, 1]), settings).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("settings", [FIXED, LEARNED], ids=["fixed", "learned"])
@pytest.mark.parametrize("place", [50, 399, 700])
def test_what_comes_later_changes_no_loss(settings: TiltSettings, place: int) -> None:
    tokens = text(800)
    others = np.concatenate((tokens[: place + 1], text(800, seed=1)[place + 1 :]))
    assert (fast(tokens, settings)[:place] == fast(others, settings)[:place]).all()
    assert (fast(tokens, settings)[place:] != fast(others, settings)[place:]).any()


@pytest.mark.parametrize(("p", "right"), [(0.05, 0.6), (0.6, 0.05), (0.3, 0.3)])
def test_strength_becomes_that_of_the_hits_there_were(p: float, right: float) -> None:
    """Best is β = log(h (1 − p) / (p (1 − h))) where hints are right h of the time and p is always the same."""
    n, generator = 20_000, np.random.default_rng(0)
    hit = generator.random(n) < right
    found = Hints(np.zeros(n, np.int32), np.zeros(n, np.int32))
    nats = np.where(hit, -math.log(p), 1.0)
    losses = tilt(nats, np.full(n, math.log(p)), found, np.where(hit, 0, 1), LEARNED)
    share = hit.mean()
    best = math.log(share * (1 - p) / (p * (1 - share)))
    at_best = tilted(nats, np.full(n, math.log(p)), found.tokens, np.where(hit, 0, 1), best)
    assert losses[-1000:].sum() == pytest.approx(at_best[-1000:].sum(), abs=0.5)
    assert losses.sum() <= at_best.sum() + 3 * math.log(n)  # the price of not knowing: a few log n in all


def test_strength_depends_on_what_the_model_knows() -> None:
    """Hints of one kind, needed where p is small and useless where it is right: two strengths, not one between."""
    n, generator = 20_000, np.random.default_rng(0)
    p = np.where(generator.random(n) < 0.5, 0.02, 0.8)
    hit = generator.random(n) < np.where(p < 0.5, 0.5, 0.8)
    found, targets = Hints(np.zeros(n, np.int32), np.zeros(n, np.int32)), np.where(hit, 0, 1)
    nats = np.where(hit, -np.log(p), 1.0)
    learned = tilt(nats, np.log(p), found, targets, LEARNED).mean()
    fixed = min(tilted(nats, np.log(p), found.tokens, targets, beta).mean() for beta in np.arange(0, 5, 0.1))
    assert learned < fixed - 0.05


def test_a_text_that_repeats_itself_gets_cheaper() -> None:
    tokens = text(3000)
    plain = -table().numpy()[tokens[:-1], tokens[1:]].astype(np.float64)
    fixed, learned = fast(tokens, FIXED), fast(tokens, LEARNED)
    assert learned.mean() < fixed.mean() < plain.mean()


def test_the_ledger_hears_of_every_token_that_is_learned_from() -> None:
    tokens = text(100)
    ledger = Ledger(99)
    referee(Tilted(Bigram(), LEARNED, ledger), tokens, ledger=ledger)
    assert (ledger.scored, ledger.learned) == (99, 99)
    hasty = Tilted(Bigram(), LEARNED, Ledger(99))
    hasty.reveal(int(tokens[0]))
    with pytest.raises(RuleError, match="learn from target 0 before it is scored"):
        hasty.reveal(int(tokens[1]))
