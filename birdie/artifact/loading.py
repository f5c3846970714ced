"""Loading of .birdie files: all tensors (into a module or a dict), or one tensor.

No pickle and no code: a file decodes to tensors or raises ArtifactError. A file that uses a scheme from another package
names it; the file is decoded only if that scheme is registered, or if the caller names it in `schemes`.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from birdie.artifact import metadata as file_metadata
from birdie.artifact.container import ALIAS, Reader
from birdie.artifact.device_file import CompressedTensors, open_file, target_of
from birdie.artifact.file import Data, File, decoded_bytes
from birdie.artifact.lazy import CodedTensor, attach
from birdie.artifact.links import base_of, opened
from birdie.artifact.options import Limits, LoadOptions
from birdie.artifact.state_dict import belongs_to_extra, state_dict_of
from birdie.checkpoints.rebuild import has_views, rebuild, with_views
from birdie.compress import registry
from birdie.compress.device.compressed import works
from birdie.compress.filling import Keys, load_into
from birdie.compress.state import is_extra, moved, plain_state
from birdie.compress.wrappers import own_names, unwrapped
from birdie.errors import ArtifactError, ConfigError
from birdie.system.device import dtype_name, require_device
from birdie.system.file_objects import Input, source_of
from birdie.system.keywords import keywords

M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")


class LoadFunction(Protocol[P]):
    """Type of `load`: options are the fields of a dataclass."""

    @overload
    def __call__(
        self, path: Input, into: None = None, strict: bool = True, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, Tensor]: ...
    @overload
    def __call__(self, path: Input, into: M, strict: Literal[True] = True, *args: P.args, **kwargs: P.kwargs) -> M: ...
    @overload
    def __call__(
        self, path: Input, into: nn.Module, strict: Literal[False], *args: P.args, **kwargs: P.kwargs
    ) -> Keys: ...


def _takes(
    kind: Callable[P, LoadOptions],
) -> Callable[[Callable[..., dict[str, Tensor] | nn.Module | Keys]], LoadFunction[P]]:
    return keywords(kind)


@_takes(LoadOptions)
def load(
    path: Input, into: nn.Module | None = None, strict: bool = True, *, options: LoadOptions
) -> dict[str, Tensor] | nn.Module | Keys:
    """Decode a file to a dict of tensors, or into a module.

    Args:
        path: a .birdie file, its bytes, or a binary file object, which is read from its position to its end; from its
            start, if it is at its end, as after `birdie.save`.
        into: a module to copy the tensors into, by its own `load_state_dict`: what that converts, renames or adds, as
            modules do with files of their older versions, is right here too. Wrappers (DataParallel, torch.compile,
            AveragedModel, …) may be around the module, or any part of it, or around what the file was made of.
        strict: names must be those of `into`; False loads those that are.

    Returns:
        name → tensor, tied names sharing one tensor, equal ones with one each: a state dict, with extra state and
        versions of modules if the file has them; or `into`; or, if not `strict`, what `load_state_dict` returns:
        (missing_keys, unexpected_keys).

    Raises:
        ArtifactError: the file is missing, corrupt, takes more than `max_bytes` or `max_operations` to decode, or uses
            an unknown scheme.
        WeightsError: names, shapes or kinds of numbers do not match `into`, or `into` has no memory (meta). The module
            is as it was.
        ConfigError: an option is wrong, or `into` cannot be loaded lazily.
    """
    device, dtype = options.device, options.dtype
    _require_arguments(into, strict, device, dtype)
    source = source_of(path)
    registry.import_schemes(options.schemes)
    if into is None and not strict:
        raise ConfigError("strict=False is about the names of a module; give into=, or leave it out")
    part = Selection(options.prefix, options.names)
    chosen = None if part.is_all else part.of
    if options.lazy:
        if into is None:
            raise ConfigError("lazy loading needs the module that reads the weights; give into=, or leave lazy out")
        file = File(source, registry.decoder, base_of(source, options, chosen))
        try:
            file.require(options.max_bytes, options.max_operations, None if part.is_all else part.of(file))
            keys = _attach(file, into, part, options, strict)
        except BaseException:
            file.close()
            raise
        return into if strict else keys
    with (
        opened(source, options, chosen) as reference,
        open_file(source, device if part.is_all else "cpu", into, reference) as file,
    ):
        names, copies = part.of(file), () if into is not None else _copies(file)
        max_bytes = options.max_bytes
        if max_bytes is None and into is not None:
            max_bytes = file.default_limit + _allocated(file, into)
        file.require(max_bytes, options.max_operations, None if part.is_all else names, independent=copies)
        tensors = file.decode_all(names, options.workers)
        if into is None:
            distinct = {id(tensor): moved(tensor, device, dtype) for tensor in tensors.values()}
            tensors = {name: distinct[id(tensor)] for name, tensor in tensors.items()}
        tensors |= {name: tensors[name].clone() for name in copies if name in tensors}
        state = part.state(tensors, file, nested=into is None)
    if into is None:
        return state
    if file.device.type != "cpu" and not any(tensor.is_meta for tensor in plain_state(unwrapped(into)).values()):
        into.to(file.device)  # so that tensors do not go to the CPU and back
    keys = load_into(into, state, file.where, strict=strict, partial=part.names is not None)
    into.to(device=device, dtype=dtype)
    return into if strict else keys


def load_entries(path: Data, limits: Limits) -> dict[str, Tensor]:
    """Return the tensors that a file has entries of, by name."""
    registry.import_schemes(limits.schemes)
    with opened(path, limits) as reference, File(path, registry.decoder, reference) as file:
        copies = _copies(file)
        file.require(limits.max_bytes, limits.max_operations, independent=copies)
        tensors = file.decode_all(None, limits.workers)
        return tensors | {name: tensors[name].clone() for name in copies if name in tensors}


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors of a file that are loaded: those whose names have a prefix, and among them those that were named."""

    prefix: str = ""
    names: Collection[str] | None = None

    @property
    def is_all(self) -> bool:
        """Return whether all tensors are loaded."""
        return not self.prefix and self.names is None

    def of(self, file: Reader) -> list[str]:
        """Return the names of the tensors in a file."""
        chosen = [name for name in file.ordered if name.startswith(self.prefix)]
        if self.names is not None:
            patterns = [self.names] if isinstance(self.names, str) else list(self.names)
            hits = {pattern: self._matches(pattern, chosen) for pattern in patterns}
            if absent := [pattern for pattern in patterns if not hits[pattern]]:
                raise ArtifactError(
                    f"{file.where} holds no tensor {self.prefix + absent[0]!r}; `birdie inspect` lists its names"
                )
            wanted = {name for names in hits.values() for name in names}
            chosen = [name for name in chosen if name in wanted]
        if not chosen and not self.is_all:
            raise ArtifactError(
                f"{file.where} holds no tensor named {self.prefix + '…'!r}; `birdie inspect` lists its names"
            )
        return chosen

    def _matches(self, pattern: str, names: Sequence[str]) -> list[str]:
        inner = {name.removeprefix(self.prefix): name for name in names}
        if pattern in inner:
            return [inner[pattern]]
        # a part of an extra state belongs to its name
        return [name for short, name in inner.items() if fnmatchcase(short, pattern) or short.startswith(f"{pattern}/")]

    def state(self, tensors: Mapping[str, Tensor], file: File, *, nested: bool) -> dict[str, Any]:
        """Return the state dict of these tensors, which are `of` the file.

        Args:
            tensors: by their names in the file.
            file: that holds them.
            nested: keep the names of a file of a nested checkpoint as they are; else such a file is taken for the state
                dict that was saved, if that is what it holds.
        """
        fields = file.fields
        entries, tree = tensors, fields.get("tree") if self.is_all else None
        if tree is not None and has_views(tree):
            tensors = with_views(tree, entries)
        order = file.keys if "order" in fields else None
        state = state_dict_of(tensors, _only(fields.get("state"), self, tensors), file.where, order)
        if not nested and tree is not None:
            state = _saved_state(rebuild(tree, entries), tensors) or state
        if not self.prefix:
            return state
        about = getattr(state, "_metadata", None)
        short = OrderedDict((name.removeprefix(self.prefix), item) for name, item in state.items())
        if about is None:
            return dict(short)
        module = self.prefix.rstrip(".")
        vars(short)["_metadata"] = OrderedDict(
            (path.removeprefix(module).lstrip("."), one)
            for path, one in about.items()
            if path == module or path.startswith(self.prefix)
        )
        return short


def _only(about: Any, part: Selection, tensors: Mapping[str, Tensor]) -> Any:
    """Return what a file keeps beside its tensors, without the extra states that are not loaded."""
    if part.is_all or not isinstance(about, dict) or not isinstance(about.get("extra"), dict):
        return about

    def is_loaded(name: str) -> bool:
        if part.names is None:
            return name.startswith(part.prefix)
        return name in tensors or any(other.startswith(f"{name}/") for other in tensors)

    return {**about, "extra": {name: item for name, item in about["extra"].items() if is_loaded(name)}}


def _saved_state(content: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Return the state dict that `birdie.save_object` was given, if it was one: a flat dict of all tensors."""
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        return None
    kept = {name: item for name, item in content.items() if isinstance(item, Tensor) or is_extra(name, item, False)}
    inner = tuple(f"{name}/" for name, item in kept.items() if not isinstance(item, Tensor))
    if not all(name in kept or name.startswith(inner) for name in tensors):
        return None
    state = OrderedDict(kept)
    vars(state).update(vars(content) if isinstance(content, OrderedDict) else {})
    return state


def _copies(file: File) -> list[str]:
    """Return the aliases whose tensors are independent of their targets."""
    if "copies" not in file.fields:
        return []
    aliases = [name for name in file.names if file.entry(name).kind == ALIAS]
    return file_metadata.copies_in(file.fields, aliases)


def _allocated(file: File, module: nn.Module) -> int:
    """Return the decoded bytes of the entries for which `module` has a tensor of the shape and at least the memory."""
    state = plain_state(unwrapped(module))
    renamed = own_names(file.names, state.keys(), ())
    entries = {renamed[name]: file.entry(name) for name in file.names}
    return sum(
        decoded_bytes(entries[name])
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and not tensor.is_meta and not is_lazy(tensor) and name in entries
        if tensor.layout is torch.strided
        if tuple(tensor.shape) == entries[name].shape and tensor.nbytes >= decoded_bytes(entries[name])
    )


def _attach(file: File, into: nn.Module, part: Selection, options: LoadOptions, strict: bool) -> Keys:
    """Let the weights of `into` be decoded when they are read."""
    decode: Callable[[str], Tensor] = partial(file.decode, threads=options.workers)
    target = target_of(options.device, unwrapped(into))
    if target is not None and works(target):
        decode = CompressedTensors(file, target, options.workers or os.cpu_count() or 1).decode
    about = file.fields.get("state")
    coded = {}
    for name in part.of(file):
        stored = file.stored(name)
        coded[name] = decode(stored) if belongs_to_extra(name, about) else CodedTensor.of(file.entry(stored), decode)
    state = part.state(coded, file, nested=False)
    return attach(into, state, file, decode, options, strict=strict, partial=part.names is not None)


def _require_arguments(into: Any, strict: Any, device: Any, dtype: Any) -> None:
    """Check the arguments of `load` before the file is opened."""
    if into is not None and not isinstance(into, nn.Module):
        raise ConfigError(f"into is a {type(into).__name__}, not a module; leave it out to get a dict of tensors")
    if not isinstance(strict, bool):
        raise ConfigError(f"strict={strict!r} is neither True nor False")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype {dtype!r} is not a torch.dtype; give for example torch.float32")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"weights cannot be cast to {dtype_name(dtype)}; choose a floating dtype")
    if device is not None:
        require_device(device)
