"""Regular files of others: a pipe would block whoever opens it, and opening a device may change something."""

import io
import os
import stat
from pathlib import Path

from birdie.errors import DataError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def require_regular(path: Path) -> None:
    """Check that `path` is a regular file, or a link to one, without opening it.

    Raises:
        DataError: it is something else.
        OSError: there is nothing, or it cannot be looked at.
    """
    _require(path.stat().st_mode, path)


def open_regular(path: Path, name: str | None = None, folder: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading, and nothing else, even if it is replaced meanwhile.

    Args:
        path: the file, as the user would name it.
        name: its name in the open `folder`, where links are not followed; None: `path` is opened, links followed.
        folder: the descriptor of that folder.

    Raises:
        DataError: it is no regular file.
        OSError: it cannot be opened.
    """
    follow = name is None
    target = path if name is None else name
    _require(os.stat(target, dir_fd=folder, follow_symlinks=follow).st_mode, path)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    file = open(os.open(target, flags, dir_fd=folder), "rb")  # noqa: PTH123, SIM115
    try:
        _require(os.fstat(file.fileno()).st_mode, path)
    except DataError:
        file.close()
        raise
    return file


def read_text(path: Path) -> str:
    """Return the text of a regular file, with "\\n" at the ends of its lines.

    Raises:
        DataError: it is no regular file.
        OSError: it cannot be read.
    """
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
        return file.read()


def _require(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise DataError(f"{path} is {kind}, which is never opened; give a regular file")
