"""A module whose weights stay coded until they are used: reading one decodes it.

    module.weight ─► Module.__getattr__ ─► Tensors["weight"] ─► Store (birdie.artifact.tensor_cache) ─► tensor

Decoding hangs on the read, not on hooks around forward, because not every use is a call: attention reads the weight of
its output projection without calling it, a tied head reads the embedding's, recurrent layers keep lists of theirs. A
read is right wherever it comes from, and an exception in a forward leaves nothing to clean up.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from birdie.artifact.tensor_cache import Slot, Store, Stored
from birdie.compress.state import fill
from birdie.errors import ConfigError, WeightsError

M = TypeVar("M", bound=nn.Module)
_EAGER = "load it without lazy"


class Tensors(MutableMapping[str, Tensor | None]):
    """The parameters or buffers of a module by name: slots are decoded when read, all else is what it is.

    It takes the place of the dict that torch keeps them in, so that every way to them (attributes, `parameters`,
    `state_dict`) leads through here.
    """

    def __init__(self, store: Store, items: Mapping[str, Slot | Tensor | None]) -> None:
        self.store, self._items = store, dict(items)

    def __getitem__(self, key: str) -> Tensor | None:
        """The tensor `key`, decoded if it has to be."""
        item = self._items[key]
        return self.store.get(item) if isinstance(item, Slot) else item

    def __setitem__(self, key: str, value: Tensor | None) -> None:
        """Put a tensor of the caller's in the place of whatever was there."""
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        """Forget `key`."""
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        """The names, without decoding."""
        return iter(self._items)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        """Whether there is such a name, without decoding."""
        return key in self._items

    def discard(self, key: str) -> None:
        """Forget `key`: torch asks what is no dict in this way."""
        self._items.pop(key, None)

    def copy(self) -> "Tensors":
        """Another one, with the same tensors."""
        return Tensors(self.store, self._items)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tensors":
        """Another one, with copies of what is in memory."""
        return Tensors(self.store, copy.deepcopy(self._items, memo))

    def slots(self) -> dict[str, Slot]:
        """What is not in memory."""
        return {key: item for key, item in self._items.items() if isinstance(item, Slot)}

    def move(self, apply: Callable[[], None], cast: Callable[[Slot], Slot], swap: Callable[[Any], None]) -> None:
        """Move what is in memory by `apply`, which finds it where `swap` puts it, and all else by `cast`.

        Raises:
            ConfigError: the cache cannot hold what a cast would make.
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
    """What every module below a lazily loaded one is as well: it runs, moves and is copied, and refuses the rest."""

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode.

        Raises:
            ConfigError: training was asked for.
        """
        if mode:
            raise ConfigError(f"a lazily loaded {type(self).__name__} runs but cannot be trained; {_EAGER} to train")
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move what is in memory, and note where the rest goes once it is decoded."""

        def cast(slot: Slot) -> Slot:
            device, dtype = slot.casts[-1]
            probe = fn(torch.empty(0, dtype=dtype, device=device))
            return slot.cast(probe.device, probe.dtype)

        def apply() -> None:
            super(LazyModule, self)._apply(fn, recurse)  # type: ignore[no-untyped-call]

        for kind in ("_parameters", "_buffers"):
            held = self.__dict__[kind]
            if isinstance(held, Tensors):
                apply = functools.partial(held.move, apply, cast, functools.partial(self.__dict__.__setitem__, kind))
        apply()
        return self

    def _load_from_state_dict(self, *_: Any) -> NoReturn:
        raise ConfigError(f"a lazily loaded {type(self).__name__} takes no other weights; build the module anew")

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refuse to be pickled: the weights are in the file."""
        raise ConfigError(
            f"a lazily loaded {type(self).__name__} cannot be pickled; save its state_dict(), or send the .birdie file"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another module over the same file and the same cache."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class LazyRecurrent(LazyModule):
    """RNN, LSTM and GRU keep a list of their weights: here it is made when asked for, so that it holds nothing."""

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
    """A subclass of module class `kind` under its name: `isinstance` and `repr` say what they said."""
    base = LazyRecurrent if issubclass(kind, nn.RNNBase) else LazyModule
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _Outline(nn.Module):
    """Shapes and dtypes of a module: `fill` compares with a file, and there is nothing to copy."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.state = state

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.state

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        return None


def _hollow(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device="cpu").expand(shape)


Places = dict[str, tuple[nn.Module, str, str, Tensor]]  # name → module, "_parameters" or "_buffers", name there, tensor


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
) -> M:
    """Make `module` read its weights from a file when they are used; puts it in evaluation mode.

    Args:
        module: with or without memory of its own (the meta device); the memory it has is given back.
        stored: name of each tensor → what the file holds.
        decode: name of the bytes (`Stored.name`) → tensor, from any thread.
        close: called when the last module that reads the file is gone.
        where: the file, for messages.
        device, dtype: where the module goes, as in `Module.to`.
        cache_bytes: of decoded tensors held at most; default 1.5 times the largest layer.

    Raises:
        WeightsError: names, shapes or kinds of numbers do not match, or a buffer that is not in the file has no memory.
        ConfigError: the module is of a kind that cannot be loaded lazily, or `cache_bytes` holds less than one tensor.
    """
    if any(isinstance(each, LazyModule) for each in module.modules()):
        raise ConfigError(f"the module already reads its weights from a file; build it anew for {where}")
    own = module.state_dict(keep_vars=True)
    hollow = {name: _hollow(tuple(t.shape), t.dtype) if _is_plain(t) else t for name, t in own.items()}
    fill(_Outline(hollow), {name: _hollow(each.shape, each.dtype) for name, each in stored.items()}, where)
    places = _places(module)
    _require_places(module, own, places, where)
    source = {id(places[name][3]): stored[name] for name in own}  # of tied tensors the last is loaded last
    slots: dict[str, Slot] = {}
    for name in own:
        _, kind, _, tensor = places[name]
        at = torch.device("cpu") if tensor.is_meta else tensor.device
        movable = tensor.is_floating_point() or tensor.is_complex()
        slot = Slot(source[id(tensor)], ((at, tensor.dtype),), kind == "_parameters")
        last = dtype if dtype is not None and movable else tensor.dtype
        slots[name] = slot.cast(at if device is None else torch.empty(0, device=device).device, last)
    store = Store(decode, close, cache_bytes)
    layers: dict[int, dict[str, Slot]] = {}
    for name, slot in slots.items():
        layers.setdefault(id(places[name][0]), {})[name] = slot
    for layer in layers.values():
        store.fit(layer)
    _install(module, places, slots, store)
    module.to(device=device, dtype=dtype)
    return module.eval()


def _is_plain(item: Any) -> bool:
    return isinstance(item, Tensor) and not is_lazy(item)


def _places(module: nn.Module) -> Places:
    """Where every parameter and buffer is kept, by each of its names."""
    found: Places = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(each, kind).items():
                if tensor is not None:
                    found[f"{prefix}.{key}" if prefix else key] = each, kind, key, tensor
    return found


def _require_places(module: nn.Module, own: Mapping[str, Any], places: Places, where: str) -> None:
    """Refuse what could be wrong in silence: tensors that are elsewhere as well, and those that would never be read."""
    for name in own:
        if name not in places or isinstance(places[name][0], torch.jit.ScriptModule):
            raise ConfigError(f"tensor {name!r} is not kept as a parameter or buffer of a plain module; {_EAGER}")
    for name, (_, _, _, tensor) in places.items():
        if name not in own and tensor.is_meta:
            raise WeightsError(
                f"buffer {name!r} of the module is not in {where} and has no memory; make it on a real device, or "
                "build the module there"
            )
    names = {id(places[name][3]): name for name in own}
    for prefix, each in module.named_modules():
        for key, value in vars(each).items():
            if key in ("_parameters", "_buffers", "_modules") or (isinstance(each, nn.RNNBase) and "_flat" in key):
                continue
            parts = value.values() if isinstance(value, dict) else value
            for part in parts if isinstance(value, list | tuple | set | dict) else [value]:
                if id(part) in names:
                    raise ConfigError(
                        f"{f'{prefix}.{key}' if prefix else key} of the module also holds tensor {names[id(part)]!r} "
                        f"and would miss what is decoded; {_EAGER}"
                    )


def _install(module: nn.Module, places: Places, slots: Mapping[str, Slot], store: Store) -> None:
    for each in list(module.modules()):
        if not isinstance(each, torch.jit.ScriptModule):
            for key in ("_flat_weights", "_flat_weight_refs") if isinstance(each, nn.RNNBase) else ():
                each.__dict__.pop(key, None)
            kind: Any = type(each)  # for mypy, which takes classes of modules for unhashable
            each.__class__ = _lazy_class(kind)
    for name, slot in slots.items():
        owner, kind, key, _ = places[name]
        if not isinstance(owner.__dict__[kind], Tensors):
            owner.__dict__[kind] = Tensors(store, owner.__dict__[kind])
        owner.__dict__[kind]._items[key] = slot
