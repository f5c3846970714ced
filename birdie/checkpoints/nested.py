"""Walks through nested dicts, lists and tuples, and the tensors in them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from birdie.checkpoints.pytree import tensors_in


def items(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a dict, or the positions and items of a list; stand-ins have none."""
    if isinstance(node, Mapping):
        yield from node.items()
    elif type(node) in (list, tuple):
        yield from enumerate(node)


def tensor_bytes(content: Any) -> int:
    """Return the bytes of all tensors in nested dicts, lists and tuples; tied tensors are counted once."""
    return sum(size for _, size in memories(content))


def memories(content: Any) -> set[tuple[int, int]]:
    """Return the address and the bytes of all tensors in `content` that are one array in memory."""
    arrays = set()
    for tensor in tensors_in(content):
        with suppress(RuntimeError, NotImplementedError):  # sparse tensors and subclasses that wrap other tensors
            arrays.add((tensor.data_ptr(), tensor.nbytes))
    return arrays


def is_optimizer(node: Any) -> bool:
    """Return whether a dict is the state of an optimizer, which has groups of parameters."""
    return isinstance(node, Mapping) and "param_groups" in node


def holds_matrices(content: Any) -> bool:
    """Return whether a matrix is anywhere in `content` but in the states of optimizers."""
    return any(isinstance(node, Tensor) and node.ndim > 1 for node in _nodes(content))


def has_stand_ins(content: Any) -> bool:
    """Return whether an object that was not opened is anywhere in `content`: a kind of list stands for it."""
    return any(isinstance(node, list) and type(node) is not list for node in _nodes(content))


def _nodes(content: Any) -> Iterator[Any]:
    """Yield `content` and all that is in its dicts, lists and tuples, but for the states of optimizers."""
    waiting, seen = [content], set()
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Mapping | list | tuple) and id(node) not in seen and not is_optimizer(node):
            seen.add(id(node))
            waiting += node.values() if isinstance(node, Mapping) else node
