"""The challenge's shard format: `.bin` files of tokens.

    256 × int32 little-endian: magic 20240520, version 1, number of tokens n, zeros
    n × uint16 little-endian: token ids

The size must be exactly 1024 + 2n bytes. Documents follow each other as BOS + tokens; `fineweb_train_000000.bin`,
`fineweb_train_000001.bin`, … in name order are one sequence of tokens.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from numpy.typing import NDArray

from birdie.errors import ConfigError, DataError
from birdie.gpt.data.byte_accounting import Tokens
from birdie.system.files import atomic_path
from birdie.system.regular import regular_file

Split = Literal["train", "val"]

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
SHARD_TOKENS = 100_000_000
MAX_VOCAB = 1 << 16  # ids are uint16
_MAX_TOKENS = 2**31 - 1  # the count is an int32
_MOST_TOKENS = 1 << 29  # of one read: Linux returns less than 2 GiB


def _header(tokens: int) -> bytes:
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = MAGIC, VERSION, tokens
    return header.tobytes()


def write_shard(path: str | os.PathLike[str], tokens: NDArray[np.integer[Any]]) -> None:
    """Write `tokens` (N,) as one shard, atomically."""
    payload = _as_uint16(tokens)
    if not 0 < len(payload) <= _MAX_TOKENS:
        raise DataError(f"a shard holds 1 to {_MAX_TOKENS:,} tokens, not {len(payload):,}; {path} was not written")
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(_header(len(payload)))
        file.write(payload.tobytes())


def _as_uint16(tokens: NDArray[np.integer[Any]]) -> Tokens:
    if tokens.dtype != np.uint16 and len(tokens) and not (tokens.min() >= 0 and tokens.max() < 2**16):
        raise DataError(f"token ids {tokens.min()} to {tokens.max()} do not fit 16 bits; use a vocabulary up to 65,536")
    return tokens.astype("<u2", copy=False)


def read_shard(path: str | os.PathLike[str]) -> Tokens:
    """Return the tokens (N,) of a shard as a read-only memory map."""
    path = Path(path)
    try:
        size = regular_file(path).stat().st_size
        with path.open("rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES), np.uint8)
        if len(header) < HEADER_BYTES:
            raise DataError(
                f"{path} has {size:,} bytes, less than a shard's header of {HEADER_BYTES:,}; download it again"
            )
        magic, version, count = (int(value) for value in header.view("<i4")[:3])
        _check_header(path, magic, version, count, size)
        return np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES, shape=(count,))
    except OSError as error:
        raise DataError(f"cannot read shard {path}: {(error.strerror or str(error)).lower()}") from error


class ShardReader:
    """Reader of a shard that may be read over hours: each read opens the file and sees whether it is still the same.

    A memory map would show changed tokens, and the process would die of a signal where the file was cut.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.length = len(read_shard(path))
        self.path = Path(path)
        self._identity = _identity(self.path.stat())

    def read(self, start: int, count: int) -> Tokens:
        """Return at most `count` tokens from `start` on; fewer at the end, and beyond a GiB."""
        count = min(count, self.length - start, _MOST_TOKENS)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(HEADER_BYTES + 2 * start)
                data = file.read(2 * count)
                same = _identity(os.fstat(file.fileno())) == self._identity
        except OSError as error:
            raise DataError(f"cannot read shard {self.path}: {(error.strerror or str(error)).lower()}") from error
        if not same or len(data) != 2 * count:
            raise DataError(f"shard {self.path} was changed while it was in use; restore it, then resume")
        return np.frombuffer(data, "<u2")


def load_tokens(paths: Sequence[Path], limit: int | None = None) -> Tokens:
    """Return the tokens (N,) of all shards, or the first `limit` of them, in memory."""
    shards = [ShardReader(path) for path in paths]
    total = sum(shard.length for shard in shards)
    tokens, done = np.empty(total if limit is None else min(limit, total), np.uint16), 0
    for shard in shards:
        start = 0
        while start < shard.length and done < len(tokens):
            part = shard.read(start, len(tokens) - done)
            tokens[done : done + len(part)] = part
            start, done = start + len(part), done + len(part)
    return tokens


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_header(path: Path, magic: int, version: int, count: int, size: int) -> None:
    if magic != MAGIC:
        raise DataError(f"{path} is no token shard: it begins with {magic}, a shard begins with {MAGIC}")
    if version != VERSION:
        raise DataError(f"{path} is a shard of version {version}; only version {VERSION} can be read")
    if count <= 0:
        raise DataError(f"the header of {path} says {count:,} tokens, a shard has at least one; prepare the data again")
    expected = HEADER_BYTES + 2 * count
    if size != expected:
        raise DataError(
            f"{path} has {size:,} bytes, but {count:,} tokens take {expected:,}; it is damaged, download it again"
        )


class ShardWriter:
    """Writer of the shards `<folder>/<name>_<split>_%06d.bin`; each file appears when it is complete.

    Use it as a context manager; on an error the incomplete shard is removed. The last shard is shorter. Without tokens
    no file is written.

    Args:
        name: of the text.
        split: "train" or "val", or "val_bytes" for the byte sidecar of "val" (`birdie.gpt.data.byte_sidecar`).
    """

    def __init__(
        self, folder: Path, name: str, split: Split | Literal["val_bytes"], shard_tokens: int = SHARD_TOKENS
    ) -> None:
        if not 0 < shard_tokens <= _MAX_TOKENS:
            raise ConfigError(f"shard_tokens={shard_tokens} must lie between 1 and {_MAX_TOKENS:,}")
        self.paths: list[Path] = []
        self._folder = folder
        self._stem = f"{name}_{split}"
        self._shard_tokens = shard_tokens
        self._open = ExitStack()
        self._file: BinaryIO | None = None
        self._written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        else:
            self._open.__exit__(kind, error, trace)

    def write(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Append `tokens` (N,)."""
        rest = _as_uint16(tokens)
        while len(rest):
            file = self._file or self._start()
            part = rest[: self._shard_tokens - self._written]
            file.write(part.tobytes())
            self._written += len(part)
            rest = rest[len(part) :]
            if self._written == self._shard_tokens:
                self._finish()

    def _start(self) -> BinaryIO:
        path = self._folder / f"{self._stem}_{len(self.paths):06d}.bin"
        temporary = self._open.enter_context(atomic_path(path))
        self._file = self._open.enter_context(temporary.open("wb"))
        self._file.write(bytes(HEADER_BYTES))
        self._written = 0
        self.paths.append(path)
        return self._file

    def _finish(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._file.write(_header(self._written))
            self._file = None
        self._open.close()
