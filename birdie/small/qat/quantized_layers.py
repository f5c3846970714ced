"""Layers that compute with a function of their parameters, while the parameters stay what and where they are.

    layer.weight ──► property of a subclass ──► read(layer, "weight") ──► the weight that the layer uses

Each layer gets a subclass of its class in which `weight` is a property. The parameter stays in the layer under its
name, so state dicts, optimizers, ties and parameter banks do not change.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from birdie.errors import ConfigError

Layer = tuple[nn.Module, str]
"""A layer, and the attribute of one of its parameters."""
Read = Callable[[nn.Module, str], Tensor]
"""Layer and attribute → the weight that the layer uses."""
_ORIGINAL = "_class_without_birdie"  # attribute of a subclass: the class of the layer before


def read_through(layers: Iterable[Layer], read: Read, *, in_evaluation: bool = False) -> None:
    """Make layers use functions of their parameters while they are in training mode.

    Args:
        layers: whose class changes.
        in_evaluation: whether they use it in evaluation mode as well.
    """
    keys: dict[nn.Module, list[str]] = {}
    for layer, key in layers:
        keys.setdefault(layer, []).append(key)
    if any(hasattr(type(layer), _ORIGINAL) for layer in keys):
        raise ConfigError("the module is in quantization-aware training already; call remove() of that first")
    for layer, names in keys.items():
        kind = type(layer)
        members: dict[str, Any] = {key: _property(key, read, in_evaluation) for key in names}
        if isinstance(layer, nn.RNNBase):  # it keeps a list of its weights beside them
            members["_flat_weights"] = property(_flat_weights, lambda _, __: None)
        layer.__class__ = type(kind.__name__, (kind,), {**members, _ORIGINAL: kind, "__module__": kind.__module__})


def read_plainly(layers: Iterable[nn.Module]) -> None:
    """Give layers back their classes; those that have them are left as they are."""
    for layer in layers:
        if _ORIGINAL in vars(type(layer)):
            layer.__class__ = vars(type(layer))[_ORIGINAL]
            if isinstance(layer, nn.RNNBase):
                layer._flat_weights = _flat_weights(layer)


def layers_of(module: nn.Module, chosen: Callable[[str, nn.Parameter], bool]) -> dict[str, Layer]:
    """Return the layers of the parameters that are `chosen` by name and value, by name; a tied one under each."""
    return {
        name: (layer, key)
        for prefix, layer in module.named_modules()
        for key, weight in layer._parameters.items()
        if weight is not None and chosen(name := f"{prefix}.{key}" if prefix else key, weight)
    }


def parameter(layer: nn.Module, key: str) -> nn.Parameter:
    """Return the parameter itself, whatever the layer reads."""
    weight = layer._parameters[key]
    assert weight is not None
    return weight


def _property(key: str, read: Read, in_evaluation: bool) -> property:
    def weight_of(layer: nn.Module) -> Tensor | None:
        weight = layer._parameters[key]
        return weight if weight is None or not (in_evaluation or layer.training) else read(layer, key)

    return property(weight_of)


def _flat_weights(layer: Any) -> list[Tensor | None]:
    return [getattr(layer, name, None) for name in layer._flat_weights_names]
