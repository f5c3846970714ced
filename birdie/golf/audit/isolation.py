"""The two ways to isolate a process, from one table of mounts and one filter of system calls.

    mounts(submission) ──► bubblewrap: its command line ─┐
                       └─► unshare: namespaces.py ───────┴──► the command, in a root of its own

The root is empty but for what the table names: the system's libraries and Python, read-only; the submission, read-only;
five devices; a scratch folder in memory; the processes of its own namespace. None of the machine's home, temporary,
run-time or data folders is in there.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from birdie.golf.audit import seccomp

Mount = tuple[str, str, str]
"""Kind, source and target: "bind" (read-only), "device", "link", "tmpfs" (source: its bytes), "proc", "readonly"."""

SCRATCH, SUBMISSION = "/tmp", "/submission"
PACKAGE = Path(__file__).resolve().parents[2]
INSIDE = f"/python/{PACKAGE.name}"
"""The folder of birdie in the sandbox."""
NAMESPACES = Path(__file__).with_name("namespaces.py")

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES = ("null", "full", "random", "urandom")  # not zero: mapped, it is memory that no process is charged for
_MASKED = (  # of the machine; root's sandbox is root's for these files
    *("keys", "key-users", "kcore", "kmsg", "kallsyms", "modules", "slabinfo", "vmallocinfo", "pagetypeinfo"),
    *("kpagecount", "kpageflags", "kpagecgroup", "timer_list", "sched_debug", "sysrq-trigger", "iomem", "cmdline"),
)
_BUBBLEWRAP = {
    "bind": ("--ro-bind", "{source}", "{target}"),
    "device": ("--dev-bind", "{source}", "{target}"),
    "link": ("--symlink", "{source}", "{target}"),
    "tmpfs": ("--size", "{source}", "--tmpfs", "{target}"),
    "proc": ("--proc", "{target}"),
    "readonly": ("--remount-ro", "{target}"),
}


class NotPossibleError(Exception):
    """This way to isolate a process is not available; the message says why."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line that isolates itself, and the data that one of its descriptors must give."""

    command: tuple[str, ...]
    filter: bytes | None = None


def mounts(submission: Path, scratch_bytes: int) -> list[Mount]:
    """Return the table of mounts, parents before children."""
    table = [("tmpfs", str(scratch_bytes), SCRATCH), ("tmpfs", "65536", "/dev"), ("proc", "proc", "/proc")]
    for path in _SYSTEM:
        if Path(path).is_symlink():
            table.append(("link", str(Path(path).readlink()), path))
        elif Path(path).exists():
            table.append(("bind", path, path))
    table += [("bind", path, path) for path in _pythons()]
    table += [("bind", str(PACKAGE), INSIDE), ("bind", str(submission), SUBMISSION)]
    table += [("device", f"/dev/{name}", f"/dev/{name}") for name in _DEVICES]
    table += [("link", "/proc/self/fd", "/dev/fd"), ("link", SCRATCH, "/dev/shm")]
    table += [("bind", "/dev/null", f"/proc/{name}") for name in _MASKED if Path("/proc", name).exists()]
    return [*table, *(("readonly", "", path) for path in ("/proc", "/dev", "/"))]


def _pythons() -> Iterator[str]:
    """Yield the folders that Python and its packages are installed in, without those that lie in another."""
    folders = {Path(folder) for folder in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)}
    folders |= {folder.resolve() for folder in folders}
    shown = [Path(path) for path in _SYSTEM]
    for folder in sorted(folders, key=lambda folder: len(folder.parts)):
        if Path.home().resolve().is_relative_to(folder):
            raise NotPossibleError(f"Python is installed in {folder}, which holds the home folder as well")
        if not any(folder.is_relative_to(path) for path in shown):
            shown.append(folder)
            yield str(folder)


def bubblewrap(table: Sequence[Mount], command: Sequence[str]) -> Launch:
    """Return how bubblewrap (`bwrap`) starts a command in the sandbox."""
    program = shutil.which("bwrap")
    if program is None:
        raise NotPossibleError("bubblewrap is not installed")
    fill = ((_BUBBLEWRAP[kind], {"{source}": source, "{target}": target}) for kind, source, target in table)
    arguments = [values.get(part, part) for parts, values in fill for part in parts]
    options = ("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL")
    return Launch(
        (program, *options, *arguments, "--chdir", SCRATCH, "--seccomp", "{filter}", "--", *command), _filter()
    )


def unshare(table: Sequence[Mount], command: Sequence[str]) -> Launch:
    """Return how `namespaces.py` starts a command in the sandbox."""
    if not sys.platform.startswith("linux"):
        raise NotPossibleError(f"sandboxes need Linux's namespaces, and this is {sys.platform}")
    plan = json.dumps({"mounts": table, "filter": _filter().hex(), "folder": SCRATCH, "command": command})
    return Launch((sys.executable, "-I", "-S", "-B", str(NAMESPACES), plan))


def _filter() -> bytes:
    program = seccomp.program()
    if program is None:
        raise NotPossibleError(f"there is no filter of system calls for {os.uname().machine}")
    return program


WAYS: dict[str, Callable[[Sequence[Mount], Sequence[str]], Launch]] = {"bubblewrap": bubblewrap, "unshare": unshare}
"""Ways to isolate a process, the preferred one first."""
