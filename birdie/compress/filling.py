"""Filling of a module from a state dict by its own `load_state_dict`: completely, or not at all.

    state dict ─► names of the module ─► load_state_dict: hooks, migrations by version, copies ─► kept, or undone

Whatever torch loads, is loaded: modules rename, convert and add tensors of older versions themselves. Numbers that
would be lost (complex to real, floating to whole ones) are refused, which torch does not.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from birdie.compress.state import folded, plain_state, problem_of
from birdie.compress.tensors import repeats_memory
from birdie.compress.undo import Undo, tensors_of
from birdie.compress.wrappers import COUNTER, own_names, without_wrappers
from birdie.errors import BirdieError, WeightsError
from birdie.system.device import dtype_name

_REMEDY = "load it without into, or build the right module"


class Keys(NamedTuple):
    """Names that `load_state_dict` reports: expected and missing, there and unexpected."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def fill(module: nn.Module, state: Mapping[str, Any], source: str, remedy: str = _REMEDY) -> nn.Module:
    """Copy `state` into `module`, wrapped or not.

    Args:
        module: the destination.
        state: name → tensor, and what a module keeps beside tensors; with the versions of its modules (`_metadata`).
        source: origin of the state, for error messages.
        remedy: what to do about a mismatch, for error messages.
    """
    load_into(module, state, source, remedy)
    return module


def load_into(
    module: nn.Module,
    state: Mapping[str, Any],
    source: str,
    remedy: str = _REMEDY,
    *,
    strict: bool = True,
    partial: bool = False,
) -> Keys:
    """Copy `state` into `module` as `fill`, and return the names that did not match.

    Args:
        module, state, source, remedy: as for `fill`.
        strict: raise WeightsError if names do not match.
        partial: the state is a part by intention, so nothing is missing.
    """
    with without_wrappers(module) as inner:
        named = for_module(inner, state)
        current = plain_state(inner)
        for name, weight in current.items():
            if name in named or (strict and not partial):
                _require_memory(name, weight, source, named.get(name))
        trained = {name: target for name, target in folded(inner).items() if name in named}
        others = OrderedDict((name, item) for name, item in named.items() if name not in trained)
        vars(others).update(vars(named))
        with Loading(inner, source, remedy, current, named) as loading:
            keys = loading.load(others, trained, strict=strict, partial=partial)
            for name, (owner, attribute) in trained.items():
                setattr(owner, attribute, named[name].to(current[name]))
            return keys


def for_module(module: nn.Module, state: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    """Return a state, with its `_metadata`, under the names that `module` has, and ties under all of their names."""
    expected = set(plain_state(module))
    parts = {name for name, _ in module.named_modules(remove_duplicate=False)}
    renamed = own_names(state, expected, parts)
    named = OrderedDict(with_ties(module, {renamed[name]: item for name, item in state.items()}))
    about = getattr(state, "_metadata", None)
    if about is not None:
        paths = own_names(about, parts, parts)
        vars(named)["_metadata"] = OrderedDict((paths[name], dict(one)) for name, one in about.items())
    return named


def with_ties(module: nn.Module, items: Mapping[str, Any]) -> dict[str, Any]:
    """Return name → item with the missing names of tensors that have an item under another name.

    Hugging Face libraries write a tied tensor to disk under one of its names.
    """
    current = {name: item for name, item in module.state_dict(keep_vars=True).items() if isinstance(item, Tensor)}
    known = {id(tensor): items[name] for name, tensor in current.items() if name in items}
    return {**{name: known[id(tensor)] for name, tensor in current.items() if id(tensor) in known}, **items}


def _require_memory(name: str, weight: Any, source: str, value: Any) -> None:
    """Raise WeightsError if a tensor of the module cannot hold a value; a lazy one takes the shape of any."""
    if isinstance(weight, Tensor) and is_lazy(weight) and isinstance(value, Tensor):
        return
    if isinstance(weight, Tensor) and (weight.is_meta or is_lazy(weight)):
        how = "run it once on an input" if is_lazy(weight) else "call its to_empty(device='cpu')"
        raise WeightsError(f"{source} cannot be copied into {name!r} of the module, which has no memory; {how} first")
    if isinstance(weight, Tensor) and (problem := problem_of(weight)):
        raise WeightsError(
            f"{source} cannot be copied into {name!r} of the module ({problem}); load it first, then convert it"
        )


class Loading(TorchFunctionMode):
    """Runs `load_state_dict` of a module, which is as it was if an error leaves the context.

    Tensors of the module get new memory as values are copied into them; the values move into their own memory at the
    end, so that nothing but the state is in memory besides.
    """

    def __init__(
        self, module: nn.Module, source: str, remedy: str, current: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.module, self.source, self.remedy, self.current, self.state = module, source, remedy, current, state
        self.names = {id(tensor): (name, tensor) for name, tensor in tensors_of(module)}
        self.undo = Undo(module)
        self.lossy: list[str] = []
        self.originals: dict[int, tuple[Tensor, Tensor]] = {}
        self.taken: set[int] = set()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is not None:
            for tensor, original in self.originals.values():
                tensor.data = original
            self.undo.restore()
            return
        for tensor, original in self.originals.values():
            value = tensor.data
            if repeats_memory(original):
                continue  # it keeps the new memory
            tensor.data = original
            with torch.no_grad():
                tensor.copy_(value)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_ and len(args) > 1 and id(args[0]) in self.names:
            self.copy(args[0], args[1])
            return args[0]
        if getattr(func, "__name__", "") == "__get__":  # of a property, as a shape: the most frequent by far
            return func(*args, **(kwargs or {}))
        with self.undo:
            return func(*args, **(kwargs or {}))

    def copy(self, tensor: Tensor, value: Tensor) -> None:
        """Give `tensor` of the module the values of another one, in new memory."""
        if not self.can_hold(tensor, value):
            return
        new = value.detach().expand(tensor.shape).to(tensor.device, tensor.dtype)
        if new.data_ptr() in self.taken or not new.is_contiguous():
            new = new.clone()
        self.taken.add(new.data_ptr())
        self.originals.setdefault(id(tensor), (tensor, tensor.data))
        tensor.data = new

    def can_hold(self, tensor: Tensor, value: Tensor) -> bool:
        """Return whether `tensor` holds numbers of the kind of `value`; else note that it does not."""
        if torch.can_cast(value.dtype, tensor.dtype):
            return True
        kinds = f"{dtype_name(value.dtype)} in the file, {dtype_name(tensor.dtype)} in the module"
        self.lossy.append(f"{self.names[id(tensor)][0]} {kinds}")
        return False

    def load(
        self, state: Mapping[str, Any], trained: Mapping[str, Any] = {}, *, strict: bool = True, partial: bool = False
    ) -> Keys:
        """Load a state and return the names that did not match.

        Args:
            state: under the names of the module.
            trained: plain names of weights that the module has in another form, which the caller sets.
            strict, partial: as for `load_into`.
        """
        try:
            reported = self.module.load_state_dict(state, strict=False)
        except BirdieError:
            raise
        except Exception as error:  # hooks and migrations are code of anybody
            problems = {"different shape": self._shapes(self.current), "different kind of numbers": self.lossy}
            raise self._error(problems, error) from error
        elsewhere = tuple(f"{name.rpartition('.')[0]}.parametrizations.".lstrip(".") for name in trained)
        ties = with_ties(self.module, state)
        missing = [name for name in reported.missing_keys if not name.startswith(elsewhere) and name not in ties]
        keys = Keys(missing, list(reported.unexpected_keys))
        problems = {"different shape": self._shapes(trained), "different kind of numbers": self.lossy}
        if strict:
            missing = [] if partial else sorted(name for name in missing if not _is_counter(name))
            unexpected = sorted(name for name in keys.unexpected_keys if not _is_counter(name))
            problems = {"missing": missing, "unexpected": unexpected} | problems
        if any(problems.values()):
            raise self._error(problems)
        return keys

    def _shapes(self, names: Iterable[str]) -> list[str]:
        """Return the tensors of another shape than those in the module."""
        pairs = [(name, self.state.get(name), self.current[name]) for name in names]
        return [
            f"{name} {tuple(item.shape)} in the file, {tuple(weight.shape)} in the module"
            for name, item, weight in pairs
            if isinstance(item, Tensor) and isinstance(weight, Tensor) and item.shape != weight.shape
        ]

    def _error(self, problems: Mapping[str, list[str]], error: Exception | None = None) -> WeightsError:
        listed = [f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names]
        if not listed and error is not None:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            listed = [" ".join(lines[1:] if "loading state_dict" in lines[0] else lines)[:400].rstrip(".")]
        return WeightsError(f"{self.source} does not fit the module ({'; '.join(listed)}); {self.remedy}")


def _is_counter(name: str) -> bool:
    """Return whether a name is that of the counter of an AveragedModel, of which one of the two sides has none."""
    return name.rpartition(".")[2] == COUNTER
