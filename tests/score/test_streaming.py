"""Windows and streaming evaluation equal their references, and streaming equals windows where it should."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError, RuleError
from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime.distributed import World
from birdie.score.accumulator import Accumulator
from birdie.score.evaluator import record
from birdie.score.mode import NgramSettings, Scoring, ScoringSettings
from birdie.score.modes import StreamingMode, WindowMode
from birdie.score.ngram import NgramBias, NgramScorer
from birdie.score.reference import StreamScorer, WindowScorer, reference_losses
from birdie.score.streaming import segments
from birdie.score.windows import Windows, document_begins, non_overlapping, per_document, score_windows, sliding
from tests.device import DEVICE

BOS = 1
TINY = {"vocab_size": 30, "num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "bos_id": BOS}


def tiny_gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(TINY | changes))).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def text(length: int, begins: tuple[int, ...] = (), seed: int = 0) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(2, 30, length).astype(np.uint16)
    tokens[list(begins)] = BOS
    return tokens


def new_accumulator(tokens: np.ndarray) -> Accumulator:
    return Accumulator(tokens, np.ones(len(tokens), dtype=np.uint16), BOS, keep_losses=True)


def new_scoring(model: GPT, tokens: np.ndarray, length: int = 12, world: World | None = None, **more: Any) -> Scoring:
    settings, world = ScoringSettings(**more), world or World()
    return Scoring(model, tokens, new_accumulator(tokens), length, BOS, DEVICE, settings, batch_tokens=64, world=world)


def losses_of(scoring: Scoring) -> np.ndarray:
    assert scoring.accumulator.losses is not None
    return scoring.accumulator.losses


def by_windows(model: GPT, tokens: np.ndarray, windows: Windows, **more: Any) -> np.ndarray:
    scoring = new_scoring(model, tokens, **more)
    score_windows(scoring, windows)
    return losses_of(scoring)


def by_stream(model: GPT, tokens: np.ndarray, mode: StreamingMode, **more: Any) -> np.ndarray:
    scoring = new_scoring(model, tokens, **more)
    mode.score(scoring)
    return losses_of(scoring)


def assert_close(one: np.ndarray, two: np.ndarray) -> None:
    np.testing.assert_allclose(one, two, rtol=0, atol=2e-5)


KINDS: dict[str, dict[str, Any]] = {
    "smeared": {"smear": "gated", "bigram_vocab_size": 17},
    "longer than trained": {"rope_dims": 4, "rope_train_seq_len": 5},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("length", "stride"), [(12, 12), (12, 5), (12, 1), (80, 3)])
def test_windows_equal_the_reference(length: int, stride: int, temperature: float, kind: str) -> None:
    model, tokens = tiny_gpt(**KINDS[kind]), text(60)
    scorer = WindowScorer(model, length, stride, temperature=temperature)
    losses = by_windows(model, tokens, sliding(59, length, stride), temperature=temperature)
    assert_close(losses, reference_losses(scorer, tokens))


@kinds
def test_windows_in_documents_equal_the_reference(kind: str) -> None:
    model, tokens = tiny_gpt(**KINDS[kind]), text(60, (0, 9, 10, 31))
    windows = per_document(document_begins(tokens, BOS), 59, 12, 4)
    expected = reference_losses(WindowScorer(model, 12, 4, bos_id=BOS), tokens)
    assert_close(by_windows(model, tokens, windows), expected)


@kinds
def test_a_stream_in_each_document_equals_the_reference(kind: str) -> None:
    model, tokens = tiny_gpt(**KINDS[kind]), text(60, (0, 9, 10, 31))
    losses = by_stream(model, tokens, StreamingMode(chunk=5), documents=True)
    assert_close(losses, reference_losses(StreamScorer(model, 12, 5, bos_id=BOS), tokens))


@kinds
@pytest.mark.parametrize("exact", [False, True])
def test_no_loss_depends_on_where_its_document_ends(kind: str, exact: bool) -> None:
    """Not even through a rotary base that grows with a window that is short because its document is."""
    model, tokens = tiny_gpt(**KINDS[kind]), text(40, (0,))
    ended = tokens.copy()
    ended[20] = BOS

    def losses(stream: np.ndarray) -> np.ndarray:
        if exact:
            return by_stream(model, stream, StreamingMode(chunk=5, exact=True), length=32, documents=True)
        return by_windows(model, stream, per_document(document_begins(stream, BOS), 39, 32, 32))

    assert_close(losses(tokens)[:19], losses(ended)[:19])
    assert abs(losses(tokens)[25] - losses(ended)[25]) > 1e-3


@kinds
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_a_stream_equals_the_reference(chunk: int, sinks: int, kind: str) -> None:
    model, tokens = tiny_gpt(**KINDS[kind]), text(60)
    sinks = min(sinks, 12 - chunk)
    scorer = StreamScorer(model, 12, chunk, sinks=sinks, temperature=0.8)
    losses = by_stream(model, tokens, StreamingMode(chunk, sinks), temperature=0.8)
    assert_close(losses, reference_losses(scorer, tokens))


def test_a_quantized_cache_equals_the_reference() -> None:
    model, tokens = tiny_gpt(), text(120)
    losses = by_stream(model, tokens, StreamingMode(chunk=16, kv_bits=3), length=40)
    expected = reference_losses(StreamScorer(model, 40, 16, kv_bits=3), tokens)
    assert float(np.median(np.abs(losses - expected))) < 1e-4  # rounding may choose another level now and then
    assert float(np.abs(losses - expected).mean()) < 1e-3
    plain = by_stream(model, tokens, StreamingMode(chunk=16), length=40)
    assert float(np.abs(losses - plain)[64:].mean()) > 0.01


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 50), st.integers(1, 12), st.integers(1, 6))
def test_an_exact_stream_equals_non_overlapping_windows(length: int, chunk: int, seed: int) -> None:
    model, tokens = tiny_gpt(), text(length, seed=seed)
    assert_close(
        by_stream(model, tokens, StreamingMode(chunk, exact=True)),
        by_windows(model, tokens, sliding(length - 1, 12, 12)),
    )
    tokens[:: seed + 2] = BOS
    assert_close(
        by_stream(model, tokens, StreamingMode(chunk, exact=True), documents=True),
        by_windows(model, tokens, per_document(document_begins(tokens, BOS), length - 1, 12, 12)),
    )


def test_documents_that_fit_the_context_equal_windows_in_documents() -> None:
    begins = (0, 7, 14, 20, 27, 33, 40, 46, 52, 59, 66, 73, 80, 86)
    model, tokens = tiny_gpt(isolate_documents=True), text(90, begins)
    windows = per_document(document_begins(tokens, BOS), 89, 12, 4)
    assert_close(by_stream(model, tokens, StreamingMode(chunk=4)), by_windows(model, tokens, windows))


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_layers_with_short_attention_windows_equal_sliding_windows(chunk: int) -> None:
    model, tokens = tiny_gpt(attn_window=3, num_layers=4), text(90)
    losses = by_stream(model, tokens, StreamingMode(chunk))
    assert_close(losses, by_windows(model, tokens, sliding(89, 12, chunk)))


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))
def test_segments_score_each_target_once_after_a_context(targets: int, count: int, context: int) -> None:
    parts = segments(targets, count, context)
    times = np.zeros(targets, dtype=int)
    for first, stop in zip(parts.firsts, parts.stops, strict=True):
        times[first:stop] += 1
    assert (times == 1).all()
    assert len(parts) <= count
    assert (parts.firsts[1:] - parts.begins[1:] == min(context, targets - 1)).all()


def test_segments_are_scored_side_by_side_and_ranks_do_not_matter() -> None:
    model, tokens = tiny_gpt(num_layers=1), text(90)
    assert not np.isnan(by_stream(model, tokens, StreamingMode(chunk=5))).any()
    ranks = [by_stream(model, tokens, StreamingMode(5, segments=6), world=World(rank, 3)) for rank in range(3)]
    assert (np.isnan(ranks).sum(0) == 2).all()  # each target on one rank
    assert_close(np.nansum(ranks, 0), by_stream(model, tokens, StreamingMode(5, segments=6)))
    # a segment begins elsewhere, so its chunks do: with one layer and chunks of one token nothing else differs
    one = by_stream(model, tokens, StreamingMode(chunk=1))
    assert_close(by_stream(model, tokens, StreamingMode(chunk=1, segments=6)), one)


@pytest.mark.parametrize("beta", [None, 2.0])
def test_the_ngram_bias_equals_its_reference_in_windows_and_streams(beta: float | None) -> None:
    model, tokens = tiny_gpt(), np.tile(text(17), 3)
    ngram = NgramSettings(enabled=True, table_bits=8, orders=(3, 2, 1), beta=beta)
    for mode, scorer in (
        (WindowMode(), WindowScorer(model, 12, 5)),
        (StreamingMode(chunk=5), StreamScorer(model, 12, 5)),
    ):
        scoring = new_scoring(model, tokens, stride=5, ngram=ngram)
        record(mode, scoring)
        expected = reference_losses(NgramScorer(scorer, ngram), tokens)
        assert_close(losses_of(scoring), expected)
        assert np.abs(expected - reference_losses(WindowScorer(model, 12, 5), tokens)).max() > 0.1
    with pytest.raises(RuleError, match="target 0 was scored 0 times"):
        NgramBias(tokens, ngram).close(new_accumulator(tokens), World(), DEVICE)


def test_nothing_is_scored_twice() -> None:
    model, tokens = tiny_gpt(), text(40)
    scoring = new_scoring(model, tokens)
    score_windows(scoring, non_overlapping(39, 12))
    with pytest.raises(RuleError, match="target 0 "):
        StreamingMode(chunk=4).score(scoring)
    with pytest.raises(RuleError, match=r"36 targets .* 39"):
        scoring.accumulator.score(39, 0.0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"chunk": 0}, "chunk is 0"),
        ({"segments": 0}, "segments is 0"),
        ({"sinks": -1}, "sinks is -1"),
        ({"kv_bits": 5}, "kv_bits is 5"),
        ({"exact": True, "sinks": 4}, "exact"),
        ({"exact": True, "segments": 2}, "exact"),
        ({"exact": True, "kv_bits": 3}, "exact"),
    ],
)
def test_settings_that_contradict_are_refused(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(StreamingMode(), **change)
