"""A model as name → tensor: what can be stored, which names share one tensor, and the way back into a module."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from birdie.compress.tensors import FORMATS
from birdie.device import dtype_name
from birdie.errors import WeightsError


def named_tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `model`, sorted by name.

    Raises:
        WeightsError: an item is not a dense tensor that can be stored.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    for name, weight in state.items():
        if not isinstance(name, str) or not isinstance(weight, Tensor):
            kind = type(weight).__name__
            raise WeightsError(
                f"item {name!r} is a {kind}, not a named tensor; give a flat dict of tensors (a state_dict)"
            )
        if weight.layout is not torch.strided or weight.is_quantized or weight.is_meta or weight.dtype not in FORMATS:
            what = "a meta tensor" if weight.is_meta else f"{dtype_name(weight.dtype)}, {weight.layout}"
            raise WeightsError(f"tensor {name!r} ({what}) cannot be stored; make it dense and of a plain dtype")
    return {name: state[name] for name in sorted(state)}


def without_ties(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors by their first name, second name → first name): tied means the same view of the same memory."""
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name, weight in state.items():
        if weight.numel():
            memory = (weight.device, weight.untyped_storage().data_ptr(), weight.storage_offset())
            view = (tuple(weight.shape), weight.stride(), weight.dtype, weight.is_conj(), weight.is_neg())
            target = first.setdefault((*memory, *view), name)
            if target != name:
                ties[name] = target
    return {name: weight for name, weight in state.items() if name not in ties}, ties


def fill(module: nn.Module, state: Mapping[str, Tensor], where: str) -> nn.Module:
    """Copy `state` into `module`.

    Raises:
        WeightsError: names or shapes do not match; lists them all.
    """
    own = module.state_dict()
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    mismatched = [
        f"{name} {tuple(state[name].shape)} in the file, {tuple(weight.shape)} in the module"
        for name, weight in own.items()
        if name in state and isinstance(weight, Tensor) and weight.shape != state[name].shape
    ]
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("different shape", mismatched))
        if names
    ]
    if problems:
        raise WeightsError(
            f"{where} does not fit the module ({'; '.join(problems)}); load it without into, or build the right module"
        )
    module.load_state_dict(state)
    return module
