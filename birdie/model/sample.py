"""Sampling text from a model, one token at a time, through the same forward that trains and scores it."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.model.gpt import GPT

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
    vocab_size = rows if vocab_size is None else vocab_size
    if ids.ndim != 1 or not len(ids):
        raise ConfigError(f"ids have shape {tuple(ids.shape)}; give one row with at least one token")
    if int(ids.min()) < 0 or int(ids.max()) >= rows:
        raise ConfigError(f"token ids {int(ids.min())}…{int(ids.max())} leave the vocabulary of {rows}")
    if not 1 <= vocab_size <= rows:
        raise ConfigError(f"vocab_size is {vocab_size}; it must be from 1 to the model's {rows}")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature is {temperature}; it must be finite and at least 0")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k is {top_k}; it must be at least 1")
    if context < 1:
        raise ConfigError(f"context is {context}; it must be at least 1")
    draw = partial(_draw, temperature=temperature, top_k=top_k, generator=generator)
    return _generate(model, ids, tokens, context, lambda logits: draw(logits[:vocab_size]))


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
    """One token id, (1,) int64, from logits (vocab_size,)."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    if top_k is not None and top_k < len(logits):
        worst_kept = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < worst_kept, -torch.inf)
    below_best = logits.float() - logits.max()
    scaled = below_best / max(temperature, _LEAST_TEMPERATURE)
    return torch.multinomial(scaled.softmax(0), 1, generator=generator)
