"""Smear: each position sees the embedding of its predecessor in the document.

    fixed    x_t ← (1 − g) ⊙ x_t + g ⊙ x_{t−1}              g = σ(gate), one share per channel; after the norm
    gated    x_t ← x_t + λ · σ(W · x_t[:window]) · x_{t−1}  the share depends on the token; before the norm

Cost: dim, or window + 1 parameters; one pass over x. The first token of a document has no predecessor.

Source: fixed, openai/parameter-golf #162; gated, #1667 with the correction of #1851. Measured: −0.039 and −0.037.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.gpt.model.layers import rms, shift
from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT


class FixedSmear(nn.Module):
    """Fixed smear; g starts at one half."""

    before_norm = False

    def __init__(self, dim: int, bos_id: int) -> None:
        super().__init__()
        self.bos_id = bos_id
        self.gate = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x: (batch, length, dim) of ids (batch, length) → the same shape."""
        has_predecessor = _has_predecessor(ids, self.bos_id).to(x.dtype)
        return x + torch.sigmoid(self.gate).to(x.dtype) * has_predecessor * (shift(x, 1, 0.0) - x)


class GatedSmear(nn.Module):
    """Gated smear; λ and W start at zero."""

    before_norm = True

    def __init__(self, window: int, bos_id: int) -> None:
        super().__init__()
        self.bos_id, self.window = bos_id, window
        self.gate = nn.Parameter(torch.zeros(1, window))
        self.amount = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x: (batch, length, dim) of ids (batch, length) → the same shape."""
        share = torch.sigmoid(F.linear(x[..., : self.window], self.gate.to(x.dtype)))
        has_predecessor = _has_predecessor(ids, self.bos_id).to(x.dtype)
        return x + self.amount.to(x.dtype) * share * has_predecessor * shift(x, 1, 0.0)


def smear_of(config: "GPTConfig") -> FixedSmear | GatedSmear | None:
    """Return the smear that `config` asks for, or None."""
    if config.smear == "none":
        return None
    gated = config.smear == "gated"
    return GatedSmear(config.gate_window, config.bos_id) if gated else FixedSmear(config.model_dim, config.bos_id)


def _has_predecessor(ids: Tensor, bos_id: int) -> Tensor:
    """Return whether each token has a predecessor in its document, (batch, length, 1)."""
    inside = ids != bos_id
    return (inside & (torch.arange(ids.shape[1], device=ids.device) > 0))[..., None]


def _diagnostics(model: "GPT") -> Iterator[str]:
    smear = model.smear
    if isinstance(smear, GatedSmear):
        yield f"gated smear: amount 0 → {float(smear.amount):.3g}, gate 0 → {rms(smear.gate):.3g}"
    elif smear is not None:
        shares = torch.sigmoid(smear.gate)
        yield f"fixed smear: shares 0.5 → {float(shares.min()):.3g} to {float(shares.max()):.3g}"


SMEAR = Technique(
    groups={"smear.gate": "scalars", "smear.amount": "scalars"},
    diagnostics=_diagnostics,
    lookback=1,
)
