"""Initial values of a new GPT that differ from those its layers choose.

- orthogonal_init ("OrthoInit"): matrices start orthogonal. *Experimental*; measured (docs/techniques.md): −0.004 ±
  0.007.
- overtone_init ("OvertoneInit"): the embedding's singular values fall as k^−½. Measured: −0.011 ± 0.003.
- phased_init: early layers start with more of the embedding than late ones. *Experimental*; measured: +0.005 ± 0.006.

Source: records of openai/parameter-golf of 19 March 2026.
"""

import math

import torch
from torch import Tensor, nn

SMALLEST = 64  # matrices with a shorter side keep their initial values


@torch.no_grad()
def orthogonal_init_(model: nn.Module) -> int:
    """Make all linear weights of at least 64 × 64 orthogonal, except those that start at zero; return their number."""
    count = 0
    for module in model.modules():
        if not isinstance(module, nn.Linear) or module.weight.is_meta or min(module.weight.shape) < SMALLEST:
            continue
        if bool(module.weight.any()):
            nn.init.orthogonal_(module.weight)
            count += 1
    return count


@torch.no_grad()
def overtone_init_(embedding: Tensor) -> None:
    """Replace the singular values of an embedding, (vocabulary, dim), by s₁ · k^−½, k = 1, 2, …, in place."""
    left, values, right = torch.linalg.svd(embedding.float(), full_matrices=False)
    target = values[0] * torch.arange(1, len(values) + 1, device=values.device).float().rsqrt()
    embedding.copy_((left * target) @ right)


def phased_share(layer: int, layers: int) -> float:
    """Return the initial share of the residual stream in a layer, σ(3 · (layer / (layers − 1) − ½)); the embedding
    has the rest.
    """
    position = layer / (layers - 1) if layers > 1 else 1.0
    return 1 / (1 + math.exp(-3 * (position - 0.5)))
