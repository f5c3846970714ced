"""Pages of mapped files: what was read counts as memory of the process until it is released.

A checkpoint is mapped, not read: the system loads a page when it is touched, and keeps it. Whoever goes through a model
tensor by tensor calls `release` after each, so that the process never holds more than the tensors at hand. Only pages
that are known to be those of a file that nobody changed are released: inside of `releasing`, which its caller enters
with the tensors that it mapped itself.
"""

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from birdie.errors import ChangedError
from birdie.system.platform import mapped_ranges, release_pages

_sizes: dict[Path, os.stat_result] = {}  # of mapped files, as they were at first
_ranges: list[tuple[int, int]] = []  # of addresses that may be released, rising


@contextmanager
def releasing(files: Iterable[Path]) -> Iterator[None]:
    """Let `release` give back pages of these files, mapped by this process and not changed since."""
    outer = list(_ranges)
    _ranges[:] = sorted([*outer, *mapped_ranges(files)])
    try:
        yield
    finally:
        _ranges[:] = outer


@contextmanager
def complete(files: Iterable[Path], since: Mapping[Path, os.stat_result] | None = None) -> Iterator[None]:
    """Let `require_complete` tell whether one of these files, mapped by this process, was written to in the meantime.

    Without it the process would go on with zeros, or with a mixture of two contents. Where a file was cut and a page
    beyond its new end is read, the system ends the process (SIGBUS).

    Args:
        since: file → its status when it was first read; that of others is taken now.
    """
    outer = dict(_sizes)
    for file, status in (since or {}).items():
        _sizes.setdefault(file, status)
    for file in files:
        if file not in _sizes and mapped_ranges([file]):
            _sizes[file] = file.stat()
    try:
        yield
    except Exception:
        require_complete()  # of what followed from zeros it is the cause
        raise
    finally:
        _sizes.clear()
        _sizes.update(outer)


def require_complete() -> None:
    """Check that nobody wrote to the files of `complete`. Only then may be kept what was read of them."""
    for file, first in _sizes.items():
        with suppress(FileNotFoundError):  # what was removed or replaced stays mapped as it was
            require_unchanged(file, first)


def require_unchanged(file: Path, first: os.stat_result) -> None:
    """Check that nobody wrote to a file since it had some status; one that was replaced by another is as it was."""
    now = file.stat()
    if (now.st_dev, now.st_ino) != (first.st_dev, first.st_ino):
        return
    if now.st_size != first.st_size:
        raise ChangedError(
            f"{file} had {first.st_size:,} bytes and has {now.st_size:,} now: another process changed it while it was "
            "read; copy it again, then run this again"
        )
    if now.st_mtime_ns != first.st_mtime_ns:
        raise ChangedError(f"another process wrote to {file} while it was read; run this again when it is done")


def release(tensor: Tensor) -> None:
    """Give back the pages that lie inside of `tensor`; it stays as it is, and is read again from the file if needed."""
    if not _ranges or tensor.device.type != "cpu":
        return
    start = tensor.data_ptr()
    stop = start + tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    stop = min(stop, start + tensor.numel() * tensor.itemsize)
    index = bisect_right(_ranges, (start, sys.maxsize)) - 1
    if index < 0 or stop > _ranges[index][1]:
        return
    release_pages(start, int(stop))
