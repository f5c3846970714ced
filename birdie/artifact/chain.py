"""A chain: the checkpoints of a run in a folder of links, each restored bit for bit.

    checkpoints of a run ──extend──► run.birdie/step-00000040.birdie, … ──restore──► a checkpoint
                                                                       ──survey───► a row for each link

Every few links one stands alone, so a damaged link costs those that follow it up to the next such one. A tensor is a
difference to the link before where that takes fewer bytes than the tensor by itself; of the moments of an optimizer it
hardly ever does, which a sample shows. A link appears under its name when it is complete, and what is in a chain is not
encoded again. `birdie.artifact.links` reads them.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from torch import Tensor

from birdie.artifact.base import Base
from birdie.artifact.checkpoint_series import CheckpointParts, name_of_link, split_checkpoint
from birdie.artifact.file import File
from birdie.artifact.file_parts import join
from birdie.artifact.links import (
    MOST,
    SUFFIX,
    FileTable,
    Limits,
    Link,
    damage_of,
    decoded,
    is_link,
    other_bytes,
    read_link,
    stages_of,
    tensors_of,
)
from birdie.artifact.save import write_model
from birdie.compress import registry
from birdie.compress.difference import digest
from birdie.compress.rate.based import pays
from birdie.entropy.hints import EffortOption
from birdie.errors import ArtifactError, ConfigError, OutputError
from birdie.runtime.callbacks import Notify, no_message
from birdie.runtime.files import atomic_folder, atomic_path
from birdie.runtime.mapped import complete, releasing
from birdie.runtime.outputs import TEMPORARY, require_folder, require_output_folder, require_writable

FULL_EVERY = 10
"""Links of which one stands alone, by default."""
_GIVE = "; give a .birdie file, or the folder of a chain that birdie compress wrote"
_LEAST_BYTES = 1 << 10  # of a tensor that may be a difference; smaller ones are coded together


@dataclass(frozen=True, slots=True)
class Row:
    """A link of a chain.

    Attributes:
        name: of its file.
        step: of its checkpoint; None if the file cannot be read.
        checkpoint: name of its checkpoint, by which it is known if no step is in it; "" for others.
        bytes: of the file.
        checkpoint_bytes: of the files of its checkpoint; None if the file cannot be read.
        base: file name of the link to which it is a difference; "" if it stands alone.
        damage: why the checkpoint cannot be restored; "" if it can.
        added: whether the link was written just now.
    """

    name: str
    step: int | None
    bytes: int
    checkpoint_bytes: int | None
    base: str = ""
    damage: str = ""
    added: bool = False
    checkpoint: str = ""


class Chain:
    """The chain in a folder, which need not exist yet.

    Args:
        folder: of the links.
        full_every: so many links, one of which stands alone.
        coder: of tensors that are stored alone.
        follows_run: a checkpoint that is added says that the run went back to it, so links of later steps are removed.
        notify: called with a line for each thing that the user should know.

    Raises:
        ConfigError: `full_every` is no number of links.
        OutputError: something else than a chain is in the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        full_every: int = FULL_EVERY,
        coder: EffortOption = "fast",
        follows_run: bool = False,
        notify: Notify = no_message,
    ) -> None:
        if not 1 <= full_every <= MOST:
            raise ConfigError(f"full_every is {full_every}; one of 1 to {MOST:,} links can stand alone")
        self.folder, self._full_every, self._coder, self._notify = folder, full_every, coder, notify
        self._follows_run = follows_run
        self._damage: dict[str, Mapping[str, str]] = {}  # of links that were read, by name

    @property
    def paths(self) -> list[Path]:
        """The files of the links, sorted by name."""
        return link_paths(self.folder)

    def require_writable(self, *, overwrite: bool = False) -> None:
        """Check that links can be written into the folder: nothing but links is in it, damaged or not."""
        require_folder(self.folder, overwrite=True)
        others = sorted(
            path.name
            for path in (self.folder.iterdir() if self.folder.is_dir() else ())
            if not path.name.startswith((TEMPORARY, ".")) and (path.suffix != SUFFIX or _is_other_file(path))
        )
        if others and not overwrite:
            raise OutputError(
                f"cannot write {self.folder}: it has {others[0]!r}, which is no link of a chain; choose another "
                "folder, or add --overwrite (overwrite=True)"
            )
        require_writable(self.folder)

    def extend(
        self,
        checkpoints: Mapping[int, Path],
        *,
        named: Mapping[Path, int] | None = None,
        on_disk: Mapping[int, Path] | None = None,
        replace_others: bool = False,
    ) -> Iterator[Row]:
        """Add checkpoints that are not in the chain, in the order of their steps; yield a row for each.

        Args:
            checkpoints: step → path.
            named: path → step of checkpoints that are known by their names, as last.ckpt; one that is in the chain
                replaces that of the same name.
            on_disk: step → path of others, so that a link need not be decoded to serve as a base.
            replace_others: remove the link of another checkpoint of the same step, and all later ones; else that is
                an error.

        Raises:
            OutputError: the chain has another checkpoint of a step, or a link cannot be written.
            WeightsError: a checkpoint cannot be read.
        """
        links, on_disk = self._links(), {**(on_disk or {}), **checkpoints}
        latest: CheckpointParts | None = None
        for step, path in sorted(checkpoints.items()):
            parts = split_checkpoint(path)
            same_step = {name: link for name, link in links.items() if link.step == step and not link.is_named}
            known = {link.digest for link in same_step.values()}
            if known - {parts.digest} and not (replace_others or self._follows_run):
                raise OutputError(
                    f"{self.folder} holds another checkpoint of step {step} than {path}; choose another -o, or add "
                    "--overwrite (overwrite=True), which removes that and all later ones"
                )
            if known != {parts.digest} and (known or self._follows_run):
                self._remove([name for name, link in links.items() if link.step >= step], links)
            name = next((name for name in same_step if name in links), "")
            if not (is_known := bool(name) and self._is_sound(name, links)):
                if name or (self.folder / name_of_link(path.name)).exists():
                    self._notify(f"{self.folder / (name or name_of_link(path.name))} is damaged; it is written again")
                name = name or name_of_link(path.name)
                links.pop(name, None)
                base = self._base(step, links)
                state = self._state(base, links, on_disk, latest) if base else _State()
                links[name] = self._write(name, Link(step, path.name, parts.is_folder, {}), parts, base, links, state)
                self._damage = {other: damage for other, damage in self._damage.items() if not damage}  # may be sound
                self._damage[name] = {}
            link, latest = links[name], parts
            yield _row_of(self.folder / name, link, added=not is_known)
        for path, step in sorted((named or {}).items(), key=lambda item: (item[1], item[0].name)):
            name, is_known = self._extend_by(path, step, links, on_disk)
            yield _row_of(self.folder / name, links[name], added=not is_known)

    def _extend_by(
        self, path: Path, step: int, links: dict[str, Link], on_disk: Mapping[int, Path]
    ) -> tuple[str, bool]:
        """Write the link of a checkpoint that is known by its name; return its file's name, and whether it was there.

        It may be a difference to a link that no other could be one to: nothing ever depends on it.
        """
        parts = split_checkpoint(path)
        name = next((name for name, link in links.items() if link.is_named and link.name == path.name), "")
        if name and (links[name].step, links[name].digest) == (step, parts.digest) and self._is_sound(name, links):
            return name, True
        if name and links[name].digest != parts.digest:
            self._notify(f"{path.name} was of step {links[name].step} in {self.folder}; it is replaced")
        name = name or next(one for one in (name_of_link(path.name), path.name + SUFFIX) if one not in links)
        links.pop(name, None)
        base = self._latest(step + 1, links)
        state = self._state(base, links, on_disk, None) if base else _State()
        link = Link(step, path.name, parts.is_folder, {}, is_named=True)
        links[name] = self._write(name, link, parts, base, links, state)
        self._damage[name] = {}
        return name, False

    def remove_all(self) -> None:
        """Remove all links; the folder stays."""
        for path in self.paths:
            path.unlink()

    def _links(self) -> dict[str, Link]:
        """Return name → facts of the links that can be read."""
        links = {}
        for path in self.paths:
            try:
                links[path.name] = read_link(path)
            except ArtifactError as error:
                self._notify(f"warning: {error}; what follows it up to the next full link cannot be restored")
        return links

    def _remove(self, names: Collection[str], links: dict[str, Link]) -> None:
        """Remove links, the last first: whatever is left at any moment is a chain."""
        if not names:
            return
        steps = [links[name].step for name in names]
        for name in sorted(names, key=lambda name: links[name].order, reverse=True):
            (self.folder / name).unlink()
            links.pop(name)
            self._damage.pop(name, None)
        self._notify(f"removed {len(names)} links of steps {min(steps)} to {max(steps)} from {self.folder}")

    def _is_sound(self, name: str, links: Mapping[str, Link]) -> bool:
        """Return whether a link, and all before it to which it is a difference, can be restored; each is read once."""
        unknown = []
        while name and name not in self._damage:
            unknown.append(name)
            name = links[name].base if name in links else ""
        for name in reversed(unknown):
            self._damage[name] = damage_of(self.folder / name, self._damage)
            if self._damage[name]:
                self._notify(f"warning: {next(iter(self._damage[name].values()))}")
        return not self._damage[unknown[0] if unknown else name]

    def _base(self, step: int, links: Mapping[str, Link]) -> str:
        """Return the link to which the one of a step is a difference; "" if it stands alone."""
        name = self._latest(step, links)
        if not name:
            return ""
        depth, one = 1, name
        while (base := links[one].base) in links and links[base].step < links[one].step:
            depth, one = depth + 1, base
        return name if depth < self._full_every else ""

    def _latest(self, step: int, links: Mapping[str, Link]) -> str:
        """Return the last link before a step; "" if there is none, or it is damaged."""
        earlier = {name: link for name, link in links.items() if link.step < step and not link.is_named}
        name = max(earlier, key=lambda name: earlier[name].step, default="")
        return name if name and self._is_sound(name, links) else ""

    def _state(
        self, name: str, links: Mapping[str, Link], on_disk: Mapping[int, Path], latest: CheckpointParts | None
    ) -> "_State":
        """Return the content of a link: that of its checkpoint, if it is still on disk, else decoded."""
        link = links[name]
        if latest is None or latest.digest != link.digest:
            path = on_disk.get(link.step)
            latest = None if path is None else split_checkpoint(path)
        if latest is not None and latest.digest == link.digest:
            other = {file: parts.other for file, parts in latest.files.items()}
            return _State(latest.tensors, other, latest.paths)
        path, stages = self.folder / name, stages_of(self.folder / name)
        with File(path, registry.decoder, decoded(stages)) as file:
            file.require()
            return _State(file.decode_all(), other_bytes(file, stages), [])

    def _write(
        self, name: str, link: Link, parts: CheckpointParts, base: str, links: Mapping[str, Link], earlier: "_State"
    ) -> Link:
        """Write the link of a checkpoint, as a difference where that is smaller, and return its facts.

        Args:
            name: of its file.
            link: its facts, without files and base.
            parts: of the checkpoint.
            base: name of the link that it may be a difference to; "" if there is none.
            links: name → facts of the links of the chain.
            earlier: content of the base.
        """
        files, other = {}, {}
        is_one = bool(base) and not (parts.is_folder or links[base].is_folder)  # which may have another name each time
        for file, one in parts.files.items():
            known = earlier.other.values() if is_one else [earlier.other.get(file)]
            same = one.other in known
            files[file] = FileTable(one.size, one.sha256, tuple(parts.order(file)), one.gaps, same)
            if not same:
                other[file] = one.other
        link = replace(link, files=files)
        with complete([*parts.paths, *earlier.paths]), releasing(parts.paths):
            counterparts = {
                other: earlier.tensors[other]
                for tensor, other in self._pairs(parts.tensors, earlier.tensors, by_content=link.is_named).items()
                if pays(parts.tensors[tensor], earlier.tensors[other])
            }
            if counterparts or len(other) < len(files):
                link = replace(link, base=base, base_digest=links[base].digest)
            write_model(
                parts.tensors,
                self.folder / name,
                lossless=True,
                base=Base.of(base, counterparts, earlier.paths) if counterparts else None,
                coder=self._coder,
                files=other,
                link=link.to_json(),
            )
        return link

    @staticmethod
    def _pairs(tensors: Mapping[str, Tensor], earlier: Mapping[str, Tensor], *, by_content: bool) -> Mapping[str, str]:
        """Return tensor → the one before that it may be a difference to: of its name, or also of other names."""
        if not by_content:
            return {name: name for name, one in tensors.items() if name in earlier and one.nbytes >= _LEAST_BYTES}
        parts, renamed = Base.of("", earlier).matching(tensors)  # a state dict alone, or in another file
        pairs = {name: renamed.get(name, name) for name in parts}
        return {
            name: other
            for name, other in pairs.items()
            if tensors[name].nbytes >= _LEAST_BYTES or digest(tensors[name]) == digest(earlier[other])
        }


@dataclass(frozen=True, slots=True)
class _State:
    """Content of the checkpoint before, to which differences are stored; empty if a link stands alone.

    Attributes:
        tensors: name → tensor.
        other: name → bytes around the tensors of a file.
        paths: files that are mapped.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    other: Mapping[str, bytes] = field(default_factory=dict)
    paths: Collection[Path] = ()


def link_paths(folder: Path) -> list[Path]:
    """Return the links in a folder, unread, sorted by name; none if it is none."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("."))


def _is_other_file(path: Path) -> bool:
    """Return whether a .birdie file is sound and no link."""
    try:
        return not is_link(path)
    except ArtifactError:
        return False


def _row_of(path: Path, link: Link, *, added: bool = False) -> Row:
    checkpoint = link.name if link.is_named else ""
    return Row(path.name, link.step, path.stat().st_size, link.bytes, link.base, added=added, checkpoint=checkpoint)


def find_link(folder: Path, step: int) -> Path:
    """Return the link of a step: that of the checkpoint with the number, or else of the one known by its name.

    Raises:
        ArtifactError: there is none that can be read, or several are known by their names.
    """
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


def survey(folder: Path) -> list[Row]:
    """Return a row for each link of a chain, in the order of steps, after reading all of every file.

    Raises:
        ArtifactError: the folder has no link.
    """
    rows: dict[str, Row] = {}
    orders: dict[str, tuple[int, bool, str]] = {}
    for path in link_paths(folder):
        row = Row(path.name, None, path.stat().st_size, None)
        try:
            row = _row_of(path, link := read_link(path))
            orders[path.name] = link.order
        except ArtifactError as error:
            row = replace(row, damage=str(error))
        rows[path.name] = row
    if not rows:
        raise ArtifactError(f"{folder} holds no link of a chain{_GIVE}")
    ordered = sorted(rows.values(), key=lambda row: orders.get(row.name, (-1, False, row.name)))
    damage: dict[str, Mapping[str, str]] = {}  # a base precedes what depends on it
    for index, row in enumerate(ordered):
        if row.step is not None:
            damage[row.name] = damage_of(folder / row.name, damage)
            ordered[index] = replace(row, damage=next(iter(damage[row.name].values()), ""))
    return ordered


def restore(path: Path, target: Path, *, overwrite: bool = False, **limits: Unpack[Limits]) -> int:
    """Write the checkpoint of a link as it was, bit for bit, and return its bytes.

    Args:
        path: of the link; its chain is beside it.
        target: the folder of the checkpoint; of a checkpoint that is a file, that file, or a folder for it.
        overwrite: let a folder have content: files of the same names are replaced, and all others stay.
        limits: of each link of the chain.

    Raises:
        ArtifactError: a link is damaged or missing, or what it decodes to does not have the digests of the checkpoint.
        OutputError: the target cannot be written.
    """
    link, stages = read_link(path), stages_of(path)
    inputs = [path, *(stage.path for stage in stages)]
    with File(path, registry.decoder, decoded(stages, **limits)) as file:
        file.require(limits.get("max_bytes"), limits.get("max_operations"))
        other = other_bytes(file, stages, limits.get("max_bytes"))
        tensors = file.decode_all(workers=limits.get("workers"))
    parts = {name: (tensors_of(link, name, tensors), other.get(name, b"")) for name in link.files}
    for name, (some, rest) in parts.items():
        table = link.files[name]
        if sum(table.gaps) > len(rest) or sum(tensor.nbytes for tensor in some) + len(rest) != table.bytes:
            raise ArtifactError(
                f"the parts of {name} in {path} do not add up to its {table.bytes:,} bytes; it is damaged"
            )

    def write(folder: Path) -> None:
        for name, (some, rest) in parts.items():
            file = folder / name if link.is_folder else folder
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                digest = join(out, some, link.files[name].gaps, rest)
            if digest != link.files[name].sha256:
                raise ArtifactError(
                    f"{name} of {path} does not come back with the digest that it had; the chain was changed, so take "
                    "another copy"
                )

    if link.is_folder:
        target = require_output_folder(target, overwrite=overwrite)
        with atomic_folder(target, overwrite=overwrite, inputs=inputs) as new:
            write(new)
    else:
        with atomic_path(target) as new:
            write(new)
    return link.bytes
