"""Attention functions by name: softmax, and those that a user registers.

    def windowed(q, k, v, mask):        # q (B, H, T, D), k and v (B, K, T, D), mask as in AttentionFunction
        ...
    register("windowed", windowed)      # model.attention = "windowed"

A recipe and an artifact hold the name only, never code: whoever loads the artifact registers the function first.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from birdie.errors import ConfigError

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""q (batch, heads, length, d), k and v (batch, kv heads, length, d), mask → (batch, heads, length, d).

The mask, (batch, 1, length, length) bool, marks the keys that each position may attend to; None: all up to its own.
"""


def softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q · kᵀ / √d) · v, by the fastest kernel of SDPA; fewer queries than keys are the last positions."""
    if mask is None and q.shape[2] < k.shape[2]:
        mask = _causal_mask(q.shape[2], k.shape[2], q.device)
    return grouped_attention(q, k, v, mask, is_causal=mask is None)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
    """Return SDPA of query heads that share keys, (batch, heads, length, d), never by its kernel that stores scores."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and _needs_copies(q.device.type, q.dtype, masked=mask is not None):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)


def _needs_copies(device: str, dtype: torch.dtype, *, masked: bool) -> bool:
    """Return whether keys must be copied for each query head: on CUDA, flash attention takes no mask and no float32,
    and the memory-efficient kernel no shared keys; what is left stores all scores.
    """
    return device == "cuda" and (masked or dtype == torch.float32)


def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal mask of the last `queries` of `keys` positions, (queries, keys) bool."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


_FUNCTIONS: dict[str, AttentionFunction] = {"softmax": softmax}


def register(name: str, function: AttentionFunction) -> None:
    """Register `function` for recipes under `name`. It must be causal, which birdie cannot check here.

    Raises:
        ConfigError: the name is in use.
    """
    if _FUNCTIONS.get(name, function) is not function:
        raise ConfigError(f"an attention function {name!r} is already registered; choose another name")
    _FUNCTIONS[name] = function


def attention_function(name: str) -> AttentionFunction:
    """Return the attention function that is registered as `name`."""
    if name not in _FUNCTIONS:
        raise ConfigError(
            f"attention {name!r} is unknown; choose {', '.join(sorted(_FUNCTIONS))}, or register it first "
            "(birdie.gpt.model.attention_functions.register)"
        )
    return _FUNCTIONS[name]
