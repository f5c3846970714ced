"""Loading of .birdie files: all tensors (into a module or a dict), or one tensor.

No pickle and no code: a file decodes to tensors or raises ArtifactError. A file that uses a scheme from another package
names it; the file is decoded only if that scheme is registered, or if the caller names it in `schemes`.
"""

import os
from collections.abc import Collection
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from birdie.artifact import metadata as file_metadata
from birdie.artifact.codes import FIRST_FOREIGN, registered_decoders
from birdie.artifact.container import ALIAS, Reader
from birdie.artifact.decoding import (
    DecoderOf,
    decode_all,
    decode_entry,
    decoded_bytes,
    default_limit,
    dtype_of,
    require_limits,
    stored_name,
)
from birdie.artifact.device import CompressedTensors, SideStream, device_decoder, target_of
from birdie.artifact.lazy import attach, with_ties
from birdie.artifact.tensor_cache import Stored
from birdie.compress.device.compressed import works
from birdie.compress.rate.target import whole_number
from birdie.compress.registry import import_schemes
from birdie.compress.state import fill, moved, plain_state
from birdie.compress.wrappers import unwrapped
from birdie.errors import ConfigError
from birdie.runtime.device import dtype_name
from birdie.runtime.outputs import Source, require_path

M = TypeVar("M", bound=nn.Module)


@overload
def load(
    path: Source,
    *,
    into: None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    lazy: bool = False,
    cache_bytes: int | None = None,
    offload: bool = False,
    max_bytes: int | None = None,
    max_operations: int | None = None,
    schemes: Collection[str] = (),
    workers: int | None = None,
) -> dict[str, Tensor]: ...
@overload
def load(
    path: Source,
    *,
    into: M,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    lazy: bool = False,
    cache_bytes: int | None = None,
    offload: bool = False,
    max_bytes: int | None = None,
    max_operations: int | None = None,
    schemes: Collection[str] = (),
    workers: int | None = None,
) -> M: ...
def load(
    path: Source,
    *,
    into: nn.Module | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    lazy: bool = False,
    cache_bytes: int | None = None,
    offload: bool = False,
    max_bytes: int | None = None,
    max_operations: int | None = None,
    schemes: Collection[str] = (),
    workers: int | None = None,
) -> dict[str, Tensor] | nn.Module:
    """Decode a file to a dict of tensors, or into a module.

    Args:
        path: a .birdie file.
        into: a module to copy the tensors into; names and shapes must match exactly.
        device: destination of the tensors (or of the module); default: the CPU (or the module's current device). On
            CUDA with Triton, files of the coder "fast" are decoded there (birdie.compress.device), to the same bits.
        dtype: dtype to which floating tensors (or the module) are cast after decoding.
        lazy: decode nothing now, but each tensor when `into` reads it (birdie.artifact.lazy). The module can only run:
            it is put in evaluation mode, and may have been built on the meta device. The file stays open.
        cache_bytes: with lazy, most bytes of decoded tensors to keep; default 1.5 times the largest layer.
        offload: with lazy on a GPU, keep coded tensors in pinned memory of the host instead of the GPU's.
        max_bytes: refuse to decode more than this; default the larger of 1 GiB and 64 × the file. By default tensors
            for which `into` has memory already do not count.
        max_operations: refuse to decode a file that takes more operations, of about a nanosecond each; default 2 for
            each byte that may be decoded, and 65,536 for each of the file. Small files that would take long are refused
            by it.
        schemes: names of schemes from other packages that this file may use. They are imported, which runs their code.
        workers: threads; None uses every core.

    Returns:
        name → tensor, tied names sharing one tensor, equal ones with one each; or `into`.

    Raises:
        ArtifactError: the file is missing, corrupt, takes more than `max_bytes` or `max_operations` to decode, or uses
            an unknown scheme.
        WeightsError: names, shapes or kinds of numbers do not match `into`, or `into` has no memory (meta).
        ConfigError: a setting is wrong, or `into` cannot be loaded lazily.
    """
    _require_arguments(path, into, device, dtype)
    max_bytes, workers = whole_number("max_bytes", max_bytes, 0), whole_number("workers", workers)
    max_operations = whole_number("max_operations", max_operations, 0)
    cache_bytes = whole_number("cache_bytes", cache_bytes, 0)
    if cache_bytes is not None and not lazy:
        raise ConfigError("cache_bytes limits the cache of lazy loading; give lazy=True as well, or leave it out")
    if offload and not lazy:
        raise ConfigError("offload is about where lazy loading keeps coded tensors; give lazy=True, or leave it out")
    import_schemes(schemes)
    if lazy:
        if into is None:
            raise ConfigError("lazy loading needs the module that reads the weights; give into=, or leave lazy out")
        limits = max_bytes, max_operations
        return _load_lazily(
            path, into, limits, workers, offload=offload, device=device, dtype=dtype, cache_bytes=cache_bytes
        )
    with Reader(path) as reader:
        if max_bytes is None and into is not None:
            max_bytes = default_limit(reader) + _allocated(reader, unwrapped(into))
        decoders, copies = decoders_of(reader), () if into is not None else _copies(reader)
        require_limits(reader, decoders, max_bytes, max_operations, shared=True, independent=copies)
        tensors = _decode_all(reader, decoders, workers or os.cpu_count() or 1, device, into)
        if into is None:
            tensors = {name: moved(tensor, device, dtype) for name, tensor in tensors.items()}
        state = {name: tensors[stored_name(reader, name)] for name in reader.names}
        state |= {name: state[name].clone() for name in copies}
    if into is None:
        return state
    fill(unwrapped(into), with_ties(unwrapped(into), state), str(path))
    return into.to(device=device, dtype=dtype)


def _decode_all(
    reader: Reader, decoders: DecoderOf, workers: int, device: torch.device | str | None, into: nn.Module | None
) -> dict[str, Tensor]:
    """Decode every stored tensor, on a GPU if that is where they go; then `into` is moved there before they are."""
    module = None if into is None else unwrapped(into)
    on_device = device_decoder(device, module)
    if on_device is None:
        return decode_all(reader, decoders, workers)
    tensors = decode_all(reader, decoders, workers, on_device.decode, on_device.device)
    on_device.require_sound(reader.where)
    if module is not None and not any(tensor.is_meta for tensor in plain_state(module).values()):
        module.to(on_device.device)  # so that tensors do not go to the CPU and back
    return tensors


def _copies(reader: Reader) -> list[str]:
    """Return the aliases whose tensors are independent of their targets."""
    if ALIAS not in reader.schemes:
        return []
    aliases = [name for name in reader.names if reader.entry(name).scheme == ALIAS]
    return file_metadata.copies_in(file_metadata.parse(bytes(reader.metadata), reader.where), aliases, reader.where)


def _allocated(reader: Reader, module: nn.Module) -> int:
    """Return the decoded bytes of the entries for which `module` has a tensor of the shape and at least the memory."""
    entries = {name: reader.entry(name) for name in reader.names}
    return sum(
        decoded_bytes(entries[name])
        for name, tensor in plain_state(module).items()
        if isinstance(tensor, Tensor) and not tensor.is_meta and not is_lazy(tensor) and name in entries
        if tensor.layout is torch.strided
        if tuple(tensor.shape) == entries[name].shape and tensor.nbytes >= decoded_bytes(entries[name])
    )


def _load_lazily(
    path: Source, into: M, limits: tuple[int | None, int | None], workers: int | None, *, offload: bool, **settings: Any
) -> M:
    reader = Reader(path)
    try:
        decoders = decoders_of(reader)
        require_limits(reader, decoders, *limits, shared=True)
        entries = {name: reader.entry(stored_name(reader, name)) for name in reader.names}
        stored = {name: Stored(entry.name, entry.shape, dtype_of(entry)) for name, entry in entries.items()}
        target = target_of(settings["device"], unwrapped(into))
        if target is not None and works(target):
            side = SideStream(target)
            threads = workers or os.cpu_count() or 1
            tensors = CompressedTensors(reader, decoders, target, offload=offload, workers=threads, side=side)
            decode, settings["start"] = tensors.decode, tensors.start
        else:
            decode = partial(decode_entry, reader, decoder_of=decoders, threads=workers)
        attach(unwrapped(into), stored, decode, reader.close, where=reader.where, **settings)
    except BaseException:
        reader.close()
        raise
    return into.eval()


def decode_tensor(
    path: Source, name: str, *, max_bytes: int | None = None, max_operations: int | None = None
) -> Tensor:
    """Decode one tensor of a file, reading only its bytes.

    Raises:
        ArtifactError: there is no such tensor, it is corrupt, or it takes more than `max_bytes` or `max_operations`.
        ConfigError: the path is not valid.
    """
    _require_arguments(path)
    with Reader(path) as reader:
        stored, decoders = stored_name(reader, name), decoders_of(reader)
        require_limits(reader, decoders, max_bytes, max_operations, [stored], shared=True)
        return decode_entry(reader, stored, decoders)


def decoders_of(reader: Reader) -> DecoderOf:
    """Return the decoder of each entry; raises ArtifactError where a scheme is not registered."""
    foreign: dict[str, str] = {}
    if max(reader.schemes, default=0) >= FIRST_FOREIGN:
        foreign = file_metadata.parse(bytes(reader.metadata), reader.where).get("schemes", {})
    return registered_decoders(foreign)


def _require_arguments(path: Any, into: Any = None, device: Any = None, dtype: Any = None) -> None:
    """Check the arguments of `load` before the file is opened.

    Raises:
        ConfigError: one is no path, no module, no device of this machine, or no dtype for a module.
    """
    if not isinstance(path, bytes | memoryview):  # the bytes of a file are accepted in place of its path
        require_path(path)
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
