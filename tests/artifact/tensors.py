"""State dicts for the tests of whole files, and equality to the bit."""

import numpy as np
import torch

from birdie.compress.tensors import FORMATS, to_bits


def model() -> dict[str, torch.Tensor]:
    """Return a small state dict: two matrices, one of them under two names, a norm, a counter, a mask."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(128, 64, generator=generator)
    return {
        "tok_emb.weight": embedding,
        "blocks.0.w": torch.randn(96, 64, generator=generator) * 0.02,
        "blocks.0.norm": torch.randn(64, generator=generator),
        "lm_head.weight": embedding,
        "steps": torch.tensor(12345),
        "mask": torch.tensor([True, False]),
    }


def every_dtype() -> dict[str, torch.Tensor]:
    """Return random bit patterns in every dtype and several shapes, and non-contiguous views."""
    state: dict[str, torch.Tensor] = {}
    generator = np.random.default_rng(0)
    for dtype in FORMATS:
        for shape in [(), (5,), (3, 4), (2, 2, 3), (0, 3)]:
            count = int(np.prod(shape, dtype=int))
            high = 2 if dtype is torch.bool else 256
            data = generator.integers(0, high, (count + 1) * dtype.itemsize).astype(np.uint8)
            state[f"{dtype}.{shape}"] = torch.from_numpy(data).view(dtype)[:count].reshape(shape)
    base = torch.randn(20, 30)
    return state | {"transposed": base.T, "strided": base[::3, 1::2], "expanded": base[:1].expand(9, 30)}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True for equal dtype, shape and bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.numel() == 0 or bool((to_bits(one) == to_bits(other)).all())
