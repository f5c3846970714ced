"""Sampling text from a model, one token at a time, through the same forward that trains and scores it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.model.gpt import GPT


def generate(
    model: GPT,
    ids: Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    context: int = 1024,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield `tokens` token ids that continue `ids`.

    Args:
        ids: (length,) int64, at least one token; a document begins with the tokenizer's BOS.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw among the k likeliest tokens only; None draws among all.
        context: how many of the last tokens the model sees; the length it was trained at is a good choice.
        generator: source of randomness, on the device of the model; None is torch's global one.

    Raises:
        ConfigError: an argument is out of range.
    """
    vocab_size = model.config.vocab_size
    if ids.ndim != 1 or not len(ids):
        raise ConfigError(f"ids have shape {tuple(ids.shape)}; give one row with at least one token")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ConfigError(f"token ids {int(ids.min())}…{int(ids.max())} leave the vocabulary of {vocab_size}")
    if not temperature >= 0:
        raise ConfigError(f"temperature is {temperature}; it must be at least 0")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k is {top_k}; it must be at least 1")
    if context < 1:
        raise ConfigError(f"context is {context}; it must be at least 1")
    return _generate(model, ids, tokens, temperature, top_k, context, generator)


def _generate(
    model: GPT,
    ids: Tensor,
    tokens: int,
    temperature: float,
    top_k: int | None,
    context: int,
    generator: torch.Generator | None,
) -> Iterator[int]:
    window = ids.to(model.tok_emb.weight.device)[-context:]
    for _ in range(tokens):
        with torch.inference_mode():
            logits = model(window[None])[0, -1]
            token = _draw(logits, temperature, top_k, generator)
            window = torch.cat((window, token))[-context:]
        yield int(token)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token id, (1,) int64, from logits (vocab_size,)."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    if top_k is not None and top_k < len(logits):
        worst_kept = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < worst_kept, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
