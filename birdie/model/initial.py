"""Weights a new GPT starts with, where a technique wants other ones than its layers give.

Sources: records of openai/parameter-golf of 19 March 2026 ("OrthoInit", "OvertoneInit").
"""

import math

import torch
from torch import Tensor, nn

SMALLEST = 64  # a matrix with a side below it keeps what it has


@torch.no_grad()
def orthogonal(model: nn.Module) -> int:
    """Make all linear weights of 64 × 64 and more orthogonal but for those that start at zero; how many that were."""
    count = 0
    for module in model.modules():
        if not isinstance(module, nn.Linear) or module.weight.is_meta or min(module.weight.shape) < SMALLEST:
            continue
        if bool(module.weight.any()):
            nn.init.orthogonal_(module.weight)
            count += 1
    return count


@torch.no_grad()
def overtones(embedding: Tensor) -> None:
    """Give an embedding, (vocabulary, dim), the singular values s₁ · k^−½, k = 1, 2, …, in place."""
    left, values, right = torch.linalg.svd(embedding.float(), full_matrices=False)
    wanted = values[0] * torch.arange(1, len(values) + 1, device=values.device).float().rsqrt()
    embedding.copy_((left * wanted) @ right)


def phase(layer: int, layers: int) -> float:
    """Share of the stream that a layer starts with, the rest being the embedding: σ(3 · (layer / (layers − 1) − ½))."""
    place = layer / (layers - 1) if layers > 1 else 1.0
    return 1 / (1 + math.exp(-3 * (place - 0.5)))
