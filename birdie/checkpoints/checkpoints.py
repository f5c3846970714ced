"""Readers of other checkpoint formats: name → tensor, on the CPU, without running code of the file.

    safetensors                    read directly
    what torch.save writes         opened with weights_only=True, and memory-mapped where the format allows
    either of them, packed         zlib, gzip, xz, zstd or brotli; the challenge's int8 export is dequantized
    ONNX                           its tensors, with a row for each output (birdie.checkpoints.onnx_file)
    folder or .index.json          Hugging Face shards (safetensors preferred)

The first bytes of a file tell its format, whatever its name. Which dict of nested ones is meant decides
`birdie.checkpoints.layouts`. Tied tensors stay tied. `read_weights` also tells what else the checkpoint holds;
`read_checkpoint` and `read_object` return all of it, unchanged.
"""

import io
import json
import os
import pickle
import pickletools
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from birdie.checkpoints.layouts import Choice, choose
from birdie.checkpoints.limits import require_names
from birdie.checkpoints.name_patterns import ALL, NamePatterns
from birdie.checkpoints.numpy_values import opener_of
from birdie.checkpoints.onnx_file import read_onnx
from birdie.checkpoints.unpacking import COMPRESSORS
from birdie.checkpoints.weight_shards import INDEX, Joined, join, own_file, read_by_index, shard_files
from birdie.compress.wrappers import without_prefixes
from birdie.errors import BirdieError, WeightsError
from birdie.system.parsing import parse_object
from birdie.system.regular import regular_file

Format: TypeAlias = Literal["safetensors", "torch", "packed", "index", "onnx"]
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
MARK = ("writer", "birdie")  # in the headers of .safetensors files of a folder that birdie wrote
MIN_UNPACKED_LIMIT = 1 << 30
UNPACKED_PER_BYTE = 64
_MAX_PARTS = 16
_BLOCK = 1 << 20  # bytes of a file that are checked at a time
_MOST_HEADER = 100_000_000  # bytes of the header of a safetensors file
_MAGIC = {
    b"\x1f\x8b\x08": ["zlib"],
    b"\xfd7zXZ\x00": ["lzma"],
    b"\x28\xb5\x2f\xfd": ["zstd"],
    b"\x5d\x00\x00": ["lzma", "brotli"],
}
_PICKLED = (".pt", ".pth", ".th", ".bin", ".ckpt")
_SUFFIXES: dict[str, Format] = {  # of files whose first bytes tell nothing: damaged ones, brotli, ONNX
    ".onnx": "onnx",
    ".safetensors": "safetensors",
    ".ptz": "packed",
    ".br": "packed",
    **dict.fromkeys(_PICKLED, "torch"),
}
_FOREIGN = {  # position, first bytes
    (0, b"GGUF"): "a GGUF file",
    (0, b"\x89HDF\r\n"): "an HDF5 file",
    (0, b"\x93NUMPY"): "a NumPy file",
    (0, b"\x89BRD\r\n"): "a .birdie file",
    (4, b"TFL3"): "a TensorFlow Lite file",
    (0, b"version https://git-lfs"): "a pointer of Git LFS and not the file itself; run git lfs pull",
    (
        257,
        b"ustar",
    ): "a tar archive; unpack it and compress the files in it, or, if torch before 0.2 wrote it, save it again",
}
_DISTRIBUTED = (
    "a part of a distributed checkpoint; make one file of its folder with "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE"
)
_LEGACY = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # the number that begins older files of torch.save
_PICKLES = 4  # of the older format: that number, the version, the system, the content
_HEAD = 264  # bytes
_SAFE: list[Any] = [io.BytesIO]  # holds bytes and a position; extra states of modules are in it
_READ = "safetensors, ONNX and what torch.save writes, also under gzip, zlib, xz, zstd or brotli"


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint, by name."""
    return read_weights(path).state


def read_weights(
    path: str | os.PathLike[str],
    *,
    keys: Sequence[str] = (),
    patterns: NamePatterns = ALL,
    skip_objects: bool = False,
) -> Choice:
    """Read the tensors of a checkpoint, by name, and list what else it holds.

    Args:
        keys: key paths of the dicts of tensors that are meant, "model.ema", as in `birdie.checkpoints.layouts.choose`.
        patterns: names of the tensors to take.
        skip_objects: leave out objects of classes that `weights_only=True` refuses, instead of refusing the file.
    """
    path = Path(path)
    if path.is_dir() or format_of(path) == "index":
        if keys:
            raise WeightsError(f"{path} is no single checkpoint, so it has no key {keys[0]!r}; give one of its files")
        joined = _joined(path)
        choice, left, notes = Choice(joined.state), joined.left, joined.notes
    else:
        content, left, notes = read_by_index(read_object_or_tensors(path, skip_objects), path)
        choice = choose(content, path, keys, patterns)
    return replace(
        choice,
        state=without_prefixes(choice.state),
        dropped=choice.dropped | {name: size for name, (size, _) in left.items()},
        notes=(*choice.notes, *notes),
    )


class Complete(NamedTuple):
    """All of a file."""

    content: Any  # the object that torch.save wrote, or else the tensors by name
    left: dict[str, int]  # name of each tensor that the index of shards does not read → its bytes
    notes: tuple[str, ...]  # sentences on them


def read_checkpoint(path: str | os.PathLike[str]) -> Complete:
    """Read all of one file, for a lossless copy.

    Names keep their prefixes. Objects of classes that `weights_only=True` refuses are replaced by stand-ins, which
    cannot be stored.
    """
    path = Path(path)
    content, left, notes = read_by_index(read_object_or_tensors(path, skip_objects=True), path)
    return Complete(content, {name: size for name, (size, _) in left.items()}, notes)


def read_object(path: str | os.PathLike[str], *, skip_objects: bool = False) -> Any:
    """Read the whole object that torch.save wrote, to a file or a packed one, with tensors on the CPU.

    Args:
        skip_objects: put stand-ins for objects of classes that `weights_only=True` refuses, instead of refusing the
            file. A stand-in has the name of the class; no code of the class is run.
    """
    path = Path(path)
    if (form := format_of(path)) not in ("torch", "packed"):
        raise WeightsError(f"{path} is not a file that torch.save writes, but of the format {form}; give such a file")
    return read_object_or_tensors(path, skip_objects)


def format_of(path: Path) -> Format:
    """Return the format of a file, which its first bytes tell."""
    if path.name.endswith(INDEX):
        return "index"
    _require_content(path)
    foreign = foreign_format(path)
    form = None if foreign else _format_of(_head(path)) or _SUFFIXES.get(path.suffix.lower())
    if form is None:
        unknown = f"of an unknown format (its name ends in {path.suffix!r})"
        raise WeightsError(f"{path} is {foreign or unknown}; birdie reads {_READ}")
    return form


def foreign_format(path: Path) -> str | None:
    """Return the name of a format that birdie knows and does not read, or None."""
    if path.suffix == ".distcp":
        return _DISTRIBUTED
    return _foreign(_head(path))


def _foreign(head: bytes) -> str | None:
    if _is_safetensors(head):  # whose header has any length and any names
        return None
    return next((name for (start, magic), name in _FOREIGN.items() if head[start:].startswith(magic)), None)


def is_foreign_pickle(path: Path) -> bool:
    """Return whether a file is a pickle that torch.save did not write, as those of NumPy arrays and settings."""
    head = _head(path)
    return _begins_a_pickle(head) and _LEGACY not in head[:32] and not _is_safetensors(head)


def _head(path: Path) -> bytes:
    with regular_file(path).open("rb") as file:
        return file.read(_HEAD)


def _is_safetensors(head: bytes) -> bool:
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MOST_HEADER


def _begins_a_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"


def _format_of(head: bytes) -> Format | None:
    if _is_safetensors(head):
        return "safetensors"
    if head.startswith(b"PK\x03\x04") or _begins_a_pickle(head):
        return "torch"
    if _is_packed(head):
        return "packed"
    return "index" if head.lstrip().startswith(b"{") else None


def _is_packed(head: bytes) -> bool:
    return head.startswith(tuple(_MAGIC)) or _looks_like_zlib(head)


def _joined(path: Path) -> Joined:
    """Return the tensors of a folder or an index, or of the one file of a folder, under the names they have there."""
    if path.is_dir():
        path = _main_file(path)
    if format_of(path) == "index":
        return join(path, lambda shard: choose(read_object_or_tensors(shard), shard).state)
    return Joined(choose(read_object_or_tensors(path), path).state, {}, {}, ())


def headers_of(files: Sequence[Path]) -> dict[str, str]:
    """Return the metadata in the headers of the files that are safetensors, without "format" and birdie's mark.

    Where two files differ, the value of the second has the name of its file behind its key.
    """
    header: dict[str, str] = {}
    for file in files:
        if format_of(file) == "safetensors":
            for key, value in read_header(file).items():
                header[key if header.get(key, value) == value else f"{key} ({file.name})"] = value
    header.pop("format", None)
    return {key: value for key, value in header.items() if (key, value) != MARK}


def read_header(file: Path) -> dict[str, str]:
    """Return all metadata in the header of a .safetensors file."""
    try:
        with safe_open(file, "pt") as opened:
            return opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file} is not a complete safetensors file ({_first_line(error)}); copy it again"
        ) from error


def safetensors_header(tensors: Mapping[str, Any], about: Mapping[str, str], form: str) -> bytes:
    """Return the beginning of a .safetensors file, as birdie and the library write it: length, JSON, spaces.

    Args:
        tensors: name → dtype, shape and offsets.
        about: metadata.
        form: "format" in it, "pt" for torch; "" for none.
    """
    metadata = {**about, "format": form} if form else {**about}
    fields = {"__metadata__": metadata, **tensors} if metadata else tensors
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def format_in_usual_header(file: Path) -> str | None:
    """Return "format" in the header of a .safetensors file, "" without one; None if birdie writes another header."""
    with file.open("rb") as opened:
        data = _header_bytes(opened)
    fields = json.loads(data)
    about = fields.pop("__metadata__", {})
    form = str(about.pop("format", ""))
    tensors = dict(sorted(fields.items(), key=lambda item: item[1]["data_offsets"]))
    is_same = safetensors_header(tensors, dict(sorted(about.items())), form)[8:] == data
    return form if is_same and MARK not in about.items() else None


def _require_content(path: Path) -> None:
    try:
        empty = regular_file(path).stat().st_size == 0
    except OSError as error:
        raise WeightsError(f"cannot open {path}: {(error.strerror or str(error)).lower()}; check the path") from error
    except ValueError as error:
        raise WeightsError(f"{str(path)!r} is not a valid path ({error}); check the path") from error
    if empty:
        raise WeightsError(f"{path} is empty; copy it again")


def read_object_or_tensors(path: Path, skip_objects: bool = False) -> Any:
    """Read the object that torch.save wrote, or the tensors of a safetensors file by name.

    Args:
        skip_objects: as for `read_object`.
    """
    form = format_of(path)
    if form == "index":
        raise WeightsError(f"{path} holds JSON, and no tensors; give the file of the checkpoint")
    if form == "safetensors":
        with path.open("rb") as file:
            return _read_safetensors(path, file, lambda: load_file(path, device="cpu"))
    if form == "onnx":
        return read_onnx(path).tensors
    if form == "torch":
        return _unpickle(path, path, skip_objects)
    data = _unpacked(path)
    if foreign := _foreign(data[:_HEAD]) or ("packed as well; unpack it once" if _is_packed(data[:_HEAD]) else None):
        raise WeightsError(f"{path} is packed, and what is inside is {foreign}; birdie reads {_READ}")
    if _format_of(data[:_HEAD]) == "safetensors":
        return _read_safetensors(path, io.BytesIO(data), lambda: load(data))
    return _unpickle(io.BytesIO(data), path, skip_objects)


def _read_safetensors(path: Path, file: BinaryIO, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors in the order in which they lie in the file."""
    try:
        header = parse_object(_header_bytes(file))
        header.pop("__metadata__", None)
    except ValueError as error:
        raise WeightsError(f"{path} is not a complete safetensors file ({error}); copy it again") from error
    require_names(header)
    try:
        tensors = read()
        return {name: tensors[name] for name in sorted(header, key=lambda name: header[name]["data_offsets"])}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{path} is not a complete safetensors file ({_first_line(error)}); copy it again"
        ) from error


def _header_bytes(file: BinaryIO) -> bytes:
    """Return the header at the beginning of a safetensors file."""
    size = int.from_bytes(file.read(8), "little")
    if size > _MOST_HEADER:
        raise ValueError(f"it says that its header has {size:,} bytes, and at most {_MOST_HEADER:,} can be")
    return file.read(size)


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


def _openers(
    source: Path | io.BytesIO, skip_objects: bool
) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return (what opens it, name) for classes and functions that `source` names and `weights_only` refuses.

    Numbers of NumPy are opened always, and its arrays and generators never keep a file from being opened; of other
    libraries there are stand-ins by request.
    """
    with ExitStack() as stack:
        is_zip = zipfile.is_zipfile(source)
        file = source if isinstance(source, io.BytesIO) else stack.enter_context(source.open("rb"))
        file.seek(0)
        stack.enter_context(safe_globals(_SAFE))
        names = get_unsafe_globals_in_checkpoint(file) if is_zip else _numpy_in_older_format(file)
    openers = {name: opener_of(name) for name in names}
    return [
        (opener or type(ascii(name)[1:-1][:80], (_StandIn,), {}), name)
        for name, opener in openers.items()
        if opener or skip_objects or name.startswith("numpy.")
    ]


def _numpy_in_older_format(file: BinaryIO) -> list[str]:
    """Return the classes and functions of NumPy that a file in the older format of torch.save names."""
    names: set[str] = set()
    with suppress(ValueError, EOFError, IndexError, AttributeError):  # what is damaged, torch.load says
        for _ in range(_PICKLES):
            operations = pickletools.genops(file)
            names |= {str(name).replace(" ", ".") for code, name, _ in operations if code.name == "GLOBAL"}
    return sorted(name for name in names if name.startswith("numpy."))


def _unpickle(source: Path | io.BytesIO, path: Path, skip_objects: bool = False) -> Any:
    """Return the object that torch.save wrote to `source`, opened without running code."""
    _require_torch_save(source, path)
    mapped = _can_be_mapped(source, path)
    try:
        return _load(source, mapped, _openers(source, skip_objects))
    except MemoryError:
        raise
    except Exception as error:  # damaged files make torch.load raise nearly anything
        raise WeightsError(f"{path} {_reason(error, source, mapped, skip_objects)}") from error


def _load(source: Path | io.BytesIO, mapped: bool, openers: list[Any]) -> Any:
    with ExitStack() as stack:
        stack.enter_context(safe_globals([*_SAFE, *openers]))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # the error says more
        file: Path | BinaryIO = source
        if isinstance(source, Path) and source.suffix == ".safetensors":  # torch.load goes by the name
            file, mapped = stack.enter_context(source.open("rb")), False
        elif isinstance(source, io.BytesIO):
            source.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _require_torch_save(source: Path | io.BytesIO, path: Path) -> None:
    """Check that a zip file or a pickle is one of torch.save."""
    try:
        with zipfile.ZipFile(source) as archive:
            entries = [entry.partition("/")[2] or entry for entry in archive.namelist()]
    except zipfile.BadZipFile:
        return  # of the older format, or damaged
    if "constants.pkl" in entries:
        raise WeightsError(
            f"{path} is a TorchScript program, which is code; save its tensors with "
            "torch.save(torch.jit.load(…).state_dict(), …), if you trust it"
        )
    if "models/model.json" in entries:
        raise WeightsError(
            f"{path} is a program of torch.export, which is code; save its tensors with "
            "torch.save(torch.export.load(…).state_dict, …), if you trust it"
        )
    if "data.pkl" not in entries:
        what = f"; birdie reads {_READ}: unpack it, if such files are in it"
        if any(name.endswith(".npy") for name in entries):
            what = ", but NumPy; save its arrays with safetensors.numpy.save_file(dict(numpy.load(…)), …)"
        raise WeightsError(f"{path} is a zip file that torch.save did not write{what}")


def _reason(error: Exception, source: Path | io.BytesIO, mapped: bool, skip_objects: bool) -> str:
    """Return why torch.load cannot open a file, and what to do."""
    text = str(error)
    if "Tensor subclass" in text or "must be imported to load" in text:  # no stand-in can be a tensor
        return (
            "holds tensors of a class that birdie does not open; save plain tensors, for example what their "
            "dequantize() or full_tensor() returns"
        )
    if not isinstance(error, pickle.UnpicklingError):
        return f"is damaged or not what torch.save wrote ({_first_line(error)}); copy it again"
    if "global" in text.lower() or (skip_objects and _openers(source, skip_objects)):
        name = re.search(r"GLOBAL (\S{1,80})", text)
        what = "a pickled object" if name is None else f"a pickled object ({ascii(name[1])[1:-1]})"
        skipped = "; take its tensors alone with birdie compress --weights-only" if not skip_objects else ""
        if not skipped or not _has_weights_beside_objects(source, mapped):
            skipped = (
                "; save its tensors with torch.save(model.state_dict(), …) in the program that wrote it, or open it "
                "there with torch.load(…, weights_only=False), if you trust it"
            )
        return f"holds {what} that may run code when opened, which birdie never does{skipped}"
    if isinstance(source, Path) and is_foreign_pickle(source):
        return (
            "is a pickle that torch.save did not write, and pickles may run code when opened, which birdie never does; "
            "open it in the program that wrote it, if you trust it, and save its tensors with torch.save(…)"
        )
    return "is not a checkpoint that torch.save wrote; check the file"


def _has_weights_beside_objects(source: Path | io.BytesIO, mapped: bool) -> bool:
    try:
        state = choose(_load(source, mapped, _openers(source, skip_objects=True)), Path()).state
    except Exception:  # whatever torch.load raises
        return False
    return any(isinstance(tensor, Tensor) and tensor.ndim > 1 for tensor in state.values())


def _can_be_mapped(source: Path | io.BytesIO, path: Path) -> bool:
    """Return whether `source` is a zip file of stored entries: torch maps deflated ones without inflating them."""
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
    """Check the CRC-32 of every entry, which torch.load does not read."""
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
    if _format_of(data[:_HEAD]) == "torch":
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


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files that are read for a checkpoint: of a folder or an index, the index and its shards."""
    path = Path(path)
    if path.is_dir():
        path = _main_file(path)
    return [path, *sorted(shard_files(path).values())] if format_of(path) == "index" else [path]


def _main_file(folder: Path) -> Path:
    """Return the first file of `FOLDER_NAMES` that the folder has."""
    for name in FOLDER_NAMES:
        if os.path.lexists(folder / name):
            return own_file(folder / name, folder)
    raise WeightsError(f"folder {folder} holds none of {', '.join(FOLDER_NAMES)}; give the checkpoint's file")
