"""Encoding of a link: the content of a checkpoint, as a delta to that of an earlier one where that is smaller.

content + content of the base ──pairs of tensors──► write_model ──decoded, digests compared──► the link
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from birdie.artifact.base import Base
from birdie.artifact.links import Link
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import write_model
from birdie.chain.checkpoint_series import CheckpointParts
from birdie.chain.link_content import LinkContent, content_after, require_digests
from birdie.delta.delta_coding import digest
from birdie.delta.delta_job import pays
from birdie.entropy.hints import EffortOption
from birdie.errors import ArtifactError, ChangedError
from birdie.system.mapped import complete, releasing

_PIECE = 1 << 22  # bytes that are read at a time
_LEAST_BYTES = 1 << 10  # of a tensor that may be a delta; smaller ones are coded together


def write_link(
    path: Path,
    link: Link,
    content: LinkContent,
    base: tuple[str, Link] | None,
    earlier: LinkContent,
    effort: EffortOption,
) -> Link:
    """Write the link of a checkpoint and return its facts; it has its name when it decodes to the digests in them.

    Args:
        link: its facts, without base.
        base: file name of the link that it may be a delta to, and facts about that; None: it stands alone.
        earlier: content of the base.

    Raises:
        ChangedError: another process wrote to a file that is mapped.
    """
    is_one = base is not None and not (link.is_folder or base[1].is_folder)  # which may have another name each time
    files, other = {}, {}
    for file, table in link.files.items():
        known = earlier.other.values() if is_one else [earlier.other.get(file)]
        around = content.other.get(file, b"")
        files[file] = replace(table, same=around in known)
        if not files[file].same:
            other[file] = around
    link = replace(link, files=files)
    with complete((), {**earlier.since, **content.since}), releasing(content.paths):
        counterparts = {
            other: earlier.tensors[other]
            for tensor, other in _pairs(content.tensors, earlier.tensors, by_content=link.is_named).items()
            if pays(content.tensors[tensor], earlier.tensors[other])
        }
        if base is not None and (counterparts or len(other) < len(files)):
            link = replace(link, base=base[0], base_digest=base[1].digest)
        base_link = base[1] if base is not None and link.base else None

        def check(written: Path) -> None:
            try:
                require_digests(link, content_after(written, earlier, base_link), path)
            except ArtifactError:
                _require_unchanged(link, content)
                raise

        write_model(
            content.tensors,
            path,
            SaveOptions(
                lossless=True,
                base=Base.of(link.base, counterparts, earlier.paths) if counterparts else None,
                effort=effort,
            ),
            files=other,
            link=link.to_json(),
            check=check,
        )
    return link


def _pairs(tensors: Mapping[str, Tensor], earlier: Mapping[str, Tensor], *, by_content: bool) -> Mapping[str, str]:
    """Return tensor → the one before that it may be a delta to: of its name, or also of other names."""
    if not by_content:
        return {name: name for name, one in tensors.items() if name in earlier and one.nbytes >= _LEAST_BYTES}
    parts, renamed = Base.of("", earlier).matching(tensors)  # a state dict alone, or in another file
    pairs = {name: renamed.get(name, name) for name in parts}
    return {
        name: other
        for name, other in pairs.items()
        if tensors[name].nbytes >= _LEAST_BYTES or digest(tensors[name]) == digest(earlier[other])
    }


def content_of(parts: CheckpointParts) -> LinkContent:
    """Return the content of a checkpoint on disk."""
    since = {parts.path / name if parts.is_folder else parts.path: file.status for name, file in parts.files.items()}
    return LinkContent(parts.tensors, {name: file.other for name, file in parts.files.items()}, since)


def begins(parts: CheckpointParts, link: Link) -> bool:
    """Return whether every file of a link is, in a checkpoint, one that begins with the same bytes."""
    paths = {name: parts.path / name if parts.is_folder else parts.path for name in link.files}
    return all(
        path.is_file() and _digest_of(path, link.files[name].bytes) == link.files[name].sha256
        for name, path in paths.items()
    )


def _require_unchanged(link: Link, content: LinkContent) -> None:
    """Check that the files of a checkpoint, read again, are those that were read; their times may not tell."""
    for path, table in zip(content.since, link.files.values(), strict=False):
        if path.is_file() and _digest_of(path, table.bytes) != table.sha256:
            raise ChangedError(f"another process wrote to {path} while it was read; run this again when it is done")


def _digest_of(path: Path, count: int) -> str:
    """Return the SHA-256 of the first `count` bytes of a file, hexadecimal."""
    start = hashlib.sha256()
    with path.open("rb") as file:
        while count and (piece := file.read(min(count, _PIECE))):
            start.update(piece)
            count -= len(piece)
    return start.hexdigest()
