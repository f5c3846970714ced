"""Writing without half-written files: everything birdie leaves on disk goes through here.

A file is written under a temporary name beside its target, flushed to the disk, and renamed over the target, so a
reader sees the old bytes or the new bytes and a crash, a full disk or Ctrl-C leaves nothing behind under the real name.
What is run as it is read, such as compiled code, is read by `read_trusted` alone.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from birdie.errors import OutputError

UMASK = os.umask(0o022)  # it can only be read by setting it, which threads must not see: once, here
os.umask(UMASK)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the folder of `target`; on success it becomes `target`, on any error it is removed.

    Raises:
        OutputError: the folder is missing or read-only, or the disk is full.
    """
    target = require_file(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {_reason(error)}; choose a folder that can be written") from error
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~UMASK)
        temporary.replace(target)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {target}: {_reason(error)}; nothing was changed there") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Like `atomic_path` for a folder of files: `target` appears whole, replacing an earlier one, or not at all.

    Raises:
        OutputError: as `atomic_path`.
    """
    target = Path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError as error:
        raise OutputError(f"cannot write {target}: {_reason(error)}; choose a folder that can be written") from error
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
        temporary.chmod(0o777 & ~UMASK)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
            target.replace(old / "replaced")
            temporary.replace(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.replace(target)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {target}: {_reason(error)}; nothing was changed there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_bytes(target: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write `data` to `target`, whole or not at all."""
    with atomic_path(target) as path:
        path.write_bytes(data)


def require_file(target: str | os.PathLike[str]) -> Path:
    """`target`, links followed, if a file can stand there: asked before long work, not after it.

    Raises:
        OutputError: something other than a plain file is there already.
    """
    target = Path(target)
    try:
        if target.is_symlink():  # the file it leads to is replaced, not the link
            target = target.resolve()
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "not a plain file"
            raise OutputError(f"cannot write {target}: it is {kind}; give the name of a file")
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"cannot write {target}: {_reason(error)}; choose another file") from error
    return target


def require_writable(folder: str | os.PathLike[str]) -> Path:
    """Create `folder` if need be and prove that a file can be written there: asked before long work, not after it.

    Raises:
        OutputError: it cannot.
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
    """The content of `path` if nobody but this user, or root, could have put it there.

    Raises:
        PermissionError: somebody else could: the file, or a folder on the way to it, is another's or open to others.
        OSError: it cannot be read.
    """
    if not hasattr(os, "getuid"):
        raise PermissionError(1, "who wrote it cannot be known on this system")
    flags = os.O_RDONLY | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(1, "it is not a file that only you can write")
        for folder in path.resolve().parents:
            if not _closed(folder.stat()):
                raise PermissionError(1, f"others can write to {folder}")
        return file.read()


def _closed(status: os.stat_result) -> bool:
    """Whether only this user and root can change what a folder holds; in a sticky one others touch only their own."""
    owned = status.st_uid in (0, os.getuid())
    return owned and (not status.st_mode & 0o022 or bool(status.st_mode & stat.S_ISVTX))
