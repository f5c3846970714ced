"""Lazy loading: the weights of a module stay coded until they are used, and reading one decodes it.

    module.weight ─► Module.__getattr__ ─► Tensors["weight"] ─► TensorCache.get ─► tensor

Decoding is triggered by the attribute read, not by hooks around forward. Not every use is a call: attention reads the
weight of its output projection without calling it, a tied head reads the embedding's weight. And where modules have
hooks, torch does not use its fast kernel of encoder layers, whose outputs have other last bits.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from birdie.artifact.container import Entry
from birdie.artifact.file import File, dtype_of
from birdie.artifact.options import LoadOptions
from birdie.artifact.tensor_cache import Slot, TensorCache
from birdie.compress.calibration.modes import set_evaluation
from birdie.compress.filling import Keys, Loading, for_module
from birdie.compress.state import is_extra
from birdie.compress.wrappers import without_wrappers
from birdie.errors import ConfigError, WeightsError

_EAGER = "load it without lazy"
_COPIED = "cannot be copied or pickled; save its state_dict(), or load the .birdie file once more"


class Tensors(MutableMapping[str, Tensor | None]):
    """The parameters or buffers of a module by name, in place of the dict in which torch keeps them.

    A slot is decoded when it is read, by whatever reads it: attributes, `parameters`, `state_dict`; a tensor is
    returned as it is.

    Args:
        cache: decodes slots.
        items: name → slot or tensor.
        flat_weights: returns the list of the weights of a recurrent layer. It is no parameter, but torch looks for
            attributes among them.
    """

    def __init__(
        self,
        cache: TensorCache,
        items: Mapping[str, Slot | Tensor | None],
        flat_weights: Callable[[], Any] | None = None,
    ) -> None:
        self.cache, self.items_, self.flat_weights = cache, dict(items), flat_weights

    def __getitem__(self, key: str) -> Tensor | None:
        if key == "_flat_weights" and self.flat_weights is not None:
            tensors: Any = self.flat_weights()
            return tensors  # type: ignore[no-any-return]
        item = self.items_[key]
        return self.cache.get(item) if isinstance(item, Slot) else item

    def __setitem__(self, key: str, value: Tensor | None) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def __contains__(self, key: object) -> bool:
        return key in self.items_ or (key == "_flat_weights" and self.flat_weights is not None)

    def discard(self, key: str) -> None:
        """Remove a tensor: torch calls this method on containers that are no dict."""
        self.items_.pop(key, None)

    def copy(self) -> "Tensors":
        """Return a shallow copy, with the same tensors."""
        return Tensors(self.cache, self.items_, self.flat_weights)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise ConfigError(f"lazily loaded weights {_COPIED}")


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(message)


def _train(module: weakref.ref[nn.Module], mode: bool = True) -> nn.Module:
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


class CodedTensor(Tensor):
    """A tensor of a file in a state dict: it has a shape and a dtype, and is decoded when anything else is asked of it.

    Attributes:
        stored: name of the entry that holds its bytes.
        value: the tensor, once it is decoded: what a migration of the module may have changed in place.
    """

    stored: str
    value: Tensor | None
    decode: Callable[[str], Tensor]

    @staticmethod
    def of(entry: Entry, decode: Callable[[str], Tensor]) -> "CodedTensor":
        """Return the tensor of an entry, which `decode` decodes by its name."""
        coded = torch.empty(entry.shape, dtype=dtype_of(entry), device="meta").as_subclass(CodedTensor)
        coded.stored, coded.decode, coded.value = entry.name, decode, None
        return coded

    @classmethod
    def __torch_function__(
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.device.__get__:
            return torch.device("cpu")
        if _describes(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(CodedTensor, CodedTensor.decoded, (args, kwargs or {}))
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
    """Runs `load_state_dict`, and notes which tensor of the module is one of the file instead of copying it.

    What the module computes from tensors of the file is copied, or noted for a tensor without memory.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sources: dict[int, Tensor] = {}

    def copy(self, tensor: Tensor, value: Tensor) -> None:
        if isinstance(value, CodedTensor) and value.value is not None:
            value = value.value
        if not isinstance(value, CodedTensor) and not tensor.is_meta:
            self.sources.pop(id(tensor), None)
            super().copy(tensor, value)
        elif self.can_hold(tensor, value):
            if not isinstance(value, CodedTensor):
                value = value.detach().to("cpu", tensor.dtype, copy=True)
                value = nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value
            self.sources[id(tensor)] = value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
    file: File,
    decode: Callable[[str], Tensor],
    options: LoadOptions,
    *,
    strict: bool,
    partial: bool,
) -> Keys:
    """Make `module` read its weights from a file when they are used, and put it in evaluation mode.

    The module's own `load_state_dict` says which tensor of the file is which weight. What it computes from tensors of
    the file is computed now and stays in memory. Options and result are those of `birdie.load`.

    Args:
        module: with memory or on the meta device; the memory of its tensors is freed.
        state: name of each tensor → `CodedTensor`; and the extra states of the file.
        file: closed when the last module that reads it is garbage-collected.
        decode: name of a stored tensor → tensor; called from any thread.
        partial: the state is a part by intention, so nothing is missing.
    """
    where, device, dtype = file.where, options.device, options.dtype
    if any(isinstance(value, Tensors) for part in module.modules() for value in vars(part).values()):
        raise ConfigError(f"the module already reads its weights from a file; build it anew for {where}")
    with without_wrappers(module) as inner:
        named, current = for_module(inner, state), inner.state_dict(keep_vars=True)
        if waiting := [name for name, tensor in current.items() if is_lazy(tensor)]:
            raise WeightsError(
                f"{where} cannot be copied into {waiting[0]!r} of the module, which has no memory; "
                "run it once on an input first"
            )
        with _Recording(inner, where, f"{_EAGER}, or build the right module", current, named) as recording:
            keys = recording.load(named, strict=strict, partial=partial)
            owners = _owners(inner)
            _require_owners(inner, current, owners, recording.sources, where)
            sources = {name: recording.sources.get(id(owner[3])) for name, owner in owners.items()}
            slots = {
                name: _slot(owners[name], source, device, dtype)
                for name, source in sources.items()
                if isinstance(source, CodedTensor)
            }
            cache = TensorCache(decode, file.close, slots.values(), options.cache_bytes)
        for name, source in sources.items():
            owner, kind, key, _ = owners[name]
            if source is not None:
                vars(owner)[kind][key] = None if name in slots else source
        inner.to(device=device, dtype=dtype)  # what stays in memory
        _install(inner, owners, slots, cache)
    set_evaluation(module)
    return keys


def _slot(
    owner: tuple[nn.Module, str, str, Tensor],
    coded: CodedTensor,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Slot:
    _, kind, _, tensor = owner
    casts: tuple[torch.dtype, ...] = (tensor.dtype,)
    if dtype is not None and dtype != tensor.dtype and (tensor.is_floating_point() or tensor.is_complex()):
        casts = (tensor.dtype, dtype)
    if device is None:
        device = torch.device("cpu") if tensor.is_meta else tensor.device
    target = torch.empty(0, device=device).device  # "cuda" is the current GPU
    return Slot(coded.stored, tuple(coded.shape), casts, target, kind == "_parameters")


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
    module: nn.Module, state: Mapping[str, Any], owners: Owners, sources: Mapping[int, Tensor], where: str
) -> None:
    """Refuse silent errors: tensors that are also kept outside of the parameters, or are never read from there."""
    for name, item in state.items():
        if is_extra(name, item, of_module=True):
            continue
        if name not in owners or isinstance(owners[name][0], torch.jit.ScriptModule):
            raise ConfigError(f"tensor {name!r} is not kept as a parameter or buffer of a plain module; {_EAGER}")
    for name, (_, kind, _, tensor) in owners.items():
        if tensor.is_meta and id(tensor) not in sources:
            what = "parameter" if kind == "_parameters" else "buffer"
            raise WeightsError(
                f"{what} {name!r} of the module is not in {where} and has no memory; create it on a real device, or "
                "build the module on one"
            )
    names = {id(tensor): name for name, (_, _, _, tensor) in owners.items() if id(tensor) in sources}
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if key in ("_parameters", "_buffers", "_modules") or (isinstance(part, nn.RNNBase) and "_flat" in key):
                continue
            if held := [names[id(item)] for item in tree_leaves(value) if id(item) in names]:
                raise ConfigError(
                    f"{f'{prefix}.{key}' if prefix else key} of the module also holds tensor {held[0]!r} and would not "
                    f"see the decoded weights; {_EAGER}"
                )


def _install(module: nn.Module, owners: Owners, slots: Mapping[str, Slot], cache: TensorCache) -> None:
    for part in list(module.modules()):
        if isinstance(part, torch.jit.ScriptModule):
            continue
        if isinstance(part, nn.RNNBase):  # torch's list would keep every tensor alive
            content = vars(part)
            content.pop("_flat_weights", None)
            content["_flat_weight_refs"] = [None] * len(part._flat_weights_names)  # by which torch looks for changes
            flat_weights = functools.partial(_flat_weights, weakref.ref(part))
            content["_parameters"] = Tensors(cache, content["_parameters"], flat_weights)
        _restrict(part)
    for name, slot in slots.items():
        owner, kind, key, _ = owners[name]
        if not isinstance(vars(owner)[kind], Tensors):
            vars(owner)[kind] = Tensors(cache, vars(owner)[kind])
        vars(owner)[kind].items_[key] = slot


def _flat_weights(module: weakref.ref[nn.Module]) -> list[Tensor | None]:
    part: Any = module()
    return [getattr(part, name, None) for name in part._flat_weights_names]
