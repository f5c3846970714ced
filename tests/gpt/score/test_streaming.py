"""Streaming evaluation equals windows where it should; `test_modes` has what all modes have in common."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError
from birdie.gpt.score.modes.streaming import StreamingMode
from birdie.gpt.score.reference import StreamScorer, reference_losses
from birdie.gpt.score.window_losses import segments
from tests.gpt.score.references import BOS, VOCABULARY, documents, losses_of, tiny_gpt


def text(length: int, begins: tuple[int, ...] = (), seed: int = 0) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(2, VOCABULARY, length).astype(np.uint16)
    tokens[list(begins)] = BOS
    return tokens


def by_stream(model: Any, tokens: np.ndarray, mode: StreamingMode, **more: Any) -> np.ndarray:
    return losses_of(model, tokens, mode=mode.name, streaming=mode, **more)


def assert_close(one: np.ndarray, two: np.ndarray) -> None:
    np.testing.assert_allclose(one, two, rtol=0, atol=2e-5)


def test_a_quantized_cache_equals_the_reference() -> None:
    model, tokens = tiny_gpt(model_dim=32, num_heads=4, num_kv_heads=2), text(121)
    losses = by_stream(model, tokens, StreamingMode(chunk=16, kv_bits=3), train_seq_len=40)
    expected = reference_losses(StreamScorer(model, 40, 16, kv_bits=3), tokens)
    assert float(np.median(np.abs(losses - expected))) < 1e-4  # rounding may choose another level now and then
    assert float(np.abs(losses - expected).mean()) < 1e-3
    plain = by_stream(model, tokens, StreamingMode(chunk=16), train_seq_len=40)
    assert float(np.abs(losses - plain)[64:].mean()) > 1e-4


@settings(max_examples=10)
@given(st.integers(2, 50), st.integers(1, 12), st.integers(1, 6))
def test_an_exact_stream_equals_non_overlapping_windows(length: int, chunk: int, seed: int) -> None:
    model, tokens, exact = tiny_gpt(), text(length, seed=seed), StreamingMode(chunk, exact=True)
    assert_close(by_stream(model, tokens, exact), losses_of(model, tokens))
    tokens[:: seed + 2] = BOS
    assert_close(by_stream(model, tokens, exact, documents=True), losses_of(model, tokens, documents=True))


def test_documents_that_fit_the_context_equal_windows_in_documents() -> None:
    begins = (0, 7, 14, 20, 27, 33, 40, 46, 52, 59, 66, 73, 80)
    model, tokens = tiny_gpt(isolate_documents=True), text(85, begins)
    windows = losses_of(model, tokens, documents=True, stride=4)
    assert_close(by_stream(model, tokens, StreamingMode(chunk=4)), windows)


@pytest.mark.parametrize("chunk", [1, 4])
def test_layers_with_short_attention_windows_equal_sliding_windows(chunk: int) -> None:
    model, tokens = tiny_gpt(attn_window=3, num_layers=4), text(85)
    assert_close(by_stream(model, tokens, StreamingMode(chunk)), losses_of(model, tokens, stride=chunk))


def test_segments_of_one_layer_equal_one_stream() -> None:
    """A segment begins elsewhere, so its chunks do: with one layer and chunks of one token nothing else differs."""
    model, tokens = tiny_gpt(num_layers=1), documents()
    one = by_stream(model, tokens, StreamingMode(chunk=1))
    assert_close(by_stream(model, tokens, StreamingMode(chunk=1, segments=4)), one)


@settings(max_examples=25)
@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))
def test_segments_score_each_target_once_after_a_context(targets: int, count: int, context: int) -> None:
    parts = segments(targets, count, context)
    times = np.zeros(targets, dtype=int)
    for first, stop in zip(parts.firsts, parts.stops, strict=True):
        times[first:stop] += 1
    assert (times == 1).all()
    assert len(parts) <= count
    assert (parts.firsts[1:] - parts.begins[1:] == min(context, targets - 1)).all()


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
