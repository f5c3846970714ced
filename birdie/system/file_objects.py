"""File objects and bytes in memory in place of paths: what `birdie.load` reads and `birdie.save` writes to.

    path ─────────────────────────► path
    bytes, bytearray, mmap, … ────► memoryview
    open(…, "rb"), io.BytesIO, … ─► memoryview of all from its position to its end

An object that is at its end is read from its start: it was just written. Any object with a method `read` or `write` is
a file object.
"""

import io
import os
from contextlib import suppress
from typing import Any, Protocol

from birdie.errors import ArtifactError, ConfigError, OutputError
from birdie.system.outputs import Source, require_path


class Readable(Protocol):
    """A binary file object that is open for reading."""

    def read(self) -> bytes:
        """Return all from its position to its end."""
        ...


class Writable(Protocol):
    """A binary file object that is open for writing."""

    def write(self, data: bytes, /) -> Any:
        """Write bytes at its position, and return how many; None: all."""
        ...


Input = Source | bytes | bytearray | memoryview | Readable
"""A path, the bytes of a file, or a binary file object."""
Output = Source | Writable
"""A path, or a binary file object."""


def source_of(data: Input) -> Source | memoryview:
    """Return a path as it is, or the bytes that stand for a file.

    Raises:
        ConfigError: it is neither a path, nor bytes, nor a binary file object that is open for reading.
        ArtifactError: it cannot be read.
    """
    if isinstance(data, str | os.PathLike):
        require_path(data)
        return data
    content: Any = data
    if hasattr(data, "read"):
        _require_binary(data, "rb")
        content = _read(data)
    try:
        view = memoryview(content)
    except TypeError:
        require_path(data)
        raise
    return view if view.c_contiguous else memoryview(view.tobytes())


def _read(file: Any) -> Any:
    try:
        content = file.read()
        if not content and _is_seekable(file):
            file.seek(0)
            content = file.read()
    except Exception as error:  # objects of other packages raise any kind
        raise ArtifactError(f"cannot read {_name(file)}: {_reason(error)}; open it again") from error
    if not isinstance(content, bytes | bytearray | memoryview):
        raise ConfigError(f"{_name(file)} reads a {type(content).__name__}, not bytes; open it with mode 'rb'")
    return content


def is_writable(target: object) -> bool:
    """Return whether a target is a file object, and no path."""
    return not isinstance(target, str | os.PathLike) and hasattr(target, "write")


def require_room(file: Any) -> None:
    """Check that bytes can be written to a file object, and replace none; call it before long work."""
    _require_binary(file, "wb")
    if callable(writable := getattr(file, "writable", None)) and not writable():
        raise ConfigError(f"{_name(file)} is not open for writing; open it with mode 'wb'")
    count = file.getbuffer().nbytes if isinstance(file, io.BytesIO) else _bytes_after(file)
    if count > 0:  # a buffer that is at its end is read from its start
        where = "already" if isinstance(file, io.BytesIO) else "after its position, which would be replaced in part"
        raise ConfigError(f"{_name(file)} holds {count:,} bytes {where}; give an empty one")


def write_all(file: Any, data: bytes) -> None:
    """Write bytes at the position of a file object: all, or nothing where it can be cut."""
    start = file.tell() if _is_seekable(file) else None
    written = 0
    try:
        while written < len(data):
            count = file.write(data[written:] if written else data)
            if not count and (count is not None or isinstance(file, io.RawIOBase)):
                raise OSError("it takes no more bytes")
            written += len(data) if count is None else count
        if callable(flush := getattr(file, "flush", None)):
            flush()  # a full disk is seen now
    except BaseException as error:
        if start is not None:
            with suppress(Exception):
                file.seek(start)
                file.truncate()
        if not isinstance(error, Exception):
            raise
        raise OutputError(
            f"cannot write to {_name(file)}: {_reason(error)}; give another file object, or a path"
        ) from error


def _require_binary(file: Any, mode: str) -> None:
    if isinstance(file, io.TextIOBase) or isinstance(getattr(file, "encoding", None), str):
        raise ConfigError(f"{_name(file)} is open for text; open it with mode {mode!r}")
    if getattr(file, "closed", False) is True:
        raise ConfigError(f"{_name(file)} is closed; open it again")


def _bytes_after(file: Any) -> int:
    """Return the number of bytes after the position of a file object; 0 if it does not tell."""
    if not _is_seekable(file):
        return 0
    with suppress(OSError, ValueError):
        start = file.tell()
        try:
            file.seek(0, os.SEEK_END)
            end: int = file.tell()
            return end - int(start)
        finally:
            file.seek(start)
    return 0


def _is_seekable(file: Any) -> bool:
    seekable = getattr(file, "seekable", None)
    return callable(seekable) and bool(seekable())


def _name(file: Any) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) and name else f"the {type(file).__name__}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
