"""A private copy of a script's folder, and which of its files were opened.

    the folder ──regular files only──► a copy that the sandbox mounts, read-only ──inotify──► files that were opened

Pipes, sockets and devices stay behind, links are copied as links and can only point at what the sandbox has. The kernel
reports the first opening of each file to whoever holds the copy, so no code in the sandbox can hide one. Nobody sees
what is read without opening a file, so all of it counts: names, sizes, and targets of links.
"""

import contextlib
import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from birdie.errors import DataError
from birdie.golf.audit.deadline import Deadline
from birdie.runtime.regular import open_regular, require_regular

MAX_BYTES = 512 * 2**20
"""Bytes that are copied; larger files stay behind."""
MAX_FILES = 4096
"""Files and folders that are copied. The kernel queues 16,384 reports."""
MAX_DEPTH = 64
"""Folders within folders that are looked into."""
STAT_BYTES = 4
"""Bytes of what a file tells beside its name and its content: a size of up to 512 MiB, whether it can be executed."""

_OPENED, _ONCE = 0x20, 0x80000000
_EVENT = struct.Struct("iIII")


class Snapshot:
    """The copy of a script and of the folder that it lies in; without a script, empty.

    Attributes:
        folder: the copy.
        script: the name of the script in it.
        files: all other files and their bytes, by their paths in the folder.
        left: number of entries that were left out: no regular files, or beyond the limits.
        size: bytes of the script.
        listed: bytes that can be read without opening a file, of all that was copied.
    """

    def __init__(self, script: Path | None, folder: Path) -> None:
        self.folder, self.script = folder, script.name if script is not None else ""
        self.files: dict[str, int] = {}
        self.left = self.size = self.listed = 0
        self._bytes, self._entries = MAX_BYTES, MAX_FILES
        self._watched: dict[int, str] = {}
        self._opened: set[str] = set()
        self._watch = -1
        folder.mkdir()
        if script is None:
            return
        require_regular(script)
        with open_regular(script) as file:
            self.size = self._copy(file.fileno(), folder / script.name)
        self._copy_folder(script.parent.resolve())
        self.listed = listed_bytes(folder, Deadline())
        self._watch_files()

    def opened(self) -> dict[str, int]:
        """Return the files that were opened so far, and their bytes."""
        try:
            while events := os.read(self._watch, 1 << 16):
                position = 0
                while position < len(events):
                    number, mask, _, length = _EVENT.unpack_from(events, position)
                    position += _EVENT.size + length
                    if mask & _OPENED:
                        self._opened.add(self._watched[number])
        except BlockingIOError:
            pass
        return {path: self.files[path] for path in sorted(self._opened)}

    def close(self) -> None:
        """Stop watching the files of the copy."""
        if self._watch >= 0:
            os.close(self._watch)
            self._watch = -1

    def _copy_folder(self, source: Path) -> None:
        for folder, descriptor, names in walk(source):
            for name in names:
                target = self.folder / folder.relative_to(source) / name
                if target == self.folder / self.script:
                    continue
                if self._entries <= 0:
                    self.left += 1
                else:
                    self._entries -= 1
                    self._copy_entry(folder / name, name, descriptor, target)
            if self._entries <= 0:
                return

    def _copy_entry(self, path: Path, name: str, descriptor: int, target: Path) -> None:
        try:
            mode = os.lstat(name, dir_fd=descriptor).st_mode
            if stat.S_ISDIR(mode):
                target.mkdir()
            elif stat.S_ISLNK(mode):
                target.symlink_to(os.readlink(name, dir_fd=descriptor))
            else:
                with open_regular(path, name, descriptor) as file:
                    self.files[str(target.relative_to(self.folder))] = self._copy(file.fileno(), target)
        except (DataError, OSError):  # nothing that can be read, or it has just gone
            self.left += 1

    def _copy(self, source: int, target: Path) -> int:
        """Copy an open file, and return its bytes."""
        status = os.fstat(source)
        if status.st_size > self._bytes:
            raise OSError(f"{target.name} has {status.st_size:,} bytes; {self._bytes:,} more may be copied")
        self._bytes -= status.st_size
        descriptor = os.open(
            target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, status.st_mode & 0o100 | 0o600
        )
        with open(descriptor, "wb") as copy, open(source, "rb", closefd=False) as file:  # noqa: PTH123
            left = status.st_size  # and no more, should it grow
            while left and (block := file.read(min(left, 1 << 20))):
                copy.write(block)
                left -= len(block)
        return status.st_size - left

    def _watch_files(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("files can be watched on Linux only")
        libc = ctypes.CDLL(None, use_errno=True)
        self._watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for path in self.files:
            number = libc.inotify_add_watch(
                self._watch, os.fsencode(self.folder / path), ctypes.c_uint32(_OPENED | _ONCE)
            )
            if number < 0:
                self.close()
                raise OSError(ctypes.get_errno(), "the files cannot be watched")
            self._watched[number] = path


def walk(source: Path) -> Iterator[tuple[Path, int, list[str]]]:
    """Yield each folder from `source` down, its descriptor, and the names in it; parents before children.

    Hidden folders, `__pycache__` and virtual environments are left out, and links are not followed.
    """
    for name, folders, files, descriptor in os.fwalk(source):
        folder = Path(name)
        kept = [inner for inner in sorted(folders) if not _is_hidden(inner) and not _is_python(inner, descriptor)]
        links = [inner for inner in kept if stat.S_ISLNK(os.lstat(inner, dir_fd=descriptor).st_mode)]
        folders[:] = [inner for inner in kept if inner not in links]
        if folders and len(folder.relative_to(source).parts) == MAX_DEPTH:
            raise DataError(f"{source} has folders nested more than {MAX_DEPTH} deep; move them out of it")
        yield folder, descriptor, [*folders, *sorted(files), *links]


def listed_bytes(source: Path, deadline: Deadline) -> int:
    """Return the bytes that can be read in a folder without opening a file: names, sizes, and targets of links."""
    size = 0
    for _, descriptor, names in walk(source.resolve()):  # as it does not follow links
        for name in names:
            deadline.check()
            with contextlib.suppress(FileNotFoundError):  # it has just gone
                status = os.lstat(name, dir_fd=descriptor)
                # POSIX: the size of a link is that of its target's name
                size += len(os.fsencode(name)) + (status.st_size if stat.S_ISLNK(status.st_mode) else STAT_BYTES)
    return size


def _is_hidden(folder: str) -> bool:
    return folder.startswith(".") or folder == "__pycache__"  # compiled code may be of another source


def _is_python(folder: str, descriptor: int) -> bool:
    """Return whether a folder is a virtual environment."""
    try:
        os.stat(f"{folder}/pyvenv.cfg", dir_fd=descriptor, follow_symlinks=False)
    except OSError:
        return False
    return True
