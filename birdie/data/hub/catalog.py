"""Catalog of the challenge's published data sets: which files of a repository make up one data set.

    ROOT/manifest.json                                             counts, and the tokenizer of each data set
    ROOT/datasets/fineweb10B_sp1024/fineweb_{train,val}_%06d.bin
    ROOT/tokenizers/fineweb_1024_bpe.model

The listing says which files exist, the manifest which files should exist. If the manifest is missing, malformed or
incomplete, file names decide, and a note says so. If manifest and listing contradict each other, the result is an
error.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from birdie.data.hub.repository import RemoteFile
from birdie.data.shards import HEADER_BYTES, Split
from birdie.errors import ConfigError, DataError
from birdie.runtime.names import is_name

MANIFEST = "manifest.json"
DEFAULT_ROOT = "datasets/"  # root of the export in the challenge's repository, which has older exports as well
MAX_MANIFEST = 16_000_000  # bytes; real ones have a few thousand
MAX_MODEL = 64_000_000
_MAX_SHARD = HEADER_BYTES + 2 * (2**31 - 1)
_SHARD = re.compile(r"((?:.*/)?)datasets/fineweb10B_([^/]+)/fineweb_(train|val)_(\d{6})\.bin")
_VARIANT = re.compile(r"sp[1-9]\d{0,5}|byte260")

ShardIndex = dict[tuple[str, str], dict[Split, dict[int, RemoteFile]]]
"""(root, variant) → split → number → shard."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Entry of a manifest for one data set; a value that is missing or malformed is None.

    Attributes:
        train_files: number of training shards.
        val_files: number of validation shards.
        val_tokens: number of validation tokens.
        model: path of the tokenizer's model below the root.
        notes: one sentence for each gap.
    """

    train_files: int | None = None
    val_files: int | None = None
    val_tokens: int | None = None
    model: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoteDataset:
    """Files of one published data set.

    Attributes:
        variant: "sp1024", "byte260", …
        model: file of the tokenizer; None for raw bytes, which need none.
        train: training shards, in order.
        val: all validation shards, in order.
        val_tokens: number of validation tokens according to the manifest.
        notes: one sentence for each irregularity of the source.
    """

    variant: str
    model: RemoteFile | None
    train: tuple[RemoteFile, ...]
    val: tuple[RemoteFile, ...]
    val_tokens: int | None = None
    notes: tuple[str, ...] = ()


def require_variant(variant: str) -> str:
    """Return `variant` if it is a vocabulary that birdie can read."""
    if not _VARIANT.fullmatch(variant):
        raise ConfigError(
            f"variant {variant!r} is unknown; choose sp and the vocabulary's size, as in sp1024, or byte260"
        )
    return variant


def find_root(files: Mapping[str, RemoteFile], variant: str, root: str | None = None) -> str:
    """Return the folder of the repository that holds data set `variant`: "", or a path that ends with a slash.

    Args:
        files: listing of the repository.
        variant: name of the data set.
        root: folder to use; default: `DEFAULT_ROOT` if it has the variant, else the only folder that has it.
    """
    roots = sorted({folder for folder, name in _index_shards(files) if name == variant})
    if root is not None:
        root = f"{root.strip('/')}/".removeprefix("/")
        roots = [folder for folder in roots if folder == root]
    if DEFAULT_ROOT in roots:
        return DEFAULT_ROOT
    if len(roots) == 1:
        return roots[0]
    if roots:
        names = ", ".join(folder or "/" for folder in roots)
        raise ConfigError(f"several folders of the repository have {variant}: {names}; choose one with --remote-root")
    available = sorted({f"{name} (in {folder or '/'})" for folder, name in _index_shards(files)})
    raise DataError(
        f"the repository has no variant {variant}{f' in {root}' if root else ''}; "
        f"it has {', '.join(available) or 'none'}"
    )


def select_files(
    files: Mapping[str, RemoteFile], root: str, variant: str, manifest_bytes: bytes | None
) -> RemoteDataset:
    """Return the files of `variant` below `root`, according to the listing and the manifest (None: there is none)."""
    if manifest_bytes is None:
        manifest = _no_entry("the repository has none")
    else:
        manifest = read_manifest(manifest_bytes, f"fineweb10B_{variant}")
    notes = list(manifest.notes)
    shards = _index_shards(files)[root, variant]
    val = _contiguous(shards.get("val", {}), manifest.val_files, "val", notes)
    if not val or len(val) < (manifest.val_files or 0):
        raise DataError(
            f"the repository has {len(val)} of {manifest.val_files or 'all'} validation shards of {variant}; a score "
            "on a part of them is not comparable, so use another repository or revision"
        )
    train = _contiguous(shards.get("train", {}), manifest.train_files, "train", notes)
    for file in (*train, *val):
        if not HEADER_BYTES < file.size <= _MAX_SHARD or file.size % 2:
            raise DataError(
                f"the hub lists {file.path} with {file.size:,} bytes, which no shard has; nothing was downloaded"
            )
    model = _tokenizer_model(files, root, variant, manifest.model)
    return RemoteDataset(variant, model, train, val, manifest.val_tokens, tuple(notes))


def _index_shards(files: Mapping[str, RemoteFile]) -> ShardIndex:
    index: ShardIndex = {}
    for path, file in files.items():
        if match := _SHARD.fullmatch(path):
            root, variant, name, number = match.groups()
            split: Split = "train" if name == "train" else "val"
            index.setdefault((root, variant), {}).setdefault(split, {})[int(number)] = file
    return index


def _contiguous(
    shards: Mapping[int, RemoteFile], count: int | None, split: Split, notes: list[str]
) -> tuple[RemoteFile, ...]:
    """Return the shards up to the first gap, at most `count`: later shards belong to another export.

    Args:
        shards: number → file.
        count: number of shards according to the manifest.
        split: name of the split.
        notes: gets one sentence for each irregularity.
    """
    numbers = sorted(shards)
    contiguous = [number for index, number in enumerate(numbers) if number == numbers[0] + index]
    if len(contiguous) < len(numbers):
        missing = numbers[0] + len(contiguous)
        notes.append(
            f"fineweb_{split}_{missing:06d}.bin is missing, so {len(numbers) - len(contiguous)} after it are ignored"
        )
    if count is not None and count < len(contiguous):
        notes.append(
            f"the manifest counts {count} {split} shards, so {len(contiguous) - count} further ones are ignored"
        )
    if count is not None and count > len(contiguous):
        notes.append(f"the manifest counts {count:,} {split} shards, of which {len(contiguous)} exist")
    return tuple(shards[number] for number in contiguous[:count])


def _tokenizer_model(
    files: Mapping[str, RemoteFile], root: str, variant: str, manifest_path: str | None
) -> RemoteFile | None:
    if not variant.startswith("sp"):
        return None
    path = root + (manifest_path or f"tokenizers/fineweb_{variant.removeprefix('sp')}_bpe.model")
    if path not in files:
        raise DataError(f"the repository lacks the tokenizer of {variant}, {path}; use another one or another revision")
    if files[path].size > MAX_MODEL:
        raise DataError(
            f"the hub lists {path} with {files[path].size:,} bytes, too large for a tokenizer; nothing was downloaded"
        )
    return files[path]


def _no_entry(reason: str) -> Manifest:
    return Manifest(notes=(f"{MANIFEST}: {reason}, so the file names decide",))


def read_manifest(data: bytes, dataset: str) -> Manifest:
    """Return the entry of data set `dataset` in the manifest `data`; unknown keys are ignored."""
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        return _no_entry("it is not JSON")
    entry = _entry(manifest, "datasets", dataset)
    if entry is None:
        return _no_entry(f"it does not name {dataset}")
    stats = entry.get("stats")
    stats = stats if isinstance(stats, dict) else {}
    tokenizer = _entry(manifest, "tokenizers", entry.get("tokenizer_name")) or {}
    model = tokenizer.get("model_path")
    if model is not None and (not is_name(model)):
        raise DataError(
            f"{MANIFEST} names the tokenizer {model!r}, which leads out of the repository; nothing was downloaded"
        )
    counts = {key: _count(stats.get(key)) for key in ("files_train", "files_val", "tokens_val")}
    missing = [key for key, value in counts.items() if value is None]
    notes = (f"{MANIFEST}: it has no {', no '.join(missing)} of {dataset}, so the listed files decide",)
    return Manifest(counts["files_train"], counts["files_val"], counts["tokens_val"], model, notes if missing else ())


def _entry(manifest: Any, key: str, name: Any) -> dict[str, Any] | None:
    """Return the entry with this name in the list `key` of a manifest, or None."""
    entries = manifest.get(key) if isinstance(manifest, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and name is not None and entry.get("name") == name:
            return entry
    return None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 48 else None
