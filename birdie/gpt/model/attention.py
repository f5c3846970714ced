"""Causal self-attention with rotary positions, normalized queries and keys, and grouped key–value heads.

    x ─► q, k: norm, rotate, gain ─────────────────────────────────┐
    x ─► v: [+ value embedding] [mixed with the first layer's] ─► attend ─► [− component along v] ─► [gate] ─► proj

From RoPE (Su et al. 2021), grouped-query attention (Ainslie et al. 2023) and query–key normalization (Henry et al.
2020); the learned gain of each query head replaces a temperature. Parts in brackets are techniques, off by default.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.gpt.model.attention_context import AttentionContext
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.layers import Linear
from birdie.gpt.model.rotary import rotate
from birdie.gpt.model.technique import Technique
from birdie.gpt.model.techniques.exclusive_attention import EXCLUSIVE_ATTENTION, is_exclusive, remove_own_value
from birdie.gpt.model.techniques.head_gate import HEAD_GATE, gate_weight, gates
from birdie.gpt.model.techniques.value_residual import VALUE_RESIDUAL, mix, mixing_weights

ATTENTION = Technique(
    groups={
        **dict.fromkeys(("c_q.weight", "c_k.weight", "c_v.weight", "proj.weight"), "matrices"),
        "q_gain": "scalars",
    },
    query_head_rows=("q_gain",),
)
"""The baseline's part."""


class Attention(nn.Module):
    """attend(gain · RoPE(norm(q)), RoPE(norm(k)), v), causal, with several query heads per key–value head.

    Attributes:
        windowed: whether the layer attends to the last `attn_window` positions only.
    """

    techniques: ClassVar[tuple[Technique, ...]] = (ATTENTION, EXCLUSIVE_ATTENTION, VALUE_RESIDUAL, HEAD_GATE)

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        dim = config.model_dim
        self.config, self.layer = config, layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.c_q = Linear(dim, dim)
        self.c_k = Linear(dim, config.kv_dim)
        self.c_v = Linear(dim, config.kv_dim)
        self.proj = Linear(dim, dim)
        nn.init.zeros_(self.proj.weight)
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))
        self.exclusive = is_exclusive(config, layer)
        self.value_mix = mixing_weights(config)
        self.head_gate = gate_weight(config)
        layers = config.attn_window_layers
        self.windowed = config.attn_window > 0 and (not layers or layer in layers)

    def forward(
        self, x: Tensor, context: AttentionContext, first_values: Tensor | None, last_n: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output, (batch, length, dim), and the values before mixing, (batch, length, kv heads, d).

        Args:
            x: normalized input of the block, (batch, length, dim).
            first_values: values of the first layer that ran; None in that layer.
            last_n: compute the output of the last n positions only; None: of all.
        """
        batch, length, dim = x.shape
        queried, cos, sin = x, context.cos, context.sin
        if last_n is not None:
            queried, cos, sin = x[:, -last_n:], cos[-last_n:], sin[-last_n:]
        q = self.c_q(queried).view(batch, -1, self.num_heads, self.head_dim)
        k = self.c_k(x).view(batch, length, self.num_kv_heads, self.head_dim)
        v = self.c_v(x)
        if self.layer in context.extra_values:
            v = v + context.extra_values[self.layer]
        values = v.view(batch, length, self.num_kv_heads, self.head_dim)
        v = mix(values, first_values, self.value_mix)
        q = rotate(F.rms_norm(q, (self.head_dim,)), cos, sin) * self.q_gain.to(x.dtype)[:, None]
        k = rotate(F.rms_norm(k, (self.head_dim,)), context.cos, context.sin)
        v = v.transpose(1, 2)
        y = context.attention[self.windowed](q.transpose(1, 2), k.transpose(1, 2), v)
        if self.exclusive:
            y = remove_own_value(y, v if last_n is None else v[:, :, -last_n:])
        y = y.transpose(1, 2)
        if self.head_gate is not None:
            y = y * gates(queried, self.head_gate, self.config)[..., None]
        out: Tensor = self.proj(y.reshape(batch, -1, dim))
        return out, values
