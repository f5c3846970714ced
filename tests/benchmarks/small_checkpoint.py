"""A small checkpoint for the tests of symbol sets and lossless coders."""

import torch
from torch import Tensor

from benchmarks import symbols

MIXED = {
    "a": torch.tensor([[-128, 127, 0], [5, -1, -128]], dtype=torch.int8),
    "b": torch.tensor([[300, -128, 127], [-129, -127, 128], [0, -32768, 32767]], dtype=torch.int16),
    "c": torch.arange(-5, 6, dtype=torch.int8),
}
"""Integer tensors with values that need the escape of `benchmarks.streams`."""


def state(seed: int = 0) -> dict[str, Tensor]:
    """Return an embedding, a matrix with unequal rows and a row of zeros, a convolution, and a vector."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(24, 40, generator=generator) * torch.linspace(0.01, 0.2, 24)[:, None]
    matrix[3] = 0
    return {
        "tok_emb.weight": torch.randn(64, 16, generator=generator),
        "fc.weight": matrix,
        "conv.weight": torch.randn(8, 4, 3, 3, generator=generator) * 2,
        "bias": torch.randn(8, generator=generator),
    }


def symbol_set(*, integers: bool) -> symbols.SymbolSet:
    """Return the checkpoint as integers or as bfloat16."""
    quantized = (symbols.resnet if integers else symbols.bf16)(state())
    return symbols.SymbolSet(quantized.name, quantized.tensors)
