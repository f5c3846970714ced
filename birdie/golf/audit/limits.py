"""Limits of all processes of a sandbox together: memory, processes, files. Counted and enforced from outside.

Resource limits hold for each process by itself. A control group limits the sum where one may be made; a thread counts
it everywhere, every few milliseconds, and ends the sandbox beyond the limit.
"""

import contextlib
import os
import re
import secrets
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

INTERVAL = 0.02
"""Seconds between two counts."""
KILLED = 10.0
"""Seconds in which killed processes end."""
CGROUPS = Path("/sys/fs/cgroup")

_NUMBERS = re.compile(r"^(\w+):\s+(\d+)", re.MULTILINE)


class Limits(NamedTuple):
    """Limits of a sandbox: bytes of memory, processes and threads, bytes and number of scratch files."""

    memory: int
    processes: int
    scratch: int
    files: int


class Watch:
    """A thread that counts what the processes of a namespace use, and kills all of them beyond the limits.

    The processes are those in the sandbox's own /proc, which is opened here once: nothing in there can hide from it.
    """

    def __init__(self, launcher: int, limits: Limits, scratch: str) -> None:
        self.limits, self.reason = limits, ""
        first = _child(launcher)
        inner = _child(first)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with contextlib.ExitStack() as descriptors:
            self._first = os.pidfd_open(first)
            descriptors.callback(os.close, self._first)
            self._proc = os.open(f"/proc/{inner}/root/proc", flags)
            descriptors.callback(os.close, self._proc)
            self._scratch = os.open(f"/proc/{inner}/root{scratch}", flags)
            descriptors.callback(os.close, self._scratch)
            self._descriptors = descriptors.pop_all()
        with contextlib.suppress(OSError):  # without memory the sandbox is ended first
            Path(f"/proc/{inner}/oom_score_adj").write_text("1000")
        self.cgroup = Cgroup.of((first, inner), limits)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sandbox-watch", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Kill the first process of the namespace, and all others with it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def close(self) -> None:
        """Stop counting, and wait until the killed processes have ended, the first of them last."""
        self._stop.set()
        self._thread.join()
        select.select([self._first], [], [], KILLED)
        self._descriptors.close()
        if self.cgroup is not None:
            self.cgroup.remove()

    def exceeded(self) -> str:
        """Return which limit the sandbox has reached; "" if none."""
        return self.reason or (self.cgroup.exceeded(self.limits) if self.cgroup is not None else "")

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                self.reason = self._count()
            except OSError as error:
                self.reason = f"what it uses cannot be counted ({error})"
            if self.exceeded():
                self.kill()
                return

    def _count(self) -> str:
        """Return which limit is exceeded; "" if none."""
        memory = processes = 0
        numbers = [name for name in os.listdir(self._proc) if name.isdecimal()]  # noqa: PTH208
        for name in numbers:
            fields = self._read(f"{name}/status")
            processes += fields.get("Threads", 0)
            memory += 1024 * (fields.get("VmRSS", 0) + fields.get("VmSwap", 0) + fields.get("VmPTE", 0))
        if max(processes, len(numbers)) > self.limits.processes:
            return _too_many(self.limits)
        if memory > self.limits.memory:  # count what processes share once; slow, so only here
            memory = 0
            for name in numbers:
                sizes = self._read(f"{name}/smaps_rollup")
                shared = sizes.get("Pss", 0) + sizes.get("SwapPss", 0)
                memory += 1024 * (shared + self._read(f"{name}/status").get("VmPTE", 0))
            if memory > self.limits.memory:
                return _too_large(self.limits)
        files = os.statvfs(self._scratch)
        if files.f_files - files.f_ffree > self.limits.files:
            return f"its scratch folder has more than {self.limits.files:,} files"
        return ""

    def _read(self, path: str) -> dict[str, int]:
        """Return the numbers in a file of /proc; none if the process has ended."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return {}
        with open(descriptor, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            try:
                return {name: int(number) for name, number in _NUMBERS.findall(file.read())}
            except OSError:
                return {}


def _too_large(limits: Limits) -> str:
    return f"its processes together take more than {limits.memory:,} bytes of memory"


def _too_many(limits: Limits) -> str:
    return f"it runs more than {limits.processes} processes and threads"


def _child(parent: int) -> int:
    """Return the one process that `parent` has started."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                children.append(int(path.parent.name))
    if len(children) != 1:
        raise ProcessLookupError(f"process {parent} has {len(children)} children, not 1")
    return children[0]


class Cgroup:
    """A control group of the sandbox: of version 2 with delegated controllers, or of version 1.

    Attributes:
        version: 1 or 2.
    """

    def __init__(self, version: int, memory: Path, processes: Path) -> None:
        self.version, self._memory, self._processes = version, memory, processes

    @classmethod
    def of(cls, processes: tuple[int, ...], limits: Limits) -> Self | None:
        """Return a new group with these processes in it; None if none may be made."""
        for group in _possible():
            _remove_stale(group[1:])
            cgroup = cls(*group)
            try:
                cgroup._make(processes, limits)
            except OSError:
                cgroup.remove()
                continue
            return cgroup
        return None

    def exceeded(self, limits: Limits) -> str:
        """Return which limit the group has reached; "" if none."""
        events = "memory.events" if self.version == 2 else "memory.oom_control"
        if _field(self._memory / events, "oom_kill"):
            return _too_large(limits)
        return _too_many(limits) if _field(self._processes / "pids.events", "max") else ""

    def remove(self) -> None:
        """Remove the group, in which no process is left."""
        for folder in {self._memory, self._processes}:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _make(self, processes: tuple[int, ...], limits: Limits) -> None:
        most = str(limits.memory + limits.scratch)
        for folder in {self._memory, self._processes}:
            folder.mkdir()
        if self.version == 2:
            (self._memory / "memory.max").write_text(most)
            with contextlib.suppress(OSError):  # not every kernel counts swap
                (self._memory / "memory.swap.max").write_text("0")
        else:
            (self._memory / "memory.limit_in_bytes").write_text(most)
        (self._processes / "pids.max").write_text(str(limits.processes))
        for folder in {self._memory, self._processes}:
            for process in processes:
                (folder / "cgroup.procs").write_text(str(process))


def _possible() -> Iterator[tuple[int, Path, Path]]:
    """Yield (version, folder of memory, folder of processes) of groups that might be made."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    name = f"birdie-{os.getpid()}-{secrets.token_hex(8)}"
    paths = {
        controller: path for line in lines for _, names, path in [line.split(":", 2)] for controller in names.split(",")
    }
    if "memory" in paths and "pids" in paths:
        memory, processes = (CGROUPS / part / paths[part].lstrip("/") / name for part in ("memory", "pids"))
        yield 1, memory, processes
    elif "" in paths:  # beside our own group: one that has processes can have no groups with limits
        parent = (CGROUPS / paths[""].lstrip("/")).parent
        with contextlib.suppress(OSError):
            if {"memory", "pids"} <= set((parent / "cgroup.subtree_control").read_text().split()):
                yield 2, parent / name, parent / name


def _remove_stale(folders: Iterable[Path]) -> None:
    """Remove the groups of auditors that were killed; a group that has processes cannot be removed."""
    for group in (group for folder in folders for group in folder.parent.glob("birdie-*-*")):
        if not Path("/proc", group.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def _field(path: Path, name: str) -> int:
    """Return a number in a file of counters."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == name), 0)
    except (OSError, ValueError):
        return 0
