"""Twins: tensors of one model that are nearly equal, such as an average beside the weights, or copies of an expert.

A lossless file stores one of them, and of the others the deltas to it.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from birdie.compress.tensors import parts
from birdie.delta.delta_job import pays

LEAST = 1 << 12  # elements of a tensor
_SAMPLE = 1 << 10  # elements that are compared, about
_NEAR = 0.5  # distance of two samples, of the size of one, from which a difference is not tried
_MOST = 64  # tensors of one shape that others are compared with


def twins(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name → name of an earlier tensor to which the difference is likely to take fewer bytes.

    No tensor that has one is that of another.
    """
    alike: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() >= LEAST and tensor.is_floating_point():
            alike.setdefault((tensor.shape, tensor.dtype), []).append(name)
    return {name: other for names in alike.values() for name, other in _pairs(names, tensors)}


def _pairs(names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    firsts: dict[str, Tensor] = {}
    for name in names if len(names) > 1 else ():
        some = _sample(tensors[name])
        if not some.isfinite().all() or not some.any():
            continue
        distances = {first: float((some - known).norm()) for first, known in firsts.items()}
        nearest = min(distances, key=lambda first: distances[first], default=None)
        if nearest is not None and distances[nearest] < _NEAR * float(some.norm()):
            if pays(tensors[name], tensors[nearest]):
                yield name, nearest
        elif len(firsts) < _MOST:
            firsts[name] = some


def _sample(tensor: Tensor) -> Tensor:
    """Return elements of the first block of a tensor at even distances, as float64."""
    block = next(parts(tensor)).reshape(-1)
    return block[:: max(1, len(block) // _SAMPLE)][:_SAMPLE].detach().cpu().double()
