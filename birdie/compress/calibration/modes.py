"""Training and evaluation mode for a while: each part of a module comes back to the mode it had."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(parts: Iterable[nn.Module], *, training: bool) -> Iterator[None]:
    """`parts` alone, not what lies in them, in training mode or in evaluation mode."""
    before = [(part, part.training) for part in parts]
    for part, _ in before:
        part.training = training
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode
