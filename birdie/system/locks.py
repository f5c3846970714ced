"""Locks between processes: `filelock` on a file, which the system releases when its holder ends, however it ends.

So a lock is never stale, and a locked file tells that its process lives, also on another machine that shares the disk.
Who holds the lock of a folder stands in a file beside it, because not every system lets others read a locked file.
"""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from birdie.errors import ConfigError
from birdie.system.callbacks import Notify
from birdie.system.platform import NO_LINK

LOCK, HOLDER = ".lock", ".lock.holder"
"""The lock of a run folder, or of another folder of results, and the file that names its holder."""

_START = b"process "  # of the holder's name
_MOST_HOLDER = 512


def open_locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open and lock `path` without waiting; return its descriptor, which holds the lock until it is closed.

    A folder can be locked on POSIX alone. A BlockingIOError says that another process holds the lock.
    """
    try:
        from filelock import lock_descriptor  # late: most processes lock nothing
    except ImportError as error:  # a script runs with the filelock that torch brought
        raise OSError(errno.ENOTSUP, "filelock is missing or older than 3.30") from error
    while True:
        file = os.open(path, flags | NO_LINK, 0o666)
        try:
            if not lock_descriptor(file, blocking=False):
                raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock", str(path))
            if os.path.samestat(os.fstat(file), path.lstat()):
                return file
        except FileNotFoundError:  # its holder removed it between the opening and the lock
            if not flags & os.O_CREAT:
                os.close(file)
                raise
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock `path`."""
    try:
        os.close(open_locked(path, os.O_RDWR))
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@contextmanager
def locked_folder(folder: Path, notify: Notify) -> Iterator[None]:
    """Hold the lock of an existing folder for the body of the context.

    Where the system cannot lock, a warning is sent to `notify` and the body runs without the lock.
    """
    path, holder = folder / LOCK, folder / HOLDER
    _require_lock(path)
    lock = None
    try:
        lock = open_locked(path)
    except BlockingIOError as error:
        raise ConfigError(
            f"{folder} is in use by {_read(holder).decode(errors='replace') or 'another process'}; wait until it ends, "
            "stop it, or choose another folder"
        ) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        notify(f"warning: {folder} cannot be locked ({reason}); let no other process write there meanwhile")
    if lock is None:
        yield
        return
    try:
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        with suppress(OSError):  # a full disk, or something else of that name: the lock holds all the same
            if _names_holder(holder):  # of a process that was killed
                holder.unlink()
            with holder.open("xb") as file:
                file.write(_START + f"{os.getpid()} on {socket.gethostname()} since {since}".encode())
        yield
    finally:
        with suppress(OSError):
            if _names_holder(holder):
                holder.unlink()
        with suppress(OSError):  # while it is held: afterwards it may be another's
            path.unlink()
        os.close(lock)


def _require_lock(path: Path) -> None:
    """Check that nothing but a lock has the name of one."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a file but has the name of a lock; remove it")
        if status.st_nlink > 1 or status.st_size:
            raise ConfigError(f"{path} has the name of a lock, and something else is in it; move it elsewhere")


def _names_holder(path: Path) -> bool:
    """Return whether a file names a holder, or is the beginning of one, whose process died as it wrote it."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        is_small = stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_HOLDER
        return is_small and _START.startswith(_read(path)[: len(_START)])
    return False


def _read(path: Path) -> bytes:
    """Return what a small file of this module has in it; nothing of a link or a large file."""
    try:
        with open(os.open(path, os.O_RDONLY | NO_LINK), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            return file.read() if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_HOLDER else b""
    except FileNotFoundError:
        return b""
