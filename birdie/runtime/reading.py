"""Regular files: the only kind that is opened for reading."""

import os
import stat
from pathlib import Path


def require_regular(path: str | os.PathLike[str]) -> Path:
    """Return `path` if it is a regular file, or leads to one: opening a FIFO would wait for its writer."""
    path = Path(path)
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError("is a folder" if stat.S_ISDIR(mode) else "not a regular file")
    return path
