"""Readers of other checkpoint formats: name → tensor, on the CPU, without running code of the file.

    .safetensors                   read directly
    .pt .pth .th .bin              torch.save, opened with weights_only=True and memory-mapped where the format allows
    .ptz                           torch.save under zlib, xz, zstd or brotli; the challenge's int8 export is dequantized
    folder or .index.json          Hugging Face shards (safetensors preferred)

A checkpoint that nests its tensors (state_dict, model, …) is unwrapped when there is exactly one choice, and prefixes
that wrappers add to names (`module.`, `_orig_mod.`, …) are dropped. Tied tensors stay tied. `read_weights` also tells
what else the checkpoint holds; `read_checkpoint` and `read_object` return all of it, unchanged.
"""

import io
import json
import os
import pickle
import re
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from birdie.artifact import int8_zlib as baseline
from birdie.artifact.pytree import tensors_in
from birdie.compress.state import is_extra, is_text, named_tensors
from birdie.compress.wrappers import COUNTER, plain_name
from birdie.entropy.general_purpose import COMPRESSORS
from birdie.errors import BirdieError, WeightsError
from birdie.runtime.names import is_name
from birdie.runtime.reading import require_regular

PICKLED = (".pt", ".pth", ".th", ".bin")
FOLDER_NAMES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
MAX_INDEX_BYTES = 1 << 26
MIN_UNPACKED_LIMIT = 1 << 30
UNPACKED_PER_BYTE = 64
_MAX_PARTS = 16
_BLOCK = 1 << 20  # bytes of a file that are checked at a time
_PREFIX = "module."
_MAGIC = {b"\xfd7zXZ\x00": ["lzma"], b"\x28\xb5\x2f\xfd": ["zstd"], b"\x5d\x00\x00": ["lzma", "brotli"]}


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint, by name.

    Raises:
        WeightsError: it is missing, damaged, of an unknown format, holds code, or holds several dicts of tensors.
    """
    return read_weights(path)[0]


def read_weights(
    path: str | os.PathLike[str], *, skip_objects: bool = False
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Read the tensors of a checkpoint, by name, and list what else it holds.

    Args:
        path: of the checkpoint.
        skip_objects: leave out objects of classes that `weights_only=True` refuses, instead of refusing the file.

    Returns:
        The state dict, and the key path of everything beside it → bytes of the tensors there that the state dict lacks.

    Raises:
        WeightsError: as `read_state_dict`.
    """
    path = Path(path)
    if not _is_pickled(path):
        return without_prefixes(read_files(path)), {}
    content = read_object(path, skip_objects=skip_objects)
    keys, state = _find_tensors(content, path)
    return without_prefixes(state), _sizes_beside(keys, content, state)


def read_checkpoint(path: str | os.PathLike[str]) -> Any:
    """Read all of a checkpoint, for a lossless copy: the object that torch.save wrote, or else the tensors by name.

    Names keep their prefixes, and tensors by name are sorted. Objects of classes that `weights_only=True` refuses are
    replaced by stand-ins, which cannot be stored.

    Raises:
        WeightsError: it is missing, damaged or of an unknown format.
    """
    path = Path(path)
    return read_object(path, skip_objects=True) if _is_pickled(path) else dict(sorted(read_files(path).items()))


def read_object(path: str | os.PathLike[str], *, skip_objects: bool = False) -> Any:
    """Read the whole object that torch.save wrote to a .pt, .pth, .th, .bin or .ptz, with tensors on the CPU.

    Args:
        path: of the file.
        skip_objects: put stand-ins for objects of classes that `weights_only=True` refuses, instead of refusing the
            file. A stand-in has the name of the class; no code of the class is run.

    Raises:
        WeightsError: the file is missing, damaged, of another format, or holds code.
    """
    path = Path(path)
    _require_content(path)
    if path.suffix not in (*PICKLED, ".ptz"):
        raise WeightsError(f"{path} is not a file that torch.save writes; give {', '.join(PICKLED)} or .ptz")
    return _unpickle(path if path.suffix in PICKLED else io.BytesIO(_unpacked(path)), path, skip_objects)


def _is_pickled(path: Path) -> bool:
    return path.suffix in (*PICKLED, ".ptz") and not path.is_dir()


def read_files(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder, an index or a file, under the names they have there.

    Raises:
        WeightsError: as `read_state_dict`.
    """
    if path.is_dir():
        path = _main_file(path)
    return _read_shards(path) if path.name.endswith(".index.json") else _read_file(path)


def header_of(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata in the headers of .safetensors files, without their "format"; quantizers keep theirs there.

    Args:
        path: as in `files_of`.

    Raises:
        WeightsError: a file is missing or damaged.
    """
    header: dict[str, str] = {}
    for file in files_of(path):
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, "pt") as opened:
                    header |= opened.metadata() or {}
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    f"{file} is not a complete safetensors file ({_first_line(error)}); copy it again"
                ) from error
    header.pop("format", None)
    return header


def _require_content(path: Path) -> None:
    try:
        empty = require_regular(path).stat().st_size == 0
    except OSError as error:
        raise WeightsError(f"cannot open {path}: {(error.strerror or str(error)).lower()}; check the path") from error
    except ValueError as error:
        raise WeightsError(f"{str(path)!r} is not a valid path ({error}); check the path") from error
    if empty:
        raise WeightsError(f"{path} is empty; copy it again")


def _read_file(path: Path) -> dict[str, Tensor]:
    _require_content(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in (*PICKLED, ".ptz"):
        return _find_tensors(read_object(path), path)[1]
    raise WeightsError(f"{path} ends in {path.suffix!r}; birdie reads .safetensors, {', '.join(PICKLED)} and .ptz")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path, device="cpu"))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{path} is not a complete safetensors file ({_first_line(error)}); copy it again"
        ) from error


class _StandIn(list[Any]):
    """Stands for an object whose class is not opened: a list of values from which the file builds the object."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # the object may be a key

    def __new__(cls, *values: Any) -> "_StandIn":
        new = super().__new__(cls)
        new.extend(values[:_MAX_PARTS])  # a small file may name one long tuple again and again
        return new

    def __init__(self, *values: Any) -> None:
        pass  # pickles call either __new__ alone or the class

    def __setstate__(self, state: Any) -> None:
        self.append(state)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def _stand_ins(source: Path | io.BytesIO) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return (a stand-in class, name) for every class or function that `source` names and `weights_only` refuses."""
    if not zipfile.is_zipfile(source):
        return []
    if isinstance(source, io.BytesIO):
        source.seek(0)
    names = get_unsafe_globals_in_checkpoint(source)
    return [(type(ascii(name)[1:-1][:80], (_StandIn,), {}), name) for name in names]


def _unpickle(source: Path | io.BytesIO, path: Path, skip_objects: bool = False) -> Any:
    """Return the object that torch.save wrote to `source`, opened without running code."""
    stand_ins: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = []
    try:
        mapped = _can_be_mapped(source, path)
        if skip_objects:
            stand_ins = _stand_ins(source)
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with safe_globals(stand_ins):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except (WeightsError, MemoryError):
        raise
    except Exception as error:  # damaged files make torch.load raise nearly anything
        raise WeightsError(f"{path} {_reason(error, skip_objects, bool(stand_ins))}") from error


def _reason(error: Exception, skip_objects: bool, replaced: bool) -> str:
    """Return why torch.load cannot open a file, and what to do."""
    text = str(error)
    if "Tensor subclass" in text or "must be imported to load" in text:  # no stand-in can be a tensor
        return (
            "holds tensors of a class that birdie does not open; save plain tensors, for example what their "
            "dequantize() or full_tensor() returns"
        )
    if not isinstance(error, pickle.UnpicklingError):
        if "TorchScript" in text:
            return "is a TorchScript program; save torch.jit.load(…).state_dict() instead"
        return f"is damaged or not what torch.save wrote ({_first_line(error)}); copy it again"
    if replaced or "global" in text.lower():
        name = re.search(r"GLOBAL (\S{1,80})", text)
        what = "a pickled object" if name is None else f"a pickled object ({ascii(name[1])[1:-1]})"
        remedy = "" if skip_objects else ", or take them alone with birdie compress --weights-only"
        return (
            f"holds {what} that may run code when opened, which birdie never does; save its tensors with "
            f"torch.save(model.state_dict(), …) or as .safetensors{remedy}"
        )
    return "is not a checkpoint that torch.save wrote; check the file"


def _can_be_mapped(source: Path | io.BytesIO, path: Path) -> bool:
    """Return whether `source` is a zip file of uncompressed entries: torch maps deflated ones without inflating them.

    Raises:
        WeightsError: it is a zip file whose content would take too much memory, or has another checksum.
    """
    if not zipfile.is_zipfile(source):
        return False
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        total, limit = sum(entry.file_size for entry in entries), _unpacked_limit(path)
        if total > limit:
            raise WeightsError(
                f"{path} cannot be unpacked: its entries would grow to {total:,} bytes, more than the {limit:,} "
                "allowed; save it again without compression if you trust it"
            )
        _require_checksums(archive, path)
    return isinstance(source, Path) and stored


def _require_checksums(archive: zipfile.ZipFile, path: Path) -> None:
    """Check the CRC-32 of every entry, which torch.load does not read.

    Raises:
        WeightsError: one differs from the content, or entries overlap.
    """
    entries = archive.infolist()
    ends = [0, *(entry.header_offset + entry.compress_size for entry in entries)]
    if any(entry.header_offset < end for end, entry in zip(accumulate(ends, max), entries, strict=False)):
        raise WeightsError(f"{path} has entries that overlap; do not trust this checkpoint")
    for entry in entries:
        if entry.CRC == 0:  # none: torch.serialization has set_crc32_options(False), and skip_data for tensors
            continue
        try:
            with archive.open(entry) as content:
                while content.read(_BLOCK):
                    pass
        except (zipfile.BadZipFile, zlib.error) as error:
            raise WeightsError(f"{path} is damaged: {entry.filename} has another checksum; copy it again") from error


def _unpacked_limit(path: Path) -> int:
    """Return how many bytes the content of `path` may take once unpacked."""
    return max(MIN_UNPACKED_LIMIT, UNPACKED_PER_BYTE * path.stat().st_size)


def _unpacked(path: Path) -> bytes:
    """Return the bytes of `path` without its general-purpose compressor; the result is limited in size."""
    data = path.read_bytes()
    if data[:2] == b"PK":
        return data
    compressors = next((names for magic, names in _MAGIC.items() if data.startswith(magic)), ["zlib", "brotli"])
    reasons: list[BirdieError] = []
    for name in compressors:
        try:
            return COMPRESSORS[name].decompress(data, _unpacked_limit(path))
        except BirdieError as error:
            reasons.append(error)
    reason = reasons[0] if _looks_like_zlib(data) else reasons[-1]
    raise WeightsError(f"{path} cannot be unpacked as {' or '.join(compressors)} ({reason}); copy it again") from reason


def _looks_like_zlib(data: bytes) -> bool:
    """Return whether `data` starts with the two bytes of RFC 1950: method deflate, and a multiple of 31."""
    return len(data) >= 2 and data[0] & 15 == 8 and int.from_bytes(data[:2], "big") % 31 == 0


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160].rstrip(".") if lines else type(error).__name__


def _find_tensors(content: Any, path: Path) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return the only dict of tensors in `content`, after the keys to it: none if `content` holds nothing else."""
    if isinstance(content, Mapping) and content.get("__quant_format__") == baseline.FORMAT:
        for group in ("quantized", "scales", "passthrough"):
            if isinstance(content.get(group), Mapping):
                named_tensors(content[group])
        return (), baseline.dequantize(content)
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise WeightsError(f"{path} holds a {kind}, not a dict of tensors; save torch.save(model.state_dict(), …)")
    states = _tensor_dicts(content)
    if len(states) != 1:
        keys = ", ".join(repr(key) for key in list(content)[:20]) or "nothing"
        problem = "several dicts of tensors" if states else "no dict of tensors"
        raise WeightsError(f"{path} holds {problem} under its keys {keys}; save the one you mean with torch.save(…)")
    return states[0]


def _tensor_dicts(content: Mapping[Any, Any], depth: int = 0) -> list[tuple[tuple[Any, ...], dict[str, Tensor]]]:
    """Return the keys to each dict of nothing but tensors, and the dict: `content`, or one or two levels inside."""
    if _is_tensor_dict(content):
        return [((), _copied(content))]
    return [
        ((key, *keys), state)
        for key, value in content.items()
        if isinstance(value, Mapping) and depth < 2
        for keys, state in _tensor_dicts(value, depth + 1)
    ]


def _sizes_beside(keys: tuple[Any, ...], content: Any, state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the path of everything in `content` beside the `state` at `keys` → bytes of the tensors there.

    Memory that several tensors share counts where it occurs first.
    """
    seen, sizes = _memories(state), {}
    for depth, key in enumerate(keys):
        for other, value in content.items():
            if other is not key:
                memories = _memories(value) - seen
                sizes["/".join(map(str, (*keys[:depth], other)))] = sum(size for _, size in memories)
                seen |= memories
        content = content[key]
    return sizes


def tensor_bytes(content: Any) -> int:
    """Return the bytes of all tensors in nested dicts, lists and tuples; tied tensors are counted once."""
    return sum(size for _, size in _memories(content))


def _memories(content: Any) -> set[tuple[int, int]]:
    """Return the address and the bytes of all tensors in `content` that are one array in memory."""
    memories = set()
    for tensor in tensors_in(content):
        with suppress(RuntimeError, NotImplementedError):  # sparse tensors and subclasses that wrap other tensors
            memories.add((tensor.data_ptr(), tensor.nbytes))
    return memories


def _is_tensor_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(
            isinstance(key, str) and (isinstance(item, Tensor) or is_extra(key, item, of_module=False))
            for key, item in value.items()
        )
    )


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of a state dict, with the versions of its modules if it has them."""
    if not hasattr(state, "_metadata"):
        return dict(state)
    copied = OrderedDict(state)
    vars(copied)["_metadata"] = state._metadata
    return copied


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files that are read for a checkpoint: of a folder or an index, the index and its shards.

    Raises:
        WeightsError: the folder holds no checkpoint, the index is broken, or a link leads out of the folder.
    """
    path = Path(path)
    if path.is_dir():
        path = _main_file(path)
    return [path, *sorted(_shards(path))] if path.name.endswith(".index.json") else [path]


def _main_file(folder: Path) -> Path:
    """Return the first file of `FOLDER_NAMES` that the folder has."""
    for name in FOLDER_NAMES:
        if os.path.lexists(folder / name):
            return own_file(folder / name, folder)
    raise WeightsError(f"folder {folder} holds none of {', '.join(FOLDER_NAMES)}; give the checkpoint's file")


def own_file(path: Path, folder: Path) -> Path:
    """Return `path`, found in `folder`, if its links stay there or lead to the blobs of the same Hugging Face cache.

    Raises:
        WeightsError: they lead elsewhere, or nowhere.
    """
    try:
        file, folder = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise WeightsError(f"cannot open {path}: {reason}; check the links, or copy it again") from error
    caches = [parent.parents[1] for parent in (folder, *folder.parents) if parent.parent.name == "snapshots"]
    if not file.is_relative_to(folder) and file.parent not in [cache / "blobs" for cache in caches]:
        raise WeightsError(
            f"{path} is a link to {file}, outside its own folder; do not trust this checkpoint, or copy the file there"
        )
    return path


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Read all tensors that a Hugging Face index lists, from shards in the folder of the index."""
    state: dict[str, Tensor] = {}
    for shard, names in sorted(_shards(index).items()):
        tensors = _read_file(shard)
        absent = [name for name in names if name not in tensors]
        if absent:
            raise WeightsError(f"{shard} lacks {absent[0]!r}, a tensor that {index.name} lists for it; copy it again")
        state |= {name: tensors[name] for name in names}
    return state


def _shards(index: Path) -> dict[Path, list[str]]:
    """Return the shards of an index, each with the names of its tensors."""
    shards: dict[str, list[str]] = {}
    for name, shard in _weight_map(index).items():
        shards.setdefault(shard, []).append(name)
    return {own_file(index.parent / shard, index.parent): names for shard, names in shards.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor name → shard file of an index, every shard inside the folder of the index."""
    try:
        if require_regular(index).stat().st_size > MAX_INDEX_BYTES:
            raise WeightsError(
                f"{index} has more than {MAX_INDEX_BYTES:,} bytes, too many for an index; check the file"
            )
        shards = json.loads(index.read_bytes())["weight_map"]
        pairs = dict(shards.items())
    except OSError as error:
        raise WeightsError(f"cannot open {index}: {(error.strerror or str(error)).lower()}; check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{index} is not an index with a weight_map; copy it again") from error
    if not pairs:
        raise WeightsError(f"{index} has an empty weight_map; copy it again")
    for name, shard in pairs.items():
        if not is_text(name) or (isinstance(shard, str) and not is_text(shard)):
            raise WeightsError(f"{index} lists {name!r} in shard {shard!r}, which are not both text; copy it again")
        if not is_name(shard):
            raise WeightsError(
                f"{index} lists {name!r} in shard {shard!r}, outside its own folder; do not trust this checkpoint"
            )
    return pairs


def without_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
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
        return state
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
