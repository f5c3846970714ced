"""Outputs: where a file or folder may be written, checked before long work and before anything is read.

A user who names an output is asked before it replaces what is not of its kind; what birdie names itself is never a
link. docs/reliability.md has the table.
"""

import os
import re
import stat
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from birdie.errors import ConfigError, OutputError

Source = str | os.PathLike[str]
TEMPORARY = ".birdie-"
"""Beginning of the names of temporary folders (`birdie.system.files`)."""
_START = 64  # bytes that tell the kind of a file


def reason_of(error: OSError | ValueError) -> str:
    """Return why a file cannot be written; a ValueError means that its name has a NUL."""
    return (getattr(error, "strerror", None) or str(error)).lower()


def require_file(target: Source) -> Path:
    """Return `target` if a file can be written there; call it before long work."""
    target = Path(target)
    if kind := _kind_of(target, stat.S_IFREG):
        raise OutputError(f"cannot write {target}: it is {kind}; give the name of a file")
    return target


def require_folder(target: Source, *, overwrite: bool = False) -> Path:
    """Return `target` if a folder can be written there; call it before long work."""
    target = Path(target)
    if kind := _kind_of(target, stat.S_IFDIR):
        raise OutputError(f"cannot write {target}: it is {kind}; give the name of a folder")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise OutputError(
            f"cannot write {target}: the folder has content; give a new one, or --overwrite (overwrite=True) to "
            "replace the files of the same names in it"
        )
    return target


def require_own_folder(folder: Source, mark: str, *, beside: Collection[str] = (), folders: Iterable[str] = ()) -> Path:
    """Return a folder of results if birdie may write into it: a missing or empty one, or one that it has begun.

    Args:
        folder: the user's; a link to a folder is one.
        mark: name of the file by which birdie knows its folder.
        beside: names that may be there before that file is.
        folders: names of folders in it that birdie writes into, which may not be links.
    """
    folder = Path(folder)
    if folder.is_dir():
        for name in folders:
            require_folder(folder / name, overwrite=True)
        is_own = _kind_of(folder / mark, stat.S_IFREG) is None and (folder / mark).exists()
        names = {path.name for path in folder.iterdir() if not path.name.startswith(TEMPORARY)}
        if not (is_own or names <= {*beside}):
            other = min(names - {*beside})
            raise OutputError(
                f"cannot write into {folder}: it has {other!r} and no {mark}, so it is not a folder that birdie began; "
                "choose a new one"
            )
    return folder


def _kind_of(target: Path, wanted: int) -> str | None:
    """Return what is at `target`, not through a link, if something is there that is not of the kind wanted."""
    try:
        kind = stat.S_IFMT(target.lstat().st_mode)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {target}: {reason_of(error)}; choose another name") from error
    if kind == stat.S_IFLNK:
        return f"a link to {target.readlink()}"
    names = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder"}
    return None if kind == wanted else names.get(kind, "not a regular file")


def require_writable(folder: Source) -> Path:
    """Create `folder` if necessary, check that a file can be written into it, and return it, before long work."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write into {folder}: {reason_of(error)}; choose another folder") from error
    return folder


def require_path(path: object) -> None:
    """Refuse what no file can be called, and ~ for the home folder."""
    problem = f"{path!r} is not a path that a file can have; give a str or Path without NUL"
    try:
        if isinstance(path, str | os.PathLike) and b"\0" not in os.fsencode(path):
            first, slash, _ = os.fsdecode(path).partition("/")
            if not (slash and first.startswith("~")) or os.path.lexists(first):
                return
            problem = f"{os.fsdecode(path)} begins with ~, which a shell replaces only unquoted; write out the folder"
    except (TypeError, ValueError):
        pass
    raise ConfigError(problem)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files that birdie writes, and replaces without asking."""

    name: str  # with its article
    start: bytes  # pattern of the first bytes

    def has(self, path: Path) -> bool:
        """Return whether a regular file is of this kind, or empty."""
        with path.open("rb") as file:
            data = file.read(_START)
        return not data or re.match(self.start, data) is not None


_NONE = Kind("", b"$.")


def require_output(
    target: Source, inputs: Iterable[Source] = (), *, kind: Kind | None = None, overwrite: bool | None = False
) -> Path:
    """Return the path to write if the user may name `target` as an output; call it before anything is read.

    Args:
        target: a file; with `overwrite`, a link to one stands for the file.
        inputs: files that are read, which it must not replace.
        kind: of the file that will be written; None: of a kind that replaces none.
        overwrite: replace a file of any kind. None: no, and the caller has no such option that an error could name.
    """
    path = require_file_name(target)
    require_no_input(target, inputs)
    if overwrite and path.is_symlink():
        path = Path(os.path.realpath(path))
    require_file(path)
    try:
        if overwrite or not path.exists() or (kind or _NONE).has(path):
            return path
    except OSError as error:
        raise OutputError(f"cannot write {path}: {reason_of(error)}; choose another name") from error
    what = "exists" if kind is None else f"exists and is not {kind.name}"
    remedy = "remove it" if overwrite is None else "add --overwrite (overwrite=True)"
    raise OutputError(f"cannot write {path}: it {what}; choose another name, or {remedy}")


def require_output_folder(target: Source, *, overwrite: bool = False) -> Path:
    """Return the path to write if the user may name `target` as a folder to write; a link to a folder stands for it."""
    require_path(target)
    path = Path(target)
    is_link_to_one = path.is_symlink() and path.is_dir()
    return require_folder(Path(os.path.realpath(path)) if is_link_to_one else path, overwrite=overwrite)


def require_file_name(target: Source) -> Path:
    """Return `target` if its last part can be the name of a file."""
    require_path(target)
    if os.path.basename(target) in ("", os.curdir, os.pardir):  # noqa: PTH119 (a Path has lost the slash at the end)
        raise OutputError(f"cannot write {os.fspath(target)!r}: that is the name of a folder; give the name of a file")
    return Path(target)


def require_no_input(target: Source, inputs: Iterable[Source]) -> None:
    """Check that writing `target` replaces none of `inputs`."""
    for other in inputs:
        if _is_same_file(target, other):
            raise ConfigError(f"writing {target} would destroy {other}, which is read; choose another output")


def _is_same_file(one: Source, other: Source) -> bool:
    try:
        return os.path.samefile(one, other)  # noqa: PTH121 (both may be text)
    except (OSError, ValueError):  # one of them does not exist yet
        return os.path.realpath(one) == os.path.realpath(other)
