"""Locks between processes: `flock` on a file, which the kernel releases when its holder ends, however it ends.

So a lock is never stale, and a locked file tells that its process lives, also on another machine that shares the disk.
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
from birdie.runtime.callbacks import Notify

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


NO_LINK = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY"))
"""Flags that open no link, and do not wait for the writer of a pipe."""


def open_locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open and lock `path`, a file or folder, without waiting; return its descriptor, which holds the lock."""
    while True:
        file = os.open(path, flags | NO_LINK, 0o666)
        try:
            if fcntl is None:
                raise OSError(errno.ENOTSUP, "this system has no flock")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


LOCK = ".lock"
"""Name of the file that holds the lock of a run folder, or of another folder of results."""
_HOLDER = b"process "
_MOST_HOLDER = 512


@contextmanager
def locked_folder(folder: Path, name: str, notify: Notify) -> Iterator[None]:
    """Hold the lock of an existing folder, the file `name` in it, for the body of the context.

    Where the system cannot lock, a warning is sent to `notify` and the body runs without the lock.
    """
    path = folder / name
    try:
        file = open_locked(path)
    except BlockingIOError as error:
        raise ConfigError(
            f"{folder} is in use by {_holder(path) or 'another process'}; wait until it ends, stop it, or choose "
            "another folder"
        ) from error
    except OSError as error:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(f"{path} is not a file but has the name of a lock; remove it") from error
        reason = (error.strerror or str(error)).lower()
        notify(f"warning: {folder} cannot be locked ({reason}); let no other process write there meanwhile")
        yield
        return
    try:
        status = os.fstat(file)
        content = os.read(file, len(_HOLDER)) if stat.S_ISREG(status.st_mode) else b"?"
        if content not in (b"", _HOLDER) or status.st_size > _MOST_HOLDER or status.st_nlink > 1:
            raise ConfigError(f"{path} has the name of a lock, and something else is in it; move it elsewhere")
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.truncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, _HOLDER + f"{os.getpid()} on {socket.gethostname()} since {since}".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
    finally:
        os.close(file)


def _holder(path: Path) -> str:
    """Return what the holder of a lock wrote into it; "" if that cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        file = os.open(path, os.O_RDONLY | NO_LINK)
        try:
            return os.read(file, _MOST_HOLDER).decode()
        finally:
            os.close(file)
    return ""
