"""The n-gram logit bias: hints come from revealed tokens alone, a biased prediction is a distribution that is known
before its token, and the batched form equals the reference."""

import math
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as tests
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import ConfigError, DataError, RuleError
from birdie.gpt.score.ledger import Ledger
from birdie.gpt.score.mode import COUNTS, NgramSettings
from birdie.gpt.score.ngram import HintTables, NgramHints, NgramScorer, apply_bias, biased_losses, hints
from birdie.gpt.score.reference import reference_losses

SMALL = NgramSettings(orders=(3, 2, 1), table_bits=14)  # no two contexts of four tokens share a slot
streams = st.lists(st.integers(0, 3), min_size=1, max_size=120)


def by_definition(tokens: list[int], settings: NgramSettings) -> list[tuple[int, int]]:
    """Hint and bucket after each token, from dictionaries of whole contexts."""
    orders = sorted(settings.orders)
    tables: dict[tuple[int, ...], list[int]] = {}
    rates: dict[int, list[float]] = defaultdict(lambda: [0.6, 2.0])
    predicted: dict[tuple[int, ...], tuple[int, int]] = {}
    answer = []
    for i, token in enumerate(tokens):
        for context, (candidate, bucket) in predicted.items():
            rates[bucket][0] += candidate == token
            rates[bucket][1] += 1
            entry = tables[context]
            if candidate == token:
                entry[1] = min(entry[1] + 1, 255)
                entry[2] = entry[2] // 2 + 1 if entry[2] > 2 else entry[2]
            else:
                entry[2] = min(entry[2] + 1, 255)
                entry[1] = entry[1] // 2 + 1 if entry[1] > 2 else entry[1] - 1
                if not entry[1]:
                    entry[:2] = [token, 1]
        for order in orders:
            context = tuple(tokens[i - order : i])
            if i >= order and context not in tables:
                tables[context] = [token, 1, 0]
        predicted = {}
        for rank, order in enumerate(orders):
            context = tuple(tokens[i + 1 - order : i + 1])
            if i + 1 >= order and context in tables:
                candidate, followed, not_followed = tables[context]
                often = 0 if followed < 2 else 1 if followed < 4 else 2
                predicted[context] = candidate, COUNTS * rank + 2 * often + (not_followed > 0)
        best, hint = (
            max(
                ((rates[bucket][0] / rates[bucket][1], bucket // COUNTS), (candidate, bucket))
                for candidate, bucket in predicted.values()
            )
            if predicted
            else ((-1.0, 0), (-1, 0))
        )
        answer.append(hint if best[0] >= settings.threshold else (-1, hint[1]))
    return answer


@tests(deadline=None)  # the first example compiles
@given(streams, st.sampled_from([0.0, 0.4]))
def test_hints_are_those_of_the_definition(tokens: list[int], threshold: float) -> None:
    settings = NgramSettings(orders=SMALL.orders, table_bits=SMALL.table_bits, threshold=threshold)
    result = hints(np.array(tokens), settings)
    assert list(zip(result.tokens.tolist(), result.buckets.tolist(), strict=True)) == by_definition(tokens, settings)


@tests(deadline=None)
@given(streams, st.data())
def test_later_tokens_change_no_hint(tokens: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    later = data.draw(st.lists(st.integers(0, 3), max_size=20))
    one, other = hints(np.array(tokens), SMALL), hints(np.array(tokens[: position + 1] + later), SMALL)
    for a, b in zip(one, other, strict=True):
        assert a[: position + 1].tolist() == b[: position + 1].tolist()


@tests(deadline=None)
@given(streams)
def test_hints_token_by_token_are_the_same(tokens: list[int]) -> None:
    result, tables = hints(np.array(tokens), SMALL), HintTables(SMALL)
    assert [tables.reveal(token) for token in tokens] == list(
        zip(result.tokens.tolist(), result.buckets.tolist(), strict=True)
    )


def test_a_collision_is_no_match() -> None:
    settings = NgramSettings(orders=(4, 2), table_bits=4)  # 16 slots for thousands of contexts
    tokens = np.random.default_rng(0).integers(0, 12, 4000)
    result = hints(tokens, settings)
    followed: dict[tuple[int, ...], set[int]] = defaultdict(set)
    hinted = 0
    for i in range(len(tokens)):
        for order in settings.orders:
            if i >= order:
                followed[tuple(tokens[i - order : i])].add(int(tokens[i]))
        if result.tokens[i] >= 0:
            hinted += 1
            order = sorted(settings.orders)[result.buckets[i] // COUNTS]
            assert int(result.tokens[i]) in followed[tuple(tokens[i + 1 - order : i + 1])]
    assert 0 < hinted < len(tokens) / 2


@pytest.mark.parametrize("token", [-1, 65_536])
def test_tokens_out_of_range_are_refused(token: int) -> None:
    with pytest.raises(DataError, match="65,536"):
        hints(np.array([1, token]), SMALL)
    with pytest.raises(DataError, match="65,536"):
        HintTables(SMALL).reveal(token)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"orders": ()}, "orders"),
        ({"orders": (2, 2)}, "orders"),
        ({"orders": (0, 2)}, "orders"),
        ({"beta": 9.0}, "beta is 9"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"table_bits": 2}, "table_bits is 2"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        NgramSettings(**settings)  # type: ignore[arg-type]


VOCABULARY = 11
FIXED = NgramSettings(orders=(3, 2, 1), beta=2.0, table_bits=12)
LEARNED = NgramSettings(orders=(3, 2, 1), table_bits=12)
strengths = pytest.mark.parametrize("settings", [FIXED, LEARNED], ids=["fixed", "learned"])


@cache
def logp_table(seed: int = 0) -> Tensor:
    return torch.log_softmax(2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)), 1)


class BigramScorer:
    """Predicts from the previous token alone."""

    def __init__(self) -> None:
        self.last = 0

    def predict(self) -> Tensor:
        return logp_table()[self.last]

    def reveal(self, token: int) -> None:
        self.last = token


def text(length: int, seed: int = 0) -> np.ndarray:
    """Phrases that repeat, and noise."""
    generator = np.random.default_rng(seed)
    phrases = generator.integers(0, VOCABULARY, (5, 12))
    parts = [phrases[generator.integers(5)] if generator.random() < 0.7 else generator.integers(0, VOCABULARY, 4)]
    while sum(map(len, parts)) < length:
        parts.append(
            phrases[generator.integers(5)] if generator.random() < 0.7 else generator.integers(0, VOCABULARY, 4)
        )
    return np.concatenate(parts)[:length]


def batched(tokens: np.ndarray, settings: NgramSettings) -> np.ndarray:
    inputs, targets = tokens[:-1], tokens[1:]
    result = hints(inputs, settings)
    logp = logp_table().numpy()[inputs]
    rows = np.arange(len(inputs))
    return apply_bias(-logp[rows, targets], logp[rows, np.maximum(result.tokens, 0)], result, targets, settings)


@strengths
def test_the_batched_form_equals_the_reference(settings: NgramSettings) -> None:
    tokens = text(1500)
    expected = reference_losses(NgramScorer(BigramScorer(), settings), tokens)
    assert batched(tokens, settings) == pytest.approx(expected, abs=1e-5)


@strengths
def test_predictions_are_distributions_and_repeatable(settings: NgramSettings) -> None:
    scorer, changed = NgramScorer(BigramScorer(), settings), 0
    for token in text(400).tolist():
        scorer.reveal(token)
        logp = scorer.predict()
        assert float(torch.logsumexp(logp.double(), 0)) == pytest.approx(0, abs=1e-6)
        assert torch.equal(logp, scorer.predict())
        changed += not torch.equal(logp, logp_table()[token])
    assert changed > 200


@given(st.integers(0, 10_000), st.floats(-8, 8), st.integers(-1, VOCABULARY - 1))
def test_the_losses_of_all_tokens_form_a_distribution(seed: int, beta: float, hint: int) -> None:
    """A form that looks at the target, as the first one of #1420 did, pays the normalizer only where it gains."""
    logp = logp_table(seed % 7)[seed % VOCABULARY].double().numpy()
    losses = biased_losses(
        -logp, np.full(VOCABULARY, logp[hint]), np.full(VOCABULARY, hint), np.arange(VOCABULARY), beta
    )
    assert float(np.logaddexp.reduce(-losses)) == pytest.approx(0, abs=1e-5)


def test_strength_zero_changes_nothing() -> None:
    tokens, settings = text(300), NgramSettings(orders=(2, 1), beta=0.0, table_bits=12)
    plain = -logp_table().numpy()[tokens[:-1], tokens[1:]].astype(np.float64)
    assert (batched(tokens, settings) == plain).all()
    assert (reference_losses(NgramScorer(BigramScorer(), settings), tokens) == plain).all()


@strengths
@pytest.mark.parametrize("position", [50, 399, 700])
def test_later_tokens_change_no_loss(settings: NgramSettings, position: int) -> None:
    tokens = text(800)
    others = np.concatenate((tokens[: position + 1], text(800, seed=1)[position + 1 :]))
    assert (batched(tokens, settings)[:position] == batched(others, settings)[:position]).all()
    assert (batched(tokens, settings)[position:] != batched(others, settings)[position:]).any()


@pytest.mark.parametrize(("p", "right"), [(0.05, 0.6), (0.6, 0.05), (0.3, 0.3)])
def test_the_learned_strength_becomes_the_best_fixed_one(p: float, right: float) -> None:
    """Best is β = log(h (1 − p) / (p (1 − h))) where hints are right h of the time and p is constant."""
    n, generator = 20_000, np.random.default_rng(0)
    hit = generator.random(n) < right
    result = NgramHints(np.zeros(n, np.int32), np.zeros(n, np.int32))
    nats = np.where(hit, -math.log(p), 1.0)
    losses = apply_bias(nats, np.full(n, math.log(p)), result, np.where(hit, 0, 1), LEARNED)
    share = hit.mean()
    best = math.log(share * (1 - p) / (p * (1 - share)))
    at_best = biased_losses(nats, np.full(n, math.log(p)), result.tokens, np.where(hit, 0, 1), best)
    assert losses[-1000:].sum() == pytest.approx(at_best[-1000:].sum(), abs=0.5)
    assert losses.sum() <= at_best.sum() + 3 * math.log(n)  # the price of learning it: a few log n in total


def test_every_token_learned_from_is_declared_to_the_ledger() -> None:
    tokens = text(100)
    ledger = Ledger(99)
    reference_losses(NgramScorer(BigramScorer(), LEARNED, ledger), tokens, ledger=ledger)
    assert (ledger.scored, ledger.learned) == (99, 99)
    early = NgramScorer(BigramScorer(), LEARNED, Ledger(99))
    early.reveal(int(tokens[0]))
    with pytest.raises(RuleError, match="target 0 "):
        early.reveal(int(tokens[1]))
