"""Regular files: the only kind that is opened for reading. Apart from `files`, as the standalone decoder needs it."""

import os
import stat
from pathlib import Path


def require_regular(path: str | os.PathLike[str]) -> Path:
    """Return `path` if it is a regular file, or leads to one: opening a FIFO would wait for its writer.

    Raises:
        OSError: it does not exist, or is a folder, FIFO, socket or device.
    """
    mode = os.stat(path).st_mode  # noqa: PTH116 (shorter in the standalone decoder)
    if not stat.S_ISREG(mode):
        raise OSError("is a folder" if stat.S_ISDIR(mode) else "not a regular file")
    return Path(path)
