"""Requests to the Hugging Face Hub by huggingface_hub (the extra `hub`), whose failures are one sentence."""

import errno
import os
from collections.abc import Callable
from typing import Any, TypeVar

from birdie.errors import BirdieError, ConfigError, DataError, OutputError

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_WRAPPERS = {"LocalEntryNotFoundError", "IncompleteSnapshotError", "ValueError"}  # errors about the library's cache
_FINAL = {
    "HFValidationError": "is not the name of a repository, which has the form owner/name",
    "OfflineModeIsEnabled": "cannot be requested: HF_HUB_OFFLINE is set; unset it",
    "GatedRepoError": "is gated: accept its terms on its page, then set HF_TOKEN or run `hf auth login`",
    "RepositoryNotFoundError": "does not exist, or is private: check the name, or set HF_TOKEN to a token with access",
    "RevisionNotFoundError": "has no such revision; check its name",
    "FileMetadataError": "is sent without size and digest; check the connection, HF_ENDPOINT and proxies",
}
_BY_STATUS = {
    401: _FINAL["RepositoryNotFoundError"],
    403: "is refused (403): the token in HF_TOKEN lacks the permission",
    404: "does not exist (404); check the name, and HF_ENDPOINT",
}

T = TypeVar("T")


def library() -> Any:
    """Return huggingface_hub, which is imported by those alone who use the Hub."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError("the Hub needs huggingface_hub: pip install 'birdie-compress[hub]'") from error
    return huggingface_hub


def request(work: Callable[[], T], subject: str) -> T:
    """Return `work()`; any failure of the library, which tries again itself, becomes one sentence.

    Args:
        subject: what is requested, for the sentence.
    """
    try:
        return work()
    except BirdieError:
        raise
    except Exception as error:  # the types of transport errors differ between versions of the library
        cause: BaseException = error
        while type(cause).__name__ in _WRAPPERS and cause.__cause__ is not None:
            cause = cause.__cause__
        raise _in_words(cause, subject) from error


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _in_words(error: BaseException, subject: str) -> BirdieError:
    kind, status = type(error).__name__, _status(error)
    if isinstance(error, OSError) and error.errno in _DISK:
        reason = os.strerror(error.errno or 0).lower()
        return OutputError(f"cannot write {subject}: {reason}; free some space, or choose another folder")
    if words := _FINAL.get(kind) or _BY_STATUS.get(status or 0):
        return (ConfigError if kind == "HFValidationError" else DataError)(f"{subject} {words}")
    if status is not None:
        return DataError(f"{subject}: the Hub answered {status}; try again later")
    reason = " ".join(str(error).split())[:200] or "no reason given"
    return DataError(f"{subject}: the request failed ({kind}: {reason}); check the connection, HF_ENDPOINT and proxies")
