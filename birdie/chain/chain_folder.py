"""A chain: the checkpoints of a run in a folder of links, each restored bit for bit.

    checkpoints of a run ──extend──► run.birdie/step-00000040.birdie, … ──restore──► a checkpoint
                                                                       ──survey───► a row for each link

Every few links one stands alone, so a damaged link costs those that follow it up to the next such one. A tensor is a
delta to the link before where that takes fewer bytes than the tensor by itself; of the moments of an optimizer it
hardly ever does, which a sample shows. A link appears under its name when it is complete and what it decodes to has the
digests of its checkpoint; what is in a chain is not encoded again. One process at a time writes into a chain.
`birdie.artifact.links` reads links, `birdie.chain.chain_rows` lists them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from birdie.artifact.container import MAGIC
from birdie.artifact.links import MOST, SUFFIX, FileTable, Link, damage_of, is_link, link_paths, read_link
from birdie.chain.chain_rows import Row
from birdie.chain.checkpoint_series import CheckpointParts, name_of_link, split_checkpoint
from birdie.chain.link_content import LinkContent, read_content, require_digests
from birdie.chain.link_encoding import begins, content_of, write_link
from birdie.entropy.hints import EffortOption
from birdie.errors import ArtifactError, ChangedError, ConfigError, OutputError
from birdie.system.callbacks import Notify, no_message
from birdie.system.locks import locked_folder
from birdie.system.mapped import complete, require_complete
from birdie.system.outputs import TEMPORARY, require_folder, require_writable

FULL_EVERY = 10
"""Links of which one stands alone, by default."""


class Chain:
    """The chain in a folder, which need not exist yet.

    Args:
        folder: of the links.
        full_every: so many links, one of which stands alone.
        effort: of tensors that are stored alone.
        follows_run: a checkpoint that is added says that the run went back to it, so links of later steps are removed.
        notify: called with a line for each thing that the user should know.

    Attributes:
        waiting: checkpoint that changed while it was read, and is not in the chain → why.

    Raises:
        ConfigError: `full_every` is no number of links.
        OutputError: something else than a chain is in the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        full_every: int = FULL_EVERY,
        effort: EffortOption = "fast",
        follows_run: bool = False,
        notify: Notify = no_message,
    ) -> None:
        if not 1 <= full_every <= MOST:
            raise ConfigError(f"full_every is {full_every}; one of 1 to {MOST:,} links can stand alone")
        self.folder, self._full_every, self._effort, self._notify = folder, full_every, effort, notify
        self._follows_run = follows_run
        self._damage: dict[str, Mapping[str, str]] = {}  # of links that were read, by name
        self.waiting: dict[Path, str] = {}

    @property
    def paths(self) -> list[Path]:
        """The files of the links, in the order of the numbers in their names."""
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

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Link]]:
        """Keep the chain for this process, and yield name → facts of its links; a folder that stays empty goes."""
        is_new = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with locked_folder(self.folder, self._notify):
                yield self._links()
        finally:
            if is_new and self.folder.is_dir() and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def extend(
        self,
        checkpoints: Mapping[int, Path],
        *,
        named: Mapping[Path, int] | None = None,
        on_disk: Mapping[int, Path] | None = None,
        replace_others: bool = False,
    ) -> Iterator[Row]:
        """Add checkpoints that are not in the chain, in the order of their steps; yield a row for each.

        One that another process writes to meanwhile is left for later (`waiting`). The link of one that was read before
        it was complete is replaced, if no other link needs it.

        Args:
            checkpoints: step → path.
            named: path → step of checkpoints that are known by their names, as last.ckpt; one that is in the chain
                replaces that of the same name.
            on_disk: step → path of others, so that a link need not be decoded to serve as a base.
            replace_others: remove the link of another checkpoint of the same step, and all later ones; else that is
                an error.

        Raises:
            ConfigError: another process writes into the chain.
            OutputError: the chain has another checkpoint of a step, or is of another run, or a link cannot be written.
            WeightsError: a checkpoint cannot be read.
        """
        with self._locked() as links:
            on_disk = {**(on_disk or {}), **checkpoints}
            if not (replace_others or self._follows_run):
                self._require_same_run(checkpoints, links)
            latest: CheckpointParts | None = None
            confirmed = False  # a checkpoint of the run is known to be in the chain
            for step, path in sorted(checkpoints.items()):
                try:
                    parts = split_checkpoint(path)
                    self._make_room(step, parts, links, confirmed=confirmed, replace_others=replace_others)
                    row = self._add(step, parts, links, on_disk, latest)
                except ChangedError as error:
                    self.waiting[path] = str(error)
                    continue
                latest, confirmed = parts, confirmed or not row.added
                yield row
            for path, step in sorted((named or {}).items(), key=lambda item: (item[1], item[0].name)):
                try:
                    yield self._add_named(step, split_checkpoint(path), links, on_disk)
                except ChangedError as error:
                    self.waiting[path] = str(error)

    def others(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of links that are not among `rows`: of checkpoints that the chain alone still has."""
        known = {row.name for row in rows}
        links = [(name, link) for name, link in self._links().items() if name not in known]
        return [Row.of(self.folder / name, link, kept=True) for name, link in links]

    def drop(self, choose: Callable[[Mapping[str, Link]], Collection[str]]) -> list[Row]:
        """Remove links; those that are deltas to them are written anew first. Return rows of what is removed.

        Args:
            choose: name → facts of the links that can be read → the names of those that go.

        Raises:
            ConfigError: another process writes into the chain, or nothing would remain of it.
            ArtifactError: a link that stays needs one that is damaged.
        """
        with self._locked() as links:
            names = sorted(choose(links), key=lambda name: links[name].order)
            if links and not links.keys() - {*names}:
                raise ConfigError(f"no checkpoint of {self.folder} would remain; remove the folder instead")
            removed = [Row.of(self.folder / name, links[name]) for name in names]
            kept = {name: link for name, link in links.items() if name not in names}
            for name in sorted(kept, key=lambda name: kept[name].order):
                if kept[name].base in names:
                    self._rebase(name, kept)
            self._remove(names, links)
            return removed

    def _rebase(self, name: str, kept: dict[str, Link]) -> None:
        """Write a link anew, as a delta to the last one before it that stays."""
        path = self.folder / name
        link, content = read_content(path)
        require_digests(link, content, path)
        preceding = {other: one for other, one in kept.items() if one.order < link.order and other != name}
        base = self._latest(link.step + 1, preceding) if link.is_named else self._base(link.step, preceding)
        earlier = read_content(self.folder / base)[1] if base else LinkContent()
        known = (base, kept[base]) if base else None
        bare = replace(link, base="", base_digest="")
        kept[name] = write_link(path, bare, content, known, earlier, self._effort)
        self._damage[name] = {}

    def remove_all(self) -> None:
        """Remove all links; the folder stays."""
        if self.paths:
            with locked_folder(self.folder, self._notify):
                for path in self.paths:
                    path.unlink()

    def _require_same_run(self, checkpoints: Mapping[int, Path], links: Mapping[str, Link]) -> None:
        """Check that checkpoints may be of the run of the chain, if none of their steps is in it: all are later."""
        steps = {link.step for link in links.values() if not link.is_named}
        if steps and checkpoints and not steps & checkpoints.keys() and min(checkpoints) < max(steps):
            first = checkpoints[min(checkpoints)]
            raise OutputError(
                f"{self.folder} holds checkpoints of steps {min(steps)} to {max(steps)}, and neither {first} nor one "
                "after it; choose another -o, or add --overwrite (overwrite=True) if all are of one run"
            )

    def _make_room(
        self, step: int, parts: CheckpointParts, links: dict[str, Link], *, confirmed: bool, replace_others: bool
    ) -> None:
        """Remove what the link of a checkpoint replaces: others of its step, if that was asked for or was too early."""
        same_step = {name: link for name, link in links.items() if link.step == step and not link.is_named}
        others = [name for name, link in same_step.items() if link.digest != parts.digest]
        if others and not (replace_others or self._follows_run):
            if not all(self._is_early(name, parts, links, confirmed=confirmed) for name in others):
                raise OutputError(
                    f"{self.folder} holds another checkpoint of step {step} than {parts.path}; choose another -o, or "
                    "add --overwrite (overwrite=True), which removes that and all later ones"
                )
            self._notify(f"{parts.path.name} has changed since it was added to {self.folder}; it is added again")
            self._remove(others, links)
        elif others or (self._follows_run and not same_step):
            self._remove([name for name, link in links.items() if link.step >= step], links)

    def _is_early(self, name: str, parts: CheckpointParts, links: Mapping[str, Link], *, confirmed: bool) -> bool:
        """Return whether a link was written before its checkpoint was complete, and nothing depends on it.

        The checkpoint has changed since, and either begins as the link's does or is known to be of the same run.
        """
        written = (self.folder / name).stat().st_mtime_ns
        is_needed = any(link.base == name for link in links.values())
        changed = max(file.status.st_mtime_ns for file in parts.files.values())
        return not is_needed and changed > written and (confirmed or begins(parts, links[name]))

    def _add(
        self,
        step: int,
        parts: CheckpointParts,
        links: dict[str, Link],
        on_disk: Mapping[int, Path],
        latest: CheckpointParts | None,
    ) -> Row:
        """Return the row of a checkpoint with a number, after writing its link if there is none that is sound."""
        same = [
            name
            for name, link in links.items()
            if (link.step, link.digest, link.is_named) == (step, parts.digest, False)
        ]
        for name in same:
            if self._is_sound(name, links):
                return Row.of(self.folder / name, links[name])
        name = self._name(parts.path.name, same, links)
        base = self._base(step, links)
        self._encode(name, Link(step, parts.path.name, parts.is_folder, {}), parts, base, links, on_disk, latest)
        return Row.of(self.folder / name, links[name], added=True)

    def _add_named(self, step: int, parts: CheckpointParts, links: dict[str, Link], on_disk: Mapping[int, Path]) -> Row:
        """Return the row of a checkpoint that is known by its name, after writing its link if it is another.

        It may be a delta to a link that no other could be one to: nothing ever depends on it.
        """
        path = parts.path
        name = next((name for name, link in links.items() if link.is_named and link.name == path.name), "")
        if name and (links[name].step, links[name].digest) == (step, parts.digest) and self._is_sound(name, links):
            return Row.of(self.folder / name, links[name])
        if name and links[name].digest != parts.digest:
            self._notify(f"{path.name} was of step {links[name].step} in {self.folder}; it is replaced")
        name = name or self._name(path.name, [], links)
        base, link = self._latest(step + 1, links), Link(step, path.name, parts.is_folder, {}, is_named=True)
        self._encode(name, link, parts, base, links, on_disk, None)
        return Row.of(self.folder / name, links[name], added=True)

    def _name(self, checkpoint: str, damaged: Collection[str], links: Mapping[str, Link]) -> str:
        """Return the name of the file of a new link: one that is free, or that of its link which is damaged."""
        first = name_of_link(checkpoint)
        stem = first.removesuffix(SUFFIX)
        names = [*damaged, first, checkpoint + SUFFIX, *(f"{stem}-{number}{SUFFIX}" for number in range(2, MOST))]
        for name in names:
            path = self.folder / name
            if name in damaged or (name not in links and _is_broken(path)):
                self._notify(f"{path} is damaged; it is written again")
                return name
            if not path.exists() and not path.is_symlink():
                if name != first:
                    self._notify(f"{self.folder / first} is of another checkpoint; {checkpoint} is in {name}")
                return name
        raise OutputError(f"{self.folder} has other files of all names for {checkpoint}; choose another folder")

    def _links(self) -> dict[str, Link]:
        """Return name → facts of the links that can be read."""
        links = {}
        for path in self.paths:
            try:
                links[path.name] = read_link(path)
            except ArtifactError as error:
                if not _is_other_file(path):
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
        count = f"{len(names)} links of steps {min(steps)} to {max(steps)}"
        self._notify(f"removed {count if len(names) > 1 else f'the link of step {steps[0]}'} from {self.folder}")

    def _is_sound(self, name: str, links: Mapping[str, Link]) -> bool:
        """Return whether a link, and all before it to which it is a delta, can be restored; each is read once."""
        unknown = []
        while name and name not in self._damage and (self.folder / name).exists():
            unknown.append(name)
            name = links[name].base if name in links else ""
        causes = {reason for known in self._damage.values() for reason in known.values()}
        for name in reversed(unknown):
            self._damage[name] = damage_of(self.folder / name, self._damage)
            reason = next(iter(self._damage[name].values()), "")
            if reason and reason not in causes:
                self._notify(f"warning: {reason}")
                causes.add(reason)
        return not self._damage[unknown[0] if unknown else name]

    def _base(self, step: int, links: Mapping[str, Link]) -> str:
        """Return the link to which the one of a step is a delta; "" if it stands alone."""
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

    def _encode(
        self,
        name: str,
        link: Link,
        parts: CheckpointParts,
        base: str,
        links: dict[str, Link],
        on_disk: Mapping[int, Path],
        latest: CheckpointParts | None,
    ) -> None:
        """Write the link of a checkpoint and note it in `links`; `base` may be the name of its base."""
        files = {
            file: FileTable(one.size, one.sha256, parts.order(file), one.gaps) for file, one in parts.files.items()
        }
        known = (base, links[base]) if base else None
        link, content = replace(link, files=files), content_of(parts)
        earlier = self._earlier(base, links, on_disk, latest) if base else LinkContent()
        try:
            links[name] = write_link(self.folder / name, link, content, known, earlier, self._effort)
        except ChangedError:
            with complete((), content.since):
                require_complete()
            if not earlier.paths:
                raise
            earlier = read_content(self.folder / base)[1]  # it was the checkpoint before that changed
            links[name] = write_link(self.folder / name, link, content, known, earlier, self._effort)
        self._damage = {other: damage for other, damage in self._damage.items() if not damage}  # may be sound
        self._damage[name] = {}

    def _earlier(
        self, name: str, links: Mapping[str, Link], on_disk: Mapping[int, Path], latest: CheckpointParts | None
    ) -> LinkContent:
        """Return the content of a link: that of its checkpoint, if it is still on disk, else decoded."""
        link = links[name]
        if latest is None or latest.digest != link.digest:
            path = on_disk.get(link.step)
            try:
                latest = None if path is None else split_checkpoint(path)
            except ChangedError:
                latest = None
        if latest is not None and latest.digest == link.digest:
            return content_of(latest)
        return read_content(self.folder / name)[1]


def _is_broken(path: Path) -> bool:
    """Return whether a file that birdie wrote is damaged, by its own checksum."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        if not MAGIC.startswith(file.read(len(MAGIC))):  # an empty one may be the rest of its own
            return False
    try:
        is_link(path)
    except ArtifactError:
        return True
    return False


def _is_other_file(path: Path) -> bool:
    """Return whether a file of a link's name is none: another's, or a sound .birdie file of another kind."""
    try:
        return not is_link(path)
    except ArtifactError:
        return not _is_broken(path)
