"""Work on a file in the making: on disk beside it, and found again after its process died.

    .model.birdie.coded/         locked by the process of rank 0
    └── DIGEST.birdie            a record: one tensor, or a block of one, as the complete file will hold it

A record is named by a digest of its key (the weights and all settings that its bytes depend on) and of the number that
the file system gave the folder, which a copy does not keep: nothing that came out of an archive is taken for a record.
The folder is removed once the output is complete, and after errors that the same command would meet again. When the
process was killed or interrupted it stays: the same command continues from it.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from birdie.artifact import container
from birdie.artifact.container import Entry, Reader, Stream
from birdie.artifact.file import DTYPES
from birdie.compress.coding import Coded, Quantized
from birdie.errors import ArtifactError, BirdieError, OutputError
from birdie.system.distributed import World, send_to_main
from birdie.system.files import atomic_path, remove_abandoned
from birdie.system.locks import open_locked
from birdie.system.outputs import require_file, require_folder
from birdie.system.provenance import versions

_RECORD = re.compile(r"[0-9a-f]{64}\.birdie")
_CODE = 1  # of the scheme of a record's entry, which its name replaces: the container does not interpret it
_PIECE = 1 << 22  # bytes that are read at a time


@dataclass(frozen=True, slots=True)
class StoredStream(Stream):
    """A coded stream on disk; `payload` is empty."""

    path: Path  # of the record, as its rank names it
    # offset, stored: of the payload, in bytes
    offset: int
    stored: int
    size: int  # bytes of the record
    rank: int  # that has the record

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return self.stored

    def pieces(self) -> Iterator[bytes]:
        """Yield the payload, a few MiB at a time."""
        yield from _pieces(self.path, self.offset, self.stored)


class Resume:
    """Records of one output. It is a context manager.

    Args:
        output: the file that is being written.
        rank: of this process.
    """

    def __init__(self, output: Path, rank: int = 0) -> None:
        self.rank = rank
        self.folder = output.absolute().parent / f".{output.name}.coded"
        self._lock: int | None = None
        try:
            require_folder(self.folder, overwrite=True).mkdir(parents=True, exist_ok=True)
            if rank == 0:
                self._lock = open_locked(self.folder, os.O_RDONLY)
            self._number = self.folder.stat().st_ino
        except BlockingIOError as error:
            raise OutputError(f"{output} is being written by another process; wait, or choose another name") from error
        except OSError as error:
            raise OutputError(
                f"cannot write {self.folder} for {output}: {(error.strerror or str(error)).lower()}; choose another "
                "folder"
            ) from error

    def recall(self, key: str) -> Coded | None:
        """Return the tensor of `key` that a process left which died, if there is one and it is not damaged."""
        path = self._path(key)
        with suppress(ArtifactError, OutputError, ValueError):
            if require_file(path).exists():
                with Reader(path) as reader:
                    (name,) = reader.names
                    reader.read(name)  # checks the CRC-32
                    return self._stored(path, reader, name)
        return None

    def keep(self, key: str, coded: Coded) -> Coded:
        """Write a tensor as a record, whose entry has the name of the scheme; return it with payloads on disk."""
        path = self._path(key)
        entry = Entry(coded.scheme, _CODE, DTYPES.index(coded.dtype), coded.shape, coded.params, coded.streams)
        with atomic_path(path, flush=False) as temporary:
            temporary.write_bytes(container.to_bytes([entry]))
        with Reader(path) as reader:
            stored = self._stored(path, reader, entry.name)
        assert stored is not None
        return stored

    def collect(self, world: World, tensors: Mapping[str, Quantized]) -> dict[str, Quantized]:
        """Copy to rank 0 the records that are on disks of other machines, and return what has them there.

        All ranks must call it.
        """
        records = {stream.path: stream for tensor in tensors.values() for stream in _stored(tensor)}
        copies: dict[Path, Path] = {}
        for record in world.broadcast([record for record in records.values() if not record.path.exists()]):
            data = send_to_main(world, record.rank, lambda one=record: _pieces(one.path, 0, one.size), record.size)  # type: ignore[misc]
            if not world.is_main:
                for _ in data:
                    pass
                continue
            copies[record.path] = self.folder / record.path.name
            with atomic_path(copies[record.path], flush=False) as temporary, temporary.open("wb") as file:
                file.writelines(data)
        return {name: _moved(tensor, copies) for name, tensor in tensors.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, BirdieError | OSError):
            self._remove()
        elif self.rank == 0 and any(self.folder.iterdir()):
            logging.getLogger("birdie").warning(
                "what is done is kept in %s: the same command continues from there", self.folder
            )
        elif self.rank == 0:
            self._remove()
        if self._lock is not None:
            os.close(self._lock)

    def _remove(self) -> None:
        """Remove the records, and the folder unless somebody else has put something there."""
        with suppress(OSError):
            remove_abandoned(self.folder)
            for path in self.folder.iterdir():
                if _RECORD.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            self.folder.rmdir()

    def _path(self, key: str) -> Path:
        text = f"{self._number} {versions()['birdie']} {key}"
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.birdie"

    def _stored(self, path: Path, reader: Reader, name: str) -> Coded | None:
        header, streams = reader.header(name), []
        entry = header.entry
        if entry.dtype >= len(DTYPES):
            return None
        offset = header.offset
        for stream, length in zip(entry.streams, header.lengths, strict=True):
            streams.append(StoredStream(stream.coder, b"", path, offset, length, reader.size, self.rank))
            offset += length
        return Coded(entry.name, entry.shape, DTYPES[entry.dtype], entry.params, tuple(streams), header.crc)


def _stored(tensor: Quantized) -> Iterator[StoredStream]:
    if isinstance(tensor, Coded):
        yield from (stream for stream in tensor.streams if isinstance(stream, StoredStream))
        for part in tensor.parts:
            yield from _stored(part)


def _moved(tensor: Any, copies: Mapping[Path, Path]) -> Any:
    """Return a coded tensor whose streams are in copies of their records."""
    streams = tuple(
        replace(stream, path=copies.get(stream.path, stream.path)) if isinstance(stream, StoredStream) else stream
        for stream in tensor.streams
    )
    return replace(tensor, streams=streams, parts=tuple(_moved(part, copies) for part in tensor.parts))


def _pieces(path: Path, offset: int, length: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while length:
            piece = file.read(min(_PIECE, length))
            if not piece:
                raise OSError(f"{path} was cut while it was in use")
            length -= len(piece)
            yield piece
