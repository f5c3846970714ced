"""Checkpoints that are complete: one that is still being written waits.

A trainer writes for seconds, and no system tells when it is done. A checkpoint is complete if nothing of it has changed
for a while, no process has a file of it open for writing, as far as the system tells, and its files do not end before
their content does. What lies beside it under a longer form of its name (ckpt_220.pt.tmp) counts as a part of it.
"""

import json
import os
import re
import time
import zipfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from birdie.checkpoints.folder_scan import TORCH
from birdie.system.platform import is_open_for_writing

QUIET = 2.0
"""Seconds without a change after which a checkpoint may be complete."""
_MOST_HEADER = 100_000_000  # bytes of the header of a .safetensors file; more is none
_ZIP = b"PK\x03\x04"

_Status = dict[Path, tuple[int, int, int]]


def unfinished(checkpoints: Collection[Path]) -> dict[Path, str]:
    """Return checkpoint → why it is not complete, of those that are not; wait a moment for what changed just now.

    Args:
        checkpoints: files and folders in one folder.
    """
    seen = _statuses(checkpoints)
    youngest = max((changed for status in seen.values() for _, changed, _ in status.values()), default=0)
    if time.time() - youngest / 1e9 < QUIET:
        time.sleep(QUIET)
    problems, now = {}, _statuses(checkpoints)
    for path, status in seen.items():
        if now[path] != status:
            problems[path] = f"{path.name} is still being written"
        elif problem := _problem(path, status):
            problems[path] = problem
    return problems


def is_twin(name: str, of: str) -> bool:
    """Return whether a name is a longer form of a checkpoint's: ckpt_220.pt.tmp, tmp-checkpoint-220, step-4.part."""
    return name != of and re.search(rf"(?<![^\W_]){re.escape(of)}(?![^\W_])", name) is not None


def _statuses(checkpoints: Collection[Path]) -> dict[Path, _Status]:
    """Return checkpoint → its status; what is no checkpoint beside them may be a twin of one."""
    known = {*checkpoints}
    others = [other for folder in {path.parent for path in known} for other in folder.iterdir() if other not in known]
    return {path: _status(path, [other for other in others if is_twin(other.name, path.name)]) for path in checkpoints}


def _status(path: Path, twins: Collection[Path]) -> _Status:
    """Return file or folder → bytes, time of its last change and number, of all in a checkpoint and of its twins."""
    status: _Status = {}
    for root in (path, *twins):
        for file in (root, *_below(root)):
            with suppress(OSError):  # gone meanwhile
                facts = file.lstat()
                status[file] = facts.st_size, facts.st_mtime_ns, facts.st_ino
    return status


def _below(folder: Path) -> Iterator[Path]:
    """Yield all files and folders in a folder; nothing if it is none."""
    if folder.is_dir() and not folder.is_symlink():
        for parent, folders, files in os.walk(folder):
            yield from (Path(parent) / name for name in (*folders, *files))


def _problem(path: Path, status: _Status) -> str:
    """Return why a checkpoint that does not change is not complete; "" if it is."""
    for file in status:
        if is_open_for_writing(file):
            return f"{file.name} is still being written"
        if file.is_relative_to(path) and file.is_file() and (end := missing_end(file)):
            return f"{file.name} {end}"
    return ""


def missing_end(path: Path) -> str:
    """Return how the end of a file tells that it is missing; "" for a file that is complete, or of no such kind."""
    size = path.stat().st_size
    if not size:
        return "is empty" if path.name.lower().endswith((*TORCH, ".safetensors")) else ""
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(_ZIP):
            return "" if zipfile.is_zipfile(file) else "has lost its end, the directory of a zip file"
        if path.name.lower().endswith(".safetensors"):
            length = int.from_bytes(start, "little")
            if length > _MOST_HEADER:
                return ""
            end = _end_of_tensors(file.read(length)) if 8 + length <= size else None
            return "" if end is not None and 8 + length + end <= size else "has lost its end, tensors of its header"
    return ""


def _end_of_tensors(header: bytes) -> int | None:
    """Return where the last tensor of a .safetensors file ends, after its header; None if that does not tell."""
    try:
        about = json.loads(header)
        return max((int(one["data_offsets"][1]) for name, one in about.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
