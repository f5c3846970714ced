"""State of a module before its loading, to which it returns if an error ends that.

    attributes, containers and hooks of all parts ─┐
    memory and flags of tensors ───────────────────┼──► Undo ──restore──► the module as it was
    content of tensors that an operation changes ──┘

Code of modules runs while they load: it may replace tensors, fill them in place, delete buffers, count in a list. What
it changes inside objects of other classes, or through the memory of an array of NumPy, nobody sees.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

Memory = tuple[Tensor, type, Tensor, bool]  # a tensor, its class, what shares its memory, whether it requires gradients


class Undo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which operations that write into the tensors of a module are noticed, so that `restore` undoes them.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._attributes = [(part, dict(vars(part)), _containers(part)) for part in module.modules()]
        self._extra = [
            (part, copy.deepcopy(part.get_extra_state()))
            for part in module.modules()
            if type(part).set_extra_state is not nn.Module.set_extra_state
            and type(part).get_extra_state is not nn.Module.get_extra_state
        ]
        self._memory: list[Memory] = [
            (tensor, type(tensor), tensor.data, tensor.requires_grad)
            for tensor in {id(tensor): tensor for _, tensor in tensors_of(module)}.values()
            if type(tensor) in (Tensor, nn.Parameter) or is_lazy(tensor)
        ]
        self._sharing: dict[int, list[Tensor]] = {}
        for _, _, data, _ in self._memory:
            if (number := _storage(data)) is not None:
                self._sharing.setdefault(number, []).append(data)
        self._content: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in _written(func._schema, args, kwargs):
                self._keep(tensor)
        return func(*args, **kwargs)

    def restore(self) -> None:
        """Make the module as it was."""
        for part, attributes, containers in self._attributes:
            vars(part).clear()
            vars(part).update(attributes)
            for name, content in containers.items():
                container = vars(part)[name]
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        for tensor, kind, data, flag in self._memory:
            tensor.data = data
            if type(tensor) is not kind:  # torch gave a lazy one a shape
                tensor.__class__ = kind
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)
        with torch.no_grad():
            for data, content in self._content:
                data.copy_(content)
        for part, extra in self._extra:
            part.set_extra_state(extra)

    def _keep(self, tensor: Tensor) -> None:
        """Copy what shares the memory of a tensor, before the first write into that."""
        number = _storage(tensor)
        if number is not None:
            self._content += [(data, data.clone()) for data in self._sharing.pop(number, ())]


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all parameters and buffers."""
    for prefix, part in module.named_modules():
        for kind in (part._parameters, part._buffers):
            for key, tensor in kind.items():
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, tensor


def _containers(part: nn.Module) -> dict[str, Any]:
    """Return copies of the dicts, lists and sets of a module; those of a scripted one are none."""
    return {
        name: value.copy() if value else ()
        for name, value in vars(part).items()
        if isinstance(value, dict | list | set)
    }


def _storage(tensor: Tensor) -> int | None:
    """Return a number of the memory of a tensor; None if it has none, as a sparse one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors into which an operation writes."""
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Tensor):
                yield one
