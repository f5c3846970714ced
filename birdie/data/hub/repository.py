"""Client for one repository of the Hugging Face hub: its listing at one commit, and verified downloads of its files.

    repo, revision ──► commit ──► listing: path, size, digest
                                     └──► download: file ──► size and digest as listed, or an error

huggingface_hub (the extra `hub`) does the transfers, so `HF_ENDPOINT`, `HF_TOKEN`, proxies and its cache work as usual,
and an interrupted transfer resumes where it broke. This module adds what the library leaves to its callers: it checks
digests, stops a server that sends more bytes than it listed, retries after transient errors, and turns every other
failure into one sentence.
"""

import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from birdie.errors import BirdieError, ConfigError, DataError, OutputError
from birdie.runtime.names import is_name

OnBytes = Callable[[int], None]
"""Called with the number of bytes of the file that are read or received so far."""

MISSING = "birdie prepare hub needs the package huggingface_hub: pip install 'birdie-compress[hub]'"
RETRY_PAUSES = (1.0, 2.0, 4.0)  # seconds before each retry, in addition to the library's own retries
_TIMEOUT = 30.0
_BLOCK = 1 << 20
_TRANSIENT = {408, 429, 500, 502, 503, 504}  # HTTP status codes after which a retry may succeed
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_COMMIT = re.compile(r"[0-9a-f]{40}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in the hub's listing.

    Attributes:
        path: path in the repository, with forward slashes.
        size: bytes.
        digest: hex; SHA-256 of a file in large storage, else git's SHA-1 of the blob.
    """

    path: str
    size: int
    digest: str

    @property
    def name(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self.path).name

    def matches(self, path: Path, on_bytes: OnBytes | None = None) -> bool:
        """Return whether the local file `path` has the listed size and digest."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        sha1 = len(self.digest) == 40
        state = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False) if sha1 else hashlib.sha256()
        with path.open("rb") as file:
            count = 0
            while block := file.read(_BLOCK):
                state.update(block)
                count += len(block)
                if on_bytes is not None:
                    on_bytes(count)
        return state.hexdigest() == self.digest


@dataclass(frozen=True, slots=True)
class Repository:
    """A data set repository at one commit.

    Attributes:
        name: "owner/name".
        commit: 40 hex digits; every file is of this commit.
        files: path → file.
        endpoint: address of the hub; None: the library's default.
    """

    name: str
    commit: str
    files: Mapping[str, RemoteFile]
    endpoint: str | None = None

    @classmethod
    def open(cls, name: str, revision: str | None = None, endpoint: str | None = None) -> "Repository":
        """Request the listing of `name` at `revision` (a branch, a tag or a commit; None: the newest)."""
        api = _library().HfApi(endpoint=endpoint)
        subject = f"{name} at {api.endpoint}"

        def request() -> Any:
            return api.dataset_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT)

        info = _with_retries(request, subject)
        commit = str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise DataError(
                f"{subject} names no commit ({commit[:40]}), so its files could change during the download; "
                "check the connection and --endpoint"
            )
        return cls(name, commit, {file.path: file for file in map(_checked, info.siblings or ())}, endpoint)

    def download(self, file: RemoteFile, folder: Path, on_bytes: OnBytes | None = None) -> Path:
        """Download `file` into `folder` (below it, the path is that of the repository) and verify its digest."""
        subject = f"{file.path} of {self.name}"
        for force in (False, True):  # the first copy may come from the library's cache, the second cannot
            path = _with_retries(lambda force=force: self._transfer(file, folder, on_bytes, force), subject)  # type: ignore[misc]
            if file.matches(path):
                return path
            path.unlink()
        raise DataError(
            f"{subject} was received twice with other bytes than the hub lists ({file.digest[:12]}…); try again later"
        )

    def _transfer(self, file: RemoteFile, folder: Path, on_bytes: OnBytes | None, force: bool) -> Path:
        path = _library().hf_hub_download(
            self.name,
            file.path,
            repo_type="dataset",
            revision=self.commit,
            endpoint=self.endpoint,
            local_dir=folder,
            force_download=force,
            tqdm_class=_byte_counter(file, on_bytes),
        )
        return Path(str(path))


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(MISSING) from error
    return huggingface_hub


def _checked(sibling: Any) -> RemoteFile:
    """Return one entry of the listing as a `RemoteFile`."""
    path, size = str(sibling.rfilename), sibling.size
    digest = str(sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id)
    if not is_name(path):
        raise DataError(f"the repository lists the file {path!r}, which leads out of it; nothing was downloaded")
    if type(size) is not int or size < 0 or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest):
        raise DataError(f"the hub lists {path} without a size or a digest; nothing was downloaded")
    return RemoteFile(path, size, digest)


def _byte_counter(file: RemoteFile, on_bytes: OnBytes | None) -> type:
    """Return a class that replaces tqdm's progress bar and counts bytes.

    It stops a server that sends without end. The limit is twice the listed size, because some storage backends count
    bytes in their own way.
    """

    class ByteCounter:
        def __init__(self, *_: Any, initial: int = 0, total: int | None = None, **__: Any) -> None:
            self.n, self.total = initial, total

        def update(self, count: float | None = 1) -> None:
            self.n += int(count or 0)
            if self.n > 2 * file.size + _BLOCK:
                raise DataError(
                    f"the hub sends more of {file.path} than the {file.size:,} bytes it lists; the download was stopped"
                )
            if on_bytes is not None:
                on_bytes(min(self.n, file.size))

        def update_transfer(self, count: float | None = 1) -> None:
            """Ignore the bytes on the wire: with deduplicated storage they are not those of the file."""

        def __enter__(self) -> "ByteCounter":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., None]:  # close, refresh, set_postfix_str, …
            return lambda *_, **__: None

    return ByteCounter


def _with_retries(attempt: Callable[[], T], subject: str) -> T:
    """Return `attempt()`, retried with pauses after transient errors."""
    for pause in (*RETRY_PAUSES, None):
        try:
            with _quiet_library():
                return attempt()
        except BirdieError:
            raise
        except Exception as error:  # the types of transport errors differ between versions of the library
            cause = _root_cause(error)
            if pause is None or not _is_transient(cause):
                raise _as_birdie_error(cause, subject) from error
        time.sleep(pause)
    raise AssertionError  # the last attempt returns or raises


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Silence the library's log inside the block: it would break the progress bar, and errors are reported here."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _root_cause(error: BaseException) -> BaseException:
    """Return the original error: the library wraps it into messages about its cache."""
    while type(error).__name__ in {"LocalEntryNotFoundError", "ValueError"} and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_transient(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT
    if isinstance(error, OSError) and error.errno in _DISK:
        return False
    return type(error).__name__ not in {"HFValidationError", "OfflineModeIsEnabled", "FileMetadataError"}


def _as_birdie_error(error: BaseException, subject: str) -> BirdieError:
    """Return `error` as one sentence: what is wrong, where, and what to do."""
    kind, status = type(error).__name__, _status(error)
    if isinstance(error, OSError) and error.errno in _DISK:
        return OutputError(
            f"cannot write {subject}: {os.strerror(error.errno or 0).lower()}; free space or choose another folder"
        )
    if kind == "HFValidationError":
        return ConfigError(f"{subject}: a repository name has the form owner/name; check --repo")
    if kind == "OfflineModeIsEnabled":
        return DataError(f"{subject}: HF_HUB_OFFLINE is set, which forbids requests to the hub; unset it")
    if kind == "GatedRepoError":
        return DataError(f"{subject} is gated: accept its terms on its page, then set HF_TOKEN or run `hf auth login`")
    if kind == "RepositoryNotFoundError" or status == 401:
        return DataError(
            f"{subject} does not exist or is private: check --repo, or set HF_TOKEN to a token with access"
        )
    if kind == "RevisionNotFoundError":
        return DataError(f"{subject} has no such revision; check --revision")
    if status == 403:
        return DataError(f"{subject}: access denied (403); the token in HF_TOKEN lacks the permission")
    if status == 404:
        return DataError(f"{subject} does not exist (404); check --repo and --endpoint")
    if status is not None:
        return DataError(f"{subject}: the hub answered {status} in {len(RETRY_PAUSES) + 1} attempts; try again later")
    first = next(iter(str(error).strip().splitlines()), "") or "no reason given"
    return DataError(f"{subject}: the request failed: {kind}: {first}; check the connection, HF_ENDPOINT and proxies")
