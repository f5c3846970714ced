"""Writes of files and folders: every file that birdie leaves on disk is written with these functions.

What is written lies in a temporary folder beside its target, is flushed to the disk, and is renamed to the target. So a
reader sees the old bytes or the new bytes, and a crash, a full disk or Ctrl-C never leaves a partial file under the
target's name:

    .birdie-INODE-XXXXXXXX.part/    for this user alone, locked by the process that writes
    └── NAME                        what will be renamed to the target

Whoever next writes beside it removes what a dead process left. A name alone proves nothing: such a folder can come out
of an archive. Its name has to be the number that the file system gave it, which a copy does not keep, and its lock must
be free. No link is followed at a target: a user who names one is asked (`require_output`), others are refused.

Files that are executed when they are loaded, such as compiled code, are read with `read_trusted` and written with
`write_trusted`.
"""

import errno
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from birdie.errors import ConfigError, OutputError
from birdie.runtime.locks import NO_LINK, open_locked

_PREFIX, _SUFFIX = ".birdie-", ".part"
Source = str | os.PathLike[str]
_START = 64  # bytes that tell the kind of a file
_OWN_NAME = re.compile(r"\.birdie-(\d+)-\w+\.part")


def _reason(error: OSError | ValueError) -> str:
    """Return why a file cannot be written; a ValueError means that its name has a NUL."""
    return (getattr(error, "strerror", None) or str(error)).lower()


@contextmanager
def atomic_path(target: Source, *, flush: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `target` on success, and is removed on any error.

    An existing file keeps its permissions and, as far as this user may set them, its owner and group.

    Args:
        target: the file; its folder is created if necessary.
        flush: False for a file that may be lost with the power, as its content is checked when it is read.

    Raises:
        OutputError: `target` is a link or no file, its folder is read-only, or the disk is full.
    """
    target = require_file(target)
    with _beside(target, flush=flush) as temporary:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield temporary
        if flush:
            _flush(temporary)
        if target.exists():
            _copy_permissions(target, temporary)
        temporary.replace(target)


@contextmanager
def atomic_folder(
    target: Source, *, overwrite: bool = False, replace: bool = False, inputs: Iterable[Source] = ()
) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `target` on success and is removed on any error.

    Args:
        target: a folder that does not exist or is empty.
        overwrite: let it have content: files of the new folder then replace those of the same names, one by one, and
            all others stay.
        replace: let it have content, all of which is replaced: the caller knows that birdie wrote it.
        inputs: files that were read, which are not replaced.

    Raises:
        OutputError: `target` has content, is a link or no folder, or cannot be written.
        ConfigError: a file of the new folder would replace one of `inputs`.
    """
    target = require_folder(target, overwrite=overwrite or replace)
    with _beside(target) as temporary:
        temporary.mkdir()
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _flush(path)
        if overwrite and target.is_dir():
            _merge(temporary, target, inputs)
            return
        if target.is_dir():
            _copy_permissions(target, temporary)
            if replace:
                old = "old" if target.name != "old" else "older"
                target.replace(temporary.with_name(old))  # until the next line the target is missing
        temporary.replace(target)  # fails if somebody has written there meanwhile


@contextmanager
def _beside(target: Path, *, flush: bool = True) -> Iterator[Path]:
    """Yield a path for the successor of `target`, which the body renames; an OSError becomes an OutputError."""
    advice = "choose a folder that can be written"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(target.parent) as folder:
            advice = "nothing was changed there"
            yield folder / target.name
            advice = "it is written, but may be lost if the machine stops now"
            if flush:
                _flush(target.parent)  # the new name must survive a power cut, too
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {target}: {_reason(error)}; {advice}") from error


def _merge(new: Path, target: Path, inputs: Iterable[Source]) -> None:
    """Move the files of `new` into `target`, in place of those of the same names; check all before the first."""
    names = [path.relative_to(new) for path in sorted(new.rglob("*")) if not path.is_dir()]
    for name in names:
        _require_no_input(target / name, inputs)
        for folder in name.parents:
            require_folder(target / folder, overwrite=True)
        if (target / name).is_dir() and not (target / name).is_symlink():
            raise OutputError(f"cannot write {target / name}: it is a folder; choose another folder")
    for name in names:
        (target / name.parent).mkdir(parents=True, exist_ok=True)
        (new / name).replace(target / name)  # a link is replaced, not followed
        _flush(target / name.parent)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a folder in `parent` that only this process uses; it is removed at the end, or after the process died.

    Raises:
        OSError: it cannot be created.
    """
    remove_abandoned(parent)
    folder, lock = _new_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _new_folder(parent: Path) -> tuple[Path, int | None]:
    """Return a temporary folder named by its inode, and its lock; None where the system has no locks."""
    while True:
        created = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX, dir=parent))
        try:
            folder = created.with_name(f"{_PREFIX}{created.lstat().st_ino}-{created.name.removeprefix(_PREFIX)}")
            created.replace(folder)
            return folder, open_locked(folder, os.O_RDONLY)
        except (FileNotFoundError, BlockingIOError):  # removed, before it was locked, by one who took it for abandoned
            continue
        except OSError:  # nobody will remove it after a crash
            return folder, None


def remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders in `parent` that dead processes of this user left; those in use are kept."""
    for folder in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):  # in use, gone, or nobody can know
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
                continue
            number = _OWN_NAME.fullmatch(folder.name)
            if number is None or int(number[1]) != status.st_ino:
                folder.rmdir()  # its process died before it had its name, and it is empty; or it is somebody else's
                continue
            lock = open_locked(folder, os.O_RDONLY)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def remove_folder(folder: Path) -> None:
    """Remove `folder` as a unit: a process that dies meanwhile leaves all of it, or nothing under its name.

    Raises:
        OutputError: it cannot be removed.
    """
    try:
        with temporary_folder(folder.parent) as temporary:
            folder.replace(temporary / folder.name)
            _flush(folder.parent)
    except OSError as error:
        raise OutputError(f"cannot remove {folder}: {_reason(error)}; remove it by hand") from error


def open_append(path: Path) -> BinaryIO:
    """Open a file that birdie names itself, such as a log, to write at its end; it is created if necessary.

    Raises:
        OutputError: it is a link or no file, has another name as well, or cannot be written.
    """
    require_file(path)
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, 0o666)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {_reason(error)}; remove it, or choose another folder") from error
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
        raise OutputError(f"cannot write {path}: it is a second name of another file; remove it")
    return os.fdopen(file, "ab", buffering=0)


def _flush(path: Path) -> None:
    """Write a file or folder through to the disk."""
    if path.is_symlink() or not (path.is_dir() or path.is_file()) or (path.is_dir() and sys.platform == "win32"):
        return
    file = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(file)
    except OSError as error:
        if not (path.is_dir() and error.errno == errno.EINVAL):  # some file systems cannot flush a folder
            raise
    finally:
        os.close(file)


def _copy_permissions(source: Path, target: Path) -> None:
    """Give `target` the permissions of `source`, and its owner and group as far as this user may."""
    status, mode = source.stat(), source.stat().st_mode & 0o777
    if hasattr(os, "chown"):
        for owner in (status.st_uid, -1):
            with suppress(OSError):
                os.chown(target, owner, status.st_gid)
                break
        if target.stat().st_gid != status.st_gid:  # another group gets no more than everybody
            mode &= ~0o070 | (mode & 0o007) << 3
    target.chmod(mode)


def write_bytes(target: Source, data: bytes | memoryview) -> None:
    """Write `data` to `target` atomically.

    Raises:
        OutputError: `target` cannot be written.
    """
    with atomic_path(target) as path:
        path.write_bytes(data)


def require_file(target: Source) -> Path:
    """Return `target` if a file can be written there; call it before long work.

    Raises:
        OutputError: `target` exists and is no regular file; a link is none.
    """
    target = Path(target)
    if kind := _kind_of(target, stat.S_IFREG):
        raise OutputError(f"cannot write {target}: it is {kind}; give the name of a file")
    return target


def require_folder(target: Source, *, overwrite: bool = False) -> Path:
    """Return `target` if a folder can be written there; call it before long work.

    Raises:
        OutputError: `target` exists and is no folder, or has content and `overwrite` is False; a link is no folder.
    """
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

    Raises:
        OutputError: it has content that is not birdie's, or one of `folders` is a link or a file.
    """
    folder = Path(folder)
    if folder.is_dir():
        for name in folders:
            require_folder(folder / name, overwrite=True)
        is_own = _kind_of(folder / mark, stat.S_IFREG) is None and (folder / mark).exists()
        names = {path.name for path in folder.iterdir() if not path.name.startswith(_PREFIX)}
        if not (is_own or names <= {*beside}):
            other = min(names - {*beside})
            raise OutputError(
                f"cannot write into {folder}: it has {other!r} and no {mark}, so it is not a folder that birdie began; "
                "choose a new one"
            )
    return folder


def _kind_of(target: Path, wanted: int) -> str | None:
    """Return what is at `target`, not through a link, if something is there that is not of the kind wanted.

    Raises:
        OutputError: nobody can tell.
    """
    try:
        kind = stat.S_IFMT(target.lstat().st_mode)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {target}: {_reason(error)}; choose another name") from error
    if kind == stat.S_IFLNK:
        return f"a link to {target.readlink()}"
    names = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder"}
    return None if kind == wanted else names.get(kind, "not a regular file")


def require_writable(folder: Source) -> Path:
    """Create `folder` if necessary, check that a file can be written into it, and return it; call it before long work.

    Raises:
        OutputError: the folder cannot be created or written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write into {folder}: {_reason(error)}; choose another folder") from error
    return folder


def user_cache() -> Path:
    """Return birdie's folder in the user's cache folder, which need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "birdie"


def read_trusted(path: Path) -> bytes:
    """Return the content of `path` if only this user or root can have written it.

    Raises:
        PermissionError: a user other than root owns, or can write to, the file or one of its parent folders.
        OSError: the file cannot be read.
    """
    if not hasattr(os, "getuid"):
        raise PermissionError(1, "this system does not tell who owns a file")
    flags = os.O_RDONLY | NO_LINK
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
            raise PermissionError(1, "not a regular file that only you can write")
        _require_private_parents(path)
        return file.read()


def write_trusted(path: Path, data: bytes, *, private: bool = True) -> None:
    """Write `data` to `path` atomically, as `read_trusted` accepts it.

    The file and missing folders are created for this user alone, or without `private` for all to read.

    Raises:
        OSError: other users can write to a parent folder, or the file cannot be written.
    """
    for folder in reversed(path.parents):  # mkdir applies its mode to the last folder only
        folder.mkdir(mode=0o700 if private else 0o755, exist_ok=True)
    _require_private_parents(path)
    write_bytes(path, data)
    path.chmod(0o600 if private else 0o644)


def _require_private_parents(path: Path) -> None:
    for folder in path.resolve().parents:
        if not _is_private(folder.stat()):
            raise PermissionError(1, f"other users can write to {folder}")


def _is_private(status: os.stat_result) -> bool:
    """Return whether only this user and root can replace files of a folder; a sticky folder protects others' files."""
    owned = status.st_uid in (0, os.getuid())
    return owned and (not status.st_mode & 0o022 or bool(status.st_mode & stat.S_ISVTX))


def require_path(path: object) -> None:
    """Refuse what no file can be called.

    Raises:
        ConfigError: it is neither text nor path, or has a NUL.
    """
    try:
        if isinstance(path, str | os.PathLike) and b"\0" not in os.fsencode(path):
            return
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{path!r} is not a path that a file can have; give a str or Path without NUL")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files that birdie writes, and replaces without asking.

    Attributes:
        name: with its article.
        start: pattern of the first bytes.
    """

    name: str
    start: bytes

    def has(self, path: Path) -> bool:
        """Return whether a regular file is of this kind, or empty."""
        with path.open("rb") as file:
            data = file.read(_START)
        return not data or re.match(self.start, data) is not None


_NONE = Kind("", b"$.")


def require_output(
    target: Source, inputs: Iterable[Source] = (), *, kind: Kind | None = None, overwrite: bool = False
) -> Path:
    """Return the path to write if the user may name `target` as an output; call it before anything is read.

    Args:
        target: a file; with `overwrite`, a link to one stands for the file.
        inputs: files that are read, which it must not replace.
        kind: of the file that will be written; None: of a kind that replaces none.
        overwrite: replace a file of any kind.

    Raises:
        OutputError: `target` has the name of a folder, is a folder, special file or link, or is a file of another kind.
        ConfigError: `target` is one of `inputs`, under any name, symbolic link or hard link.
    """
    path = require_file_name(target)
    _require_no_input(target, inputs)
    if overwrite and path.is_symlink():
        path = Path(os.path.realpath(path))
    require_file(path)
    try:
        if overwrite or not path.exists() or (kind or _NONE).has(path):
            return path
    except OSError as error:
        raise OutputError(f"cannot write {path}: {_reason(error)}; choose another name") from error
    what = "exists" if kind is None else f"exists and is not {kind.name}"
    raise OutputError(f"cannot write {path}: it {what}; choose another name, or add --overwrite (overwrite=True)")


def require_output_folder(target: Source, *, overwrite: bool = False) -> Path:
    """Return the path to write if the user may name `target` as a folder to write; a link to a folder stands for it.

    Raises:
        OutputError: as `require_folder`.
    """
    require_path(target)
    path = Path(target)
    is_link_to_one = path.is_symlink() and path.is_dir()
    return require_folder(Path(os.path.realpath(path)) if is_link_to_one else path, overwrite=overwrite)


def require_file_name(target: Source) -> Path:
    """Return `target` if its last part can be the name of a file.

    Raises:
        OutputError: it is the name of a folder.
        ConfigError: it has a NUL.
    """
    require_path(target)
    if os.path.basename(target) in ("", os.curdir, os.pardir):  # noqa: PTH119 (a Path has lost the slash at the end)
        raise OutputError(f"cannot write {os.fspath(target)!r}: that is the name of a folder; give the name of a file")
    return Path(target)


def _require_no_input(target: Source, inputs: Iterable[Source]) -> None:
    for other in inputs:
        if _is_same_file(target, other):
            raise ConfigError(f"writing {target} would destroy {other}, which is read; choose another output")


def _is_same_file(one: Source, other: Source) -> bool:
    try:
        return os.path.samefile(one, other)  # noqa: PTH121 (both may be text)
    except (OSError, ValueError):  # one of them does not exist yet
        return os.path.realpath(one) == os.path.realpath(other)
