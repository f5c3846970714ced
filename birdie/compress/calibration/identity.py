"""Digests that tell calibrations apart: of a module, of its batches, and of the loss.

Another process gives the same digests to the same things, so nothing in them is an address or a name of a path.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from birdie.system.mapped import release

_SAMPLE = 1024  # elements of each weight in a module's digest
_DEPTH = 3  # of objects in objects whose attributes count
_PLAIN = bool | int | float | complex


def digest_of_module(module: nn.Module) -> str:
    """Return a digest of a module: its parts, what they compute, and some elements of each tensor.

    Training changes every weight, so a thousand of each tell models apart, and mapped weights need not be read. Two
    modules with the same weights differ in classes, functions and numbers that are attributes: activations, heads, eps.
    """
    digest = hashlib.sha256()
    for name, part in module.named_modules():
        digest.update(f"{name} {_name(type(part))} {_shown(part)}\0".encode())
        for key, value in sorted(vars(part).items()):
            if key != "training" and (text := _setting(value)):
                digest.update(f"{key} {text}\0".encode())
    for name, weight in sorted({**dict(module.named_buffers()), **module.state_dict()}.items()):
        if isinstance(weight, Tensor):
            flat = weight.detach().reshape(-1)
            sample = flat[:: max(1, len(flat) // _SAMPLE)]
            _update(digest, (name, str(tuple(weight.shape)), sample))
            release(weight)
    return digest.hexdigest()


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _shown(part: nn.Module) -> str:
    """Return what the class of a module of torch says of its settings."""
    return part.extra_repr() if type(part).__module__.startswith("torch.nn.") else ""


def _setting(value: Any) -> str:
    """Return an attribute as text if it is a number, numbers, or a function; text may be a path, so it is none."""
    if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(one, _PLAIN) for one in value)):
        return repr(value)
    return _name(value) if isinstance(value, FunctionType) else ""


def digest_of_loss(loss: Callable[..., Any]) -> str:
    """Return the name of a loss function and a digest of what it does: its code, defaults, arguments and closure."""
    digest = hashlib.sha256()
    function: Any = loss
    while isinstance(function, functools.partial):
        _update(digest, (function.args, function.keywords))
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    _update(digest, function)
    return f"{_name(named)} {digest.hexdigest()[:16]}"


def digest_of(values: Any) -> str:
    """Return a digest of tensors, arrays and plain values in containers and in the attributes of objects."""
    digest = hashlib.sha256()
    _update(digest, values)
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", values: Any, depth: int = 0) -> None:
    leaves, structure = tree_flatten(values)
    digest.update(f"{structure}\0".encode())  # keys, and which values belong together
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            data = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            digest.update(f"{leaf.dtype} {leaf.shape}".encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, nn.Module):
            digest.update(digest_of_module(leaf).encode())
        elif isinstance(leaf, FunctionType | MethodType):
            _update_function(digest, leaf, depth)
        elif isinstance(leaf, Mapping):
            _update(digest, dict(leaf), depth)
        elif leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
            digest.update(f"{type(leaf).__name__} {leaf!r}\0".encode())
        else:
            digest.update(f"{_name(type(leaf))}\0".encode())
            if depth < _DEPTH:
                _update(digest, _attributes(leaf), depth + 1)


def _update_function(digest: "hashlib._Hash", function: FunctionType | MethodType, depth: int) -> None:
    digest.update(f"{_name(function)}\0".encode())
    if isinstance(function, MethodType):
        _update(digest, function.__self__, depth)
        function = function.__func__  # type: ignore[assignment]
    assert isinstance(function, FunctionType)
    _update_code(digest, function.__code__)
    if depth < _DEPTH:
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        _update(digest, (function.__defaults__, function.__kwdefaults__, cells), depth + 1)


def _update_code(digest: "hashlib._Hash", code: CodeType) -> None:
    digest.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _update_code(digest, constant)
        elif not isinstance(constant, frozenset):  # whose order is another in each process
            digest.update(f"{constant!r}\0".encode())


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a name that has no value yet
        return False


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, with and without slots."""
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})
