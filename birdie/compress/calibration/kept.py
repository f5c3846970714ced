"""Snapshot of what a forward pass may change, which puts it back: a caller's module, loss and batches stay as they are.

    module, loss, batch ──► attributes, containers, tensors, generators ──run──► those that changed are put back

Forward passes fill caches, count calls, normalize by what they have seen, append to lists and draw random numbers. Any
object may do so, so a snapshot follows references: all modules, containers, and the attributes of other objects, two
deep. What is assigned anew is assigned back, to the very object; what is changed in place gets its values back.

Values are copied before a run, except those of parameters, which may be gigabytes: in the first run a parameter is
copied when an operator is about to write to it (`Writes`), and from then on before each run.
"""

import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

_DEEP = 2  # objects within objects that are followed, besides modules and containers
_MOST_OBJECTS = 1 << 16  # that are followed
_MOST_BYTES = 1 << 28  # of tensors that are neither parameters nor buffers
_FEW = 4  # times the bytes of a tensor up to which its complete storage is copied
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


class KeptMemory:
    """Memory of a tensor, and its values once they are copied.

    Args:
        tensor: whose storage is copied, or its own elements if the storage is far larger.
    """

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.untyped_storage().nbytes()
        self.nbytes = size if size <= _FEW * tensor.nbytes else tensor.nbytes
        self.values: Tensor | None = None
        self._tensor = tensor.detach()

    def keep(self) -> None:
        """Copy the values that it has now."""
        self._view, storage = self._tensor, self._tensor.untyped_storage()
        if storage.nbytes() == self.nbytes:  # as integers, which compare to the bit
            integers = torch.empty(0, dtype=torch.int64 if self.nbytes % 8 == 0 else torch.uint8, device=storage.device)
            self._view = integers.set_(storage)
        self.values = self._view.clone()

    def put_back(self) -> None:
        """Write the values that were kept, if there are others now."""
        if self.values is not None and not torch.equal(self._view, self.values):
            self._view.copy_(self.values)


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Keeps the values of parameters before an operator writes to them, whoever calls it.

    Args:
        memories: of parameters by the address of their storage.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what torch.compile needs takes seconds to import

    def __init__(self, memories: Mapping[int, KeptMemory]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memories = memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator."""
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for number, argument in enumerate(schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = args[number] if number < len(args) else (kwargs or {}).get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    memory = self.memories.get(_address(tensor) or 0) if isinstance(tensor, Tensor) else None
                    if memory is not None and memory.values is None:
                        memory.keep()
        return func(*args, **(kwargs or {}))


class Snapshot:
    """State of objects, and of all that they refer to, that `put_back` brings back any number of times.

    Args:
        roots: the objects.
        written: addresses of parameters whose values are copied as well.
    """

    def __init__(self, roots: Iterable[Any], written: Iterable[int] = ()) -> None:
        self.parameters: dict[int, KeptMemory] = {}
        self._seen: dict[int, Any] = {}  # holds the objects, so that no other gets the address of one
        self._mappings: list[tuple[Any, dict[Any, Any]]] = []
        self._others: list[Callable[[], Any]] = []
        self._tensors: dict[int, Tensor] = {}
        self._registered: set[int] = set()
        self._is_parameter: set[int] = set()
        for root in roots:
            self._visit(root, 0)
        self._memories = self._copied(set(written))
        self._leaves = [_Leaf(tensor) for tensor in self._tensors.values()]

    def put_back(self) -> None:
        """Bring everything back."""
        for mapping, items in self._mappings:
            same = len(mapping) == len(items) and (
                not items or (all(map(is_, mapping, items)) and all(map(is_, mapping.values(), items.values())))
            )
            if not same:
                mapping.clear()
                mapping.update(items)
        for restore in self._others:
            restore()
        for leaf in self._leaves:
            leaf.put_back()
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
            for memory in (*self._memories, *self.parameters.values()):
                memory.put_back()

    def changed(self) -> Tensor | None:
        """Return a parameter that was changed in place and whose values were not copied; None if there is none."""
        for leaf in self._leaves:
            tensor = leaf.tensor
            if id(tensor) in self._is_parameter and leaf.version is not None and tensor._version != leaf.version:
                memory = self.parameters.get(_address(tensor) or 0)
                if memory is not None and memory.values is None:
                    return tensor
                leaf.version = tensor._version
        return None

    def written(self) -> set[int]:
        """Return the addresses of parameters whose values were copied."""
        return {address for address, memory in self.parameters.items() if memory.values is not None}

    def _visit(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _ATOMS or id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if not is_lazy(value):
                self._tensors[id(value)] = value
            self._mappings.append((value.__dict__, dict(value.__dict__)))
        elif isinstance(value, dict):
            self._mappings.append((value, items := dict(value)))
            for item in items.values():
                self._visit(item, depth)
        elif isinstance(value, list | deque | set):
            self._container(value, depth)
        elif isinstance(value, tuple | frozenset):
            for item in value:
                self._visit(item, depth)
        elif (restore := _restored_state(value)) is not None:
            self._others.append(restore)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, depth)
        elif isinstance(value, partial):
            self._visit((value.func, value.args, value.keywords), depth)
        elif not isinstance(value, _CODE):
            self._object(value, depth)

    def _container(self, value: Any, depth: int) -> None:
        items = list(value)

        def restore() -> None:
            if len(value) != len(items) or not all(map(is_, value, items)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(items)

        self._others.append(restore)
        for item in items:
            self._visit(item, depth)

    def _object(self, value: Any, depth: int) -> None:
        """Follow the attributes of a module, or of an object that is not too deep."""
        is_module = isinstance(value, nn.Module)
        if not is_module:
            depth += 1
        attributes = getattr(value, "__dict__", None)
        if depth > _DEEP:
            return
        if is_module:
            parameters = [one for one in value._parameters.values() if one is not None]
            self._is_parameter.update(map(id, parameters))
            self._registered.update(map(id, (*parameters, *value._buffers.values())))
            for one in parameters:
                self._visit(one, depth)
        if isinstance(value, torch.jit.ScriptModule):
            self._scripted(value, depth)
        if isinstance(attributes, dict):
            self._mappings.append((attributes, items := dict(attributes)))
            for item in items.values():
                self._visit(item, depth)
        kind: Any = type(value)
        for name in _slots(kind):
            self._slot(value, name, depth)

    def _scripted(self, module: Any, depth: int) -> None:
        """Follow the attributes of a scripted or traced module, which its compiled code has."""
        inner, listed = module._c, getattr(module, "_concrete_type", None)  # a frozen one has constants alone
        attributes = {} if listed is None else listed.get_attributes()
        kept = {name: inner.getattr(name) for name, (_, is_parameter) in attributes.items() if not is_parameter}

        def restore() -> None:
            for name, item in kept.items():
                now = inner.getattr(name)
                if now is not item and not (type(item) in _ATOMS and now == item):
                    inner.setattr(name, item)

        self._others.append(restore)
        for item in kept.values():
            self._visit(item, depth)

    def _slot(self, value: Any, name: str, depth: int) -> None:
        missing = object()
        item = getattr(value, name, missing)

        def restore() -> None:
            if getattr(value, name, missing) is item:
                return
            if item is missing:
                object.__delattr__(value, name)
            else:
                object.__setattr__(value, name, item)

        self._others.append(restore)
        self._visit(item, depth)

    def _copied(self, written: set[int]) -> list[KeptMemory]:
        """Return the memory of tensors that are not parameters, copied; that of parameters is in `parameters`."""
        memories: dict[int, KeptMemory] = {}
        for tensor in self._tensors.values():
            if id(tensor) in self._is_parameter and (address := _address(tensor)) is not None:
                self.parameters[address] = KeptMemory(tensor)
        rest = _MOST_BYTES
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
            for tensor in self._tensors.values():
                address = _address(tensor)
                if address is None or address in self.parameters or address in memories:
                    continue
                memory = KeptMemory(tensor)
                if id(tensor) not in self._registered:
                    rest -= memory.nbytes
                    if rest < 0:
                        continue
                memories[address] = memory
            for memory in (*memories.values(), *(self.parameters[one] for one in written & self.parameters.keys())):
                memory.keep()
        return list(memories.values())


class _Leaf:
    """A tensor's memory, gradient, hooks, and whether it has gradients."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.data, self.has_memory = tensor, tensor.detach(), _address(tensor) is not None
        self.version = None if tensor.is_inference() else tensor._version
        self.requires_grad = tensor.requires_grad if tensor.is_leaf else None
        self.gradient = tensor.grad if tensor.is_leaf else None
        self.hooks = [dict(hooks or {}) for hooks in self._hooks()]

    def put_back(self) -> None:
        """Bring all but the values back."""
        tensor = self.tensor
        if self.requires_grad is not None and tensor.is_leaf:
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.gradient:
                tensor.grad = self.gradient
        if self.has_memory and not tensor.is_set_to(self.data):
            tensor.data = self.data
        for hooks, kept in zip(self._hooks(), self.hooks, strict=True):
            if hooks is not None and len(hooks) != len(kept):
                hooks.clear()
                hooks.update(kept)

    def _hooks(self) -> list[dict[int, Any] | None]:
        return [self.tensor._backward_hooks, getattr(self.tensor, "_post_accumulate_grad_hooks", None)]


_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size})


@cache
def _slots(kind: type) -> tuple[str, ...]:
    names = (getattr(base, "__slots__", ()) for base in kind.__mro__)
    listed = [name for some in names for name in ([some] if isinstance(some, str) else some)]
    return tuple(name for name in listed if not name.startswith("__"))


def _address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None if it has none: sparse tensors, wrappers, meta tensors."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


def _restored_state(value: Any) -> Callable[[], Any] | None:
    """Return what brings back the state of a random generator or an array; None for other objects."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, np.random.Generator):
        return _restored_state(value.bit_generator)
    if isinstance(value, np.random.BitGenerator):
        bits = value.state
        return lambda: setattr(value, "state", bits)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, random.Random):
        words = value.getstate()
        return lambda: value.setstate(words)
    if isinstance(value, np.ndarray) and value.dtype != object and value.flags.writeable:
        array = value.copy()
        return lambda: None if value.tobytes() == array.tobytes() else np.copyto(value, array)
    return None
