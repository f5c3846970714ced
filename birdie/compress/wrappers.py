"""The module inside of wrappers: DistributedDataParallel, DataParallel, torch.compile, checkpoints, AveragedModel.

Wrappers put a prefix before every name, and their forward passes communicate or replay graphs: files have the names of
the module inside, and calibration runs that module alone. Wrappers may be anywhere in the tree of a module.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar, cast

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

T = TypeVar("T")
COUNTER = "n_averaged"  # the buffer of AveragedModel: files keep it beside the tensors of the module inside
PRIVATE_PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of names that only wrappers use."""
_PREFIX = "module."


def unwrapped(model: T) -> T:
    """Return `model` without wrappers; anything else as it is.

    Tensors are shared. If a wrapper is inside of the module, or counts (AveragedModel), the modules around it are
    shallow copies, which run and have a state dict, but are not to be changed.
    """
    inner, counter = _inside(model)
    if not isinstance(inner, nn.Module):
        return cast(T, inner)
    if counter is None and not any(_wrapped(part) is not None for part in inner.modules()):
        return cast(T, inner)
    return cast(T, _twin(inner, counter, {}))


@contextmanager
def without_wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module inside of `module`, itself without wrappers for as long as the context lasts.

    It is the very module, so what is loaded into it, or registered on it, stays.
    """
    top, counter = _inside(module)
    assert isinstance(top, nn.Module)
    counters: list[tuple[nn.Module, Tensor | None]] = [(top, counter)]
    swapped = []
    for parent in list(top.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and _wrapped(child) is not None:
                inner, counter = _inside(child)
                assert isinstance(inner, nn.Module)
                counters.append((inner, counter))
                swapped.append((parent, name, child))
                parent._modules[name] = inner
    counting = [inner for inner, counter in counters if _takes(inner, counter)]
    for inner, counter in counters:
        if inner in counting:
            inner._buffers[COUNTER] = counter
    try:
        yield top
    finally:
        for inner in counting:
            inner._buffers.pop(COUNTER, None)
        for parent, name, child in swapped:
            parent._modules[name] = child


def plain_name(name: str, parts: Collection[str] = PRIVATE_PARTS) -> str:
    """Return a dotted name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in parts)


def without_prefixes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state under the names without wrappers.

    These are torch.compile, checkpoints and FSDP anywhere, and DataParallel or AveragedModel, whose counter has no
    prefix, around all of the module.
    """
    names, prefixes = {name: plain_name(name) or name for name in state}, 0
    while (weights := [name for name in names.values() if name != COUNTER]) and all(
        name.startswith(_PREFIX) and name != _PREFIX for name in weights
    ):
        names, prefixes = {old: name.removeprefix(_PREFIX) for old, name in names.items()}, prefixes + 1
    if all(old == name for old, name in names.items()) or len(set(names.values())) < len(names):
        return cast(dict[str, Tensor], state)
    plain = OrderedDict((names[name], item) for name, item in state.items())
    about = getattr(state, "_metadata", None)
    if about is None:
        return dict(plain)
    dropped = prefixes * _PREFIX
    vars(plain)["_metadata"] = OrderedDict(
        (plain_name(path).removeprefix(dropped.rstrip(".")).lstrip("."), one)
        for path, one in about.items()
        if f"{plain_name(path)}.".startswith(dropped)
    )
    return plain


def own_names(names: Iterable[str], expected: Collection[str], modules: Collection[str]) -> dict[str, str]:
    """Return each of `names` → the name that a module has for it, whichever wrappers one of the two has or lacks.

    Args:
        names: of a state dict; those that the module does not know stay as they are.
        expected: names in the state dict of the module.
        modules: names of its modules: what belongs to one of them under another name, as a module may accept.
    """
    names, expected, wrappers = list(names), set(expected), (*PRIVATE_PARTS, "module")
    free: dict[str, list[str]] = {}
    for name in expected.difference(names):
        free.setdefault(plain_name(name, wrappers), []).append(name)
    matched = {}
    for name in names:
        plain = plain_name(name, wrappers)
        matches = free.get(plain, [])
        if name in expected:
            matched[name] = name
        elif len(matches) == 1:
            matched[name] = matches[0]
        else:
            matched[name] = min(name, plain, key=lambda one: _unknown(one, modules))
    return matched if len(set(matched.values())) == len(matched) else {name: name for name in names}


def _unknown(name: str, modules: Collection[str]) -> int:
    """Return how many parts of a name are not those of a module: 1 for a tensor of a module that is there."""
    parts = name.split(".")
    return next((count for count in range(1, len(parts)) if ".".join(parts[:-count]) in modules), len(parts))


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return what `module` wraps; None for a module that is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel | AveragedModel):
        names: tuple[str, ...] = ("module",)
    else:
        names = ("_orig_mod", "_checkpoint_wrapped_module")
    parts = module._modules  # of a scripted module it has no get
    return next((parts[name] for name in names if name in parts), None)


def _inside(model: object) -> tuple[object, Tensor | None]:
    """Return the module inside of all wrappers around `model`, and the counter of an AveragedModel among them."""
    counter = None
    while isinstance(model, nn.Module) and (inner := _wrapped(model)) is not None:
        if isinstance(model, AveragedModel):
            counter = model._buffers.get(COUNTER, counter)
        model = inner
    return model, counter


def _takes(module: nn.Module, counter: Tensor | None) -> bool:
    return counter is not None and not hasattr(module, COUNTER)


def _twin(module: nn.Module, counter: Tensor | None, twins: dict[int, nn.Module]) -> nn.Module:
    """Return a shallow copy of `module` that has what is inside of wrappers instead of them."""
    if id(module) in twins:
        return twins[id(module)]
    children = {}
    for name, child in module._modules.items():
        inner, inner_counter = (None, None) if child is None else _inside(child)
        children[name] = None if inner is None else _twin(cast(nn.Module, inner), inner_counter, twins)
    counts = _takes(module, counter)
    if not counts and all(child is module._modules[name] for name, child in children.items()):
        twins[id(module)] = module
        return module
    twin = object.__new__(type(module))
    vars(twin).update(vars(module), _modules=children)
    if counts:
        vars(twin)["_buffers"] = {**module._buffers, COUNTER: counter}
    twins[id(module)] = twin
    return twin
