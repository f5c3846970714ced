"""Folders to and from the Hub of Hugging Face, by huggingface_hub.

folder ──`push`──► user/name            user/name ──`download`──► folder in the cache of huggingface_hub
"""

from pathlib import Path
from typing import Any

from birdie.errors import ConfigError, DataError

_INSTALL = "the Hub needs huggingface_hub; pip install 'birdie-compress[hub]'"


def push(folder: Path, repository: str, *, private: bool = True, message: str = "Upload from birdie") -> str:
    """Upload all files of a folder, a birdie folder or a submission, and return the address of the commit.

    Args:
        folder: whose files to upload; the repository is created if necessary.
        repository: "user/name".
        private: whether a new repository is private.
        message: of the commit.

    Raises:
        ConfigError: huggingface_hub is not installed, or there is nothing to upload.
        DataError: the Hub refuses it, or cannot be reached.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        raise ConfigError(f"{folder} is not a folder with files; give what birdie wrote")
    hub = _library()

    def upload() -> str:
        api = hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message))

    return str(_explained(upload, repository))


def download(repository: str, revision: str | None = None) -> Path:
    """Return the folder in the cache that holds the files of a repository.

    Raises:
        ConfigError: huggingface_hub is not installed.
        DataError: there is no such repository, or the Hub cannot be reached.
    """
    hub = _library()
    return Path(_explained(lambda: hub.snapshot_download(repository, revision=revision), repository))


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
    return huggingface_hub


def _explained(work: Any, repository: str) -> Any:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return work()
    except RepositoryNotFoundError as error:
        raise DataError(
            f"the Hub has no repository {repository!r}, or it is private; check the name, or log in"
        ) from error
    except HFValidationError as error:
        raise DataError(f"{repository!r} is not the name of a repository ({error}); give user/name") from error
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"the Hub cannot be reached for {repository!r} ({reason}); try again") from error
