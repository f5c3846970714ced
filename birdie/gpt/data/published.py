"""The challenge's published data sets: which files of a repository on the Hugging Face Hub make up one of them.

    ROOT/manifest.json                                             counts, and the tokenizer of each data set
    ROOT/datasets/fineweb10B_sp1024/fineweb_{train,val}_%06d.bin
    ROOT/tokenizers/fineweb_1024_bpe.model

The listing says which files exist, the manifest which files should exist. If the manifest is missing, malformed or
incomplete, file names decide, and a note says so. If manifest and listing contradict each other, the result is an
error. Neither is trusted: names, sizes and digests are checked before anything is downloaded.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from birdie.errors import ConfigError, DataError
from birdie.gpt.data.shards import HEADER_BYTES, Split
from birdie.system.names import is_name

MANIFEST = "manifest.json"
DEFAULT_ROOT = "datasets/"  # root of the export in the challenge's repository, which has older exports as well
MAX_MANIFEST = 16_000_000  # bytes; real ones have a few thousand
MAX_MODEL = 64_000_000
_MAX_SHARD = HEADER_BYTES + 2 * (2**31 - 1)
_SHARD = re.compile(r"((?:.*/)?)datasets/fineweb10B_([^/]+)/fineweb_(train|val)_(\d{6})\.bin")
_VARIANT = re.compile(r"sp[1-9]\d{0,5}|byte260")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in the Hub's listing.

    Attributes:
        path: path in the repository, with forward slashes.
        size: bytes.
        digest: hex; SHA-256 of a file in large storage, else git's SHA-1 of the blob.
    """

    path: str
    size: int
    digest: str

    @property
    def name(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self.path).name

    def matches(self, path: Path) -> bool:
        """Return whether the local file `path` has the listed size and digest."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        in_git = len(self.digest) == 40
        state = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False) if in_git else hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                state.update(block)
        return state.hexdigest() == self.digest


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


def read_listing(info: Any, subject: str) -> tuple[str, dict[str, RemoteFile]]:
    """Return the commit of a repository, and path → file of its listing.

    Args:
        info: answer of `HfApi.dataset_info`, with the metadata of files.
        subject: name of the repository, for errors.
    """
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise DataError(
            f"{subject} names no commit ({commit[:40]}), so its files could change during the download; check the "
            "connection and --endpoint"
        )
    return commit, {file.path: file for file in map(_checked, info.siblings or ())}


def _checked(sibling: Any) -> RemoteFile:
    path, size = str(sibling.rfilename), sibling.size
    digest = str(sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id)
    if not is_name(path):
        raise DataError(f"the repository lists the file {path!r}, which leads out of it; nothing was downloaded")
    if type(size) is not int or size < 0 or not _DIGEST.fullmatch(digest):
        raise DataError(f"the Hub lists {path} without a size or a digest; nothing was downloaded")
    return RemoteFile(path, size, digest)


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
                f"the Hub lists {file.path} with {file.size:,} bytes, which no shard has; nothing was downloaded"
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
            f"the Hub lists {path} with {files[path].size:,} bytes, too large for a tokenizer; nothing was downloaded"
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
