"""Gates on attention heads: each head's output is multiplied by a factor computed from the layer's input.

    output   2σ(W · x[:window])      starts at 1; heads · window parameters per layer       #1667
    sparse   σ(s · W · x[:window])   starts at ½; heads · window, s a constant              #1787
    dense    σ(W · x)                starts near ½; heads · dim                             #1736

Measured: −0.019, −0.019, −0.013.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.gpt.model.layers import rms
from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT


def gate_weight(config: "GPTConfig") -> nn.Parameter | None:
    """Return W of a layer, (heads, window or dim), or None where the technique is off."""
    if config.attn_gate == "none":
        return None
    dense = config.attn_gate == "dense"
    weight = nn.Parameter(torch.zeros(config.num_heads, config.model_dim if dense else config.gate_window))
    return nn.init.normal_(weight, std=0.01) if dense else weight  # type: ignore[return-value]


def gates(x: Tensor, weight: Tensor, config: "GPTConfig") -> Tensor:
    """Return the factor of each head, from x (batch, length, dim): (batch, length, heads)."""
    scale = config.sparse_gate_scale if config.attn_gate == "sparse" else 1.0
    share = torch.sigmoid(scale * F.linear(x[..., : weight.shape[1]], weight.to(x.dtype)))
    return 2 * share if config.attn_gate == "output" else share


def _diagnostics(model: "GPT") -> Iterator[str]:
    kind = model.config.attn_gate
    if kind != "none":
        weights = torch.cat([block.attn.head_gate for block in model.blocks])  # type: ignore[union-attr, misc]
        yield f"{kind} gate: {len(weights)} heads, weights {'0.01' if kind == 'dense' else '0'} → {rms(weights):.3g}"


HEAD_GATE = Technique(
    groups={"head_gate": "scalars"},
    diagnostics=_diagnostics,
    query_head_rows=("head_gate",),
)
