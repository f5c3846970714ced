"""State dicts to save, and what makes two tensors the same: for the tests of files."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birdie.artifact.file import File
from birdie.compress import registry
from birdie.compress.tensors import FORMATS, to_bits
from birdie.system.outputs import Source


def small_model() -> dict[str, Tensor]:
    """Return a small model: two matrices, one under two names, a norm, a counter and a mask."""
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


def every_dtype() -> dict[str, Tensor]:
    """Return random bit patterns in every dtype, in several shapes, and views that are not contiguous."""
    state: dict[str, Tensor] = {}
    generator = np.random.default_rng(0)
    for dtype in FORMATS:
        for shape in [(), (5,), (3, 4), (2, 2, 3), (0, 3)]:
            count = int(np.prod(shape, dtype=int))
            high = 2 if dtype is torch.bool else 256
            data = generator.integers(0, high, (count + 1) * dtype.itemsize).astype(np.uint8)
            state[f"{dtype}.{shape}"] = torch.from_numpy(data).view(dtype)[:count].reshape(shape)
    base = torch.randn(20, 30)
    return state | {"transposed": base.T, "strided": base[::3, 1::2], "expanded": base[:1].expand(9, 30)}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether dtype, shape and bits are equal: NaN payloads and signed zeros count."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.numel() == 0 or bool((to_bits(one) == to_bits(other)).all())


def decode_tensor(path: Source, name: str, **limits: Any) -> Tensor:
    """Decode one tensor of a file, reading only its bytes."""
    with File(path, registry.decoder) as file:
        file.require(names=[name], **limits)
        return file.decode(name)


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, dtypes, shapes and bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
