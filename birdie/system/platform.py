"""Differences between systems: names that POSIX or Linux alone has, each with a way where it is missing.

The rest of birdie uses none of them (tests/system/test_platform.py), except what is for Linux alone and says so:
the audit of foreign scripts.
"""

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

READ_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
"""Flags of `os.open` that do not wait for the writer of a pipe, and change no byte."""
NO_LINK = READ_FLAGS | getattr(os, "O_NOFOLLOW", 0)
"""Flags that open no link either, where the system can refuse it."""
_SIGNAL_OF_LEASE = 10  # F_SETSIG of fcntl(2), which Python does not name
END_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals by which a user or the system ends a process."""
OWN_GROUP: dict[str, Any] = (
    {"start_new_session": True}
    if hasattr(os, "killpg")
    else {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
)
"""Settings of `subprocess.Popen` by which Ctrl-C in the terminal does not reach the child."""


# Files


def read_at(file: BinaryIO, lock: Lock, length: int, offset: int) -> bytes:
    """Return at most `length` bytes of `file` at `offset`; threads share the file, and its lock where that is needed.

    By position, forked processes can share it as well; where it is missing, no process is forked either.
    """
    if not hasattr(os, "pread"):
        with lock:
            file.seek(offset)
            return file.read(length)
    data = b""
    while piece := os.pread(file.fileno(), length - len(data), offset + len(data)):
        data += piece  # the system returns less than 2 GiB at a time
    return data


def write_at(file: BinaryIO, lock: Lock, data: memoryview, offset: int) -> None:
    """Write `data` into an unbuffered file at `offset`; threads share the file."""
    if not hasattr(os, "pwrite"):
        with lock:
            file.seek(offset)
            while data:
                data = data[file.write(data) :]
        return
    while data:
        written = os.pwrite(file.fileno(), data, offset)
        data, offset = data[written:], offset + written


def is_open_for_writing(path: Path) -> bool:
    """Return whether a process has a file open for writing; False on systems that do not tell.

    Linux gives a read lease on a file of this user only if nobody has it open for writing.
    """
    if sys.platform != "linux":
        return False
    import fcntl

    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | NO_LINK)
        try:
            fcntl.fcntl(file, _SIGNAL_OF_LEASE, signal.SIGURG)  # who opens it meanwhile must not end this process
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:  # others: no lease on this file system, or the file is another user's
            return error.errno == errno.EAGAIN
        finally:
            os.close(file)
    return False


def user_id() -> int | None:
    """Return the number of this user, None where files do not have one."""
    return os.getuid() if hasattr(os, "getuid") else None


def copy_owner(status: os.stat_result, target: Path) -> None:
    """Give `target` the owner and group of another file as far as this user may."""
    if hasattr(os, "chown"):
        for owner in (status.st_uid, -1):
            with suppress(OSError):
                os.chown(target, owner, status.st_gid)
                break


# Processes


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_seconds() -> float | None:
    """Return the age of this process in seconds, or None on systems without /proc."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in ticks since boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def at_fork(acquire: Callable[[], object], release: Callable[[], None]) -> None:
    """Call `acquire` in a process that forks, and `release` in both processes after it; nothing where none can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=release)


def interrupt(process: "subprocess.Popen[Any]") -> None:
    """Send Ctrl-C to a child that was started with `OWN_GROUP`, and to its own children."""
    with suppress(ProcessLookupError, OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGINT)
        else:  # Windows has no Ctrl-C for another group; Ctrl-Break ends the child without a checkpoint
            process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))


def kill(process: "subprocess.Popen[Any]") -> None:
    """End a child that was started with `OWN_GROUP` at once, and its own children where they are a group."""
    with suppress(ProcessLookupError, OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def end_this_process(number: int = signal.SIGTERM) -> None:
    """Send this process a signal that ends it, for which Python's handler runs in the main thread."""
    if hasattr(os, "killpg"):
        os.kill(os.getpid(), number)  # also wakes the main thread
    else:  # where os.kill would end it without the handler
        signal.raise_signal(number)


# Memory


def free_memory() -> int | None:
    """Return the bytes of memory that a process may still take, None where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def mapped_ranges(files: Iterable[Path]) -> list[tuple[int, int]]:
    """Return the ranges of addresses at which this process has mapped files; none on systems that do not tell."""
    if not (sys.platform.startswith("linux") and hasattr(os, "makedev") and hasattr(mmap, "MADV_DONTNEED")):
        return []
    wanted = {(status.st_dev, status.st_ino) for status in map(os.stat, files)}
    if not wanted:  # thousands of lines may follow
        return []
    ranges = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, _, _, device, inode, *_ = line.split(maxsplit=5)
        major, minor = (int(part, 16) for part in device.split(":"))
        if (os.makedev(major, minor), int(inode)) in wanted:
            start, stop = (int(part, 16) for part in addresses.split("-"))
            ranges.append((start, stop))
    return ranges


def release_pages(start: int, stop: int) -> None:
    """Give back the memory of the pages that lie between two addresses of `mapped_ranges`."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def trim_memory() -> None:
    """Give back the memory that this process has freed, where its allocator keeps it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def interrupt_thread(thread: int, error: type[Exception]) -> None:
    """Raise an exception in another thread of Python, between two of its instructions."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
