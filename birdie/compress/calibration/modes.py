"""Temporary training or evaluation mode: every part of a module returns to its previous mode."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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
