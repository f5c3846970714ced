"""Sampling text from a model, token by token, through the same forward pass that trains and scores it.

`generate` continues a prompt for any number of tokens; `sample_sequences` samples many sequences of one length at once.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.techniques.depth_recurrence import layer_order
from birdie.system.drawing import require_drawing

_CACHE_BYTES = (
    1 << 30
)  # of keys and values at a time; a constant, so that samples do not depend on the machine's memory
_LOWEST_TEMPERATURE = 1e-30  # below it float32 cannot hold the reciprocal, and from here on the draw is the argmax

Draw = Callable[[Tensor], Tensor]
"""Logits (…, vocab_size) → one token id per row, (…, 1) int64."""


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
        model: in evaluation mode.
        ids: (length,) int64, at least one token; a document begins with the tokenizer's BOS.
        tokens: to sample.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens; None: among all.
        context: number of last tokens that the model sees; the training length is a good choice.
        vocab_size: draw only ids below it, for a model with more rows than the tokenizer has pieces; None: all.
        generator: source of randomness, on the device of the model; None: torch's global generator.
    """
    rows = model.config.vocab_size
    if ids.ndim != 1 or not len(ids):
        raise ConfigError(f"ids have shape {tuple(ids.shape)}; pass one row with at least one token")
    if int(ids.min()) < 0 or int(ids.max()) >= rows:
        raise ConfigError(f"token ids {int(ids.min())}…{int(ids.max())} are outside the vocabulary of {rows}")
    if context < 1:
        raise ConfigError(f"context is {context}; it must be at least 1")
    return _generate(model, ids, tokens, context, _sampler(model, temperature, top_k, vocab_size, generator))


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
    """Return `count` sequences sampled from the model, (count, length) int64 on the CPU, reproducible on one machine.

    Args:
        model: in evaluation mode.
        first: token that begins each, the tokenizer's BOS. The model may sample further ones.
        temperature: divides the logits; 0 takes the most likely token.
        vocab_size: draw only ids below it; None: all.
        progress: called with the number of tokens sampled so far.
    """
    if count < 1 or length < 1:
        raise ConfigError(f"{count} sequences of {length} tokens cannot be sampled; use at least 1 for both")
    if not 0 <= first < model.config.vocab_size:
        raise ConfigError(f"the first token {first} is outside the vocabulary of {model.config.vocab_size}")
    device = model.tok_emb.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    draw = _sampler(model, temperature, None, vocab_size, generator)
    sequences = torch.full((count, length), first, device=device)  # one transfer at the end, not one a token
    rows = parallel_sequences(model, count, length)
    for start in range(0, count, rows):
        batch = sequences[start : start + rows]
        cache = Cache(model, len(batch), length)
        ids = batch[:, 0]
        for position in range(1, length):
            ids = draw(cache(ids[:, None])[:, 0])[:, 0]
            batch[:, position] = ids
            if progress is not None:
                progress(start * length + len(batch) * (position + 1))
    return sequences.cpu()


def parallel_sequences(model: GPT, count: int, length: int) -> int:
    """Return how many of `count` sequences of `length` tokens `sample_sequences` samples in parallel."""
    config = model.config
    values = 2 * sum(map(len, layer_order(config, model.depth_recurrence))) * config.kv_dim * length
    return max(1, min(count, _CACHE_BYTES // (values * model.compute_dtype.itemsize)))


def _sampler(
    model: GPT, temperature: float, top_k: int | None, vocab_size: int | None, generator: torch.Generator | None
) -> Draw:
    """Return the function that draws from logits."""
    rows = model.config.vocab_size
    if vocab_size is not None and not 1 <= vocab_size <= rows:
        raise ConfigError(f"vocab_size is {vocab_size}; it must be from 1 to the model's {rows}")
    require_drawing(temperature, top_k)
    draw = partial(_draw, temperature=temperature, top_k=top_k, generator=generator)
    return lambda logits: draw(logits[..., :vocab_size])


def _generate(model: GPT, ids: Tensor, tokens: int, context: int, draw: Draw) -> Iterator[int]:
    window = ids.to(model.tok_emb.weight.device)[-context:]
    for _ in range(tokens):
        with torch.inference_mode():
            token = draw(model(window[None])[0, -1])
            window = torch.cat((window, token))[-context:]
        yield int(token)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    below_best = logits.float() - logits.amax(-1, keepdim=True)
    scaled = below_best / max(temperature, _LOWEST_TEMPERATURE)
    return torch.multinomial(scaled.softmax(-1), 1, generator=generator)
