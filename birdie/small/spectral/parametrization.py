"""Weights that are trained in another form: parametrizations (`torch.nn.utils.parametrize`) in any module.

Tied weights share one parametrization. Recurrent layers keep a list of their weights, which is filled before each
forward pass. What a parametrization must have is said in `birdie.compress.state.folded`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.nn.utils import parametrize

Part = TypeVar("Part", bound=nn.Module)


class Owner(NamedTuple):
    """A module that owns a parameter, and the parameter's attribute and full name."""

    module: nn.Module
    attribute: str
    name: str


@dataclass(frozen=True, slots=True)
class SpectralParametrized(Generic[Part]):
    """A parametrized weight: its plain name, the module that owns it, and its parametrization."""

    name: str
    module: nn.Module
    attribute: str
    weight: Part

    @property
    def original(self) -> nn.Parameter:
        """Parameter that is trained in place of the weight."""
        parameter = self.module.parametrizations[self.attribute].original  # type: ignore[union-attr, index]
        assert isinstance(parameter, nn.Parameter)
        return parameter


def parametrized(model: nn.Module, kind: type[Part]) -> Iterator[SpectralParametrized[Part]]:
    """Yield the weights whose parametrization is of this class, tied ones once per name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        lists = getattr(module, "parametrizations", None)
        if not isinstance(lists, nn.ModuleDict) or ".parametrizations." in f".{prefix}.":
            continue
        for attribute, chain in lists.items():
            if isinstance(chain, parametrize.ParametrizationList) and isinstance(chain[0], kind):
                yield SpectralParametrized(
                    f"{prefix}.{attribute}" if prefix else attribute, module, attribute, chain[0]
                )


def owners_of(model: nn.Module, chosen: Callable[[str, Tensor], bool]) -> dict[int, list[Owner]]:
    """Return the owners of each chosen parameter by its identity; a tied one has several.

    Args:
        chosen: (name, parameter) → whether it is wanted.
    """
    owners: dict[int, list[Owner]] = {}
    for prefix, module in model.named_modules():
        for attribute, weight in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            if chosen(name, weight):
                owners.setdefault(id(weight), []).append(Owner(module, attribute, name))
    return owners


def parametrize_weights(model: nn.Module, owners: Iterable[Sequence[Owner]], parts: Iterable[nn.Module]) -> None:
    """Parametrize weights in place.

    Args:
        parts: parametrization of each.
    """
    for (first, *tied), part in zip(owners, parts, strict=True):
        parametrize.register_parametrization(first.module, first.attribute, part)
        for other in tied:
            _tie(first, other)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.register_forward_pre_hook(_fill_flat_weights)
            module.register_forward_hook(_clear_flat_weights)


def plain_weights(model: nn.Module, weights: Sequence[tuple[SpectralParametrized[Any], Tensor]]) -> nn.Module:
    """Replace parametrizations by plain parameters of these values in place; tied ones stay tied."""
    plain: dict[int, nn.Parameter] = {}
    for part, weight in weights:
        _own_class(part.module)
        parametrize.remove_parametrizations(part.module, part.attribute, leave_parametrized=False)
        setattr(part.module, part.attribute, plain.setdefault(id(part.weight), nn.Parameter(weight)))
    for module in model.modules():
        for hooks, ours in (
            (module._forward_pre_hooks, _fill_flat_weights),
            (module._forward_hooks, _clear_flat_weights),
        ):
            for key in [key for key, hook in hooks.items() if hook is ours]:
                del hooks[key]
        if isinstance(module, nn.RNNBase):
            _fill_flat_weights(module, None)
    return model


def _tie(first: Owner, other: Owner) -> None:
    """Give the weight of `other` the same parametrization; a copy is registered first, to avoid a second transform."""
    setattr(other.module, other.attribute, nn.Parameter(getattr(first.module, first.attribute).detach().clone()))
    parametrize.register_parametrization(other.module, other.attribute, nn.Identity())
    chain = first.module.parametrizations[first.attribute]  # type: ignore[index]
    other.module.parametrizations[other.attribute] = chain  # type: ignore[operator, index]


def _own_class(module: nn.Module) -> None:
    """Give a module a private copy of its class: removing a parametrization changes the class, which copies share."""
    shared = type(module)
    attributes = {name: item for name, item in vars(shared).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, attributes)


def _fill_flat_weights(module: nn.Module, _: Any) -> None:
    """Fill a recurrent layer's list of weights with the current tensors, before its forward."""
    names: list[str] = module._flat_weights_names  # type: ignore[assignment]
    module._flat_weights = [getattr(module, name, None) for name in names]  # type: ignore[assignment]


def _clear_flat_weights(module: nn.Module, _: Any, __: Any) -> None:
    """Clear a recurrent layer's list of weights after its forward: tensors with a graph cannot be copied."""
    module._flat_weights = [None] * len(module._flat_weights_names)  # type: ignore[arg-type, assignment]
