"""Regular files of others: a pipe would block whoever opens it, and opening a device may change something."""

import codecs
import io
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from birdie.errors import DataError
from birdie.system.platform import READ_FLAGS

_MARKS = {  # of UTF-32 first: it begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_regular(path: Path) -> None:
    """Check that `path` is a regular file, or a link to one, without opening it."""
    _require(path.stat().st_mode, path)


def regular_file(path: str | os.PathLike[str]) -> Path:
    """Return `path` if it is a regular file, or leads to one; otherwise its OSError is for the caller's sentence."""
    path = Path(path)
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError("is a folder" if stat.S_ISDIR(mode) else "not a regular file")
    return path


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading, and nothing else, even if it is replaced meanwhile."""
    require_regular(path)
    file = open(os.open(path, os.O_RDONLY | READ_FLAGS), "rb")  # noqa: PTH123, SIM115
    try:
        _require(os.fstat(file.fileno()).st_mode, path)
    except DataError:
        file.close()
        raise
    return file


def read_text(path: Path) -> str:
    """Return the text of a regular file, in UTF-8 or as its byte order mark says, with "\\n" as the end of lines."""
    with open_regular(path) as file:
        data = file.read()
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8")
    text = data.decode(encoding, errors="replace")
    if text.count("\0") + text.count("\ufffd") > len(text) // 8:
        raise DataError(f"{path} is not text in UTF-8, or in UTF-16 with a byte order mark; convert it")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, however deep; folders that are links, or may not be read, are skipped."""
    folders = [folder]
    while folders:
        with suppress(PermissionError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry))
                elif Path(entry).is_file():
                    yield Path(entry)


def _require(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise DataError(f"{path} is {kind}, which is never opened; give a regular file")
