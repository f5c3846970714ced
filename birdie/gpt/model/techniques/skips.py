"""U-Net skips: the second half of the layers adds the outputs of the first half, the last one first.

    added    x ← x + w ⊙ output                    the baseline; w starts at one
    gated    x ← σ(g) ⊙ x + (1 − σ(g)) ⊙ w ⊙ output    dim parameters more per skip; g starts at zero

Source: gated, openai/parameter-golf #1218. Measured: −0.040.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from birdie.gpt.model.technique import Technique
from birdie.gpt.model.techniques.depth_recurrence import layer_order

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT


def skip_count(config: "GPTConfig") -> int:
    """Return the number of skips: pairs of an encoder and a decoder layer, with or without depth recurrence."""
    return max(min(map(len, layer_order(config, recurrence))) for recurrence in (False, True))


def skip_weights(config: "GPTConfig") -> nn.Parameter:
    """Return the weights w, (skips, dim)."""
    return nn.Parameter(torch.ones(skip_count(config), config.model_dim))


def skip_gates(config: "GPTConfig") -> nn.Parameter | None:
    """Return the gates g, (skips, dim), or None where skips are added."""
    return nn.Parameter(torch.zeros(skip_count(config), config.model_dim)) if config.skip_gates else None


def add_skip(x: Tensor, output: Tensor, weight: Tensor, gate: Tensor | None) -> Tensor:
    """Return x (batch, length, dim) with the skip from `output`; weight and gate: (dim,)."""
    weight = weight.to(x.dtype)
    if gate is None:
        return torch.addcmul(x, weight, output)
    return torch.lerp(weight * output, x, torch.sigmoid(gate).to(x.dtype))


def _diagnostics(model: "GPT") -> Iterator[str]:
    if model.skip_gates is not None:
        shares = torch.sigmoid(model.skip_gates)
        yield f"gated skips: shares 0.5 → {float(shares.min()):.3g} to {float(shares.max()):.3g}"


SKIPS = Technique(groups={"skip_weights": "scalars", "skip_gates": "scalars"}, diagnostics=_diagnostics)
