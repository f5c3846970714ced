"""KV cache: streaming equals recomputed windows where nothing leaves the context, and never sees later tokens."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.model.cache import RECENT, Cache
from birdie.gpt.model.cache_quantizer import Quantizer
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.score.window_losses import per_document, sliding

BOS = 1
TINY = {"vocab_size": 30, "num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "bos_id": BOS}


def random_model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(TINY | changes))).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 30, (1, length), generator=torch.Generator().manual_seed(seed))


def streamed(model: GPT, ids: Tensor, context: int, chunk: int, **options: Any) -> Tensor:
    cache = Cache(model, len(ids), context, chunk=chunk, **options)
    first = min(context, ids.shape[1])
    return torch.cat([cache(part) for part in (ids[:, :first], *ids[:, first:].split(chunk, 1)) if part.numel()], 1)


@torch.no_grad()
def windowed(model: GPT, ids: Tensor, context: int, stride: int) -> Tensor:
    """Return each position's logits from its sliding window."""
    windows = sliding(ids.shape[1], context, stride)
    rows = zip(windows.begins, windows.firsts, windows.stops, strict=True)
    return torch.cat([model(ids[:, begin:stop], last_n=stop - first) for begin, first, stop in rows], 1)


@hypothesis_settings(max_examples=12, deadline=None)
@given(st.integers(1, 70), st.integers(1, 16).flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t))))
def test_one_layer_equals_sliding_windows(length: int, sizes: tuple[int, int]) -> None:
    model, ids = random_model(num_layers=1), text(length)
    torch.testing.assert_close(streamed(model, ids, *sizes), windowed(model, ids, *sizes), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_layers_with_short_windows_equal_sliding_windows(chunk: int) -> None:
    """Three layers with windows of four positions reach nine back, all of which are in the window and in the cache."""
    model, ids = random_model(attn_window=4), text(60)
    torch.testing.assert_close(streamed(model, ids, 18, chunk), windowed(model, ids, 18, chunk), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("change", [{}, {"smear": "gated", "bigram_vocab_size": 17, "trigram": True}], ids=str)
def test_documents_shorter_than_the_context_equal_windows(chunk: int, change: dict[str, Any]) -> None:
    model, ids = random_model(isolate_documents=True, **change), text(80)
    begins = [0, 7, 19, 20, 33, 41, 52, 66]
    ids[0, begins] = BOS
    expected = torch.cat([model(ids[:, a:b]) for a, b in zip(begins, [*begins[1:], 80], strict=True)], 1)
    torch.testing.assert_close(streamed(model, ids, 24, chunk), expected, rtol=1e-4, atol=1e-4)
    cover = per_document(np.array(begins), 80, 24, 24)
    assert cover.begins.tolist() == begins  # the comparison is with one window per document


def test_beyond_the_context_deeper_layers_remember_more() -> None:
    """The one difference from windows, and the reason why streaming is not called exact."""
    model, ids = random_model(), text(60)
    one, other = streamed(model, ids, 16, 4), windowed(model, ids, 16, 4)
    torch.testing.assert_close(one[:, :16], other[:, :16], rtol=1e-4, atol=1e-4)
    assert (one - other)[:, 16:].abs().max() > 0.01


@pytest.mark.parametrize("chunk", [1, 5])
def test_sinks_come_right_before_the_positions_in_reach(chunk: int) -> None:
    model, ids = random_model(num_layers=1, rope_dims=4), text(50)
    logits = streamed(model, ids, 12, chunk, sinks=3)
    windows = sliding(50, 12, chunk)
    for begin, first, stop in zip(windows.begins, windows.firsts, windows.stops, strict=True):
        sinks = min(3, begin)
        visible = torch.cat((ids[:, :sinks], ids[:, begin:stop]), 1)
        expected = model(visible, last_n=int(stop - first))
        torch.testing.assert_close(logits[:, first:stop], expected, rtol=1e-4, atol=1e-4)
    assert (logits - streamed(model, ids, 12, chunk))[:, 20:].abs().max() > 0.01


@given(position=st.integers(1, 23), chunk=st.integers(2, 8))
@hypothesis_settings(max_examples=10, deadline=None)
def test_later_tokens_have_no_influence(position: int, chunk: int) -> None:
    model, ids = random_model(smear="gated"), text(24)
    other = ids.clone()
    other[:, position:] = text(24 - position, seed=1)
    one, two = (streamed(model, tokens, 8, chunk, sinks=8 - chunk) for tokens in (ids, other))
    torch.testing.assert_close(one[:, :position], two[:, :position], rtol=0, atol=0)


def test_rotation_is_exact_far_into_a_stream() -> None:
    """Attention depends on differences of positions; after a million, float32 angles would be off by 0.01 or more."""
    model, ids = random_model(), text(24)
    near, far = (Cache(model, 1, 16, chunk=8) for _ in range(2))
    for cache in (near, far):
        cache.position = cache._end = 8
    far.position = 50_000_000
    for part in ids.split(8, 1):
        torch.testing.assert_close(near(part), far(part), rtol=1e-4, atol=1e-4)


def quantized(model: GPT, ids: Tensor, bits: int, most: int = RECENT, **options: Any) -> Tensor:
    """Return the logits of a stream, from calls of up to `most` positions."""
    cache, parts = Cache(model, len(ids), 40, chunk=12, kv_bits=bits, **options), []
    while cache.position < ids.shape[1]:
        parts.append(cache(ids[:, cache.position : cache.position + min(most, cache.ahead)]))
    return torch.cat(parts, 1)


SETTINGS = [{}, {"attn_window": 9}, {"rope_dims": 4, "sinks": 5}, {"isolate_documents": True}]


def _split(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the cache, and the settings of the model."""
    options = {name: value for name, value in settings.items() if name == "sinks"}
    return options, {name: value for name, value in settings.items() if name not in options}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_fewer_bits_change_logits_behind_the_newest_block_more(settings: dict[str, Any]) -> None:
    options, changes = _split(settings)
    model, ids = random_model(**changes), text(140)
    ids[0, [0, 50, 90, 120]] = BOS
    exact = quantized(model, ids, 0, **options)
    errors = [(quantized(model, ids, bits, **options) - exact).abs() for bits in (8, 4, 2)]
    assert all(error[:, :RECENT].max() < 1e-4 for error in errors)
    means = [float(error[:, RECENT:].mean()) for error in errors]
    assert means[0] < 0.05 * means[-1]
    assert means == sorted(means)
    assert means[-1] > 0.01


def test_the_cache_has_the_size_of_its_bits() -> None:
    model = random_model()
    for bits in (2, 3, 4, 8):
        cache = Cache(model, 2, 64, kv_bits=bits)
        assert cache.token_bytes == 3 * 2 * 2 * Quantizer(8, bits).vector_bytes
        assert sum(part.nbytes for part in cache._stored) == 2 * 64 * cache.token_bytes
    assert Cache(model, 2, 64).token_bytes == 3 * 2 * 2 * 8 * model.compute_dtype.itemsize
    with pytest.raises(ConfigError, match="5 bits"):
        Cache(model, 1, 64, kv_bits=5)


@pytest.mark.parametrize("position", [70, 100, 150])
def test_with_few_bits_later_tokens_have_no_influence(position: int) -> None:
    model, ids = random_model(), text(160)
    other = ids.clone()
    other[:, position:] = text(160 - position, seed=1)
    one, two = quantized(model, ids, 3), quantized(model, other, 3)
    torch.testing.assert_close(one[:, :position], two[:, :position], rtol=0, atol=0)
    assert (one - two)[:, position:].abs().max() > 0.1


@pytest.mark.parametrize(
    ("sizes", "values"),
    [
        ({"context": 4, "chunk": 5}, "chunks of 5 .* context of 4"),
        ({"context": 4, "chunk": 0}, "chunks of 0"),
        ({"context": 4, "chunk": 2, "sinks": 3}, "3 sinks .* 0 to 2"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        Cache(random_model(), 1, **sizes)
    with pytest.raises(ConfigError, match=r"sinks .* isolated"):
        Cache(random_model(isolate_documents=True), 1, 8, sinks=1)
    with pytest.raises(ConfigError, match=r"5 positions, .* 4;"):
        Cache(random_model(), 1, 4)(text(5))
