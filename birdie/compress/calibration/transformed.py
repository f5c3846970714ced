"""Tensors within `torch.func` transforms (vmap, grad): wrappers, which have no memory and end with the transform."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_functorch: Any = torch._C._functorch


def is_transformed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an argument of a function is a tensor within a transform."""
    leaves = tree_leaves((args, dict(kwargs)))
    return any(isinstance(leaf, Tensor) and _functorch.is_functorch_wrapped_tensor(leaf) for leaf in leaves)


def outside(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as they are outside of all transforms, with the mapped dimensions first."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        dim = _functorch.maybe_get_bdim(tensor) if _functorch.is_batchedtensor(tensor) else -1
        tensor = _functorch.get_unwrapped(tensor)
        tensor = tensor.movedim(dim, 0) if dim >= 0 else tensor
    return tensor
