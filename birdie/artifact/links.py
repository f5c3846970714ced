"""Links of a chain: .birdie files that each hold one checkpoint of a run, most as deltas to an earlier link.

    run.birdie/
    ├── step-00000040.birdie      stands alone
    ├── step-00000080.birdie      delta to step-00000040.birdie
    └── step-00000120.birdie      delta to step-00000080.birdie

The metadata of a link have the digest of every file of its checkpoint, the name of its base, a file beside it, and the
base's digest, which is that of its files: a base may be written again, but never be of another checkpoint. A base is of
an earlier step, so no chain is endless; the base of a checkpoint without a number in its name (last.ckpt) has at most
its step, and it is no base itself. Whatever reads a link decodes its chain forward from the link that stands
alone; at most two checkpoints are in memory, and of those only the tensors that are needed.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from birdie.artifact import kept_files
from birdie.artifact.base import Base
from birdie.artifact.container import BLOCKS, DELTA, Reader
from birdie.artifact.file import Data, File
from birdie.artifact.metadata import base_in, is_inside
from birdie.artifact.options import Limits
from birdie.checkpoints.order import Json, in_order, is_order
from birdie.compress import registry
from birdie.errors import ArtifactError, ConfigError
from birdie.system.names import is_part

SUFFIX = ".birdie"
MOST = 1000
"""Links, at most, of which each is a delta to the one before."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NUMBERED = re.compile(r"([^0-9]*)([0-9]{0,20})")
_WRONG = "is not what birdie writes; the file is damaged"
_MOST_STEP = 10**20

Names = Callable[[Reader], Collection[str]]


@dataclass(frozen=True, slots=True)
class FileTable:
    """Layout of a file of a checkpoint (birdie.chain.file_parts)."""

    bytes: int  # size of the file
    sha256: str  # digest of the file, hexadecimal
    order: Json  # of its tensors as they lie in the file, then of further names of them (birdie.checkpoints.order)
    gaps: tuple[int, ...]  # the number of other bytes before each tensor that lies there
    # whether the other bytes are those of the base's file of this name, and not in the link; of a checkpoint that is
    # one file, as its base is, those of that file
    same: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """Facts about a link, from its metadata."""

    step: int  # of the checkpoint
    name: str  # of the checkpoint, a folder or a file
    is_folder: bool  # which of the two
    files: Mapping[str, FileTable]  # name → layout of each file; of a checkpoint that is a file, of that one
    base: str = ""  # file name of the link to which this one is a delta; "" if it stands alone
    base_digest: str = ""  # digest of that link's checkpoint
    # whether the checkpoint is known by its name, as last.ckpt, and not by its step, which another may have. No link is
    # a delta to such a one, which is written again when the run goes on
    is_named: bool = False

    @property
    def order(self) -> tuple[int, bool, str]:
        """Position among the links of a chain: what a link is a delta to precedes it."""
        return self.step, self.is_named, self.name

    @property
    def digest(self) -> str:
        """SHA-256 of the names, sizes and digests of all files, hexadecimal; of a checkpoint, however it is stored."""
        return digest_of({name: (file.bytes, file.sha256) for name, file in self.files.items()})

    @property
    def bytes(self) -> int:
        """Bytes of all files of the checkpoint."""
        return sum(file.bytes for file in self.files.values())

    def prefix(self, file: str) -> str:
        """Return the beginning of the names of the tensors of a file."""
        return f"{file}/" if self.is_folder else ""

    def to_json(self) -> dict[str, Any]:
        """Return the value of the metadata's key `link`."""
        files = {
            name: {
                "bytes": file.bytes,
                "sha256": file.sha256,
                **({"order": file.order} if file.order else {}),
                **({"gaps": file.gaps} if file.gaps else {}),
                **({"same": True} if file.same else {}),
            }
            for name, file in sorted(self.files.items())
        }
        base = {"base": self.base, "digest": self.base_digest} if self.base else {}
        named = {"named": True} if self.is_named else {}
        return {"step": self.step, "name": self.name, "folder": self.is_folder, "files": files, **base, **named}

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> Self | None:
        """Return the facts in the metadata of a file; None if it is no link.

        Raises:
            ArtifactError: they are not what birdie writes.
        """
        about = fields.get("link")
        if about is None:
            return None
        try:
            base, digest = about.get("base", ""), about.get("digest", "")
            link = cls(
                _natural(about["step"], _MOST_STEP),
                _checked(about["name"], is_part),
                _checked(about["folder"], lambda value: type(value) is bool),
                {name: _table(file) for name, file in about["files"].items()},
                base,
                digest,
                _checked(about.get("named", False), lambda value: type(value) is bool),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"the link in the metadata of {where} {_WRONG}") from error
        if base != "" and not (is_part(base) and base.endswith(SUFFIX)):
            raise ArtifactError(
                f"{where} names the base {str(base)[:80]!r}, which is no name of a link beside it; the file is damaged"
            )
        is_sound = all(kept_files.is_file(name, link.files) for name in link.files) and link.files
        if not is_sound or (not link.is_folder and [*link.files] != [link.name]) or (base and not _is_digest(digest)):
            raise ArtifactError(f"the link in the metadata of {where} {_WRONG}")
        return link


def digest_of(files: Mapping[str, tuple[int, str]]) -> str:
    """Return the digest of a checkpoint, from name → (bytes, SHA-256) of its files."""
    return hashlib.sha256(json.dumps(sorted(files.items()), separators=(",", ":")).encode()).hexdigest()


def link_paths(folder: Path) -> list[Path]:
    """Return the links in a folder, unread, in the order of the numbers in their names; none if it is none."""
    return sorted((path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith(".")), key=_order_of)


def _order_of(path: Path) -> tuple[list[tuple[str, int]], str]:
    """Return what brings names into order, step-9 before step-10: their texts and the numbers after them."""
    return [(text, int(number or -1)) for text, number in _NUMBERED.findall(path.name)], path.name


def read_link(path: Path) -> Link:
    """Return the facts about a link, from its header.

    Raises:
        ArtifactError: the file is damaged, or no link.
    """
    with Reader(path) as reader:
        return link_in(reader)


def is_link(source: Data) -> bool:
    """Return whether a .birdie file is a link of a chain."""
    with Reader(source) as reader:
        return Link.of(reader.fields, reader.where) is not None


@dataclass(slots=True)
class Stage:
    """A link of which others need a part."""

    path: Path  # of the link
    tensors: Collection[str]  # names of the tensors that the next link needs
    files: Collection[str]  # names of the files whose other bytes a later link takes from this one


@contextmanager
def opened(source: Data, limits: Limits, names: Names | None = None) -> Iterator[Base | None]:
    """Open the base of a file for as long as its tensors are decoded.

    Args:
        source: the file.
        limits: of the file and of the links before it, and its base; without one, a link has one beside it, and a file
            may have one in it.
        names: reader of the file → the tensors that will be decoded; None: all.
    """
    reference = base_of(source, limits, names)
    if reference is None:
        yield None
        return
    with reference.mapped():
        yield reference


def base_of(source: Data, limits: Limits, names: Names | None = None) -> Base | None:
    """Return the base of a file, which the caller closes; arguments as of `opened`."""
    with Reader(source) as reader:
        inside = DELTA in reader.kinds and is_inside(reader.fields)
        if inside and limits.base is not None:
            raise ConfigError(f"{reader.where} holds deltas between its own tensors; leave base= (--base) out")
        if inside:
            return Base.inside(source, limits.max_bytes, limits.max_operations)
        if limits.base is not None:
            return Base.open(limits.base)
        if DELTA not in reader.kinds:
            return None
        if isinstance(source, bytes | memoryview) or Link.of(reader.fields, reader.where) is None:
            return None
        stages = _stages(reader, None if names is None else names(reader), files=False)
    return decoded(stages, limits)


def stages_of(path: Path) -> list[Stage]:
    """Return the links that a link needs, the one that stands alone first, each with what is needed of it."""
    with Reader(path) as reader:
        return _stages(reader, None, files=True)


def decoded(stages: Sequence[Stage], limits: Limits) -> Base | None:
    """Return the tensors that the link after some stages is a delta to, decoded forward; None if it needs none."""
    base: Base | None = None
    for stage in stages:
        if not stage.tensors:
            continue
        with File(stage.path, registry.decoder, base) as file:
            file.require(limits.max_bytes, limits.max_operations, stage.tensors)
            tensors = file.decode_all(stage.tensors, limits.workers)
        base = Base.of(str(stage.path), tensors)
    return base


def other_bytes(reader: Reader, stages: Sequence[Stage], limit: int | None = None) -> dict[str, bytes]:
    """Return name → the bytes around the tensors of each file of a checkpoint.

    Args:
        limit: most bytes of the files of one link, as of `birdie.artifact.kept_files.read`.
    """
    content, link = kept_files.read(reader, limit), link_in(reader)
    for stage in stages:
        if stage.files:
            with Reader(stage.path) as earlier:
                for name, data in kept_files.read(earlier, limit).items():
                    if name in stage.files:
                        content[name if link.is_folder else link.name] = data
    return content


def damage_of(path: Path, damage_of_bases: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return part → reason of all parts of a link's checkpoint that cannot be restored, after reading all of the file.

    A part is the name of a tensor, or NUL and the name of a file for the bytes around its tensors. The reason of a part
    that needs another link is that of the other one.

    Args:
        damage_of_bases: name of each link of an earlier step → what this function returned of it.

    Returns:
        that; {"": reason} if nothing can be, because the header is damaged or the file is no link.
    """
    try:
        return _damage_of(path, damage_of_bases)
    except ArtifactError as error:
        return {"": str(error)}


def _damage_of(path: Path, damage_of_bases: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    with Reader(path) as reader:
        link = link_in(reader)
        for entry in reader.entries:
            try:
                reader.read(entry)
            except ArtifactError as error:
                owner = "\0".join(entry.split("\0")[:2]) if entry.startswith("\0") else entry.partition("\0")[0]
                files = [f"\0{name}" for name, file in link.files.items() if not file.same]
                ties = [name for name in reader.names if reader.stored(name) == owner]
                parts = files if owner == kept_files.ENTRY else [*reader.groups.get(owner, [owner]), *ties]
                reasons |= dict.fromkeys(parts, str(error))
        needed = _differences(reader, None)
    same = {name for name, file in link.files.items() if file.same}
    parts = [*needed, *(f"\0{name}" for name in same)]
    if parts:
        broken = damage_of_bases.get(link.base, {})
        try:
            _, base = _base_in(path, link, needed, same)
        except ArtifactError as error:
            return reasons | dict.fromkeys(parts, broken.get("", str(error)))
        theirs = sorted(needed) + [f"\0{name}" for name in sorted(_names_in(base, link, same))]
        ours = sorted(needed) + [f"\0{name}" for name in sorted(same)]
        for part, name in zip(theirs, ours, strict=True):
            if cause := broken.get(part, broken.get("", "")):
                reasons[name] = cause
    return reasons


def _stages(reader: Reader, names: Collection[str] | None, *, files: bool) -> list[Stage]:
    """Return what is needed of the links before that of a reader; those of which nothing is needed are not opened.

    Args:
        names: its tensors that will be decoded; None: all.
        files: whether the bytes around them are needed as well.
    """
    link, where = link_in(reader), Path(reader.where)
    wanted, others = _differences(reader, names), {name for name, file in link.files.items() if files and file.same}
    stages: list[Stage] = []
    while wanted or others:
        if len(stages) == MOST:
            raise ArtifactError(f"{where} is preceded by more than {MOST:,} deltas; the chain is damaged")
        successor = link
        where, link = _base_in(where, link, wanted, others)
        others = _names_in(link, successor, others)
        stages.append(Stage(where, wanted, {name for name in others if not link.files[name].same}))
        others = {name for name in others if link.files[name].same}
        with Reader(where) as earlier:
            wanted = _differences(earlier, wanted)
    return stages[::-1]


def link_in(reader: Reader) -> Link:
    link = Link.of(reader.fields, reader.where)
    if link is None:
        raise ArtifactError(f"{reader.where} is no link of a chain; give a file of a folder that birdie compress wrote")
    return link


def _base_in(where: Path, link: Link, tensors: Collection[str] = (), files: Collection[str] = ()) -> tuple[Path, Link]:
    """Return path and facts of the base of a link, after a check that it precedes it and has tensors and files."""
    if not link.base:
        raise ArtifactError(f"{where} holds deltas and names no base; the file is damaged")
    path = where.with_name(link.base)
    if not path.exists():
        raise ArtifactError(f"{where} is a delta to {link.base}, which is missing; copy it into {where.parent}")
    try:
        with Reader(path) as other:
            base = link_in(other)
            lacking = sorted({*tensors} - {*other.names})
    except ArtifactError as error:
        raise ArtifactError(f"{where} is a delta to a link that is damaged: {error}") from error
    if base.is_named or base.order[:2] >= link.order[:2]:
        raise ArtifactError(
            f"{where} of step {link.step} is a delta to {link.base} of step {base.step}, which does not precede "
            "it; the chain is damaged"
        )
    if base.digest != link.base_digest:
        raise ArtifactError(
            f"{where} is a delta to another checkpoint than that in {link.base}; copy the chain again as a whole"
        )
    if lacking or not (others := _names_in(base, link, files)) <= base.files.keys():
        missing = (lacking or sorted(others - base.files.keys()))[0]
        raise ArtifactError(f"{where} needs {missing!r} of {link.base}, which lacks it; the chain is damaged")
    return path, base


def _names_in(base: Link, link: Link, files: Collection[str]) -> set[str]:
    """Return the names that files of a link have in its base: a checkpoint that is one file may change its name."""
    return {base.name} if files and not (base.is_folder or link.is_folder) else {*files}


def _differences(reader: Reader, names: Collection[str] | None) -> set[str]:
    """Return the names of the tensors of the base that some tensors are deltas to."""
    renamed = base_in(reader.fields)[1]
    needed = set()
    for name in dict.fromkeys(reader.stored(name) for name in (reader.names if names is None else names)):
        entry = reader.entry(name)
        parts = reader.blocks(name) if entry.kind == BLOCKS else (name,)
        if any(reader.entry(part).kind == DELTA for part in parts):
            needed.add(renamed.get(name, name))
    return needed


def _table(file: Any) -> FileTable:
    return FileTable(
        _natural(file["bytes"]),
        _checked(file["sha256"], _is_digest),
        _checked(file.get("order", []), lambda value: value == [] or is_order(value)),
        tuple(map(_natural, file.get("gaps", []))),
        _checked(file.get("same", False), lambda value: type(value) is bool),
    )


def _natural(value: Any, most: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("no number of that kind")
    return value


def _checked(value: Any, check: Callable[[Any], bool]) -> Any:
    if not check(value):
        raise ValueError("not of that kind")
    return value


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def tensors_of(link: Link, file: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensors of a file in the order in which they lie there.

    Raises:
        ArtifactError: the order is none of theirs, or there are fewer.
    """
    prefix, table = link.prefix(file), link.files[file]
    names = in_order([name for name in tensors if name.startswith(prefix)], table.order, file)
    if len(table.gaps) > len(names):
        raise ArtifactError(f"{file} has {len(table.gaps):,} tensors, of which {len(names):,} are there; it is damaged")
    return [tensors[name] for name in names[: len(table.gaps)]]
