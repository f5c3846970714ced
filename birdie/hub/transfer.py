"""Folders to and from the Hub of Hugging Face, by huggingface_hub.

folder ──`push`──► user/name            user/name ──`download`──► folder in the cache of huggingface_hub
"""

from pathlib import Path

from birdie.errors import ConfigError
from birdie.system.hub_requests import library, request


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
    hub = library()

    def upload() -> str:
        api = hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message))

    return request(upload, repository)


def download(repository: str, revision: str | None = None) -> Path:
    """Return the folder in the cache that holds the files of a repository.

    Raises:
        ConfigError: huggingface_hub is not installed.
        DataError: there is no such repository, or the Hub cannot be reached.
    """
    return Path(request(lambda: library().snapshot_download(repository, revision=revision), repository))
