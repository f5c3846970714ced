"""Sampling text from a model, one token at a time, through the same forward that trains and scores it.

`generate` goes on from a prompt for as long as one likes; `sample_sequences` writes many of one length at once.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.model.cache import Cache
from birdie.model.gpt import GPT

_CACHED = 1 << 30  # bytes of keys and values held at a time; how many sequences that is depends on nothing else
_LEAST_TEMPERATURE = 1e-30  # below it float32 cannot hold the reciprocal; from there on it is the argmax anyway


def generate(
    model: GPT,
    ids: Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    context: int = 1024,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield `tokens` token ids that continue `ids`.

    Args:
        ids: (length,) int64, at least one token; a document begins with the tokenizer's BOS.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw among the k likeliest tokens only; None draws among all.
        context: how many of the last tokens the model sees; the length it was trained at is a good choice.
        vocab_size: only ids below it are drawn, for a model with more rows than the tokenizer has pieces; None: all.
        generator: source of randomness, on the device of the model; None is torch's global one.

    Raises:
        ConfigError: an argument is out of range.
    """
    rows = model.config.vocab_size
    if ids.ndim != 1 or not len(ids):
        raise ConfigError(f"ids have shape {tuple(ids.shape)}; give one row with at least one token")
    if int(ids.min()) < 0 or int(ids.max()) >= rows:
        raise ConfigError(f"token ids {int(ids.min())}…{int(ids.max())} leave the vocabulary of {rows}")
    if context < 1:
        raise ConfigError(f"context is {context}; it must be at least 1")
    return _generate(model, ids, tokens, context, _drawing(model, temperature, top_k, vocab_size, generator))


def sample_sequences(
    model: GPT,
    count: int,
    length: int,
    *,
    first: int,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """`count` sequences of the model's own, (count, length) int64 on the CPU: the same ones each time on one machine.

    Args:
        first: the token each begins with, the tokenizer's BOS. Further ones are part of what the model writes.
        temperature: divides the logits; 0 always takes the likeliest token.
        vocab_size: only ids below it are drawn; None: all the model has.
        seed: of the draws.
        progress: called with the number of tokens written so far.

    Raises:
        ConfigError: an argument is out of range.
    """
    if count < 1 or length < 1:
        raise ConfigError(f"{count} sequences of {length} tokens cannot be sampled; ask for one or more")
    if not 0 <= first < model.config.vocab_size:
        raise ConfigError(f"the first token {first} leaves the vocabulary of {model.config.vocab_size}")
    device = model.tok_emb.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    draw = _drawing(model, temperature, None, vocab_size, generator)
    rows = torch.full((count, length), first)
    at_once = together(model, count, length)
    for start in range(0, count, at_once):
        part = rows[start : start + at_once]
        step = Cache(model, len(part), length)
        ids = part[:, 0].to(device)
        for place in range(1, length):
            ids = draw(step(ids[:, None])[:, 0])[:, 0]
            part[:, place] = ids
            if progress is not None:
                progress(start * length + len(part) * (place + 1))
    return rows


def together(model: GPT, count: int, length: int) -> int:
    """How many of `count` sequences of `length` tokens are sampled side by side."""
    config = model.config
    each = 2 * sum(map(len, config.layers(model.looping))) * config.kv_dim * length
    return max(1, min(count, _CACHED // (each * model.compute_dtype.itemsize)))


def _drawing(
    model: GPT, temperature: float, top_k: int | None, vocab_size: int | None, generator: torch.Generator | None
) -> Callable[[Tensor], Tensor]:
    """How to draw from logits (…, vocab_size); raises ConfigError when an argument is out of range."""
    rows = model.config.vocab_size
    if vocab_size is not None and not 1 <= vocab_size <= rows:
        raise ConfigError(f"vocab_size is {vocab_size}; it must be from 1 to the model's {rows}")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature is {temperature}; it must be finite and at least 0")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k is {top_k}; it must be at least 1")
    draw = partial(_draw, temperature=temperature, top_k=top_k, generator=generator)
    return lambda logits: draw(logits[..., :vocab_size])


def _generate(
    model: GPT,
    ids: Tensor,
    tokens: int,
    context: int,
    draw: Callable[[Tensor], Tensor],
) -> Iterator[int]:
    window = ids.to(model.tok_emb.weight.device)[-context:]
    for _ in range(tokens):
        with torch.inference_mode():
            token = draw(model(window[None])[0, -1])
            window = torch.cat((window, token))[-context:]
        yield int(token)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token id a row, (…, 1) int64, from logits (…, vocab_size)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        worst_kept = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < worst_kept, -torch.inf)
    below_best = logits.float() - logits.amax(-1, keepdim=True)
    scaled = below_best / max(temperature, _LEAST_TEMPERATURE)
    return torch.multinomial(scaled.softmax(-1), 1, generator=generator)
