"""A model technique of your own: an attention function that lets a head attend to nothing.

    python examples/own_technique.py train laptop --model.attention softmax-off-by-one
    python examples/own_technique.py evaluate runs/first/model.birdie

Softmax gives every head a total weight of 1, also where nothing is worth attending to. This function divides by
1 + Σ exp instead, as if there were one more key and value, both zero (Evan Miller, "Attention is off by one", 2023).

Recipes and artifacts hold the name alone, so whoever loads such an artifact imports this file first. The KV cache
(sampling, streaming) supports softmax only. A technique with parameters of its own is four files inside birdie:
docs/techniques.md.
"""

import torch
import torch.nn.functional as F

from birdie.cli import main
from birdie.gpt.model.attention_functions import register


def softmax_off_by_one(q, k, v, mask):
    """Return attention with weights exp(s) / (1 + Σ exp(s)), where s = q · k / √d.

    Args:
        q: queries (batch, heads, length, d); if they are fewer than the keys, they are the last positions.
        k, v: keys and values (batch, kv heads, length, d).
        mask: the keys that each position may attend to, (batch, 1, queries, keys) bool, or None: all up to its own.
    """
    queries, keys = q.shape[2], k.shape[2]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))  # the zero key has score 0, so exp(0) = 1 in the sum
    mask = F.pad(mask, (1, 0), value=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


register("softmax-off-by-one", softmax_off_by_one)

if __name__ == "__main__":
    main()
