"""Exclusive attention (XSA): each head's output loses its component along the value of the position itself.

    y ← y − ⟨y, v̂⟩ v̂,   v̂ = v / |v|                            in the last `xsa_last_n` layers

Cost: no parameters, two passes over y.

Source: openai/parameter-golf #287. *Experimental*; measured: −0.001 ± 0.001 in the last layer, −0.006 ± 0.005 in all,
which costs 8 % of a step's time.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT


def is_exclusive(config: "GPTConfig", layer: int) -> bool:
    """Return whether `layer` has exclusive attention."""
    return layer >= config.num_layers - config.xsa_last_n


def remove_own_value(y: Tensor, v: Tensor) -> Tensor:
    """Return y without its component along v.

    Args:
        y: (batch, heads, length, d).
        v: (batch, kv heads, length, d).
    """
    batch, heads, length, d = y.shape
    kv_heads = v.shape[1]
    grouped = y.view(batch, kv_heads, heads // kv_heads, length, d)  # avoids a copy of v for each query head
    direction = F.normalize(v, dim=-1, eps=1e-6)[:, :, None]
    along = (grouped * direction).sum(-1, keepdim=True)
    return (grouped - along * direction).view(batch, heads, length, d)


def _diagnostics(model: "GPT") -> Iterator[str]:
    config = model.config
    if config.xsa_last_n:
        yield f"exclusive attention: layers {config.num_layers - config.xsa_last_n} to {config.num_layers - 1}"


EXCLUSIVE_ATTENTION = Technique(diagnostics=_diagnostics)
