"""What the challenge published: which files of a repository make up one data set.

    ROOT/manifest.json                                             counts, and which tokenizer goes with which shards
    ROOT/datasets/fineweb10B_sp1024/fineweb_{train,val}_%06d.bin
    ROOT/tokenizers/fineweb_1024_bpe.model

The listing says what there is, the manifest what there should be. Where the manifest is silent or cannot be read, names
decide and a note says so; where the two contradict each other, nothing is guessed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from birdie.data.hub import RemoteFile, inside
from birdie.data.shards import HEADER_BYTES, Split
from birdie.errors import ConfigError, DataError

MANIFEST = "manifest.json"
USUAL_ROOT = "datasets/"  # where the challenge's own repository keeps its export; older exports lie beside it
MAX_MANIFEST = 16_000_000  # bytes; a real one has some thousands
MAX_MODEL = 64_000_000
_MAX_SHARD = HEADER_BYTES + 2 * (2**31 - 1)
_SHARD = re.compile(r"((?:.*/)?)datasets/fineweb10B_([^/]+)/fineweb_(train|val)_(\d{6})\.bin")
_VARIANT = re.compile(r"sp[1-9]\d{0,5}|byte260")

Catalogue = dict[tuple[str, str], dict[Split, dict[int, RemoteFile]]]  # by root and variant


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says of one data set; None where it says nothing usable.

    Attributes:
        train_files: number of training shards.
        val_files: number of validation shards.
        val_tokens: tokens in them.
        model: path of the tokenizer's model below the root.
        notes: what it leaves open, in sentences.
    """

    train_files: int | None = None
    val_files: int | None = None
    val_tokens: int | None = None
    model: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Published:
    """The files of one data set.

    Attributes:
        variant: "sp1024", "byte260", …
        model: the tokenizer's file, or None for raw bytes, which need none.
        train: training shards there are, in stream order.
        val: validation shards, all of them.
        val_tokens: what they hold by the manifest.
        notes: what was not as it should be, in sentences.
    """

    variant: str
    model: RemoteFile | None
    train: tuple[RemoteFile, ...]
    val: tuple[RemoteFile, ...]
    val_tokens: int | None = None
    notes: tuple[str, ...] = ()


def require_variant(variant: str) -> str:
    """`variant`, if it is one birdie can read.

    Raises:
        ConfigError: it is not.
    """
    if not _VARIANT.fullmatch(variant):
        raise ConfigError(
            f"variant {variant!r} is unknown; choose sp and the vocabulary's size, as in sp1024, or byte260"
        )
    return variant


def find_root(files: Mapping[str, RemoteFile], variant: str, root: str | None = None) -> str:
    """The folder of the repository ("" or with a slash at its end) whose data set `variant` is meant.

    Args:
        files: the repository's.
        variant: the data set.
        root: the folder asked for; default: the challenge's usual one, or the only one that holds the variant.

    Raises:
        ConfigError: several folders hold it.
        DataError: none does; the message lists what there is.
    """
    found = sorted({place for place, name in _catalogue(files) if name == variant})
    if root is not None:
        root = f"{root.strip('/')}/".removeprefix("/")
        found = [place for place in found if place == root]
    if USUAL_ROOT in found:
        return USUAL_ROOT
    if len(found) == 1:
        return found[0]
    if found:
        places = ", ".join(place or "/" for place in found)
        raise ConfigError(f"several folders of the repository hold {variant}: {places}; choose one with --remote-root")
    there = sorted({f"{name} (in {place or '/'})" for place, name in _catalogue(files)})
    raise DataError(
        f"the repository has no variant {variant}{f' in {root}' if root else ''}; it has {', '.join(there) or 'none'}"
    )


def choose(files: Mapping[str, RemoteFile], root: str, variant: str, manifest: bytes | None) -> Published:
    """The files of `variant` below `root`, as listed and as the manifest (its bytes, if there is one) describes them.

    Raises:
        DataError: they are incomplete, the manifest and the listing contradict each other, or either is unsafe.
    """
    said = read_manifest(manifest, f"fineweb10B_{variant}") if manifest is not None else _silent("there is none")
    notes = list(said.notes)
    shards = _catalogue(files)[root, variant]
    val = _run(shards.get("val", {}), said.val_files, "val", notes)
    if not val or len(val) < (said.val_files or 0):
        raise DataError(
            f"the repository has {len(val)} of {said.val_files or 'all'} validation shards of {variant}; a score on a "
            "part of them compares with nothing, so use another repository or revision"
        )
    train = _run(shards.get("train", {}), said.train_files, "train", notes)
    for file in (*train, *val):
        if not HEADER_BYTES < file.size <= _MAX_SHARD or file.size % 2:
            raise DataError(
                f"the hub lists {file.path} with {file.size:,} bytes, which no shard has; nothing was fetched"
            )
    return Published(variant, _model(files, root, variant, said.model), train, val, said.val_tokens, tuple(notes))


def _catalogue(files: Mapping[str, RemoteFile]) -> Catalogue:
    found: Catalogue = {}
    for path, file in files.items():
        if match := _SHARD.fullmatch(path):
            root, variant, split, number = match.groups()
            kind: Split = "train" if split == "train" else "val"
            found.setdefault((root, variant), {}).setdefault(kind, {})[int(number)] = file
    return found


def _run(shards: Mapping[int, RemoteFile], said: int | None, split: Split, notes: list[str]) -> tuple[RemoteFile, ...]:
    """Shards without a gap, at most as many as the manifest says: what comes after is of some other export."""
    numbers = sorted(shards)
    whole = [number for place, number in enumerate(numbers) if number == numbers[0] + place]
    if len(whole) < len(numbers):
        missing = numbers[0] + len(whole)
        notes.append(
            f"fineweb_{split}_{missing:06d}.bin is not there, so the {len(numbers) - len(whole)} after it are left out"
        )
    if said is not None and said < len(whole):
        notes.append(
            f"the manifest counts {said} {split} shards, so {len(whole) - said} more that are there are left out"
        )
    if said is not None and said > len(whole):
        notes.append(f"the manifest counts {said:,} {split} shards, of which {len(whole)} are there")
    return tuple(shards[number] for number in whole[:said])


def _model(files: Mapping[str, RemoteFile], root: str, variant: str, said: str | None) -> RemoteFile | None:
    if not variant.startswith("sp"):
        return None
    path = root + (said or f"tokenizers/fineweb_{variant.removeprefix('sp')}_bpe.model")
    if path not in files:
        raise DataError(f"the repository lacks the tokenizer of {variant}, {path}; use another one or another revision")
    if files[path].size > MAX_MODEL:
        raise DataError(
            f"the hub lists {path} with {files[path].size:,} bytes, too much for a tokenizer; nothing was fetched"
        )
    return files[path]


def _silent(why: str) -> Manifest:
    return Manifest(notes=(f"{MANIFEST}: {why}, so the names of the files decide",))


def read_manifest(data: bytes, dataset: str) -> Manifest:
    """What the manifest in `data` says of the data set called `dataset`; keys birdie does not know are passed over.

    Raises:
        DataError: it names a tokenizer outside the repository.
    """
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        return _silent("it is not JSON")
    entry = _named(manifest, "datasets", dataset)
    if entry is None:
        return _silent(f"it does not name {dataset}")
    stats = entry.get("stats")
    stats = stats if isinstance(stats, dict) else {}
    tokenizer = _named(manifest, "tokenizers", entry.get("tokenizer_name")) or {}
    model = tokenizer.get("model_path")
    if model is not None and (not isinstance(model, str) or not inside(model)):
        raise DataError(
            f"{MANIFEST} names the tokenizer {model!r}, which leads out of the repository; nothing was fetched"
        )
    counts = {key: _count(stats.get(key)) for key in ("files_train", "files_val", "tokens_val")}
    missing = [key for key, value in counts.items() if value is None]
    notes = (f"{MANIFEST}: it gives no {', no '.join(missing)} of {dataset}, so the files there are decide",)
    return Manifest(counts["files_train"], counts["files_val"], counts["tokens_val"], model, notes if missing else ())


def _named(manifest: Any, key: str, name: Any) -> dict[str, Any] | None:
    """The entry called `name` in a list of the manifest."""
    entries = manifest.get(key) if isinstance(manifest, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and name is not None and entry.get("name") == name:
            return entry
    return None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 48 else None
