"""Value residual: the values of a layer are mixed with those of the first layer.

    v_i ← w₀ · v_first + w₁ · v_i                               both weights start at one half

Cost: 2 parameters per layer, one pass over the values. Where layers are repeated, v_first is that of the first pass.

Source: Zhou et al. 2024 (arXiv 2410.17897). Measured: −0.042.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT


def mixing_weights(config: "GPTConfig") -> nn.Parameter | None:
    """Return the weights of a layer, (2,), or None where the technique is off."""
    return nn.Parameter(torch.full((2,), 0.5)) if config.value_residual else None


def mix(values: Tensor, first_values: Tensor | None, weights: nn.Parameter | None) -> Tensor:
    """Return the mixed values; `values` themselves in the first layer, which has no `first_values`."""
    if weights is None or first_values is None:
        return values
    weight = weights.to(values.dtype)
    return weight[0] * first_values + weight[1] * values


def _diagnostics(model: "GPT") -> Iterator[str]:
    weights = [block.attn.value_mix for block in model.blocks]  # type: ignore[union-attr]
    if model.config.value_residual:
        mean = torch.stack(weights[1:] or weights).mean(0)  # type: ignore[arg-type]
        yield (
            "value residual: weights of the first layer's values and of a layer's own values 0.5, 0.5 → "
            f"{float(mean[0]):.3g}, {float(mean[1]):.3g}, mean over layers"
        )


VALUE_RESIDUAL = Technique(
    groups={"value_mix": "scalars"},
    diagnostics=_diagnostics,
    joined_layers=lambda config: range(config.num_layers) if config.value_residual else (),
)
