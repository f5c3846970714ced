"""Coded tensors of a large file that is being written: on disk beside it, and found again after its process died.

    .model.birdie.coded/
    ├── 0, 1, …    one file of records for each rank, locked by its process

    token 16 │ record │ record │ …        record: bytes of the header 4 │ CRC-32 of the header 4 │ header │ payloads

A record is found again by its key, a digest of the weights and of all settings that its bytes depend on. The folder is
removed once the output is complete, and after errors that the same command would meet again. When the process was
killed or interrupted it stays: the same command continues from it.
"""

import json
import logging
import os
import secrets
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from birdie.errors import BirdieError, OutputError
from birdie.runtime.distributed import World, send_to_main
from birdie.runtime.locks import open_locked

_TOKEN_BYTES = 16
_HEAD = struct.Struct("<II")
_MOST_HEADER = 1 << 20
_PIECE = 1 << 22  # bytes that are read at a time


@dataclass(frozen=True, slots=True)
class Spooled:
    """Payload in a file of records.

    Attributes:
        path: of the file, as its rank names it; token: its first bytes, which tell it from another of that name.
        offset, length: of the payload, in bytes.
        rank: that wrote it.
    """

    path: Path
    token: bytes
    offset: int
    length: int
    rank: int

    @property
    def is_here(self) -> bool:
        """Return whether this process can read the file."""
        try:
            with self.path.open("rb") as file:
                return file.read(_TOKEN_BYTES) == self.token
        except OSError:
            return False

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes, a few MiB at a time.

        Raises:
            OSError: the file cannot be read, or was cut.
        """
        left = self.length
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while left:
                piece = file.read(min(_PIECE, left))
                if not piece:
                    raise OSError(f"{self.path} was cut while it was in use")
                left -= len(piece)
                yield piece


@dataclass(frozen=True, slots=True)
class Record:
    """Payloads that belong together.

    Attributes:
        about: what else is known of them, as JSON.
        payloads: in order.
        crc: CRC-32 of all payloads, one after the other.
    """

    about: Mapping[str, Any]
    payloads: tuple[Spooled, ...]
    crc: int


class Spool:
    """Records of one rank, and those that processes which died left. It is a context manager.

    Args:
        output: the file that is being written.
        rank: of this process.

    Raises:
        OutputError: the folder cannot be written, or another process writes the same output.
    """

    def __init__(self, output: Path, rank: int = 0) -> None:
        self.output, self.rank = output, rank
        self.folder = output.absolute().parent / f".{output.name}.coded"
        self.path = self.folder / str(rank)
        self._lock, self._end = threading.Lock(), 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = open_locked(self.path)
            self._records = self._all_records()
            self._token = self._continue()
        except BlockingIOError as error:
            raise OutputError(f"{output} is being written by another process; wait, or choose another name") from error
        except OSError as error:
            raise self._error(error) from error

    def recall(self, key: str) -> Record | None:
        """Return the record of `key` that a process left which died, if there is one and it is not damaged."""
        record = self._records.get(key)
        if record is None:
            return None
        crc = 0
        with suppress(OSError):
            for payload in record.payloads:
                for piece in payload.pieces():
                    crc = zlib.crc32(piece, crc)
            return record if crc == record.crc else None
        return None

    def put(self, key: str, about: Mapping[str, Any], payloads: Sequence[bytes]) -> Record:
        """Write a record.

        Raises:
            OutputError: the disk is full.
        """
        crc = 0
        for payload in payloads:
            crc = zlib.crc32(payload, crc)
        fields = {"key": key, "about": about, "lengths": [len(payload) for payload in payloads], "crc": crc}
        header = json.dumps(fields, separators=(",", ":")).encode()
        head = _HEAD.pack(len(header), zlib.crc32(header))
        with self._lock:
            start = self._end
            for data in (head + header, *payloads):
                self._append(data)
        start += len(head) + len(header)
        return Record(about, _spooled(self.path, self._token, start, [*map(len, payloads)], self.rank), crc)

    def collect(self, world: World, payloads: Sequence[Spooled]) -> dict[Spooled, Spooled]:
        """Return, on rank 0, payload → copy for those that lie on a disk of another machine; all ranks must call it.

        Raises:
            OutputError: the disk is full.
        """
        files = {payload.path: payload for payload in payloads}
        absent = {path for path, payload in files.items() if not payload.is_here}
        copies: dict[Spooled, Spooled] = {}
        for payload in world.broadcast([payload for payload in payloads if payload.path in absent]):
            start = self._end
            for piece in send_to_main(world, payload.rank, payload.pieces, payload.length):
                self._append(piece)
            if world.is_main:
                copies[payload] = Spooled(self.path, self._token, start, payload.length, self.rank)
        return copies

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)
        if error is None or isinstance(error, BirdieError | OSError):
            if self.rank == 0 or error is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
        elif self.rank == 0:
            logging.getLogger("birdie").warning(
                "tensors that are coded are kept in %s: the same command continues from them", self.folder
            )

    def _append(self, data: bytes) -> None:
        try:
            self._end = _write(self._file, data, self._end)
        except OSError as error:
            raise self._error(error) from error

    def _all_records(self) -> dict[str, Record]:
        """Return the records of all files in the folder."""
        records: dict[str, Record] = {}
        for path in sorted(self.folder.iterdir()):
            with suppress(OSError, ValueError), path.open("rb") as file:
                if not hasattr(os, "getuid") or os.fstat(file.fileno()).st_uid == os.getuid():
                    records.update(_records(path, file))
        return records

    def _continue(self) -> bytes:
        """Cut this rank's file behind its last complete record, or begin it; return its token."""
        payloads = [payload for record in self._records.values() for payload in record.payloads]
        payloads = [payload for payload in payloads if payload.path == self.path]
        if payloads:
            last = max(payloads, key=lambda payload: payload.offset)
            self._end = last.offset + last.length
            os.truncate(self._file, self._end)
            return last.token
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.truncate(self._file, 0)
        self._end = _write(self._file, token, 0)
        return token

    def _error(self, error: OSError) -> OutputError:
        reason = (error.strerror or str(error)).lower()
        return OutputError(
            f"cannot write {self.folder} for {self.output}: {reason}; free some space, or choose another folder"
        )


def _records(path: Path, file: Any) -> Iterator[tuple[str, Record]]:
    """Yield (key, record) of every complete record of a file."""
    size = os.fstat(file.fileno()).st_size
    token, rank = file.read(_TOKEN_BYTES), int(path.name)
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, crc = _HEAD.unpack(head)
        header = file.read(min(length, _MOST_HEADER))
        if len(header) != length or zlib.crc32(header) != crc:
            return
        fields = json.loads(header)
        payloads = _spooled(path, token, file.tell(), fields["lengths"], rank)
        end = file.tell() + sum(fields["lengths"])
        if end > size:
            return
        yield fields["key"], Record(fields["about"], payloads, fields["crc"])
        file.seek(end)


def _spooled(path: Path, token: bytes, offset: int, lengths: Sequence[int], rank: int) -> tuple[Spooled, ...]:
    payloads = []
    for length in lengths:
        payloads.append(Spooled(path, token, offset, length, rank))
        offset += length
    return tuple(payloads)


def _write(file: int, data: bytes, offset: int) -> int:
    """Write all of `data` at `offset` and return where it ends."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
    return offset
