"""Layers that read their weights through a function in training mode.

Each layer gets a subclass of its class in which `weight` is a property. The parameter stays where it was, so names,
state dicts, optimizers and parameter banks do not change. Compiled graphs follow the tensors that the function reads.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from birdie.compress.small_tensors import is_matrix
from birdie.errors import ConfigError

Layer = tuple[nn.Module, str]
"""A layer, and the attribute of one of its parameters."""
Reader = Callable[[Tensor], Tensor]


def trainable_matrices(module: nn.Module, patterns: Iterable[str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, layer, attribute of the layer) of each trainable matrix that a name pattern matches."""
    for prefix, layer in module.named_modules():
        for key, weight in layer._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            usable = weight is not None and weight.requires_grad and is_matrix(weight)
            if usable and any(fnmatchcase(name, pattern) for pattern in patterns):
                yield name, layer, key


def matrices_to_train(module: nn.Module, patterns: Sequence[str]) -> dict[str, Layer]:
    """Return `trainable_matrices` by name."""
    matrices = {name: (layer, key) for name, layer, key in trainable_matrices(module, patterns)}
    if not matrices:
        raise ConfigError(
            f"qat patterns {', '.join(patterns)} match no matrix of 4096 weights or more; check the names"
        )
    return matrices


def read_through(layers: Iterable[Layer], reader: Callable[[Tensor], Reader]) -> None:
    """Make layers use functions of their parameters while they are in training mode.

    Args:
        layers: whose class changes.
        reader: parameter → function of the parameter that the layer uses.
    """
    keys: dict[nn.Module, list[str]] = {}
    for layer, key in layers:
        keys.setdefault(layer, []).append(key)
    if any(hasattr(type(layer), "unquantized") for layer in keys):
        raise ConfigError("the module is in quantization-aware training already; call remove() of that first")
    for layer, names in keys.items():
        kind = type(layer)
        properties = {key: _property(key, reader(parameter(layer, key))) for key in names}
        members = {**properties, "unquantized": kind, "__module__": kind.__module__}
        layer.__class__ = type(kind.__name__, (kind,), members)


def read_plainly(layers: Iterable[Layer]) -> None:
    """Give layers back their classes; the parameters stay as training left them."""
    for layer, _ in layers:
        if "unquantized" in vars(type(layer)):
            layer.__class__ = vars(type(layer))["unquantized"]


def parameter(layer: nn.Module, key: str) -> Tensor:
    """Return the parameter itself, whatever the layer reads."""
    weight = layer._parameters[key]
    assert weight is not None
    return weight


def _property(key: str, reader: Reader) -> property:
    def read(layer: nn.Module) -> Tensor | None:
        weight = layer._parameters[key]
        return weight if weight is None or not layer.training else reader(weight)

    return property(read)
