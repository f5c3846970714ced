"""Locks between processes: `flock` on a file, which the kernel releases when its holder ends, however it ends.

So a lock is never stale, and a locked file tells that its process lives, also on another machine that shares the disk.
"""

import errno
import os
import socket
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


def open_locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open and lock the file `path` without waiting; return its descriptor, which holds the lock until it is closed.

    Raises:
        BlockingIOError: another process, or another descriptor of this one, holds the lock.
        OSError: the file cannot be opened, or the system cannot lock it.
    """
    while True:
        file = os.open(path, flags, 0o666)
        try:
            if fcntl is None:
                raise OSError(errno.ENOTSUP, "this system has no flock")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:  # its holder removed it between the opening and the lock
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)


LOCK = ".lock"
"""Name of the file that holds the lock of a run folder, or of another folder of results."""


@contextmanager
def locked_folder(folder: Path, name: str, notify: Notify) -> Iterator[None]:
    """Hold the lock of an existing folder, the file `name` in it, for the body of the context.

    Where the system cannot lock, a warning is sent to `notify` and the body runs without the lock.

    Raises:
        ConfigError: another process holds it; the message says which.
    """
    path = folder / name
    try:
        file = open_locked(path)
    except BlockingIOError as error:
        holder = ""
        with suppress(OSError, UnicodeDecodeError):
            holder = path.read_text(encoding="utf-8")
        raise ConfigError(
            f"{folder} is in use by {holder or 'another process'}; wait until it ends, stop it, or choose another "
            "folder"
        ) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        notify(f"warning: {folder} cannot be locked ({reason}); let no other process write there meanwhile")
        yield
        return
    try:
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.truncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(file)
