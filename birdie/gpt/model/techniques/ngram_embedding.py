"""Hashed n-gram embeddings: pairs (and triples) of tokens share one small table whose rows are added to the embedding.

    row = (t · 36313 ⊕ t₋₁ · 27191 [⊕ t₋₂ · 51497]) mod (rows − 1)          x ← x + scale · proj(table[row])

The last row is for tokens with too few predecessors in their document. Cost: rows · width + width · dim + 1 parameters,
a look-up and a thin product per token. Table and projection are a factored matrix: if both started at zero, neither
would ever receive a gradient, so only the table does.

Source: openai/parameter-golf #162. Measured: pairs −0.100, pairs and triples in one table −0.055.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from birdie.gpt.model.layers import Linear, shift
from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT

_MULTIPLIERS = (36_313, 27_191, 51_497)  # of a token, its predecessor, and the predecessor's


class NgramEmbedding(nn.Module):
    """Table of hashed pairs, and triples if `trigram`, with its projection to the model's width."""

    def __init__(self, rows: int, width: int, dim: int, *, trigram: bool, bos_id: int) -> None:
        super().__init__()
        self.rows, self.trigram, self.bos_id = rows, trigram, bos_id
        self.embed = nn.Embedding(rows, width)
        self.proj = Linear(width, dim)
        self.scale = nn.Parameter(torch.tensor(0.05))
        nn.init.zeros_(self.embed.weight)
        nn.init.normal_(self.proj.weight, std=width**-0.5)

    @classmethod
    def of(cls, config: "GPTConfig") -> Self | None:
        """Return the embedding that `config` asks for, or None."""
        if not config.bigram_vocab_size:
            return None
        rows, width = config.bigram_vocab_size, config.bigram_dim
        return cls(rows, width, config.model_dim, trigram=config.trigram, bos_id=config.bos_id)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the term to add to the embeddings of ids (batch, length): (batch, length, dim)."""
        rows = self.embed(self.indices(ids, 2))
        if self.trigram:
            rows = rows + self.embed(self.indices(ids, 3))
        out: Tensor = self.scale.to(dtype) * self.proj(rows.to(dtype))
        return out

    def indices(self, ids: Tensor, n: int) -> Tensor:
        """Return the row of the n-gram that ends at each position; the last row where the document is too short."""
        mixed, incomplete = ids * _MULTIPLIERS[0], ids == self.bos_id
        for back in range(1, n):
            mixed = mixed ^ (shift(ids, back, 0) * _MULTIPLIERS[back])
            if back + 1 < n:  # an n-gram must not reach across the beginning of a document
                incomplete = incomplete | (shift(ids, back, self.bos_id) == self.bos_id)
        incomplete = incomplete | (torch.arange(ids.shape[1], device=ids.device) < n - 1)
        return torch.where(incomplete, self.rows - 1, mixed % (self.rows - 1))


def _diagnostics(model: "GPT") -> Iterator[str]:
    if model.bigram is not None:
        rows = model.bigram.embed.weight
        trained = int(rows.any(1).sum())
        name = "bigram and trigram" if model.bigram.trigram else "bigram"
        yield f"{name}: {trained:,} of {len(rows):,} rows trained, scale 0.05 → {float(model.bigram.scale):.3g}"


NGRAM_EMBEDDING = Technique(
    groups={"bigram.embed.weight": "embedding", "bigram.proj.weight": "matrices", "bigram.scale": "scalars"},
    diagnostics=_diagnostics,
    lookback=2,
)
