"""Files that a .birdie file keeps beside its tensors: configuration, tokenizer, license of a model.

    name → bytes ──► one hidden entry, all contents one after the other under LZMA; names and sizes: metadata
                 ◄── `read`

Together they take fewer bytes than one by one: tokenizer.json repeats vocab.json. Files that the base of a file of
deltas has as well are not stored: the metadata have their names, their sizes, and one digest.
"""

import hashlib
import lzma
from collections.abc import Collection, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from birdie.artifact.container import FILES, Entry, Reader, Stream
from birdie.artifact.metadata import MAX_BYTES
from birdie.errors import ArtifactError, ConfigError
from birdie.system.names import is_name

ENTRY = "\0files"  # no tensor has a name with NUL
_LEAST_WINDOW, _LARGEST_WINDOW = 1 << 12, 1 << 26
_LZMA, _UINT8 = 0, 1  # codes of the coder and of the dtype
MOST_FILES = 1 << 12
_LEAST_LIMIT, _MOST_RATIO = 1 << 28, 64


def entry_of(files: Mapping[str, bytes]) -> Entry:
    """Return the entry that holds the contents of files, in the order of their names."""
    if len(files) > MOST_FILES:
        raise ConfigError(f"a file keeps at most {MOST_FILES:,} others beside its tensors, not {len(files):,}")
    for name in files:
        if not is_file(name, files):
            raise ConfigError(
                f"{name!r} is not the name of a file in a folder; give for example 'tokenizer/vocab.json'"
            )
    content = b"".join(files[name] for name in sorted(files))
    data = lzma.compress(content, lzma.FORMAT_RAW, filters=_filters(len(content)))
    return Entry(ENTRY, 0, _UINT8, (len(content),), (), (Stream(_LZMA, data),), kind=FILES)


def sizes_of(files: Mapping[str, bytes]) -> dict[str, int] | None:
    """Return name → bytes for the metadata; None without files."""
    return {name: len(files[name]) for name in sorted(files)} or None


def listed(fields: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return name → bytes of the files that a .birdie file keeps, from its metadata."""
    sizes: dict[str, int] = fields.get("files", {})
    if len(sizes) > MOST_FILES or list(sizes) != sorted(sizes) or not all(is_file(name, sizes) for name in sizes):
        raise ArtifactError(f"the list of files kept in {where} is not what birdie writes; the file is damaged")
    return sizes


def read(reader: Reader, limit: int | None = None) -> dict[str, bytes]:
    """Return the files that a .birdie file keeps.

    Args:
        limit: most bytes of all; None: what tensors may take.
    """
    sizes = listed(reader.fields, reader.where)
    if not sizes:
        return {}
    limit = max(_LEAST_LIMIT, _MOST_RATIO * reader.size) if limit is None else limit
    if sum(sizes.values()) > limit:
        raise ArtifactError(
            f"{reader.where} keeps files of {sum(sizes.values()):,} bytes, more than the {limit:,} allowed; "
            "raise max_bytes (--max-size) if you trust where it comes from"
        )
    entry = reader.read(ENTRY)
    total = sum(sizes.values())
    if entry.kind != FILES or entry.shape != (total,) or [stream.coder for stream in entry.streams] != [_LZMA]:
        raise ArtifactError(f"the files kept in {reader.where} are not those that its header lists; it is damaged")
    try:
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_filters(total))
        content = decompressor.decompress(entry.streams[0].payload, max_length=total)
    except lzma.LZMAError as error:
        raise ArtifactError(f"the files kept in {reader.where} cannot be unpacked ({error}); it is damaged") from error
    if len(content) != total:
        raise ArtifactError(f"the files kept in {reader.where} are cut; it is damaged")
    files, start = {}, 0
    for name, size in sizes.items():
        files[name] = content[start : start + size]
        start += size
    return files


def of_base(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return what the metadata of a file of deltas have of files that are those of its base: parts of `base`."""
    return {"files": sizes_of(files), "sha256": _digest(files)} if files else {}


def in_base(fields: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return name → bytes of the files that a .birdie file has from its base, from its metadata."""
    sizes: dict[str, int] = fields.get("base", {}).get("files", {})
    kept = listed(fields, where)
    is_sound = isinstance(sizes, dict) and all(type(size) is int and 0 <= size <= MAX_BYTES for size in sizes.values())
    if (
        not is_sound
        or len(names := {**kept, **sizes}) < len(kept) + len(sizes)
        or len(names) > MOST_FILES
        or list(sizes) != sorted(sizes)
        or not all(is_file(name, names) for name in names)
    ):
        raise ArtifactError(f"the files that {where} has from its base are not what birdie writes; it is damaged")
    return sizes


def read_all(reader: Reader, base: Mapping[str, bytes] | None, limit: int | None = None) -> dict[str, bytes]:
    """Return the files that a .birdie file keeps, and those that it has from its base.

    Args:
        base: files of the base, by name; None: there is no base.
        limit: as of `read`, for each of both.
    """
    files, sizes = read(reader, limit), in_base(reader.fields, reader.where)
    if not sizes:
        return files
    about = reader.fields["base"]
    if base is None:
        raise ArtifactError(
            f"{reader.where} has {len(sizes)} of its files from its base, {about.get('of') or 'a checkpoint'}, "
            f"{next(iter(sizes))} for one; give that as base=… (--base)"
        )
    theirs = {name: base[name] for name, size in sizes.items() if len(base.get(name, b"")) == size and name in base}
    if len(theirs) < len(sizes) or _digest(theirs) != about.get("sha256"):
        other = next((name for name in sizes if name not in theirs), "one of " + ", ".join(sizes))
        raise ArtifactError(
            f"the base lacks {other}, or has another than when {reader.where} was made; give the folder that was the "
            "base then, or its .birdie file"
        )
    return dict(sorted({**files, **theirs}.items()))


def _digest(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the contents of files, in the order of their names."""
    return hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()


def is_file(name: str, names: Collection[str]) -> bool:
    """Return whether `name` is that of a file in a folder, and none of `names` has the name of its folder."""
    return is_name(name) and not any(folder in names for folder in accumulate(name.split("/")[:-1], "{}/{}".format))


def write(files: Mapping[str, bytes], folder: Path) -> None:
    """Write kept files below `folder`; their names were checked when they were read."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)


def _filters(length: int) -> list[dict[str, int]]:
    window = min(max(1 << max(length - 1, 0).bit_length(), _LEAST_WINDOW), _LARGEST_WINDOW)
    return [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window}]
