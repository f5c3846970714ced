"""Content of a link: the tensors and all other bytes of its checkpoint, checked against the digests in its metadata.

link + content of its base ──decode──► LinkContent ──restore──► the checkpoint, bit for bit
                                                   ──require_digests──► an error if it is another
"""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

from torch import Tensor

from birdie.artifact import kept_files
from birdie.artifact.base import Base
from birdie.artifact.file import File
from birdie.artifact.links import Link, decoded, link_in, link_paths, other_bytes, stages_of, tensors_of
from birdie.artifact.options import DEFAULT_LIMITS, Limits
from birdie.chain.file_parts import join
from birdie.compress import registry
from birdie.errors import ArtifactError
from birdie.system.files import Hidden, atomic_folder, atomic_path, log_hidden
from birdie.system.outputs import require_output_folder

_ATTEMPTS = 5
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class LinkContent:
    """Content of a checkpoint; empty for what a link that stands alone is a delta to."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # name → tensor
    other: Mapping[str, bytes] = field(default_factory=dict)  # name of a file → bytes around its tensors
    since: Mapping[Path, os.stat_result] = field(default_factory=dict)  # mapped file → its status when it was read

    @property
    def paths(self) -> Collection[Path]:
        """The files that are mapped."""
        return self.since.keys()


def read_content(path: Path, limits: Limits = DEFAULT_LIMITS) -> tuple[Link, LinkContent]:
    """Return the facts about a link and its content, decoded from the links beside it; `limits` are of each link.

    Raises:
        ArtifactError: a link is damaged or missing, or needs more than the limits.
    """
    stages = stages_of(path)
    with File(path, registry.decoder, decoded(stages, limits)) as file:
        file.require(limits.max_bytes, limits.max_operations)
        other = other_bytes(file, stages, limits.max_bytes)
        return link_in(file), LinkContent(file.decode_all(workers=limits.workers), other)


def content_after(path: Path, base: LinkContent, base_link: Link | None) -> LinkContent:
    """Return the content of a link from that of its base.

    Args:
        base: content of the link that it is a delta to.
        base_link: facts about that; None if it stands alone.
    """
    with File(path, registry.decoder, Base.of(str(path), base.tensors, base.paths)) as file:
        file.require()
        link, other = link_in(file), kept_files.read(file)
        for name, table in link.files.items():
            if table.same:
                earlier = base_link.name if base_link is not None and not link.is_folder else name
                other[name] = base.other.get(earlier, b"")
        return LinkContent(file.decode_all(), other)


def require_digests(link: Link, content: LinkContent, where: Path) -> None:
    """Check that content is that of the checkpoint of a link."""
    for name in link.files:
        _write(None, link, name, content, where)


def restore(
    path: Path,
    target: Path,
    limits: Limits = DEFAULT_LIMITS,
    *,
    overwrite: bool = False,
    hidden: Hidden = log_hidden,
) -> int:
    """Write the checkpoint of a link as it was, bit for bit, and return its bytes.

    Args:
        path: of the link; its chain is beside it.
        target: the folder of the checkpoint; of a checkpoint that is a file, that file.
        limits: of each link of the chain.
        overwrite: let a folder have content: files of the same names are replaced, and all others stay.
        hidden: called with the names of hidden files of the checkpoint that such a folder does not get.

    Raises:
        ArtifactError: a link is damaged or missing, or what it decodes to does not have the digests of the checkpoint.
        OutputError: the target cannot be written.
    """
    link, content = steadily(path.parent, lambda: read_content(path, limits))
    if not link.is_folder:
        with atomic_path(target) as new, new.open("wb") as out:
            _write(out, link, link.name, content, path)
        return link.bytes
    target = require_output_folder(target, overwrite=overwrite)
    with atomic_folder(target, overwrite=overwrite, inputs=link_paths(path.parent), hidden=hidden) as folder:
        for name in link.files:
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                _write(out, link, name, content, path)
    return link.bytes


def _write(out: BinaryIO | None, link: Link, name: str, content: LinkContent, where: Path) -> None:
    """Write a file of a checkpoint, and check its digest."""
    table, rest = link.files[name], content.other.get(name, b"")
    tensors = tensors_of(link, name, content.tensors)
    if sum(table.gaps) > len(rest) or sum(tensor.nbytes for tensor in tensors) + len(rest) != table.bytes:
        raise ArtifactError(f"the parts of {name} in {where} do not add up to its {table.bytes:,} bytes; it is damaged")
    if join(out, tensors, table.gaps, rest) != table.sha256:
        raise ArtifactError(
            f"{name} of {where} does not come back with the digest that it had; the chain was changed, so take another "
            "copy"
        )


def steadily(
    folder: Path, read: Callable[[], _Result], is_whole: Callable[[_Result], bool] = lambda _: True
) -> _Result:
    """Return what `read` reads of a chain; again if the chain changed meanwhile and the result is an error, or in part.

    Args:
        is_whole: tells whether nothing of a result is missing.
    """
    for attempt in range(_ATTEMPTS):
        seen = _links_of(folder)
        try:
            result = read()
        except ArtifactError:
            if attempt == _ATTEMPTS - 1 or _links_of(folder) == seen:
                raise
        else:
            if attempt == _ATTEMPTS - 1 or is_whole(result) or _links_of(folder) == seen:
                return result
    raise AssertionError("the last attempt returns or raises")


def _links_of(folder: Path) -> set[tuple[str, int, int]]:
    """Return (name, number, time of the last change) of the links in a folder."""
    links = set()
    for path in link_paths(folder):
        with suppress(OSError):  # removed meanwhile
            status = path.stat()
            links.add((path.name, status.st_ino, status.st_mtime_ns))
    return links
