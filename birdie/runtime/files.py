"""Atomic writes: every file that birdie leaves on disk is written with these functions.

A file is written under a temporary name beside its target, flushed to the disk, and renamed over the target. So a
reader sees the old bytes or the new bytes, and a crash, a full disk or Ctrl-C never leaves a partial file under the
target's name. Files that are executed when they are loaded, such as compiled code, are read with `read_trusted`.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from birdie.errors import ConfigError, OutputError

UMASK = os.umask(0o022)  # reading the umask means setting it for a moment, which is only safe before threads start
os.umask(UMASK)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `target`; on success it is renamed to `target`, on any error it is removed.

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
    """Yield a temporary folder; on success it replaces `target` as a unit, on any error it is removed.

    Raises:
        OutputError: the parent folder is missing or read-only, or the disk is full.
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
        PermissionError: another user owns, or can write to, the file or one of its parent folders.
        OSError: the file cannot be read.
    """
    if not hasattr(os, "getuid"):
        raise PermissionError(1, "this system does not tell who owns a file")
    flags = os.O_RDONLY | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(1, "not a regular file that only you can write")
        for folder in path.resolve().parents:
            if not _is_private(folder.stat()):
                raise PermissionError(1, f"other users can write to {folder}")
        return file.read()


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
