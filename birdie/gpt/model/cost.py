"""Cost of a forward and a backward pass of a GPT, counted on the meta device without computing anything.

    GPT on the meta device ──loss, backward──► torch counts products and what is kept ──► FLOPs, bytes kept

Only shapes go through the model, so its techniques are counted as they run. Conventions: a product of (m, k) and (k, n)
is 2·m·k·n FLOPs. Attention is counted separately, by its causal half and without what a fused kernel recomputes in the
backward pass. Kept bytes are what the forward pass stores for the backward pass.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.techniques.depth_recurrence import layer_order


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Cost of a forward and a backward pass over one batch.

    Attributes:
        matrix_flops: of products with weights.
        attention_flops: of queries with keys and of attention weights with values, the causal half.
        kept_bytes: stored from forward to backward, without the weights.
    """

    matrix_flops: int
    attention_flops: int
    kept_bytes: int

    @property
    def flops(self) -> int:
        """FLOPs of products and attention."""
        return self.matrix_flops + self.attention_flops


@lru_cache(maxsize=8)
def training_cost(
    config: GPTConfig, sequences: int, length: int, dtype: torch.dtype, *, depth_recurrence: bool
) -> ModelCost:
    """Return the cost of `GPT(config).loss` and its backward pass.

    Args:
        length: tokens of each.
        depth_recurrence: whether layers are repeated.
    """
    with torch.device("meta"):
        model = GPT(config)
        ids = torch.zeros((sequences, length), dtype=torch.int64)
    model.compute_dtype, model.depth_recurrence = dtype, depth_recurrence
    model.attention_function = _shapes_of_attention
    weights = {_storage(p) for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(_storage(tensor), tensor)  # a reference prevents the reuse of the number of its storage
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model.loss(ids, ids)
        kept_bytes = sum(t.untyped_storage().nbytes() for storage, t in kept.items() if storage not in weights)
        loss.backward()  # type: ignore[no-untyped-call]
    layers = sum(map(len, layer_order(config, depth_recurrence)))
    # two products forward and four backward, each of 2 · length² · dim FLOPs per sequence; causality halves them
    attention = layers * sequences * 6 * 2 * length * length * config.model_dim // 2
    return ModelCost(counter.get_total_flops(), attention, kept_bytes)


class _FusedAttention(torch.autograd.Function):
    """The shapes of fused attention: the matrix of attention weights is never stored."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        del gradients
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _shapes_of_attention(q: Tensor, k: Tensor, v: Tensor, _mask: Tensor | None) -> Tensor:
    out: Tensor = _FusedAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
