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
import logging
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from birdie.errors import OutputError
from birdie.system.locks import open_locked
from birdie.system.names import is_hidden, shown
from birdie.system.outputs import TEMPORARY, Source, reason_of, require_file, require_folder, require_no_input
from birdie.system.platform import NO_LINK, copy_owner, user_id

_SUFFIX = ".part"
Hidden = Callable[[Collection[str]], object]
"""Called with names of hidden files that are not written."""
_OWN_NAME = re.compile(r"\.birdie-(\d+)-\w+\.part")


@contextmanager
def atomic_path(target: Source, *, flush: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `target` on success, and is removed on any error.

    An existing file keeps its permissions and, as far as this user may set them, its owner and group.

    Args:
        target: the file; its folder is created if necessary.
        flush: False for a file that may be lost with the power, as its content is checked when it is read.
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
    target: Source,
    *,
    overwrite: bool = False,
    replace: bool = False,
    inputs: Iterable[Source] = (),
    hidden: Hidden | None = None,
) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `target` on success and is removed on any error.

    Args:
        target: a folder that does not exist or is empty.
        overwrite: let it have content: files of the new folder then replace those of the same names, one by one, and
            all others stay.
        replace: let it have content, all of which is replaced: the caller knows that birdie wrote it.
        inputs: files that were read, which are not replaced.
        hidden: for names that a file from somebody chose: called with the hidden ones if `target` has content, which
            are then left out. None: the names are the caller's.
    """
    target = require_folder(target, overwrite=overwrite or replace)
    with _beside(target) as temporary:
        temporary.mkdir()
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _flush(path)
        if overwrite and target.is_dir():
            if hidden is not None and any(target.iterdir()):
                _leave_out_hidden(temporary, hidden)
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
        raise OutputError(f"cannot write {target}: {reason_of(error)}; {advice}") from error


def log_hidden(names: Collection[str]) -> None:
    """Log that hidden files were left out."""
    logging.getLogger("birdie").warning(
        "left out %s: hidden files are written only into a new folder", ", ".join(map(shown, names))
    )


def _leave_out_hidden(new: Path, hidden: Hidden) -> None:
    """Remove the hidden files of `new`, and call `hidden` with their names if there are any."""
    paths = {path.relative_to(new).as_posix(): path for path in sorted(new.rglob("*")) if not path.is_dir()}
    if names := [name for name in paths if is_hidden(name)]:
        for name in names:
            paths[name].unlink()
        hidden(names)


def _merge(new: Path, target: Path, inputs: Iterable[Source]) -> None:
    """Move the files of `new` into `target`, in place of those of the same names; check all before the first."""
    names = [path.relative_to(new) for path in sorted(new.rglob("*")) if not path.is_dir()]
    for name in names:
        require_no_input(target / name, inputs)
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

    Whenever Ctrl-C comes, nothing is left: what is removed is known by a token, before the folder is there.
    """
    remove_abandoned(parent)
    token, lock = secrets.token_hex(8), None
    try:
        folder, lock = _new_folder(parent, token)
        yield folder
    finally:
        try:
            _remove_folders(parent, token)
        except (KeyboardInterrupt, OSError) as error:  # rmtree that is interrupted may close a descriptor twice
            _remove_folders(parent, token)
            raise KeyboardInterrupt from error
        finally:
            if lock is not None:
                os.close(lock)


def _remove_folders(parent: Path, token: str) -> None:
    for folder in parent.glob(f"{TEMPORARY}*{token}{_SUFFIX}"):
        shutil.rmtree(folder, ignore_errors=True)


def _new_folder(parent: Path, token: str) -> tuple[Path, int | None]:
    """Return a temporary folder named by its inode and a token, and its lock; None where the system has no locks."""
    while True:
        created = parent / f"{TEMPORARY}{token}{_SUFFIX}"
        created.mkdir(mode=0o700)
        try:
            folder = created.with_name(f"{TEMPORARY}{created.lstat().st_ino}-{token}{_SUFFIX}")
            created.replace(folder)
            return folder, open_locked(folder, os.O_RDONLY)
        except (FileNotFoundError, BlockingIOError):  # removed, before it was locked, by one who took it for abandoned
            continue
        except OSError:  # nobody will remove it after a crash
            return folder, None


def remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders in `parent` that dead processes of this user left; those in use are kept."""
    for folder in parent.glob(f"{TEMPORARY}*{_SUFFIX}"):
        with suppress(OSError):  # in use, gone, or nobody can know
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or user_id() not in (None, status.st_uid):
                continue
            number = _OWN_NAME.fullmatch(folder.name)
            if number is None or int(number[1]) != status.st_ino:
                folder.rmdir()  # its process died before it had its name, and it is empty; or it is somebody else's
                continue
            lock = open_locked(folder, os.O_RDONLY)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def remove_folder(folder: Path) -> None:
    """Remove `folder` as a unit: a process that dies meanwhile leaves all of it, or nothing under its name."""
    try:
        with temporary_folder(folder.parent) as temporary:
            folder.replace(temporary / folder.name)
            _flush(folder.parent)
    except OSError as error:
        raise OutputError(f"cannot remove {folder}: {reason_of(error)}; remove it by hand") from error


def open_append(path: Path) -> BinaryIO:
    """Open a file that birdie names itself, such as a log, to write at its end; it is created if necessary."""
    require_file(path)
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, 0o666)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {reason_of(error)}; remove it, or choose another folder") from error
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
    copy_owner(status, target)
    if target.stat().st_gid != status.st_gid:  # another group gets no more than everybody
        mode &= ~0o070 | (mode & 0o007) << 3
    target.chmod(mode)


def write_bytes(target: Source, data: bytes | memoryview) -> None:
    """Write `data` to `target` atomically."""
    with atomic_path(target) as path:
        path.write_bytes(data)


def user_cache() -> Path:
    """Return birdie's folder in the user's cache folder, which need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "birdie"


def read_trusted(path: Path) -> bytes:
    """Return the content of `path` if only this user or root can have written it."""
    flags = os.O_RDONLY | NO_LINK
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or (user_id() is not None and not _is_owned(status)):
            raise PermissionError(1, "not a regular file that only you can write")
        _require_private_parents(path)
        return file.read()


def write_trusted(path: Path, data: bytes, *, private: bool = True) -> None:
    """Write `data` to `path` atomically, as `read_trusted` accepts it.

    The file and missing folders are created for this user alone, or without `private` for all to read.
    """
    for folder in reversed(path.parents):  # mkdir applies its mode to the last folder only
        folder.mkdir(mode=0o700 if private else 0o755, exist_ok=True)
    _require_private_parents(path)
    write_bytes(path, data)
    path.chmod(0o600 if private else 0o644)


def _require_private_parents(path: Path) -> None:
    if user_id() is None:  # what is in the user's own folder is private there
        if Path.home() not in path.resolve().parents:
            raise PermissionError(1, "not below your home folder, and this system does not tell who owns a file")
        return
    for folder in path.resolve().parents:
        if not _is_private(folder.stat()):
            raise PermissionError(1, f"other users can write to {folder}")


def _is_private(status: os.stat_result) -> bool:
    """Return whether only this user and root can replace files of a folder; a sticky folder protects others' files."""
    return _is_owned(status) or (status.st_uid in (0, user_id()) and bool(status.st_mode & stat.S_ISVTX))


def _is_owned(status: os.stat_result) -> bool:
    return status.st_uid in (0, user_id()) and not status.st_mode & 0o022
