"""Temporary modes of a module: training, evaluation, and evaluation that can be differentiated.

Tensors that were made in inference mode have no gradients, so a calibration replaces them by copies for its duration.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from birdie.compress.tensors import repeats_memory
from birdie.errors import ConfigError


@contextmanager
def in_mode(parts: Iterable[nn.Module], *, training: bool) -> Iterator[None]:
    """Put `parts`, but not their children, in training or evaluation mode while the context is open."""
    modes = [(part, part.training) for part in with_mode(parts)]
    for part, _ in modes:
        part.training = training
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def with_mode(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the parts that have a mode: `torch.jit.freeze` makes it a constant."""
    return [part for part in parts if hasattr(part, "training")]


def evaluation_copy(module: nn.Module, copies: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module, in evaluation mode; `copies` are those of objects by their `id`.

    Results of forward passes that parts keep as attributes, as weight norm does, are detached: nobody needs their
    gradients, and tensors with a history cannot be copied. What cannot be copied at all, such as a lock, is shared.
    """
    results = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in results if not value.is_leaf}
    memo |= dict(copies or {})
    with torch.no_grad():  # the copy of a scripted module would have a history
        try:
            twin = copy.deepcopy(module, {**memo})
        except Exception:  # any object may raise any
            twin = copy.deepcopy(module, memo | _shared(module, memo))
        for part in twin.modules():
            for name, buffer in [*part._buffers.items()]:
                if buffer is not None and repeats_memory(buffer):  # values are written to the copy
                    setattr(part, name, buffer.clone(memory_format=torch.contiguous_format))
    set_evaluation(twin)
    return twin


def _shared(module: nn.Module, memo: Mapping[int, Any]) -> dict[int, Any]:
    """Return the attributes of parts of a module that cannot be copied, by their `id`."""
    parts = {id(part): part for part in module.modules()}
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    shared = {}
    for part in parts.values():
        for value in vars(part).values():
            try:
                copy.deepcopy(value, {**parts, **tensors, **memo})
            except Exception:
                shared[id(value)] = value
    return shared


@contextmanager
def measuring_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and no gradients of parameters, while the context is open."""
    with in_mode(module.modules(), training=False), requiring(module.parameters(), False):
        yield


@contextmanager
def with_gradients(module: nn.Module) -> Iterator[None]:
    """Let every floating parameter have gradients while the context is open."""
    with requiring(module.parameters(), True):
        yield


@contextmanager
def requiring(weights: Iterable[Tensor], required: bool) -> Iterator[None]:
    """Let tensors have gradients, or none, while the context is open, as far as they can."""
    changed = [
        weight
        for weight in weights
        if weight.requires_grad != required and weight.is_leaf and (weight.is_floating_point() or weight.is_complex())
    ]
    for weight in changed:
        weight.requires_grad_(required)
    try:
        yield
    finally:
        for weight in changed:
            weight.requires_grad_(not required)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode and gradients of every parameter, as far as gradients can pass; restore both afterwards."""
    with differentiable_tensors(module), with_gradients(module), differentiable_evaluation(module):
        yield


@contextmanager
def differentiable_evaluation(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode while the context is open, as far as gradients can pass.

    cuDNN has no gradient of recurrent layers in evaluation mode. Without dropout, training mode computes the same.
    """
    modes = [(part, part.training) for part in with_mode(module.modules())]
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
    set_evaluation(module)
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.training, part.dropout = True, 0.0


def set_evaluation(module: nn.Module) -> None:
    """Put a module in evaluation mode without a call of its `eval`, which may be anything: adapters merge weights."""
    for part in with_mode(module.modules()):
        part.training = False


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Let autocast cast weights at every use: its cache would keep the casts of weights that are replaced in place."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


@contextmanager
def differentiable_tensors(module: nn.Module) -> Iterator[None]:
    """Leave inference mode, with copies of the module's tensors that were made in it, while the context is open."""
    copies: dict[int, Tensor] = {}
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    with torch.inference_mode(False):
        for part in module.modules():
            for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
                if tensor is None or not tensor.is_inference():
                    continue
                replaced.append((part, name, tensor))
                if id(tensor) not in copies:
                    copy = tensor.detach().clone()
                    copies[id(tensor)] = nn.Parameter(copy, False) if isinstance(tensor, nn.Parameter) else copy
                setattr(part, name, copies[id(tensor)])  # not the dict: recurrent layers keep a list of their weights
        try:
            yield
        except RuntimeError as error:
            if "Inference tensors" not in str(error):
                raise
            raise ConfigError(
                "the calibration uses tensors that were made in torch.inference_mode(), which have no gradients; make "
                "the batches outside of it, or clone() their tensors"
            ) from error
        finally:
            for part, name, tensor in replaced:
                setattr(part, name, tensor)


def differentiable_batch(batch: Any) -> Any:
    """Return a batch with copies of the tensors that were made in inference mode."""
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor.is_inference() else tensor, batch)
