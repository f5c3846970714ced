"""Atomic writes: every file that birdie leaves on disk is written with these functions.

A file is written into a temporary folder beside its target, flushed to the disk, and renamed over the target. So a
reader sees the old bytes or the new bytes, and a crash, a full disk or Ctrl-C never leaves a partial file under the
target's name:

    .birdie-XXXXXXXX.part/
    ├── lock        locked by the process that writes, so that others can tell whether it lives
    ├── new/NAME    what will be renamed to the target
    └── old/NAME    a folder that is being replaced, where the system cannot swap two folders in one step

Whoever next writes beside it removes what a dead process left, and puts back a replaced folder that has no successor.
Files that are executed when they are loaded, such as compiled code, are read with `read_trusted` and
written with `write_trusted`.
"""

import ctypes
import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from birdie.errors import ConfigError, OutputError
from birdie.runtime.locks import open_locked

_PREFIX, _SUFFIX, _LOCK = ".birdie-", ".part", "lock"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `target` on success, and is removed on any error.

    An existing file keeps its permissions and, as far as this user may set them, its owner and group.

    Raises:
        OutputError: the folder is missing or read-only, or the disk is full.
    """
    target = require_file(target)
    with _replacing(target) as temporary:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield temporary
        _flush(temporary)
        if target.exists():
            _copy_permissions(target, temporary)
        temporary.replace(target)


@contextmanager
def atomic_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder; on success it replaces `target` as a unit, on any error it is removed.

    Raises:
        OutputError: the parent folder is missing or read-only, or the disk is full.
    """
    target = Path(target)
    with _replacing(target) as temporary:
        temporary.mkdir()
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _flush(path)
        if target.is_dir():
            _copy_permissions(target, temporary)
        if not os.path.lexists(target):
            temporary.replace(target)
        elif not _swap(temporary, target):
            old = temporary.parents[1] / "old"
            old.mkdir()
            target.replace(old / target.name)  # until the next line the target is missing: see `_discard`
            temporary.replace(target)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a path for the successor of `target`, which the body renames; an OSError becomes an OutputError."""
    advice = "choose a folder that can be written"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(target.parent) as folder:
            advice = "nothing was changed there"
            yield folder / target.name
            advice = "it is written, but may be lost if the machine stops now"
            _flush(target.parent)  # the new name must survive a power cut, too
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {target}: {_reason(error)}; {advice}") from error


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a folder in `parent` that only this process uses; it is removed at the end, or after the process died.

    Raises:
        OSError: it cannot be created.
    """
    remove_abandoned(parent)
    lock = None
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, suffix=_SUFFIX, dir=parent))
        try:
            lock = open_locked(folder / _LOCK)
        except (FileNotFoundError, BlockingIOError):  # removed, before it was locked, by one who took it for abandoned
            continue
        except OSError:  # no locks on this file system: nobody will remove it
            pass
        break
    try:
        (folder / "new").mkdir()
        yield folder / "new"
    finally:
        _discard(folder)
        if lock is not None:
            os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders in `parent` that dead processes of this user left; those in use are kept."""
    for folder in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            status = folder.lstat()  # not through a link, and nothing that another user prepared
            if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
                continue
            lock = open_locked(folder / _LOCK, os.O_RDWR)
        except FileNotFoundError:  # its process died before it locked, or while it removed the folder: both are empty
            with suppress(OSError):
                folder.rmdir()
        except OSError:  # in use, or nobody can know
            pass
        else:
            _discard(folder)
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


def _discard(folder: Path) -> None:
    """Remove a temporary folder, its lock last; a replaced folder whose successor never came is put back first."""
    with suppress(OSError):
        for old in (folder / "old").iterdir():
            if not os.path.lexists(target := folder.parent / old.name):
                old.replace(target)
    for name in ("new", "old"):
        shutil.rmtree(folder / name, ignore_errors=True)
    with suppress(OSError):
        (folder / _LOCK).unlink(missing_ok=True)
        folder.rmdir()


def _swap(one: Path, other: Path) -> bool:
    """Exchange two paths in one step; return False where the system or the file system cannot."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # a C library from before 2018
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


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


def write_bytes(target: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write `data` to `target` atomically.

    Raises:
        OutputError: `target` cannot be written.
    """
    with atomic_path(target) as path:
        path.write_bytes(data)


def require_file(target: str | os.PathLike[str]) -> Path:
    """Return `target` with links resolved if a file can be written there; call it before long work.

    Raises:
        OutputError: `target` exists and is not a regular file.
    """
    target = Path(target)
    try:
        if target.is_symlink():  # replace the file that the link points to, not the link
            target = target.resolve()
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "not a regular file"
            raise OutputError(f"cannot write {target}: it is {kind}; give the name of a file")
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"cannot write {target}: {_reason(error)}; choose another file") from error
    return target


def require_writable(folder: str | os.PathLike[str]) -> Path:
    """Create `folder` if necessary, check that a file can be written into it, and return it; call it before long work.

    Raises:
        OutputError: the folder cannot be created or written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
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
    flags = os.O_RDONLY | os.O_NOFOLLOW
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


Source = str | os.PathLike[str]


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


def require_output(target: Source, inputs: Iterable[Source] = ()) -> Path:
    """Return `target` if a file can be written there that replaces none of `inputs`; call it before anything is read.

    Raises:
        OutputError: `target` has the name of a folder, or is a folder or special file.
        ConfigError: `target` is one of `inputs`, under any name, symbolic link or hard link.
    """
    if os.path.basename(target) in ("", os.curdir, os.pardir):  # noqa: PTH119 (a Path has lost the slash at the end)
        raise OutputError(f"cannot write {os.fspath(target)!r}: that is the name of a folder; give the name of a file")
    file = require_file(target)
    for path in inputs:
        if _is_same_file(file, path):
            raise ConfigError(f"writing {target} would destroy {path}, which is read; choose another output")
    return Path(target)


def _is_same_file(one: Source, other: Source) -> bool:
    try:
        return os.path.samefile(one, other)  # noqa: PTH121 (both may be text)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(one) == os.path.realpath(other)
