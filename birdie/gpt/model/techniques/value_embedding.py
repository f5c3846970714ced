"""Value embeddings: a second embedding of the token is added to the values of some layers.

    v_i ← v_i + scale · layer_scale_i · proj(table[t])          the projection starts at zero

Cost: vocab_size · width + width · kv_dim + 1 + layers parameters, a look-up and a thin product.

Source: openai/parameter-golf #374. Measured: −0.056 on the last two layers.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from birdie.gpt.model.layers import Linear, rms
from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT


class ValueEmbedding(nn.Module):
    """Table and projection that `layers` share, with a scale for all and one per layer."""

    def __init__(self, vocab_size: int, width: int, kv_dim: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = layers
        self.embed = nn.Embedding(vocab_size, width)
        self.proj = Linear(width, kv_dim)
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.layer_scales = nn.Parameter(torch.ones(len(layers)))
        nn.init.normal_(self.embed.weight, std=0.01)
        nn.init.zeros_(self.proj.weight)

    @classmethod
    def of(cls, config: "GPTConfig") -> Self | None:
        """Return the embedding that `config` asks for, or None."""
        if not config.value_embed_layers:
            return None
        return cls(config.vocab_size, config.value_embed_dim, config.kv_dim, config.value_embed_layers)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> dict[int, Tensor]:
        """Return, by layer, the term to add to its values: (batch, length, kv_dim)."""
        embedded = self.scale.to(dtype) * self.proj(self.embed(ids).to(dtype))
        return {layer: embedded * self.layer_scales[index].to(dtype) for index, layer in enumerate(self.layers)}


def _diagnostics(model: "GPT") -> Iterator[str]:
    if model.value_embed is not None:
        scales = ", ".join(f"{float(scale):.3g}" for scale in model.value_embed.layer_scales)
        yield (
            f"value embeddings: layers {', '.join(map(str, model.value_embed.layers))}, projection 0 → "
            f"{rms(model.value_embed.proj.weight):.3g}, scales 1 → {scales}"
        )


VALUE_EMBEDDING = Technique(
    groups={
        "value_embed.embed.weight": "embedding",
        "value_embed.proj.weight": "matrices",
        "value_embed.scale": "scalars",
        "value_embed.layer_scales": "scalars",
    },
    diagnostics=_diagnostics,
    value_rows=("value_embed.proj.weight",),
    joined_layers=lambda config: config.value_embed_layers,
)
