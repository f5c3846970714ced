"""Folders nested deeper than Python recurses."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def deep_folder(folder: Path, depth: int = 1300) -> Iterator[Path]:
    """Make a folder with folders nested that deep; it is removed at the end, as pytest would recurse into it."""
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-r", folder], check=True)
