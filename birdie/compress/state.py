"""A model as name → tensor: what can be stored, which names share one tensor, and the way back into a module.

The `require_…` checks refuse what a caller may not ask of either way, before anything is copied or written.
"""

import operator
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from birdie.compress.tensors import FORMATS
from birdie.errors import ConfigError, WeightsError
from birdie.runtime.device import dtype_name

# A view may stand for more bytes than lie in memory (`expand`), and so may a small file; beyond this it is refused.
MIN_VIEW_LIMIT = 1 << 30
VIEW_PER_BYTE = 64


def named_tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `model`, sorted by name.

    Raises:
        WeightsError: `model` is neither module nor dict, or an item is not a dense tensor that can be stored.
    """
    state: Any = plain_state(model) if isinstance(model, nn.Module) else model
    if not isinstance(state, Mapping):
        raise WeightsError(
            f"the model is a {type(state).__name__}, not a module or a dict of tensors; give one of the two"
        )
    for name, weight in state.items():
        if not isinstance(name, str) or not isinstance(weight, Tensor):
            kind = type(weight).__name__
            raise WeightsError(
                f"item {name!r} is a {kind}, not a named tensor; give a flat dict of tensors (a state_dict)"
            )
        if not is_text(name):
            raise WeightsError(f"tensor {name!r} cannot be stored under a name that is not text; rename it")
        problem = _problem(weight)
        if problem:
            raise WeightsError(f"tensor {name!r} ({problem}) cannot be stored; make it dense and of a plain dtype")
    return {name: state[name] for name in sorted(state)}


def folded(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Plain name → (owner, attribute) of what is trained in another form and stored as the weight it gives.

    Such are parametrizations (`torch.nn.utils.parametrize`) whose first step says `folds = True`.
    """
    found = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        chains = getattr(owner, "parametrizations", None)
        if isinstance(chains, nn.ModuleDict):
            for attribute, chain in chains.items():
                if getattr(chain[0], "folds", False):  # type: ignore[index]
                    found[f"{prefix}.{attribute}" if prefix else attribute] = (owner, attribute)
    return found


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's state dict, with what is `folded` under plain names; tied weights share their memory."""
    state: dict[str, Tensor] = module.state_dict()
    found = folded(module)
    weights: dict[int, Tensor] = {}
    for name, (owner, attribute) in found.items():
        before = name.removesuffix(attribute) + f"parametrizations.{attribute}."
        state = {other: weight for other, weight in state.items() if not other.startswith(before)}
        chain = owner.parametrizations[attribute]  # type: ignore[index]
        if id(chain) not in weights:
            weights[id(chain)] = getattr(owner, attribute).detach()
        state[name] = weights[id(chain)]
    return state


def is_text(name: str) -> bool:
    """Whether a file can name a tensor so: no NUL, and no half of a surrogate pair."""
    return "\0" not in name and not any("\ud800" <= letter <= "\udfff" for letter in name)


def _problem(weight: Tensor) -> str | None:
    """Why `weight` cannot be stored, if so."""
    if is_lazy(weight):
        return "lazy, without a shape until its module has run"
    if weight.is_nested:
        return "nested"
    if weight.layout is not torch.strided or weight.is_quantized or weight.dtype not in FORMATS:
        return f"{dtype_name(weight.dtype)}, {weight.layout}"
    try:
        storage = weight.untyped_storage()
        stored = 0 if storage.device.type == "meta" else storage.nbytes()
    except (RuntimeError, NotImplementedError):  # subclasses that only wrap other tensors
        return f"a {type(weight).__name__} without memory of its own"
    if (weight.numel() and not stored) or weight.is_meta:
        return f"a {'meta' if weight.is_meta else type(weight).__name__} tensor without data"
    if weight.nbytes > max(MIN_VIEW_LIMIT, VIEW_PER_BYTE * stored):
        return f"{tuple(weight.shape)}, which repeats {stored:,} bytes of memory up to {weight.nbytes:,}"
    return None


def without_ties(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors by their first name, second name → first name): tied means the same view of the same memory."""
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name, weight in state.items():
        if weight.numel():
            memory = (weight.device, weight.untyped_storage().data_ptr(), weight.storage_offset())
            view = (tuple(weight.shape), weight.stride(), weight.dtype, weight.is_conj(), weight.is_neg())
            target = first.setdefault((*memory, *view), name)
            if target != name:
                ties[name] = target
    return {name: weight for name, weight in state.items() if name not in ties}, ties


def require_target(path: Any, into: Any = None, device: Any = None, dtype: Any = None) -> None:
    """Say early that the state in `path` cannot go into `into`, onto `device` or to `dtype`.

    Raises:
        ConfigError: one is no path, no module, no device of this machine, or no dtype for a module.
    """
    if not isinstance(path, bytes | memoryview):  # a whole file in memory is read as well
        _require_path(path)
    if into is not None and not isinstance(into, nn.Module):
        raise ConfigError(f"into is a {type(into).__name__}, not a module; leave it out to get a dict of tensors")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype {dtype!r} is not a torch.dtype; give for example torch.float32")
    if into is not None and dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"a module cannot be cast to {dtype_name(dtype)}; choose a floating dtype")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except Exception as error:  # torch raises a different kind for every kind of device
            raise ConfigError(
                f"device {device if isinstance(device, torch.device) else repr(device)} is unknown or not available on "
                "this machine; use 'cpu', or leave it out"
            ) from error


def require_request(path: Any, scheme: Any, metadata: Any) -> None:
    """Say early that nothing can be saved at `path` by `scheme` with `metadata`; specs themselves are parsed elsewhere.

    Raises:
        ConfigError: one is no path, neither spec nor (pattern, spec) rules, or no dict.
    """
    _require_path(path)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata is a {type(metadata).__name__}; give a dict")
    if scheme is None or _is_spec(scheme):
        return
    rules = list(scheme.items()) if isinstance(scheme, Mapping) else scheme
    for rule in rules if isinstance(rules, list | tuple) else [rules]:
        pair = isinstance(rule, list | tuple) and len(rule) == 2
        if not (pair and isinstance(rule[0], str) and _is_spec(rule[1])):
            raise ConfigError(f"scheme {rule!r} is neither spec nor rule; write 'int6' or [('blocks.*', 'int6')]")


def _require_path(path: Any) -> None:
    try:
        if isinstance(path, str | os.PathLike) and b"\0" not in os.fsencode(path):
            return
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{path!r} is not a path that a file can have; give a str or Path without NUL")


def _is_spec(spec: Any) -> bool:
    return isinstance(spec, str) or (callable(getattr(spec, "encode", None)) and not isinstance(spec, type))


def whole(name: str, value: Any, least: int = 1) -> int | None:
    """`value` as an int (numpy's are taken, floats are not); None stays None. Raises ConfigError."""
    try:
        if value is None or (operator.index(value) >= least and not isinstance(value, bool)):
            return None if value is None else operator.index(value)
    except TypeError:
        pass
    raise ConfigError(f"{name} {value!r} is not a whole number from {least} up; give an int")


def placed(weight: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """`weight` on `device`, cast to `dtype` if it is floating."""
    return weight.to(device=device, dtype=dtype if weight.is_floating_point() else None)


def fill(
    module: nn.Module,
    state: Mapping[str, Tensor],
    where: str,
    remedy: str = "load it without into, or build the right module",
) -> nn.Module:
    """Copy `state` into `module`; `where` it comes from and what to do are said if it does not fit.

    Raises:
        WeightsError: the module has no memory yet, or names, shapes or kinds of numbers do not match; lists them all.
    """
    own = plain_state(module)
    for name, weight in own.items():
        if isinstance(weight, Tensor) and (weight.is_meta or is_lazy(weight)):
            how = "run it once on an input" if is_lazy(weight) else "call its to_empty(device='cpu')"
            raise WeightsError(
                f"{where} cannot be copied into {name!r} of the module, which has no memory; {how} first"
            )
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    mismatched = [
        f"{name} {tuple(state[name].shape)} in the file, {tuple(weight.shape)} in the module"
        for name, weight in own.items()
        if name in state and isinstance(weight, Tensor) and weight.shape != state[name].shape
    ]
    lossy = [
        f"{name} {dtype_name(state[name].dtype)} in the file, {dtype_name(weight.dtype)} in the module"
        for name, weight in own.items()
        if name in state and isinstance(weight, Tensor) and not torch.can_cast(state[name].dtype, weight.dtype)
    ]
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("different shape", mismatched),
            ("different kind of numbers", lossy),
        )
        if names
    ]
    if problems:
        raise WeightsError(f"{where} does not fit the module ({'; '.join(problems)}); {remedy}")
    trained = folded(module)
    for name, (owner, attribute) in trained.items():
        setattr(owner, attribute, state[name].to(own[name]))
    module.load_state_dict({name: weight for name, weight in state.items() if name not in trained}, strict=not trained)
    return module
