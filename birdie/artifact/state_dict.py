"""Versions and extra state of modules: a file keeps them beside the tensors of a state dict.

    {"0.scale": T, "0._extra_state": {"step": 3}}, _metadata ──► tensors, {"versions": {"0": 2}, "extra": {…: skeleton}}

torch keeps a version for each module (`_metadata`), by which a module converts what older ones have written; without it
a file of today would be converted again. Almost all modules have version 1: a file lists those that have another, or
that might look at it, and then 1 holds for the others. A file without such a list says nothing: torch calls this None.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from birdie.checkpoints import pytree
from birdie.compress.state import is_extra
from birdie.errors import ArtifactError, WeightsError

Json = Any
_DEFAULT, _NORM = 1, 2  # versions of most modules, and of batch norms, which have num_batches_tracked since


def kept_beside(model: nn.Module | Mapping[str, Any]) -> tuple[dict[str, Tensor], Json]:
    """Return the tensors in extra states, by name, and the JSON of all that is to be kept beside tensors, or None.

    Args:
        model: a module without wrappers, or a state dict.
    """
    of_module = isinstance(model, nn.Module)
    state: Any = model.state_dict() if isinstance(model, nn.Module) else model
    if not isinstance(state, Mapping):
        return {}, None
    tensors: dict[str, Tensor] = {}
    extra = {}
    for name, item in state.items():
        if is_extra(name, item, of_module):
            inner, extra[name] = _flattened(name, item)
            tensors |= inner
    if twice := sorted(tensors.keys() & {name for name in state if name not in extra}):
        raise WeightsError(f"tensor {twice[0]!r} has the name of a part of an extra state; rename it")
    versions = _versions(model, state)
    fields = {"versions": versions, "extra": extra}
    return tensors, {key: value for key, value in fields.items() if value} or None


def state_dict_of(
    tensors: Mapping[str, Tensor], about: Json, where: str, order: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the state dict that was taken apart by `kept_beside`, with its `_metadata` if the file has versions.

    Args:
        about: JSON of the file.
        where: name of the file, for error messages.
        order: names of tensors and extra states; None if the file does not say it: extra states then come last.
    """
    if about is None:
        return dict(tensors)
    state: dict[str, Any] = OrderedDict(tensors)
    for name, skeleton in about.get("extra", {}).items():
        inner = {other.removeprefix(f"{name}/"): state.pop(other) for other in tensors if other.startswith(f"{name}/")}
        if name in state:
            inner[pytree.TENSOR] = state.pop(name)
        state[name] = pytree.rebuild(skeleton, inner)
    if order is not None:
        state = OrderedDict((name, state[name]) for name in order if name in state)
    versions = about.get("versions")
    if versions is not None:
        metadata: dict[str, Any] = OrderedDict()
        paths = dict.fromkeys(["", *(parent for name in state for parent in _parents(name)), *versions])
        for path in paths if order is not None else sorted(paths):
            value = versions.get(path, _DEFAULT)
            metadata[path] = pytree.rebuild(value, {}) if isinstance(value, list) else {"version": value}
            if not isinstance(metadata[path], dict):
                raise ArtifactError(f"the version of module {path!r} in {where} is no dict; the file is damaged")
        vars(state)["_metadata"] = metadata
    return state


def belongs_to_extra(name: str, about: Json) -> bool:
    """Return whether a tensor of a file is a part of an extra state."""
    extra = (about or {}).get("extra", {})
    return name in extra or any(name.startswith(f"{one}/") for one in extra)


def _flattened(name: str, item: Any) -> tuple[dict[str, Tensor], Json]:
    try:
        inner, skeleton = pytree.flatten(item)
    except WeightsError as error:
        raise WeightsError(f"extra state {name!r} of the module cannot be stored: {error}") from error
    return {name if path == pytree.TENSOR else f"{name}/{path}": tensor for path, tensor in inner.items()}, skeleton


def _versions(model: nn.Module | Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Json]:
    """Return module → version, or all of its metadata, of those that are not as torch's default says."""
    metadata: Mapping[str, Any] | None = getattr(state, "_metadata", None)
    if metadata is None:
        return {}
    parts = dict(model.named_modules(remove_duplicate=False)) if isinstance(model, nn.Module) else {}
    versions: dict[str, Json] = {}
    for path, about in metadata.items():
        part = parts.get(path)
        number = about.get("version") if about.keys() == {"version"} else None
        if type(number) is not int:
            inner, skeleton = pytree.flatten(dict(about))
            if inner:
                raise WeightsError(f"the metadata of module {path!r} hold tensors, which no file keeps; remove them")
            versions[path] = skeleton
        elif not (number == _DEFAULT or _is_norm(path, part, number, state)) or _converts(part):
            versions[path] = number
    return versions


def _is_norm(path: str, part: nn.Module | None, number: int, state: Mapping[str, Any]) -> bool:
    counted = f"{path}.num_batches_tracked".lstrip(".") in state
    return number == _NORM and (isinstance(part, _NormBase) or counted)


def _converts(part: nn.Module | None) -> bool:
    """Return whether a module has code of its own that may look at its version."""
    if part is None:
        return False
    hooks = [getattr(hook, "hook", hook) for hook in part._load_state_dict_pre_hooks.values()]
    return any(not _is_torch(one) for one in (type(part)._load_from_state_dict, *hooks))


def _is_torch(function: Any) -> bool:
    function = getattr(function, "func", function)
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"


def _parents(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
