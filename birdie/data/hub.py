"""A data set's repository on the Hugging Face hub: what it holds at one commit, and its files one by one, proven whole.

    repo, revision ──► commit ──► listing: path, size, digest
                                     └──► fetch: file ──► size and digest as listed, or not at all

Transfers are huggingface_hub's (the extra `hub`): `HF_ENDPOINT`, `HF_TOKEN`, proxies and its cache count as everywhere,
and a connection that breaks is taken up where it broke. What it leaves to its callers is here: digests of what arrived,
no more bytes than were listed, patience with a server in trouble, and one sentence when it stays in trouble.
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

Received = Callable[[int], None]  # bytes of the file so far

MISSING = "birdie prepare hub needs the package huggingface_hub: pip install 'birdie[hub]'"
PATIENCE = (1.0, 2.0, 4.0)  # seconds before each further attempt; the library's own come on top
_TIMEOUT = 30.0
_CHUNK = 1 << 20
_PASSING = {408, 429, 500, 502, 503, 504}  # what a server answers and may not answer the next time
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_COMMIT = re.compile(r"[0-9a-f]{40}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub lists it.

    Attributes:
        path: in the repository, with forward slashes.
        size: bytes.
        digest: hex; SHA-256 of a file in large storage, else git's SHA-1 of the blob.
    """

    path: str
    size: int
    digest: str

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name

    def matches(self, path: Path, seen: Received | None = None) -> bool:
        """Whether `path` holds these very bytes; `seen` is told how many were read."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        sha1 = len(self.digest) == 40
        state = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False) if sha1 else hashlib.sha256()
        with path.open("rb") as file:
            count = 0
            while block := file.read(_CHUNK):
                state.update(block)
                count += len(block)
                if seen is not None:
                    seen(count)
        return state.hexdigest() == self.digest


@dataclass(frozen=True, slots=True)
class Repository:
    """A data set's repository at one commit.

    Attributes:
        name: "owner/name".
        commit: 40 hex digits; every file is of this commit.
        files: by path.
        endpoint: where it was found; None: where the library looks by itself.
    """

    name: str
    commit: str
    files: Mapping[str, RemoteFile]
    endpoint: str | None = None

    @classmethod
    def open(cls, name: str, revision: str | None = None, endpoint: str | None = None) -> "Repository":
        """Ask the hub what `name` holds now, or at `revision` (a branch, a tag or a commit).

        Raises:
            ConfigError: huggingface_hub is not installed, or `name` is no repository's name.
            DataError: no such repository or revision, no access, or no sensible answer.
        """
        api = _library().HfApi(endpoint=endpoint)
        place = f"{name} at {api.endpoint}"

        def ask() -> Any:
            return api.dataset_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT)

        info = _patiently(ask, place)
        commit = str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise DataError(
                f"{place} names no commit ({commit[:40]}), so nothing there can be trusted to stay the same"
            )
        return cls(name, commit, {file.path: file for file in map(_listed, info.siblings or ())}, endpoint)

    def fetch(self, file: RemoteFile, folder: Path, received: Received | None = None) -> Path:
        """`file` under `folder` (its path in the repository below that), whole and with the digest listed.

        Raises:
            DataError: it did not come, or came wrong twice.
            OutputError: it cannot be written.
        """
        place = f"{file.path} of {self.name}"
        for again in (False, True):  # the first copy may come from the library's cache, the second cannot
            path = _patiently(lambda again=again: self._download(file, folder, received, again), place)  # type: ignore[misc]
            if file.matches(path):
                return path
            path.unlink()
        raise DataError(
            f"{place} came twice with other bytes than the hub lists ({file.digest[:12]}…); try again later"
        )

    def _download(self, file: RemoteFile, folder: Path, received: Received | None, again: bool) -> Path:
        path = _library().hf_hub_download(
            self.name,
            file.path,
            repo_type="dataset",
            revision=self.commit,
            endpoint=self.endpoint,
            local_dir=folder,
            force_download=again,
            tqdm_class=_meter(file, received),
        )
        return Path(str(path))


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(MISSING) from error
    return huggingface_hub


def _listed(sibling: Any) -> RemoteFile:
    """A file of the listing, distrusted.

    Raises:
        DataError: its path leads out of the repository, or its size or digest is none.
    """
    path, size = str(sibling.rfilename), sibling.size
    digest = str(sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id)
    if not inside(path):
        raise DataError(f"the repository lists the file {path!r}, which leads out of it; nothing was fetched")
    if type(size) is not int or size < 0 or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest):
        raise DataError(f"the hub lists {path} without a size or a digest; nothing was fetched")
    return RemoteFile(path, size, digest)


def inside(path: str) -> bool:
    """Whether `path`, relative to a folder, stays in it."""
    parts = path.split("/")
    return not ({"", ".", ".."} & set(parts)) and "\\" not in path and ":" not in parts[0] and path.isprintable()


def _meter(file: RemoteFile, received: Received | None) -> type:
    """A class that stands in for tqdm's bar and counts bytes instead.

    A server that sends without end is cut off, but not before twice the size listed: some storages count their own way.
    """

    class Meter:
        def __init__(self, *_: Any, initial: int = 0, total: int | None = None, **__: Any) -> None:
            self.n, self.total = initial, total

        def update(self, count: float | None = 1) -> None:
            self.n += int(count or 0)
            if self.n > 2 * file.size + _CHUNK:
                raise DataError(f"the hub sends more of {file.path} than the {file.size:,} bytes it lists; stopped")
            if received is not None:
                received(min(self.n, file.size))

        def update_transfer(self, count: float | None = 1) -> None:
            """Bytes on the wire, where storage is deduplicated: not the file's."""

        def __enter__(self) -> "Meter":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., None]:  # close, refresh, set_postfix_str, …
            return lambda *_, **__: None

    return Meter


def _patiently(attempt: Callable[[], T], place: str) -> T:
    """`attempt()`, again after a pause while the trouble may pass."""
    for pause in (*PATIENCE, None):
        try:
            with _silence():
                return attempt()
        except BirdieError:
            raise
        except Exception as error:  # whatever the library's transport raises differs between its versions
            reason = _reason(error)
            if pause is None or not _may_pass(reason):
                raise _explained(reason, place) from error
        time.sleep(pause)
    raise AssertionError  # the last attempt returns or raises


@contextmanager
def _silence() -> Iterator[None]:
    """Without the library's own remarks, which would run into a progress bar; what matters becomes an error."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> BaseException:
    """What went wrong at first: the library wraps it into remarks about its cache."""
    while type(error).__name__ in {"LocalEntryNotFoundError", "ValueError"} and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status in _PASSING
    if isinstance(error, OSError) and error.errno in _DISK:
        return False
    return type(error).__name__ not in {"HFValidationError", "OfflineModeIsEnabled", "FileMetadataError"}


def _explained(error: BaseException, place: str) -> BirdieError:
    """The error as one sentence of ours: what is wrong, where, and what to do."""
    kind, status = type(error).__name__, _status(error)
    if isinstance(error, OSError) and error.errno in _DISK:
        return OutputError(
            f"cannot write {place}: {os.strerror(error.errno or 0).lower()}; free space or choose another folder"
        )
    if kind == "HFValidationError":
        return ConfigError(f"{place}: a repository is called owner/name; check --repo")
    if kind == "OfflineModeIsEnabled":
        return DataError(f"{place}: HF_HUB_OFFLINE is set, so the hub is not asked; unset it")
    if kind == "GatedRepoError":
        return DataError(f"{place} is gated: accept its terms on its page, then set HF_TOKEN or run `hf auth login`")
    if kind == "RepositoryNotFoundError" or status == 401:
        return DataError(f"{place} is not there, or not for you: check --repo, or set HF_TOKEN if it is private")
    if kind == "RevisionNotFoundError":
        return DataError(f"{place} has no such revision; check --revision")
    if status == 403:
        return DataError(f"{place} is forbidden to you (403): the token in HF_TOKEN lacks the permission")
    if status == 404:
        return DataError(f"{place} is not there (404); check --repo and --endpoint")
    if status is not None:
        return DataError(f"{place}: the hub answers {status}, {len(PATIENCE) + 1} times over; try again later")
    first = next(iter(str(error).strip().splitlines()), "") or "no reason given"
    return DataError(f"{place} cannot be had: {kind}: {first}; check the connection, HF_ENDPOINT and proxies")
