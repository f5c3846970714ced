"""Weights of scripted modules that no state dict has: `torch.jit.freeze` makes them constants of the code."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from birdie.errors import WeightsError


def require_weights(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise WeightsError if frozen parts have all weights of a module; log those that have some.

    Args:
        module: with scripted parts, or without.
        state: its state dict.
    """
    frozen = [*_frozen(module, "")]
    if not frozen:
        return
    name = f"part {frozen[0]!r} of the module" if frozen[0] else "the module"
    if not any(isinstance(item, Tensor) and item.is_floating_point() for item in state.values()):
        raise WeightsError(
            f"{name} is frozen: torch.jit.freeze makes weights constants of its code, so there are none to store; give "
            "the module as it was before"
        )
    logging.getLogger("birdie").warning("%s is frozen, so its weights are code and not stored", name)


def _frozen(module: nn.Module, name: str) -> Iterator[str]:
    """Yield the names of the outermost scripted parts without parameters whose code has matrices."""
    if isinstance(module, torch.jit.ScriptModule):
        if next(module.parameters(), None) is None and _has_matrices(module):
            yield name
        return
    for child_name, child in module.named_children():
        yield from _frozen(child, f"{name}.{child_name}".lstrip("."))


def _has_matrices(module: torch.jit.ScriptModule) -> bool:
    try:
        graph: Any = module.inlined_graph  # owns its nodes
    except RuntimeError:  # it has no forward function
        return False
    nodes = graph.findAllNodes("prim::Constant")
    constants = (node.t("value") for node in nodes if node.hasAttribute("value") and node.kindOf("value") == "t")
    return any(constant.ndim > 1 and constant.is_floating_point() for constant in constants)
