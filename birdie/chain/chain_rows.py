"""A chain as a table: a row for each link, and why a checkpoint cannot be restored.

What is damaged is named once: links that need it have the same reason. `survey` reads all of every file, whose
checksums tell most damage; `verify` also decodes each link and compares digests.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from birdie.artifact.links import Link, damage_of, link_paths, read_link
from birdie.chain.link_content import LinkContent, content_after, read_content, require_digests, steadily
from birdie.errors import ArtifactError

_GIVE = "; give a .birdie file, or the folder of a chain that birdie compress wrote"


@dataclass(frozen=True, slots=True)
class Row:
    """A link of a chain.

    Attributes:
        name: of its file.
        step: of its checkpoint; None if the file cannot be read.
        checkpoint: name of its checkpoint, by which it is known if no step is in it; "" for others.
        bytes: of the file.
        checkpoint_bytes: of the files of its checkpoint; None if the file cannot be read.
        base: file name of the link to which it is a delta; "" if it stands alone.
        needed_by: file names of the links that cannot be restored without it.
        damage: why the checkpoint cannot be restored; "" if it can.
        added: whether the link was written just now.
        kept: whether its checkpoint is no longer where the others are.
    """

    name: str
    step: int | None
    bytes: int
    checkpoint_bytes: int | None
    base: str = ""
    damage: str = ""
    added: bool = False
    checkpoint: str = ""
    needed_by: tuple[str, ...] = ()
    kept: bool = False

    @classmethod
    def of(cls, path: Path, link: Link, *, added: bool = False, kept: bool = False) -> Self:
        """Return the row of a link that was read."""
        checkpoint, size = link.name if link.is_named else "", path.stat().st_size
        return cls(path.name, link.step, size, link.bytes, link.base, added=added, checkpoint=checkpoint, kept=kept)


def find_link(folder: Path, step: int) -> Path:
    """Return the link of a step: that of the checkpoint with the number, or else of the one known by its name.

    Raises:
        ArtifactError: there is none that can be read, or several are known by their names.
    """
    return steadily(folder, lambda: _find(folder, step))


def _find(folder: Path, step: int) -> Path:
    steps, problem, named = [], "", []
    for path in link_paths(folder):
        try:
            link = read_link(path)
        except ArtifactError as error:
            problem = f"; {error}"
            continue
        steps.append(link.step)
        if link.step == step and not link.is_named:
            return path
        named += [path] if link.step == step else []
    if len(named) == 1:
        return named[0]
    if named:
        raise ArtifactError(
            f"{named[0].name} and {named[1].name} of {folder} are both of step {step}; give one of them"
        )
    if not steps:
        raise ArtifactError(f"{folder} holds no link of a chain{problem or _GIVE}")
    raise ArtifactError(
        f"{folder} has no checkpoint of step {step}, but {len(steps)} of steps {min(steps)} to {max(steps)}{problem}"
    )


def dependents(bases: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return name of a link → those that need it, directly or not, from name → base, in the order of a chain."""
    needing: dict[str, list[str]] = {name: [] for name in bases}
    for name, base in bases.items():
        seen = {name}
        while base in needing and base not in seen:
            needing[base].append(name)
            seen.add(base)
            base = bases[base]
    return {name: tuple(others) for name, others in needing.items()}


def survey(folder: Path) -> list[Row]:
    """Return a row for each link of a chain, in the order of steps, after reading all of every file.

    Raises:
        ArtifactError: the folder has no link.
    """
    return steadily(folder, lambda: _survey(folder, damage_of), _is_whole)


def verify(folder: Path) -> list[Row]:
    """Return the rows of `survey`, after decoding every link and comparing it with the digests of its checkpoint."""
    return steadily(folder, lambda: _survey(folder, _Decoded(folder)), _is_whole)


def _is_whole(rows: list[Row]) -> bool:
    return not any(row.damage for row in rows)


def _survey(folder: Path, damage: Callable[[Path, Mapping[str, Mapping[str, str]]], dict[str, str]]) -> list[Row]:
    rows: dict[str, Row] = {}
    orders: dict[str, tuple[int, bool, str]] = {}
    for path in link_paths(folder):
        row = Row(path.name, None, path.stat().st_size if path.exists() else 0, None)
        try:
            row = Row.of(path, link := read_link(path))
            orders[path.name] = link.order
        except (ArtifactError, FileNotFoundError) as error:
            row = replace(row, damage=str(error))
        rows[path.name] = row
    if not rows:
        raise ArtifactError(f"{folder} holds no link of a chain{_GIVE}")
    ordered = sorted(rows.values(), key=lambda row: orders.get(row.name, (-1, False, row.name)))
    needed_by = dependents({row.name: row.base for row in ordered})
    known: dict[str, Mapping[str, str]] = {}  # a base precedes what depends on it
    for index, row in enumerate(ordered):
        if row.step is not None:
            known[row.name] = damage(folder / row.name, known)
            row = replace(row, damage=next(iter(known[row.name].values()), ""))
        else:
            known[row.name] = {"": row.damage}
        ordered[index] = replace(row, needed_by=needed_by[row.name])
    return ordered


class _Decoded:
    """Damage of links, each decoded once, forward from one that stands alone; of two checkpoints the content is kept.

    Args:
        folder: of the chain.
    """

    def __init__(self, folder: Path) -> None:
        self._bases: dict[str, str] = {}  # of links that are not yet decoded
        self._contents: dict[str, tuple[Link, LinkContent]] = {}
        for path in link_paths(folder):
            with suppress(ArtifactError):  # the survey says so
                self._bases[path.name] = read_link(path).base

    def __call__(self, path: Path, damage_of_bases: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """Return what `damage_of` returns, or also that the digests are others."""
        damage = damage_of(path, damage_of_bases)
        base = self._bases.pop(path.name, "")
        if not damage:
            try:
                damage = self._compare(path, base)
            except ArtifactError as error:
                damage = {"": str(error)}
        if base not in self._bases.values():
            self._contents.pop(base, None)
        return damage

    def _compare(self, path: Path, base: str) -> dict[str, str]:
        if base and base not in self._contents:  # which is damaged where this link does not need it
            link, content = read_content(path)
        else:
            base_link, earlier = self._contents.get(base, (None, LinkContent()))
            link, content = read_link(path), content_after(path, earlier, base_link)
        require_digests(link, content, path)
        if path.name in self._bases.values():
            self._contents[path.name] = link, content
        return {}
