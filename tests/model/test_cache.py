"""Kept keys and values: where streaming equals recomputed windows, and what it may see."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import ConfigError
from birdie.model.cache import RECENT, Cache
from birdie.model.cache_quantizer import Quantizer
from birdie.model.gpt import GPT, GPTConfig
from birdie.score.windows import per_document, sliding

BOS = 1
TINY = {"vocab_size": 30, "num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "bos_id": BOS}


def model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    made = GPT(GPTConfig(**(TINY | changes))).eval()
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 30, (1, length), generator=torch.Generator().manual_seed(seed))


def streamed(made: GPT, ids: Tensor, context: int, chunk: int, **more: Any) -> Tensor:
    cache = Cache(made, len(ids), context, chunk=chunk, **more)
    first = min(context, ids.shape[1])
    return torch.cat([cache(part) for part in (ids[:, :first], *ids[:, first:].split(chunk, 1)) if part.numel()], 1)


@torch.no_grad()
def windowed(made: GPT, ids: Tensor, context: int, stride: int) -> Tensor:
    """Each place's logits from its sliding window."""
    windows = sliding(ids.shape[1], context, stride)
    rows = zip(windows.begins, windows.firsts, windows.stops, strict=True)
    return torch.cat([made(ids[:, begin:stop], tail=stop - first) for begin, first, stop in rows], 1)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 70), st.integers(1, 16).flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t))))
def test_one_layer_equals_sliding_windows(length: int, sizes: tuple[int, int]) -> None:
    made, ids = model(num_layers=1), text(length)
    torch.testing.assert_close(streamed(made, ids, *sizes), windowed(made, ids, *sizes), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_layers_with_short_windows_equal_sliding_windows(chunk: int) -> None:
    """Three layers that see four places each reach nine back: all of these are in the window, and in the cache."""
    made, ids = model(attn_window=4), text(60)
    torch.testing.assert_close(streamed(made, ids, 18, chunk), windowed(made, ids, 18, chunk), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("change", [{}, {"smear": "gated", "bigram_vocab_size": 17, "trigram": True}], ids=str)
def test_documents_shorter_than_the_context_equal_windows(chunk: int, change: dict[str, Any]) -> None:
    made, ids = model(isolate_documents=True, **change), text(80)
    begins = [0, 7, 19, 20, 33, 41, 52, 66]
    ids[0, begins] = BOS
    expected = torch.cat([made(ids[:, a:b]) for a, b in zip(begins, [*begins[1:], 80], strict=True)], 1)
    torch.testing.assert_close(streamed(made, ids, 24, chunk), expected, rtol=1e-4, atol=1e-4)
    cover = per_document(np.array(begins), 80, 24, 24)
    assert cover.begins.tolist() == begins  # what was compared is one window a document


def test_beyond_the_context_deeper_layers_remember_more() -> None:
    """The one difference to windows, and the reason streaming is not called exact there."""
    made, ids = model(), text(60)
    one, other = streamed(made, ids, 16, 4), windowed(made, ids, 16, 4)
    torch.testing.assert_close(one[:, :16], other[:, :16], rtol=1e-4, atol=1e-4)
    assert (one - other)[:, 16:].abs().max() > 0.01


@pytest.mark.parametrize("chunk", [1, 5])
def test_sinks_are_seen_right_before_the_rest(chunk: int) -> None:
    made, ids = model(num_layers=1, rope_dims=4), text(50)
    found = streamed(made, ids, 12, chunk, sinks=3)
    windows = sliding(50, 12, chunk)
    for begin, first, stop in zip(windows.begins, windows.firsts, windows.stops, strict=True):
        away = min(3, begin)
        seen = torch.cat((ids[:, :away], ids[:, begin:stop]), 1)
        expected = made(seen, tail=int(stop - first))
        torch.testing.assert_close(found[:, first:stop], expected, rtol=1e-4, atol=1e-4)
    assert (found - streamed(made, ids, 12, chunk))[:, 20:].abs().max() > 0.01


@given(st.integers(1, 23), st.integers(2, 8))
@settings(max_examples=10, deadline=None)
def test_no_place_sees_what_comes_later(place: int, chunk: int) -> None:
    made, ids = model(smear="gated"), text(24)
    other = ids.clone()
    other[:, place:] = text(24 - place, seed=1)
    one, two = (streamed(made, each, 8, chunk, sinks=8 - chunk) for each in (ids, other))
    torch.testing.assert_close(one[:, :place], two[:, :place], rtol=0, atol=0)


def test_a_stream_far_on_is_turned_exactly() -> None:
    """Attention knows differences of positions alone; float32 angles would be off by 0.01 and more after a million."""
    made, ids = model(), text(24)
    near, far = (Cache(made, 1, 16, chunk=8) for _ in range(2))
    near.assume(8)
    far.assume(8)
    far.position = 50_000_000
    for part in ids.split(8, 1):
        torch.testing.assert_close(near(part), far(part), rtol=1e-4, atol=1e-4)


def quantized(made: GPT, ids: Tensor, bits: int, most: int = RECENT, **more: Any) -> Tensor:
    """Logits of a stream, by calls of up to `most` places."""
    cache, parts = Cache(made, len(ids), 40, chunk=12, kv_bits=bits, **more), []
    while cache.position < ids.shape[1]:
        parts.append(cache(ids[:, cache.position : cache.position + min(most, cache.ahead)]))
    return torch.cat(parts, 1)


KEPT = [{}, {"attn_window": 9}, {"rope_dims": 4, "sinks": 5}, {"isolate_documents": True}]


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_few_bits_change_what_is_behind_the_newest_block_and_the_fewer_the_more(kept: dict[str, Any]) -> None:
    more = {name: kept[name] for name in kept if name == "sinks"}
    made, ids = model(**{name: kept[name] for name in kept if name not in more}), text(140)
    ids[0, [0, 50, 90, 120]] = BOS
    exact = quantized(made, ids, 0, **more)
    apart = [(quantized(made, ids, bits, **more) - exact).abs() for bits in (8, 4, 2)]
    assert all(each[:, :RECENT].max() < 1e-4 for each in apart)
    means = [float(each[:, RECENT:].mean()) for each in apart]
    assert means[0] < 0.05 * means[-1]
    assert means == sorted(means)
    assert means[-1] > 0.01


@pytest.mark.parametrize("most", [1, 7])
@pytest.mark.parametrize("kept", KEPT[1:3], ids=str)
def test_few_bits_do_not_make_calls_matter(most: int, kept: dict[str, Any]) -> None:
    more = {name: kept[name] for name in kept if name == "sinks"}
    made, ids = model(**{name: kept[name] for name in kept if name not in more}), text(110)
    one, other = quantized(made, ids, 3, **more), quantized(made, ids, 3, most, **more)
    # a rounding may now and then choose another level
    assert float((one - other).abs().mean()) < 1e-3
    assert float(((one - other).abs() > 1e-3).float().mean()) < 0.05


def test_few_bits_take_as_many() -> None:
    made = model()
    for bits in (2, 3, 4, 8):
        cache = Cache(made, 2, 64, kv_bits=bits)
        assert cache.token_bytes == 3 * 2 * 2 * Quantizer(8, bits).vector_bytes
        assert sum(part.nbytes for part in cache._stored) == 2 * 64 * cache.token_bytes
    assert Cache(made, 2, 64).token_bytes == 3 * 2 * 2 * 8 * made.compute_dtype.itemsize
    with pytest.raises(ConfigError, match="kept in 5 bits"):
        Cache(made, 1, 64, kv_bits=5)


@pytest.mark.parametrize("place", [70, 100, 150])
def test_few_bits_see_nothing_that_comes_later(place: int) -> None:
    made, ids = model(), text(160)
    other = ids.clone()
    other[:, place:] = text(160 - place, seed=1)
    one, two = quantized(made, ids, 3), quantized(made, other, 3)
    torch.testing.assert_close(one[:, :place], two[:, :place], rtol=0, atol=0)
    assert (one - two)[:, place:].abs().max() > 0.1


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"context": 4, "chunk": 5}, "chunks of 5 tokens do not fit a context of 4"),
        ({"context": 4, "chunk": 0}, "chunks of 0"),
        ({"context": 4, "chunk": 2, "sinks": 3}, "3 sinks do not fit; give 0 to 2"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Cache(model(), 1, **sizes)
    with pytest.raises(ConfigError, match="another document"):
        Cache(model(isolate_documents=True), 1, 8, sinks=1)
    with pytest.raises(ConfigError, match="5 places at once are more than the 4 until"):
        Cache(model(), 1, 4)(text(5))
