"""Temporary modes of a module: training, evaluation, and evaluation that can be differentiated."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_mode(parts: Iterable[nn.Module], *, training: bool) -> Iterator[None]:
    """Put `parts`, but not their children, in training or evaluation mode while the context is open."""
    modes = [(part, part.training) for part in parts]
    for part, _ in modes:
        part.training = training
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def differentiable_evaluation(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode while the context is open, as far as gradients can pass.

    cuDNN has no gradient of recurrent layers in evaluation mode. Without dropout, training mode computes the same.
    """
    modes = [(part, part.training) for part in module.modules()]
    dropouts = [(part, part.dropout) for part in module.modules() if isinstance(part, nn.RNNBase)]
    set_differentiable_evaluation(module)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for recurrent, dropout in dropouts:
            recurrent.dropout = dropout


def set_differentiable_evaluation(module: nn.Module) -> None:
    """Put a module in the mode of `differentiable_evaluation` for good."""
    module.eval()
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.training, part.dropout = True, 0.0


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Let autocast cast weights at every use: its cache would keep the casts of weights that are replaced in place."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
