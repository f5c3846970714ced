"""Lazy loading: the weights of a module stay coded until they are used, and reading one decodes it.

    module.weight ─► Module.__getattr__ ─► Tensors["weight"] ─► Store (birdie.artifact.tensor_cache) ─► tensor

Decoding is triggered by the attribute read, not by hooks around forward, because not every use is a call: attention
reads the weight of its output projection without calling it, a tied head reads the embedding's weight, recurrent layers
keep lists of theirs. Every read gets the right tensor, and an exception in a forward leaves nothing to clean up.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from birdie.artifact.tensor_cache import Pending, Slot, Store, Stored
from birdie.compress.state import fill
from birdie.errors import ConfigError, WeightsError

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
_EAGER = "load it without lazy"


class Tensors(MutableMapping[str, Tensor | None]):
    """The parameters or buffers of a module by name: a slot is decoded when it is read, a tensor is returned as it is.

    It replaces the dict in which torch keeps them, so that every access (attributes, `parameters`, `state_dict`) goes
    through this class.
    """

    def __init__(self, store: Store, items: Mapping[str, Slot | Tensor | None]) -> None:
        self.store, self._items = store, dict(items)

    def __getitem__(self, key: str) -> Tensor | None:
        """Return the tensor `key`, decoded if necessary."""
        item = self._items[key]
        return self.store.get(item) if isinstance(item, Slot) else item

    def __setitem__(self, key: str, value: Tensor | None) -> None:
        """Replace the tensor or slot `key` with a tensor of the caller."""
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        """Remove the tensor `key`."""
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, without decoding."""
        return iter(self._items)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        """Return whether there is a tensor `key`, without decoding it."""
        return key in self._items

    def discard(self, key: str) -> None:
        """Remove the tensor `key`: torch calls this method on containers that are no dict."""
        self._items.pop(key, None)

    def copy(self) -> "Tensors":
        """Return a shallow copy, with the same tensors."""
        return Tensors(self.store, self._items)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tensors":
        """Return a deep copy, with copies of the tensors that are in memory."""
        return Tensors(self.store, copy.deepcopy(self._items, memo))

    def slots(self) -> dict[str, Slot]:
        """Return the slots by name: the tensors that are not in memory."""
        return {key: item for key, item in self._items.items() if isinstance(item, Slot)}

    def move(self, apply: Callable[[], None], cast: Callable[[Slot], Slot], swap: Callable[[Any], None]) -> None:
        """Move the tensors in memory to another device or dtype, and note the move for those that are not.

        Args:
            apply: moves the tensors of the dict that `swap` installed.
            cast: slot → slot that includes the move.
            swap: installs a dict as the module's parameters or buffers.

        Raises:
            ConfigError: the cache cannot hold a tensor after its cast.
        """
        moved = {key: cast(slot) for key, slot in self.slots().items()}
        self.store.fit(moved)
        for key, slot in self.slots().items():
            if moved[key] != slot and (tensor := self.store.release(slot)) is not None:
                self._items[key] = tensor
                del moved[key]
        plain = {key: item for key, item in self._items.items() if not isinstance(item, Slot)}
        swap(plain)
        try:
            apply()
        finally:
            swap(self)
            self._items.update(plain)
        self._items.update(moved)


class LazyModule(nn.Module):
    """Base class of every module below a lazily loaded one: it can run, move and be copied, and refuses the rest."""

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode.

        Raises:
            ConfigError: `mode` is True.
        """
        if mode:
            raise ConfigError(f"a lazily loaded {type(self).__name__} runs but cannot be trained; {_EAGER} to train")
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the tensors in memory, and note the device and dtype of the others for when they are decoded."""

        def cast(slot: Slot) -> Slot:
            device, dtype = slot.casts[-1]
            probe = fn(torch.empty(0, dtype=dtype, device=device))
            return slot.cast(probe.device, probe.dtype)

        def apply() -> None:
            super(LazyModule, self)._apply(fn, recurse)  # type: ignore[no-untyped-call]

        for kind in ("_parameters", "_buffers"):
            tensors = self.__dict__[kind]
            if isinstance(tensors, Tensors):
                apply = functools.partial(tensors.move, apply, cast, functools.partial(self.__dict__.__setitem__, kind))
        apply()
        return self

    def _load_from_state_dict(self, *_: Any) -> NoReturn:
        raise ConfigError(f"a lazily loaded {type(self).__name__} takes no other weights; build the module anew")

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Raise ConfigError: a pickle would not contain the weights, which are in the file."""
        raise ConfigError(
            f"a lazily loaded {type(self).__name__} cannot be pickled; save its state_dict(), or send the .birdie file"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return another module that reads the same file through the same cache."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class LazyRecurrent(LazyModule):
    """RNN, LSTM and GRU with the list of their weights built at every read, so that it keeps no tensor alive."""

    _flat_weights_names: list[str]

    @property
    def _flat_weights(self) -> list[Tensor | None]:
        return [getattr(self, name) if hasattr(self, name) else None for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, _: Any) -> None:
        pass

    @property
    def _flat_weight_refs(self) -> list[Any]:  # by which torch looks for weights that changed
        return [None] * len(self._flat_weights_names)

    @_flat_weight_refs.setter
    def _flat_weight_refs(self, _: Any) -> None:
        pass


@functools.cache
def _lazy_class(kind: Any) -> Any:
    """Return a subclass of module class `kind` with the same name, so that `isinstance` and `repr` do not change."""
    base = LazyRecurrent if issubclass(kind, nn.RNNBase) else LazyModule
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _Outline(nn.Module):
    """A stand-in with the shapes and dtypes of a module: `fill` checks it against a file and copies nothing."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.state = state

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.state

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        return None


def _placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device="cpu").expand(shape)


Owners = dict[str, tuple[nn.Module, str, str, Tensor]]  # name → module, "_parameters" or "_buffers", its key, tensor


def attach(
    module: M,
    stored: Mapping[str, Stored],
    decode: Callable[[str], Tensor],
    close: Callable[[], None],
    *,
    where: str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    cache_bytes: int | None = None,
    start: Callable[[str], Pending | None] | None = None,
) -> M:
    """Make `module` read its weights from a file when they are used, and put it in evaluation mode.

    Args:
        module: with memory or on the meta device; the memory of its tensors is freed.
        stored: name of each tensor → its description in the file.
        decode: name of a stored tensor (`Stored.name`) → tensor; called from any thread.
        close: called when the last module that reads the file is garbage-collected.
        where: name of the file, for error messages.
        device, dtype: destination of the module, as in `Module.to`.
        cache_bytes: most bytes of decoded tensors to keep; default 1.5 times the largest layer.
        start: name of a stored tensor → the same, decoded beside other work; None for one that cannot be.

    Raises:
        WeightsError: names, shapes or kinds of numbers do not match, or a buffer that is not in the file has no memory.
        ConfigError: the module cannot be loaded lazily, or `cache_bytes` is less than one tensor.
    """
    if any(isinstance(part, LazyModule) for part in module.modules()):
        raise ConfigError(f"the module already reads its weights from a file; build it anew for {where}")
    current, stored = module.state_dict(keep_vars=True), with_ties(module, stored)
    placeholders = {name: _placeholder(tuple(t.shape), t.dtype) if _is_plain(t) else t for name, t in current.items()}
    fill(_Outline(placeholders), {name: _placeholder(item.shape, item.dtype) for name, item in stored.items()}, where)
    owners = _owners(module)
    _require_owners(module, current, owners, where)
    # Tied names share one tensor; the last name in the state dict wins, as it would be the last to be copied.
    source = {id(owners[name][3]): stored[name] for name in current}
    slots: dict[str, Slot] = {}
    for name in current:
        _, kind, _, tensor = owners[name]
        at = torch.device("cpu") if tensor.is_meta else tensor.device
        movable = tensor.is_floating_point() or tensor.is_complex()
        slot = Slot(source[id(tensor)], ((at, tensor.dtype),), kind == "_parameters")
        last = dtype if dtype is not None and movable else tensor.dtype
        slots[name] = slot.cast(at if device is None else torch.empty(0, device=device).device, last)
    store = Store(decode, close, cache_bytes, start)
    layers: dict[int, dict[str, Slot]] = {}
    for name, slot in slots.items():
        layers.setdefault(id(owners[name][0]), {})[name] = slot
    for layer in layers.values():
        store.fit(layer)
    _install(module, owners, slots, store)
    module.to(device=device, dtype=dtype)
    return module.eval()


def with_ties(module: nn.Module, items: Mapping[str, T]) -> dict[str, T]:
    """Return name → item with the missing names of tensors that have an item under another name.

    Hugging Face libraries write a tied tensor to disk under one of its names.
    """
    current = module.state_dict(keep_vars=True)
    known = {id(tensor): items[name] for name, tensor in current.items() if name in items}
    return {**{name: known[id(tensor)] for name, tensor in current.items() if id(tensor) in known}, **items}


def _is_plain(item: Any) -> bool:
    return isinstance(item, Tensor) and not is_lazy(item)


def _owners(module: nn.Module) -> Owners:
    """Return the module that keeps each parameter and buffer, under all of its names."""
    owners: Owners = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(part, kind).items():
                if tensor is not None:
                    owners[f"{prefix}.{key}" if prefix else key] = part, kind, key, tensor
    return owners


def _require_owners(module: nn.Module, state: Mapping[str, Any], owners: Owners, where: str) -> None:
    """Check for silent errors: tensors that are also kept outside of the parameters, and tensors never read from there.

    Raises:
        ConfigError: a tensor is not a plain parameter or buffer, or an attribute of a module also refers to it.
        WeightsError: a buffer that the file does not have is on the meta device.
    """
    for name in state:
        if name not in owners or isinstance(owners[name][0], torch.jit.ScriptModule):
            raise ConfigError(f"tensor {name!r} is not kept as a parameter or buffer of a plain module; {_EAGER}")
    for name, (_, _, _, tensor) in owners.items():
        if name not in state and tensor.is_meta:
            raise WeightsError(
                f"buffer {name!r} of the module is not in {where} and has no memory; create it on a real device, or "
                "build the module on one"
            )
    names = {id(owners[name][3]): name for name in state}
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if key in ("_parameters", "_buffers", "_modules") or (isinstance(part, nn.RNNBase) and "_flat" in key):
                continue
            items = value.values() if isinstance(value, dict) else value
            for item in items if isinstance(value, list | tuple | set | dict) else [value]:
                if id(item) in names:
                    raise ConfigError(
                        f"{f'{prefix}.{key}' if prefix else key} of the module also holds tensor "
                        f"{names[id(item)]!r} and would not see the decoded weights; {_EAGER}"
                    )


def _install(module: nn.Module, owners: Owners, slots: Mapping[str, Slot], store: Store) -> None:
    for part in list(module.modules()):
        if not isinstance(part, torch.jit.ScriptModule):
            for key in ("_flat_weights", "_flat_weight_refs") if isinstance(part, nn.RNNBase) else ():
                part.__dict__.pop(key, None)
            kind: Any = type(part)  # for mypy, which takes classes of modules for unhashable
            part.__class__ = _lazy_class(kind)
    for name, slot in slots.items():
        owner, kind, key, _ = owners[name]
        if not isinstance(owner.__dict__[kind], Tensors):
            owner.__dict__[kind] = Tensors(store, owner.__dict__[kind])
        owner.__dict__[kind]._items[key] = slot
