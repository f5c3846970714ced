"""Causal self-attention with rotary positions, normalised queries and keys, and grouped key–value heads.

Descends from RoPE (Su et al. 2021), grouped-query attention (Ainslie et al. 2023) and query–key normalisation (Henry et
al. 2020); the learned gain on each query head takes the place of a temperature.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer without bias whose fp32 master weight is cast to the dtype of its input at each call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Rotary(nn.Module):
    """Tables of cosines and sines by position, made when first needed and kept for each device and dtype."""

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        self.head_dim, self.base = head_dim, base
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def forward(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, ±sin) as `rotate` takes them, each (length, 1, head_dim) to broadcast over heads."""
        tables = self._tables.get((device, dtype))
        if tables is None or len(tables[0]) < length:
            # sampling asks for one position more at each token: the power of two above keeps the tables
            tables = self._build(1 << (length - 1).bit_length(), device, dtype)
            self._tables[device, dtype] = tables
        return tables[0][:length], tables[1][:length]

    def _build(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # tensors made in inference mode could never be used in training again
        with torch.inference_mode(False), torch.no_grad():
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
            angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), self.base**-exponents)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            return torch.cat((cos, cos), dim=1)[:, None], torch.cat((sin, -sin), dim=1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (a, b) = (x[i], x[i + d/2]) by its position's angle into (a cos + b sin, b cos − a sin).

    Args:
        x: (batch, length, heads, d).
        cos: (length, 1, d), both halves alike.
        sin: (length, 1, d), the second half negated.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)  # a roll by half swaps a and b


class Attention(nn.Module):
    """softmax(gain · RoPE(norm(q)) · RoPE(norm(k))ᵀ / √d, causal) · v, with several query heads to a key–value head."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, qk_gain_init: float) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim // num_heads
        self.c_q = Linear(dim, dim)
        self.c_k = Linear(dim, num_kv_heads * self.head_dim)
        self.c_v = Linear(dim, num_kv_heads * self.head_dim)
        self.proj = Linear(dim, dim)
        nn.init.zeros_(self.proj.weight)
        self.q_gain = nn.Parameter(torch.full((num_heads,), qk_gain_init))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (batch, length, dim) → the same shape."""
        batch, length, dim = x.shape
        q = self.c_q(x).view(batch, length, self.num_heads, self.head_dim)
        k = self.c_k(x).view(batch, length, self.num_kv_heads, self.head_dim)
        v = self.c_v(x).view(batch, length, self.num_kv_heads, self.head_dim)
        q = rotate(F.rms_norm(q, (self.head_dim,)), cos, sin) * self.q_gain.to(x.dtype)[:, None]
        k = rotate(F.rms_norm(k, (self.head_dim,)), cos, sin)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, dim))
        return out
