"""TTT by LoRA: batches equal one document at a time, whatever the batch; score first; cheating is caught."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.errors import ConfigError, RuleError
from birdie.model.adapters import Adapters
from birdie.model.gpt import GPT
from birdie.score.modes import LoRAMode
from birdie.score.reference import reference_losses
from birdie.score.ttt.lora import DocumentTrainer, RowAdamW, balanced_batches, document_queue
from tests.model.technique_table import randomized, with_settings
from tests.score.ttt.documents import (
    BOS,
    CHUNK,
    CONTEXT,
    SETTINGS,
    TINY,
    LoRAScorer,
    TrainFirst,
    TrainFirstUndeclared,
    new_accumulator,
    one_thread,
    scored,
    stream,
)
from tests.tiny_run import EVERYTHING


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def one_at_a_time(
    model: GPT, tokens: NDArray[np.uint16], s: LoRAMode = SETTINGS, context: int = CONTEXT
) -> NDArray[np.float64]:
    """One document after the other, one chunk after the other, with torch's AdamW."""
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


def untrained(model: GPT, tokens: NDArray[np.uint16], settings: LoRAMode = SETTINGS) -> NDArray[np.float64]:
    """Losses in the same chunks and windows with learning rate 0."""
    return scored(model, tokens, dataclasses.replace(settings, lr=0.0))


MODELS: dict[str, dict[str, Any]] = {"plain": {"num_layers": 2}, "everything": {**EVERYTHING, "logit_softcap": 5.0}}
NTK: dict[str, Any] = {"num_layers": 2, "rope_dims": 4, "rope_train_seq_len": 5}
VARIANTS: dict[str, LoRAMode] = {
    "all parts": SETTINGS,
    "no q and v, α": dataclasses.replace(SETTINGS, parts=("k", "o", "mlp", "head"), alpha=4.5),
    "first record": dataclasses.replace(SETTINGS, parts=("head", "q", "v"), beta1=0.9, beta2=0.95, weight_decay=0.0),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("change", MODELS.values(), ids=MODELS)
def test_batches_equal_one_document_at_a_time(change: dict[str, Any], variant: LoRAMode) -> None:
    model, tokens = randomized(with_settings(change)).eval(), stream()
    nats = scored(model, tokens, variant)
    np.testing.assert_allclose(nats, one_at_a_time(model, tokens, variant), rtol=2e-4, atol=2e-4)
    assert np.abs(nats - untrained(model, tokens, variant)).max() > 0.01  # training had an effect


@pytest.mark.parametrize("change", [*MODELS.values(), NTK], ids=[*MODELS, "NTK"])
def test_batches_equal_the_reference(change: dict[str, Any]) -> None:
    """Token by token, in the order of the stream, whole distributions before tokens: C1 to C4 by construction."""
    model, tokens = randomized(with_settings(change)).eval(), stream()
    expected = reference_losses(LoRAScorer(model, SETTINGS, CONTEXT, BOS), tokens)
    np.testing.assert_allclose(scored(model, tokens), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_the_batch_size_changes_nothing(size: int) -> None:
    model, tokens = randomized(TINY).eval(), stream()
    nats = scored(model, tokens, dataclasses.replace(SETTINGS, batch_docs=size))
    np.testing.assert_allclose(nats, scored(model, tokens), rtol=2e-4, atol=2e-4)


def test_the_size_of_a_forward_pass_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = randomized(TINY).eval(), stream()
    expected = scored(model, tokens)
    monkeypatch.setattr("birdie.score.ttt.lora._MAX_INPUTS", {"cpu": 1})
    np.testing.assert_allclose(scored(model, tokens), expected, rtol=2e-4, atol=2e-4)


def test_learning_rate_zero_scores_the_plain_model() -> None:
    model, tokens = randomized(TINY).eval(), stream()
    queue = document_queue(tokens, BOS, 1)
    expected = np.empty(len(tokens) - 1)
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        for begin, stop in zip(queue.begins.tolist(), queue.stops.tolist(), strict=True):
            for position in range(begin, stop):
                chunk_end = (position - begin) // CHUNK * CHUNK + CHUNK
                window = ids[begin + max(0, chunk_end - CONTEXT) : position + 1]
                expected[position] = -float(model(window[None])[0, -1].log_softmax(0)[ids[position + 1]])
    np.testing.assert_allclose(untrained(model, tokens), expected, rtol=1e-4, atol=1e-4)


def test_a_warm_a_continues_from_the_document_before_in_its_row() -> None:
    """Equal in the first batch and different in the others; with B at zero A has no effect before the first step."""
    model, tokens = randomized(TINY).eval(), stream()
    warm = scored(model, tokens, dataclasses.replace(SETTINGS, warm_a=True))
    cold, queue = scored(model, tokens), document_queue(tokens, BOS, SETTINGS.batch_docs)
    same = np.isclose(warm, cold, rtol=1e-6, atol=1e-6)
    for number in range(2):
        for begin, stop in zip(*queue.batch(number), strict=True):
            assert same[begin : begin + CHUNK].all()
            assert same[begin:stop].all() == (number == 0 or stop - begin <= CHUNK)


def test_the_model_stays_as_it_is() -> None:
    model, tokens = randomized(TINY).eval(), stream()
    initial = {name: p.clone() for name, p in model.state_dict().items()}
    scored(model, tokens)
    assert all(torch.equal(p, initial[name]) for name, p in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_every_step_is_declared_to_the_ledger() -> None:
    model, tokens = randomized(TINY).eval(), stream()
    accumulator, queue = new_accumulator(tokens), document_queue(tokens, BOS, 3)
    trainer = DocumentTrainer(model, tokens, accumulator, SETTINGS, CONTEXT, 3)
    for number in range(len(queue)):
        trainer.score(*queue.batch(number))
    lengths = queue.stops - queue.begins
    expected = int(((lengths - 1) // CHUNK * CHUNK).sum())  # all but the last chunks
    assert accumulator.ledger.learned == trainer.targets_trained == expected
    assert accumulator.ledger.scored == len(tokens) - 1
    assert f" {expected:,} tokens" in trainer.diagnostics()
    assert "rms 0;" not in trainer.diagnostics()


def depends_on_target(
    score: Callable[[NDArray[np.uint16]], NDArray[np.float64]], tokens: NDArray[np.uint16], position: int
) -> bool:
    """True if losses before `position` of its document depend on the target at `position`."""
    other = tokens.copy()
    other[position + 1] = 2 + (int(tokens[position + 1]) + 7) % 48
    return bool(np.abs(score(other)[:position] - score(tokens)[:position]).max() > 1e-6)


def test_a_step_before_scoring_is_refused_by_the_ledger() -> None:
    with pytest.raises(RuleError, match=r"learn from target \d+"):
        scored(randomized(TINY).eval(), stream(), kind=TrainFirst)


def test_an_undeclared_step_shows_in_losses_that_depend_on_the_future() -> None:
    model, tokens = randomized(TINY).eval(), stream(documents=[14])
    positions = (1, 3, 4, 6, 7, 10, 12)
    assert not any(depends_on_target(lambda text: scored(model, text), tokens, i) for i in positions)
    cheat = TrainFirstUndeclared
    assert any(depends_on_target(lambda text: scored(model, text, kind=cheat), tokens, i) for i in positions)
    assert scored(model, tokens, kind=cheat).mean() < scored(model, tokens).mean()


def test_no_loss_depends_on_where_its_document_ends() -> None:
    model, tokens = randomized(with_settings(NTK)).eval(), stream(documents=[14])
    nats = scored(model, tokens)
    for position in (1, 4, 8, 9, 11, 12):
        shortened = tokens.copy()
        shortened[position + 1] = BOS
        np.testing.assert_allclose(scored(model, shortened)[:position], nats[:position], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_steps_are_those_of_torch(beta1: float) -> None:
    settings = dataclasses.replace(SETTINGS, beta1=beta1)
    ours, torchs = ([torch.randn(3, 5, generator=torch.Generator().manual_seed(0))] for _ in range(2))
    torchs[0].requires_grad_()
    optimizer = RowAdamW(ours, settings)
    expected = torch.optim.AdamW(torchs, settings.lr, (beta1, settings.beta2), settings.eps, settings.weight_decay)
    for number in range(1, 6):
        torchs[0].grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(number))
        for rows in (slice(0, 2), slice(2, 3)):
            optimizer.step(number, rows, [ours[0][rows]], [torchs[0].grad[rows]])
        expected.step()
    torch.testing.assert_close(ours[0], torchs[0].detach())
    optimizer.reset()
    fresh = RowAdamW(ours, settings)
    one, other = ours[0].clone(), ours[0].clone()
    gradient = torchs[0].grad
    assert gradient is not None
    for adamw, tensor in ((optimizer, one), (fresh, other)):
        adamw.step(1, slice(0, 3), [tensor], [gradient])
    torch.testing.assert_close(one, other)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=80), st.integers(1, 9))
def test_every_position_is_in_one_document_of_the_queue(drawn: list[int], size: int) -> None:
    tokens = np.array(drawn, np.uint16)
    queue = document_queue(tokens, BOS, size)
    positions = [
        position
        for number in range(len(queue))
        for document in zip(*queue.batch(number), strict=True)
        for position in range(*document)
    ]
    assert sorted(positions) == list(range(len(tokens) - 1))
    lengths = queue.stops - queue.begins
    assert (lengths > 0).all()
    assert (np.diff(lengths) <= 0).all()
    for begin, stop in zip(queue.begins, queue.stops, strict=True):
        assert begin == 0 or tokens[begin] == BOS
        assert BOS not in tokens[begin + 1 : stop]
        assert stop == len(tokens) - 1 or tokens[stop] == BOS


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 20), st.integers(0, 20))
def test_the_cost_of_a_batch_is_the_inputs_of_its_passes(lengths: list[int], size: int, chunk: int, more: int) -> None:
    tokens = np.concatenate([[BOS] + [2] * (n - 1) for n in lengths] + [[BOS]])
    queue, context = document_queue(tokens, BOS, size), chunk + more
    for number in range(len(queue)):
        begins, stops = queue.batch(number)
        expected = sum(min(first + chunk, context) for n in (stops - begins).tolist() for first in range(0, n, chunk))
        assert queue.cost(number, chunk, context) == expected


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 9))
def test_batches_are_shared_out_once_and_evenly(costs: list[int], size: int) -> None:
    costs.sort(reverse=True)
    shares = [balanced_batches(costs, rank, size) for rank in range(size)]
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    loads = [sum(costs[number] for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"lr": -1.0}, r"lr is -1\.0"),
        ({"eps": 0.0}, r"eps is 0\.0"),
        ({"beta2": 1.0}, r"beta2 is 1\.0"),
        ({"parts": ()}, "parts are"),
        ({"parts": ("q", "gate")}, "q, gate"),
        ({"chunk": 48, "context": 32}, "48 tokens .* 32"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        dataclasses.replace(SETTINGS, **change)


def test_chunks_must_fit_the_context() -> None:
    with pytest.raises(ConfigError, match=r"4 tokens .* 3"):
        scored(randomized(TINY), stream(), context=3)
