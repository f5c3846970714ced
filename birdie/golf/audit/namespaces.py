"""A command in Linux namespaces and a root of its own, for machines without bubblewrap.

It is started as a file (`python -I namespaces.py PLAN`, JSON from `isolation.unshare`) and imports nothing but the
standard library. Any step that fails ends it with the reason, before the command has run.

    this process, in the caller's session ──► 1: ours, ends when 2 does, and all others with it ──► 2: the command

When the first process of a namespace is killed all others die with it, and it cannot be killed from within. So it must
not be the command, which could detach from its parent and stay alive.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Mounts, control groups, host name, messages, users, processes, network."""
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 8, 4096, 16384, 1 << 18, 2
AT_FDCWD, AT_RECURSIVE, NR_MOUNT_SETATTR = -100, 0x8000, 442
RDONLY, NOSUID, NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
PR_CAP_AMBIENT, CLEAR_AMBIENT, CAPABILITY_VERSION, CAPABILITIES, SIGKILL = 47, 4, 0x20080522, 64, 9

libc = ctypes.CDLL(None, use_errno=True)


class Program(ctypes.Structure):
    """struct sock_fprog of the kernel."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def check(result: int, problem: str) -> None:
    """End this process with the reason if a call has failed."""
    if result < 0:
        sys.exit(f"{problem} ({os.strerror(ctypes.get_errno())})")


def main() -> None:
    """Isolate this process as the plan says, and run its command."""
    plan: dict[str, Any] = json.loads(sys.argv[1])
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(NAMESPACES), "no namespace can be created")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    first = os.fork()
    if first:
        wait_for(first)
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    os.setsid()
    enter_root(plan["mounts"])
    drop_capabilities()
    os.chdir(plan["folder"])
    code = bytes.fromhex(plan["filter"])
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(Program(len(code) // 8, code)), 0, 0), "no filter can be set")
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the command cannot reach into the memory of the first process
    second = os.fork()
    if second:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        wait_for(second)
    os.execv(plan["command"][0], plan["command"])


def wait_for(child: int) -> NoReturn:
    """Exit as `child` does, with a shell's exit code; until then reap processes that lost their parent."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def enter_root(mounts: list[tuple[str, str, str]]) -> None:
    """Build a root of the mounts, and leave the machine's own for good."""
    problem = "the file system cannot be built"
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), problem)
    root = Path("/tmp")  # any folder: what is in it is hidden within this namespace alone
    sources = {source: os.open(source, os.O_PATH) for kind, source, _ in mounts if kind in ("bind", "device")}
    check(tmpfs(root, "size=1m,mode=755"), problem)
    for kind, source, target in mounts:
        path = root / target.lstrip("/")
        opened = Path(f"/proc/self/fd/{sources[source]}") if source in sources else path
        if kind in ("tmpfs", "proc") or opened.is_dir():
            path.mkdir(parents=True, exist_ok=True)
        elif kind in ("bind", "device") and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        if kind == "link":
            path.symlink_to(source)
        elif kind == "tmpfs":
            check(tmpfs(path, f"size={source},mode=755"), problem)
        elif kind == "proc":
            check(libc.mount(b"proc", bytes(path), b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None), problem)
        elif kind != "readonly":
            check(libc.mount(bytes(opened), bytes(path), None, MS_BIND | MS_REC, None), problem)
            check(restrict(path, AT_RECURSIVE, RDONLY | NOSUID | (NODEV if kind == "bind" else 0)), problem)
    for descriptor in sources.values():
        os.close(descriptor)
    os.chdir(root)
    check(libc.pivot_root(b".", b"."), problem)
    check(libc.umount2(b".", MNT_DETACH), problem)
    os.chdir("/")
    for kind, _, target in mounts:
        if kind == "readonly":
            check(restrict(Path(target), 0, RDONLY), problem)


def tmpfs(path: Path, options: str) -> int:
    """Mount memory; return -1 if that failed."""
    return int(libc.mount(b"none", bytes(path), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode()))


def restrict(path: Path, depth: int, attributes: int) -> int:
    """Add attributes to a mount, and to those below it; return -1 if that failed."""
    wanted = ctypes.byref((ctypes.c_uint64 * 4)(attributes, 0, 0, 0))
    return int(libc.syscall(NR_MOUNT_SETATTR, AT_FDCWD, bytes(path), depth, wanted, 32))


def drop_capabilities() -> None:
    """Drop every capability for good, as one could change mounts back."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, CLEAR_AMBIENT, 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    sets = [value for name, value in status.items() if name.startswith("Cap")]
    if len(sets) < 4 or any(int(value, 16) for value in sets) or status.get("NoNewPrivs") != "1":
        sys.exit("capabilities within the namespace cannot be dropped")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"the sandbox cannot be built ({error})")
