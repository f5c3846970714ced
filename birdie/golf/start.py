"""First stage of a packed script: writes the modules that it carries into a folder, and imports its entry from there.

    names and texts ─► files, once for each user ─► package birdie_DIGEST ─► its entry module, imported

A packed script contains the source of this module, so it uses nothing else of birdie. Several processes may do this at
once: files appear complete, and all write the same. The package is named by its digest, so that an installed birdie is
neither imported nor hidden.
"""

import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


def start(parts: Sequence[str], entry: str, needed: str) -> tuple[ModuleType, Path]:
    """Return the entry module and the folder of the files.

    Args:
        parts: names and texts of the files in turn; names begin with `birdie/`.
        entry: dotted name of the entry module below birdie.
        needed: the packages it imports, with spaces between.
    """
    if missing := [name for name in needed.split() if not find_spec(name)]:
        problem = f"error: {', '.join(missing)} not installed; pip install -r requirements.txt"
        raise SystemExit(problem) if __name__ == "__main__" else ImportError(problem)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder, package = own_folder(digest), f"birdie_{digest}"
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        keep(folder / name.replace("birdie", package, 1), text)
    if package not in sys.modules:
        sys.path.append(str(folder))
        sys.meta_path.append(Absent(package))
    return importlib.import_module(f"{package}.{entry}"), folder


class Absent:
    """Last finder of modules: says in a sentence that a module of the package is not in the script."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: Any) -> None:
        """Refuse modules of the package, which the finders before this one would have found."""
        if name.startswith(f"{self.package}."):
            raise ImportError(f"birdie{name.removeprefix(self.package)} is not in this script; use birdie itself")


def keep(path: Path, text: str) -> Path:
    """Write a file, complete or not at all, unless it is there with this content; return `path`."""
    data = text.encode()
    if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    return path


def own_folder(name: str) -> Path:
    """Return a folder that only this user can write: in the user's cache, or a temporary one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "birdie" / "packed" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat()
        if owner.st_uid == os.getuid() and not owner.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError, AttributeError):  # no home directory; no owners of files
        pass
    return Path(tempfile.mkdtemp())
