"""Lazy loading: the weights of a module stay coded until they are used, and reading one decodes it.

    module.weight ─► Module.__getattr__ ─► Tensors["weight"] ─► TensorCache.get ─► tensor

Decoding is triggered by the attribute read, not by hooks around forward, because not every use is a call: attention
reads the weight of its output projection without calling it, a tied head reads the embedding's weight, recurrent layers
keep lists of theirs. Every read gets the right tensor, and an exception in a forward leaves nothing to clean up.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from birdie.artifact.container import Entry
from birdie.artifact.file import dtype_of
from birdie.artifact.tensor_cache import Slot, TensorCache
from birdie.compress.calibration.modes import set_evaluation
from birdie.compress.filling import Keys, Loading, for_module
from birdie.compress.state import is_extra
from birdie.compress.wrappers import without_wrappers
from birdie.errors import ConfigError, WeightsError

_EAGER = "load it without lazy"
_COPIED = "cannot be copied or pickled; save its state_dict(), or load the .birdie file once more"


class Tensors(MutableMapping[str, Tensor | None]):
    """The parameters or buffers of a module by name: a slot is decoded when it is read, a tensor is returned as it is.

    It replaces the dict in which torch keeps them, so that every access (attributes, `parameters`, `state_dict`) goes
    through this class.

    Args:
        cache: decodes slots.
        items: name → slot or tensor.
        lists: name of an attribute of the module → function that returns the tensors in it. It is no parameter, but
            torch looks for attributes among them.
    """

    def __init__(
        self,
        cache: TensorCache,
        items: Mapping[str, Slot | Tensor | None],
        lists: Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        self.cache, self._items, self._lists = cache, dict(items), lists or {}

    def __getitem__(self, key: str) -> Tensor | None:
        """Return the tensor `key`, decoded if necessary."""
        if key in self._lists:
            tensors: Any = self._lists[key]()
            return tensors  # type: ignore[no-any-return]
        item = self._items[key]
        return self.cache.get(item) if isinstance(item, Slot) else item

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
        return key in self._items or key in self._lists

    def discard(self, key: str) -> None:
        """Remove the tensor `key`: torch calls this method on containers that are no dict."""
        self._items.pop(key, None)

    def copy(self) -> "Tensors":
        """Return a shallow copy, with the same tensors."""
        return Tensors(self.cache, self._items, self._lists)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Raise ConfigError: a copy or a pickle would not contain the weights, which are in the file."""
        raise ConfigError(f"lazily loaded weights {_COPIED}")


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(message)


def _train(module: weakref.ref[nn.Module], mode: bool = True) -> nn.Module:
    """Stay in evaluation mode."""
    part = module()
    assert part is not None
    if mode:
        raise ConfigError(f"a lazily loaded {type(part).__name__} runs but cannot be trained; {_EAGER} to train")
    return type(part).train(part, mode)


def _restrict(module: nn.Module) -> None:
    """Let a module run where it was loaded, and refuse the rest.

    The methods are replaced in the module, whose class may be of any metaclass and keep any account of its subclasses.
    They do not refer to the module, which would then live until the next garbage collection.
    """
    kind = f"a lazily loaded {type(module).__name__}"
    moved = f"{kind} cannot be moved or cast; build the module anew, and give device or dtype to birdie.load"
    vars(module).update(
        train=functools.partial(_train, weakref.ref(module)),
        _apply=functools.partial(_refuse, moved),
        _load_from_state_dict=functools.partial(_refuse, f"{kind} takes no other weights; build the module anew"),
        __reduce_ex__=functools.partial(_refuse, f"{kind} {_COPIED}"),  # the weights are in the file
    )


def _is_lazy_loaded(module: nn.Module) -> bool:
    return any(isinstance(value, Tensors) for value in vars(module).values())


def _flat_weights(module: weakref.ref[nn.Module]) -> list[Tensor | None]:
    """Return the weights of an RNN, LSTM or GRU: torch's list of them would keep every tensor alive."""
    part: Any = module()
    return [getattr(part, name, None) for name in part._flat_weights_names]


class Coded(Tensor):
    """A tensor of a file in a state dict: it has a shape and a dtype, and is decoded when anything else is asked of it.

    Attributes:
        stored: name of the entry that holds its bytes.
        value: the tensor, once it is decoded: what a migration of the module may have changed in place.
    """

    stored: str
    value: Tensor | None
    decode: Callable[[str], Tensor]

    @staticmethod
    def of(entry: Entry, decode: Callable[[str], Tensor]) -> "Coded":
        """Return the tensor of an entry, which `decode` decodes by its name."""
        coded = torch.empty(entry.shape, dtype=dtype_of(entry), device="meta").as_subclass(Coded)
        coded.stored, coded.decode, coded.value = entry.name, decode, None
        return coded

    @classmethod
    def __torch_function__(
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Describe the tensor, or decode it and call `func`."""
        if func == Tensor.device.__get__:
            return torch.device("cpu")
        if _describes(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Coded, Coded.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)

    def decoded(self) -> Tensor:
        """Return the decoded tensor, the same at every call."""
        if self.value is None:
            self.value = self.decode(self.stored)
        return self.value


_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_contiguous",
            "is_floating_point", "is_complex", "is_signed", "__len__", "__hash__")  # fmt: skip
_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_meta", "is_sparse", "is_quantized", "is_nested",
               "requires_grad", "is_leaf", "grad_fn", "itemsize", "nbytes")  # fmt: skip
_DESCRIPTIONS = [getattr(Tensor, name) for name in _METHODS] + [getattr(Tensor, name).__get__ for name in _PROPERTIES]


def _describes(func: Any) -> bool:
    """Return whether a function of tensors reads no values."""
    return any(func == one for one in _DESCRIPTIONS)


class _Recording(Loading):
    """Runs `load_state_dict` and notes what would be copied into each tensor of the module, instead of copying it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sources: dict[int, Tensor] = {}

    def copy(self, tensor: Tensor, value: Tensor) -> None:
        if value is not tensor and self.can_hold(tensor, value):
            self.sources[id(tensor)] = value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse to read a tensor that has no values yet."""
        if func is not Tensor.copy_ and not _describes(func):
            for item in args:
                if isinstance(item, Tensor) and id(item) in self.sources:
                    raise ConfigError(
                        f"the module reads {self.names[id(item)][0]!r} while it is loaded, before lazy loading decodes "
                        f"it; {_EAGER}"
                    )
        return super().__torch_function__(func, types, args, kwargs)


Owners = dict[str, tuple[nn.Module, str, str, Tensor]]  # name → module, "_parameters" or "_buffers", its key, tensor


def attach(
    module: nn.Module,
    state: Mapping[str, Any],
    decode: Callable[[str], Tensor],
    close: Callable[[], None],
    *,
    where: str,
    strict: bool = True,
    partial: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    cache_bytes: int | None = None,
) -> Keys:
    """Make `module` read its weights from a file when they are used, and put it in evaluation mode.

    The module's own `load_state_dict` says which tensor of the file is which weight. What it computes from tensors of
    the file is computed now and stays in memory.

    Args:
        module: with memory or on the meta device; the memory of its tensors is freed.
        state: name of each tensor → `Coded`; and the extra states of the file.
        decode: name of a stored tensor → tensor; called from any thread.
        close: called when the last module that reads the file is garbage-collected.
        where: name of the file, for error messages.
        strict, partial: as for `birdie.compress.filling.load_into`.
        device, dtype: destination of the module, as in `Module.to`.
        cache_bytes: most bytes of decoded tensors to keep; default 1.5 times the largest layer.

    Returns:
        The names that did not match.
    """
    if any(map(_is_lazy_loaded, module.modules())):
        raise ConfigError(f"the module already reads its weights from a file; build it anew for {where}")
    with without_wrappers(module) as inner:
        named, current = for_module(inner, state), inner.state_dict(keep_vars=True)
        if waiting := [name for name, tensor in current.items() if is_lazy(tensor)]:
            raise WeightsError(
                f"{where} cannot be copied into {waiting[0]!r} of the module, which has no memory; "
                "run it once on an input first"
            )
        remedy = f"{_EAGER}, or build the right module"
        with _Recording(inner, where, remedy, current, named) as recording:
            keys = recording.load(named, strict=strict, partial=partial)
            owners = _owners(inner)
            sources = {name: recording.sources.get(id(owner[3])) for name, owner in owners.items()}
            _require_owners(inner, current, owners, sources, where)
            items = _items(owners, sources, device, dtype)
            layers: dict[int, dict[str, Slot]] = {}
            for name, item in items.items():
                if isinstance(item, Slot):
                    layers.setdefault(id(owners[name][0]), {})[name] = item
            cache = TensorCache(decode, close, layers.values(), cache_bytes)
        for name, item in items.items():
            owner, kind, key, _ = owners[name]
            owner.__dict__[kind][key] = None if isinstance(item, Slot) else item
        inner.to(device=device, dtype=dtype)  # what stays in memory
        _install(inner, owners, items, cache)
    set_evaluation(module)
    return keys


def _items(
    owners: Owners, sources: Mapping[str, Tensor | None], device: torch.device | str | None, dtype: torch.dtype | None
) -> dict[str, Slot | Tensor]:
    """Return what the module holds under each name: a slot, or a tensor that was computed."""
    items: dict[str, Slot | Tensor] = {}
    computed: dict[int, Tensor] = {}
    for name, source in sources.items():
        _, kind, _, tensor = owners[name]
        at = torch.device("cpu") if tensor.is_meta else tensor.device
        if isinstance(source, Coded) and source.value is None:
            movable = tensor.is_floating_point() or tensor.is_complex()
            last = dtype if dtype is not None and movable else tensor.dtype
            items[name] = Slot(
                source.stored,
                tuple(source.shape),
                (tensor.dtype,) if last == tensor.dtype else (tensor.dtype, last),
                at if device is None else torch.empty(0, device=device).device,
                kind == "_parameters",
            )
        elif source is not None:
            if id(tensor) not in computed:
                value = source.decoded() if isinstance(source, Coded) else source.detach()
                value = value.to(at, tensor.dtype, copy=True)
                computed[id(tensor)] = nn.Parameter(value, requires_grad=False) if kind == "_parameters" else value
            items[name] = computed[id(tensor)]
    return items


def _owners(module: nn.Module) -> Owners:
    """Return the module that keeps each parameter and buffer, under all of its names."""
    owners: Owners = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(part, kind).items():
                if tensor is not None:
                    owners[f"{prefix}.{key}" if prefix else key] = part, kind, key, tensor
    return owners


def _require_owners(
    module: nn.Module, state: Mapping[str, Any], owners: Owners, sources: Mapping[str, Tensor | None], where: str
) -> None:
    """Refuse silent errors: tensors that are also kept outside of the parameters, or are never read from there."""
    for name, item in state.items():
        if is_extra(name, item, of_module=True):
            continue
        if name not in owners or isinstance(owners[name][0], torch.jit.ScriptModule):
            raise ConfigError(f"tensor {name!r} is not kept as a parameter or buffer of a plain module; {_EAGER}")
    for name, (_, kind, _, tensor) in owners.items():
        source = sources[name]
        if (tensor.is_meta and source is None) or (source is not None and source.is_meta and type(source) is not Coded):
            what = "parameter" if kind == "_parameters" else "buffer"
            raise WeightsError(
                f"{what} {name!r} of the module is not in {where} and has no memory; create it on a real device, or "
                "build the module on one"
            )
    names = {id(owners[name][3]): name for name, source in sources.items() if source is not None}
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


def _install(module: nn.Module, owners: Owners, items: Mapping[str, Slot | Tensor], cache: TensorCache) -> None:
    for part in list(module.modules()):
        if isinstance(part, torch.jit.ScriptModule):
            continue
        if isinstance(part, nn.RNNBase):
            content = vars(part)
            content.pop("_flat_weights", None)
            content["_flat_weight_refs"] = [None] * len(part._flat_weights_names)  # by which torch looks for changes
            lists = {"_flat_weights": functools.partial(_flat_weights, weakref.ref(part))}
            content["_parameters"] = Tensors(cache, content["_parameters"], lists)
        _restrict(part)
    for name, item in items.items():
        if isinstance(item, Slot):
            owner, attribute, key, _ = owners[name]
            if not isinstance(owner.__dict__[attribute], Tensors):
                owner.__dict__[attribute] = Tensors(cache, owner.__dict__[attribute])
            owner.__dict__[attribute]._items[key] = item
