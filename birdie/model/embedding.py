"""Tokens to vectors: beside the table of tokens, tables of hashed pairs and triples, and a look at the token before.

    ids ─► tok_emb (─► embed_proj) ─► + bigram ─► gated smear ─► norm ─► fixed smear ─► x₀
                                                                   value table ─► what is added to values of some layers

All that mixes tokens stops at the beginning of a document: a token after BOS never learns what came before BOS.

Sources, pull requests of openai/parameter-golf: hashed bigrams and fixed smear #162, gated smear #1667 with the mend of
#1851, value embeddings #374.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.model.attention import Linear

BEFORE = 3  # tokens before one that it is mixed from: smear takes the last one's triple
_MULTIPLIERS = (36_313, 27_191, 51_497)  # of a token, the one before it, and the one before that


class Bigram(nn.Module):
    """Hashed pairs (and triples) of tokens, each with a row of one small table: (t·36313 ⊕ t₋₁·27191) mod (rows − 1).

    The last row is for tokens with nothing before them. Table and projection: rows · width + width · dim parameters and
    one; a look-up and a product a token.
    """

    def __init__(self, rows: int, width: int, dim: int, *, trigram: bool, bos_id: int) -> None:
        super().__init__()
        self.rows, self.trigram, self.bos_id = rows, trigram, bos_id
        self.embed = nn.Embedding(rows, width)
        self.proj = Linear(width, dim)
        self.scale = nn.Parameter(torch.tensor(0.05))
        nn.init.zeros_(self.embed.weight)
        # Zeros here as well would leave both without a gradient for ever.
        nn.init.normal_(self.proj.weight, std=width**-0.5)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the embeddings of ids (batch, length): (batch, length, dim)."""
        found = self.embed(self.indices(ids, 2))
        if self.trigram:
            found = found + self.embed(self.indices(ids, 3))
        out: Tensor = self.scale.to(dtype) * self.proj(found.to(dtype))
        return out

    def indices(self, ids: Tensor, tokens: int) -> Tensor:
        """The row of each run of `tokens` tokens that ends at each place; the last where a document is too short."""
        found, alone = ids * _MULTIPLIERS[0], ids == self.bos_id
        for back in range(1, tokens):
            found = found ^ (_shifted(ids, back, 0) * _MULTIPLIERS[back])
            if back + 1 < tokens:  # a run must not reach over the beginning of a document
                alone = alone | (_shifted(ids, back, self.bos_id) == self.bos_id)
        alone = alone | (torch.arange(ids.shape[1], device=ids.device) < tokens - 1)
        return torch.where(alone, self.rows - 1, found % (self.rows - 1))


class FixedSmear(nn.Module):
    """x_t ← (1 − g) ⊙ x_t + g ⊙ x_{t−1}, g = σ(gate) a share for each channel; half to begin with. dim parameters."""

    def __init__(self, dim: int, bos_id: int) -> None:
        super().__init__()
        self.bos_id = bos_id
        self.gate = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x: (batch, length, dim) of ids (batch, length)."""
        inside = _inside(ids, self.bos_id).to(x.dtype)
        return x + torch.sigmoid(self.gate).to(x.dtype) * inside * (_shifted(x, 1, 0.0) - x)


class GatedSmear(nn.Module):
    """x_t ← x_t + λ · σ(W · x_t[:window]) · x_{t−1}; λ and W start at zero. window + 1 parameters."""

    def __init__(self, window: int, bos_id: int) -> None:
        super().__init__()
        self.bos_id, self.window = bos_id, window
        self.gate = nn.Parameter(torch.zeros(1, window))
        self.amount = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x: (batch, length, dim) of ids (batch, length)."""
        share = torch.sigmoid(F.linear(x[..., : self.window], self.gate.to(x.dtype)))
        inside = _inside(ids, self.bos_id).to(x.dtype)
        return x + self.amount.to(x.dtype) * share * inside * _shifted(x, 1, 0.0)


class ValueEmbedding(nn.Module):
    """A second embedding of the token, for the values of some layers; the projection starts at zero.

    Table, projection, a scale for all and one for each layer: vocab_size · width + width · kv_dim + 1 + layers.
    """

    def __init__(self, vocab_size: int, width: int, kv_dim: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = layers
        self.embed = nn.Embedding(vocab_size, width)
        self.proj = Linear(width, kv_dim)
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.layer_scales = nn.Parameter(torch.ones(len(layers)))
        nn.init.normal_(self.embed.weight, std=0.01)
        nn.init.zeros_(self.proj.weight)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> dict[int, Tensor]:
        """By layer, what is added to its values: (batch, length, kv_dim)."""
        found = self.scale.to(dtype) * self.proj(self.embed(ids).to(dtype))
        return {layer: found * self.layer_scales[index].to(dtype) for index, layer in enumerate(self.layers)}


def _shifted(x: Tensor, back: int, first: float) -> Tensor:
    """x (batch, length, …), each place what was `back` places before it."""
    start = torch.full_like(x[:, :back], first)
    return torch.cat((start, x[:, : x.shape[1] - back]), dim=1)[:, : x.shape[1]]


def _inside(ids: Tensor, bos_id: int) -> Tensor:
    """Whether each token has one before it in its document, (batch, length, 1)."""
    inside = ids != bos_id
    return (inside & (torch.arange(ids.shape[1], device=ids.device) > 0))[..., None]
