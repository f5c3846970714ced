"""The module inside of DistributedDataParallel, DataParallel and torch.compile.

Wrappers put a prefix before every name, and their forward passes communicate or replay graphs: files have the names of
the module inside, and calibration runs that module alone.
"""

from typing import TypeVar, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

T = TypeVar("T")


def unwrapped(model: T) -> T:
    """Return the module inside all wrappers of `model`; anything else as it is."""
    inner: object = model
    while isinstance(inner, nn.Module):
        if isinstance(inner, DistributedDataParallel | DataParallel):
            inner = inner.module
        elif isinstance(compiled := getattr(inner, "_orig_mod", None), nn.Module):
            inner = compiled
        else:
            break
    return cast(T, inner)
