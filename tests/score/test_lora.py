"""Adapters that learn documents: equal to one document at a time, whatever the batch; score first; cheaters caught."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from birdie.errors import ConfigError, RuleError
from birdie.model.adapters import PARTS, Adapters
from birdie.model.gpt import GPT
from birdie.score.lora import DocumentLearner, LoraScorer, LoraSettings, RowAdamW
from birdie.score.queue import queue
from birdie.score.scorer import referee
from birdie.score.tally import Tally
from tests.model.technique_table import SMALL, randomized
from tests.model.technique_table import with_settings as changed
from tests.tiny_run import EVERYTHING

BOS, CHUNK, CONTEXT = 1, 4, 10
TINY = dataclasses.replace(SMALL, num_layers=2)
SETTINGS = LoraSettings(rank=3, lr=0.02, chunk=CHUNK, batch_docs=3, weight_decay=0.1)
DOCUMENTS = [8, 1, 7, 9, 4, 14, 2, 1, 5]  # tokens of each, BOS included; the first has none


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from two, which wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Table:
    def count(self, _previous: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.where(targets == BOS, 0, 2)


def stream(seed: int = 0, documents: list[int] = DOCUMENTS) -> NDArray[np.uint16]:
    tokens = np.random.default_rng(seed).integers(2, 50, sum(documents) + 1).astype(np.uint16)
    tokens[np.cumsum(documents)[:-1]] = BOS
    return tokens


def scored(
    model: GPT,
    tokens: NDArray[np.uint16],
    settings: LoraSettings = SETTINGS,
    *,
    kind: type[DocumentLearner] = DocumentLearner,
    context: int = CONTEXT,
) -> NDArray[np.float64]:
    """Nats of every place."""
    tally, found = Tally(tokens, Table(), BOS, keep=True), queue(tokens, BOS, settings.batch_docs)
    learner = kind(model, tokens, tally, settings, context, min(settings.batch_docs, len(found.begins)))
    for number in range(len(found)):
        learner.score(*found.batch(number))
    tally.ledger.close()
    assert tally.nats is not None
    return tally.nats


def reference(
    model: GPT, tokens: NDArray[np.uint16], s: LoraSettings = SETTINGS, context: int = CONTEXT
) -> NDArray[np.float64]:
    """One document after the other, one chunk after the other, by the words of the description; torch's AdamW."""
    nats = []
    begins = [0, *(i for i in range(1, len(tokens) - 1) if tokens[i] == BOS), len(tokens) - 1]
    for begin, stop in itertools.pairwise(begins):
        document = torch.from_numpy(tokens[begin : stop + 1].astype(np.int64))
        adapters = Adapters(model, 1, s.rank, alpha=s.alpha or None, parts=s.parts)
        leaves = adapters.take(0, 1)
        optimizer = torch.optim.AdamW(leaves, s.lr, (s.beta1, s.beta2), s.eps, s.weight_decay)
        with adapters.attached(model):
            for first in range(0, len(document) - 1, s.chunk):
                end = min(first + s.chunk, len(document) - 1)
                window = document[max(0, first + s.chunk - context) : end + 1]
                losses = model.loss(window[None, :-1], window[None, 1:], reduction="none")[0, -(end - first) :]
                nats += losses.tolist()
                if end < len(document) - 1:
                    optimizer.zero_grad()
                    losses.mean().backward()
                    optimizer.step()
    return np.array(nats)


def plain(model: GPT, tokens: NDArray[np.uint16], settings: LoraSettings = SETTINGS) -> NDArray[np.float64]:
    """The same chunks and windows, nothing learned."""
    return scored(model, tokens, dataclasses.replace(settings, lr=0.0))


MODELS: dict[str, dict[str, Any]] = {"nothing": {"num_layers": 2}, "everything": {**EVERYTHING, "logit_softcap": 5.0}}
NTK: dict[str, Any] = {"num_layers": 2, "rope_dims": 4, "rope_train_seq_len": 5}
WAYS: dict[str, LoraSettings] = {
    "all parts": SETTINGS,
    "no q and v, α": dataclasses.replace(SETTINGS, parts=("k", "o", "mlp", "head"), alpha=4.5),
    "day 0": dataclasses.replace(SETTINGS, parts=("head", "q", "v"), beta1=0.9, beta2=0.95, weight_decay=0.0),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("change", MODELS.values(), ids=MODELS)
def test_batches_are_one_document_at_a_time(change: dict[str, Any], way: LoraSettings) -> None:
    model, tokens = randomized(changed(change)).eval(), stream()
    found = scored(model, tokens, way)
    np.testing.assert_allclose(found, reference(model, tokens, way), rtol=2e-4, atol=2e-4)
    assert np.abs(found - plain(model, tokens, way)).max() > 0.01  # and something was learned


@pytest.mark.parametrize("change", [*MODELS.values(), NTK], ids=[*MODELS, "NTK"])
def test_the_contract_gives_the_same(change: dict[str, Any]) -> None:
    """Token by token, in the order of the stream, whole distributions before tokens: C1 to C4 by construction."""
    model, tokens = randomized(changed(change)).eval(), stream()
    found = referee(LoraScorer(model, SETTINGS, CONTEXT, BOS), tokens)
    np.testing.assert_allclose(scored(model, tokens), found, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_the_batch_changes_nothing(size: int) -> None:
    model, tokens = randomized(TINY).eval(), stream()
    found = scored(model, tokens, dataclasses.replace(SETTINGS, batch_docs=size))
    np.testing.assert_allclose(found, scored(model, tokens), rtol=2e-4, atol=2e-4)


def test_what_one_pass_can_hold_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = randomized(TINY).eval(), stream()
    whole = scored(model, tokens)
    monkeypatch.setattr("birdie.score.lora._AT_ONCE", {"cpu": 1})
    np.testing.assert_allclose(scored(model, tokens), whole, rtol=2e-4, atol=2e-4)


def test_at_rate_zero_chunks_of_the_plain_model_are_left() -> None:
    model, tokens = randomized(TINY).eval(), stream()
    begins = queue(tokens, BOS, 1)
    expected = np.empty(len(tokens) - 1)
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        for begin, stop in zip(begins.begins.tolist(), begins.stops.tolist(), strict=True):
            for place in range(begin, stop):
                chunk_end = (place - begin) // CHUNK * CHUNK + CHUNK
                window = ids[begin + max(0, chunk_end - CONTEXT) : place + 1]
                expected[place] = -float(model(window[None])[0, -1].log_softmax(0)[ids[place + 1]])
    np.testing.assert_allclose(plain(model, tokens), expected, rtol=1e-4, atol=1e-4)


def test_a_warm_a_carries_on_from_the_row_before() -> None:
    """The same for the first batch, and for none after; with B cold and A warm the second is another."""
    model, tokens = randomized(TINY).eval(), stream()
    warm = scored(model, tokens, dataclasses.replace(SETTINGS, warm_a=True))
    cold, found = scored(model, tokens), queue(tokens, BOS, SETTINGS.batch_docs)
    same = np.isclose(warm, cold, rtol=1e-6, atol=1e-6)
    for number in range(2):
        for begin, stop in zip(*found.batch(number), strict=True):
            first = same[begin : begin + CHUNK]  # B is zero, so A does nothing yet
            assert first.all()
            assert same[begin:stop].all() == (number == 0 or stop - begin <= CHUNK)


def test_the_model_stays_as_it_is() -> None:
    model, tokens = randomized(TINY).eval(), stream()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    scored(model, tokens)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_everything_of_the_ledger_is_entered() -> None:
    model, tokens = randomized(TINY).eval(), stream()
    tally, found = Tally(tokens, Table(), BOS), queue(tokens, BOS, 3)
    learner = DocumentLearner(model, tokens, tally, SETTINGS, CONTEXT, 3)
    for number in range(len(found)):
        learner.score(*found.batch(number))
    lengths = found.stops - found.begins
    expected = int(((lengths - 1) // CHUNK * CHUNK).sum())  # all but the last chunks
    assert tally.ledger.learned == learner.learned == expected
    assert tally.ledger.scored == len(tokens) - 1
    assert f"{expected:,} tokens learned from after they were scored" in learner.evidence()
    assert "rms 0;" not in learner.evidence()


class StepFirst(DocumentLearner):
    """Learns from a chunk, then scores it: illegal."""

    declares = True

    def _learning(self, places: NDArray[np.int64], first: int, rows: slice) -> None:
        held, real = self.tally, self.tally.add
        if not self.declares:
            self.tally.ledger.learn = lambda *_: None  # type: ignore[method-assign]
        held.add = lambda *_: None  # type: ignore[method-assign]
        super()._learning(places, first, rows)
        held.add = real  # type: ignore[method-assign]
        chunk = self.settings.chunk
        inputs = places[:, None] + np.arange(max(-first, chunk - self.context), chunk)
        with torch.no_grad():
            held.add(places, self._nats(inputs, chunk).numpy().astype(np.float64))


class StepFirstInSilence(StepFirst):
    """And says nothing of it."""

    declares = False


def leaks(score: Callable[[NDArray[np.uint16]], NDArray[np.float64]], tokens: NDArray[np.uint16], place: int) -> bool:
    """Whether losses before `place` of its document depend on the target at `place`."""
    other = tokens.copy()
    other[place + 1] = 2 + (int(tokens[place + 1]) + 7) % 48
    return bool(np.abs(score(other)[:place] - score(tokens)[:place]).max() > 1e-6)


def test_a_step_before_the_score_is_caught_by_the_ledger() -> None:
    with pytest.raises(RuleError, match=r"would learn from target .* before it is scored"):
        scored(randomized(TINY).eval(), stream(), kind=StepFirst)


def test_and_one_that_is_not_declared_by_what_it_knows() -> None:
    model, tokens = randomized(TINY).eval(), stream(documents=[14])
    places = (1, 3, 4, 6, 7, 10, 12)
    assert not any(leaks(lambda each: scored(model, each), tokens, place) for place in places)
    assert any(leaks(lambda each: scored(model, each, kind=StepFirstInSilence), tokens, place) for place in places)
    assert scored(model, tokens, kind=StepFirstInSilence).mean() < scored(model, tokens).mean()


def test_where_a_document_ends_is_not_known_before_it_does() -> None:
    model, tokens = randomized(changed(NTK)).eval(), stream(documents=[14])
    whole = scored(model, tokens)
    for place in (1, 4, 8, 9, 11, 12):
        cut = tokens.copy()
        cut[place + 1] = BOS
        np.testing.assert_allclose(scored(model, cut)[:place], whole[:place], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_steps_are_those_of_torch(beta1: float) -> None:
    settings = dataclasses.replace(SETTINGS, beta1=beta1)
    own, torchs = ([torch.randn(3, 5, generator=torch.Generator().manual_seed(0))] for _ in range(2))
    torchs[0].requires_grad_()
    optimizer = RowAdamW(own, settings)
    expected = torch.optim.AdamW(torchs, settings.lr, (beta1, settings.beta2), settings.eps, settings.weight_decay)
    for number in range(1, 6):
        torchs[0].grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(number))
        for rows in (slice(0, 2), slice(2, 3)):
            optimizer.step(number, rows, [own[0][rows]], [torchs[0].grad[rows]])
        expected.step()
    torch.testing.assert_close(own[0], torchs[0].detach())
    optimizer.reset()
    fresh = RowAdamW(own, settings)
    after, again = own[0].clone(), own[0].clone()
    for each, tensor in ((optimizer, after), (fresh, again)):
        each.step(1, slice(0, 3), [tensor], [torchs[0].grad])
    torch.testing.assert_close(after, again)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "lora rank is 0"),
        ({"lr": -1.0}, "lora lr is -1.0; it must be a number of at least 0"),
        ({"eps": 0.0}, "lora eps is 0.0; it must be a number above 0"),
        ({"beta2": 1.0}, "lora beta2 is 1.0"),
        ({"parts": ()}, f"choose of {', '.join(PARTS)}"),
        ({"parts": ("q", "gate")}, "lora parts are q, gate"),
        ({"chunk": 48, "context": 32}, "chunks of 48 tokens do not fit windows of 32"),
        ({"order": "sorted"}, "lora order is 'sorted'"),
        ({"order": "claimed", "warm_a": True}, "leave order fixed"),
        ({"seed": -1}, "lora seed is -1"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SETTINGS, **change)


def test_chunks_must_fit_the_context() -> None:
    with pytest.raises(ConfigError, match="chunks of 4 tokens do not fit windows of 3"):
        scored(randomized(TINY), stream(), context=3)
