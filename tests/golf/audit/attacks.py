"""Ways out of the sandbox, as code for a script: each sets `answer` to "escaped …" where it works.

The code has names for what waits outside: OUTSIDE, a folder with a file `secret`, a listening socket `server` and a
named pipe `pipe`; ABSTRACT, a listening socket without a file; MARKER, in the command line of process PID; and
INSIDE, the script's own folder, where other sockets and another pipe lie.
"""

PRELUDE = """
import ctypes, fcntl, glob, mmap, os, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
INSIDE = os.path.dirname(os.path.abspath(__file__))
def call(number, arm, *args):
    "The result of a system call, an error's number if it failed."
    import platform
    result = libc.syscall(number if platform.machine() == "x86_64" else arm, *args)
    return result if result >= 0 else -ctypes.get_errno()
def tried(*attempts):
    "The first attempt that gives something, by its number."
    for number, attempt in enumerate(attempts):
        try:
            result = attempt()
        except Exception:
            continue
        if result:
            return f"escaped by {number}: {result!r}"
    return "nothing worked"
def write(path, text=b"escaped"):
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    return os.write(descriptor, text)
def send(*address):
    with socket.socket(*address[:-1]) as client:
        client.settimeout(2)
        client.connect(address[-1])
        return client.send(b"escaped")
answer = "nothing worked"
"""

ATTACKS = {
    # found in the sandbox that this one replaced
    "socket by path": """
answer = tried(*(lambda path=path: send(socket.AF_UNIX, path) for path in (OUTSIDE + "/server", INSIDE + "/server")))
""",
    "named pipe": """
answer = tried(*(lambda path=path: write(path) for path in (OUTSIDE + "/pipe", INSIDE + "/pipe")))
""",
    "keyring": """
add = lambda ring: call(248, 217, b"user", b"birdie-test", b"x", ctypes.c_size_t(1), ring)
answer = tried(*(lambda ring=ring: add(ring) > 0 for ring in (-1, -2, -3, -4, -5)),
               lambda: call(250, 219, 0, -4, 1) > 0, lambda: call(249, 218, b"user", b"birdie-test", None, -4) > 0,
               lambda: open("/proc/keys").read())
""",
    "sockets of children": """
code = "import socket; socket.socket(); socket.socket(socket.AF_UNIX); print('escaped')"
answer = tried(lambda: subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)
""",
    "processes outside": """
def seen():
    lines = [open(path, errors="replace").read() for path in glob.glob("/proc/[0-9]*/cmdline")]
    return [line for line in lines if MARKER in line]
answer = tried(seen, lambda: open(f"/proc/{PID}/cmdline").read().count(MARKER))
""",
    # tried on this one
    "abstract socket": """
answer = tried(*(lambda kind=kind: send(socket.AF_UNIX, kind, chr(0) + ABSTRACT) for kind in (1, 2, 5)))
""",
    "network": """
kinds = ((2, 1), (2, 2), (10, 1), (16, 3), (17, 3), (40, 1))
answer = tried(*(lambda kind=kind: socket.socket(*kind) for kind in kinds))
""",
    "socket pair turned to a path": """
one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
answer = tried(lambda: one.sendto(b"escaped", INSIDE + "/datagrams"))
""",
    "terminal input": """
push = lambda path, request: fcntl.ioctl(os.open(path, os.O_RDWR | os.O_NOCTTY), request, b"x") or "pushed"
paths = ("/dev/tty", "/dev/console", "/dev/pts/0", "/dev/ptmx", "/proc/self/fd/0")
answer = tried(*(lambda path=path: push(path, 0x5412) for path in paths))
""",
    "roots in /proc": """
paths = [path for name in ("root", "cwd", "fd/*", "task/*/root") for path in glob.glob("/proc/[0-9]*/" + name)]
answer = tried(*(lambda path=path: open(path + OUTSIDE + "/secret").read() for path in ("", *paths)))
""",
    "files of the machine": """
def others(path):
    "What is in a folder but for Python's."
    pythons = (sys.prefix + "/", sys.base_prefix + "/")
    return [name for name in os.listdir(path) if not any(python.startswith(f"{path}/{name}/") for python in pythons)]
answer = tried(*(lambda path=path: others(path) for path in ("/root", "/home", "/run", "/var", "/sys", "/srv", "/mnt")),
               *(lambda path=path: open(path).read() for path in ("/etc/passwd", "/etc/shadow", OUTSIDE + "/secret")))
""",
    "parents of the root": """
up = os.open("/", os.O_RDONLY)
for _ in range(20):
    up = os.open("..", os.O_RDONLY, dir_fd=up)
answer = tried(lambda: os.open(OUTSIDE[1:] + "/secret", os.O_RDONLY, dir_fd=up), lambda: libc.chroot(b"/tmp") == 0)
""",
    "links in the submission": """
answer = tried(*(lambda name=name: open(INSIDE + "/" + name).read() for name in ("link", "folder/secret", "up/secret")))
""",
    "memory of other processes": """
others = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
answer = tried(*(lambda pid=pid: libc.ptrace(16, pid, None, None) == 0 for pid in (*others, os.getppid(), PID)),
               *(lambda pid=pid: os.open(f"/proc/{pid}/mem", os.O_RDWR) for pid in (*others, PID)),
               lambda: call(310, 270, PID, None, 0, None, 0, 0) >= 0, lambda: call(438, 438, 0, 0, 0) >= 0)
""",
    "files by handle": """
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
answer = tried(lambda: call(303, 264, -100, b"/submission", handle, ctypes.byref(ctypes.c_int()), 0) >= 0,
               lambda: call(304, 265, os.open("/usr", os.O_RDONLY), struct.pack("Iiq", 8, 1, 2), 0) >= 0)
""",
    "writing": """
folders = (INSIDE, "/", "/usr", "/usr/lib", "/dev", "/python/birdie", sys.prefix, sys.base_prefix, OUTSIDE)
answer = tried(*(lambda folder=folder: open(folder + "/escaped", "w") for folder in folders),
               *(lambda name=name: open(INSIDE + "/" + name, "ab") for name in ("train_gpt.py", "model.bin")),
               lambda: os.chmod(INSIDE + "/model.bin", 0o777) is None, lambda: os.unlink(INSIDE + "/model.bin") is None,
               lambda: os.link(INSIDE + "/model.bin", "/tmp/model.bin") is None)
""",
    "settings of the kernel": """
paths = ("sys/kernel/core_pattern", "sys/kernel/modprobe", "sys/vm/drop_caches", "sysrq-trigger", "self/oom_score_adj",
         "self/uid_map", "1/oom_score_adj", "sys/user/max_user_namespaces", "self/mem", "1/mem")
hidden = ("kcore", "kmsg", "kpagecount", "vmallocinfo", "slabinfo", "kallsyms", "cmdline")
answer = tried(*(lambda path=path: os.open("/proc/" + path, os.O_WRONLY) for path in paths),
               *(lambda path=path: open("/proc/" + path, "rb").read(8) for path in hidden))
""",
    "mounts": """
writable = (ctypes.c_uint64 * 4)(0, 7, 0, 0)
answer = tried(lambda: libc.mount(None, b"/", None, 32 | 4096, None) == 0, lambda: libc.umount2(b"/submission", 2) == 0,
               lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0, lambda: libc.umount2(b"/proc", 2) == 0,
               lambda: call(442, 442, -100, b"/", 0x8000, ctypes.byref(writable), 32) == 0,
               lambda: call(428, 428, -100, b"/", 1) >= 0, lambda: call(430, 430, b"tmpfs", 0) >= 0)
""",
    "namespaces of its own": """
flags = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x10020000)
answer = tried(*(lambda flag=flag: libc.unshare(flag) == 0 for flag in flags),
               *(lambda flag=flag: call(56, 220, flag | 17, 0, 0, 0, 0) >= 0 for flag in flags),
               lambda: call(435, 435, struct.pack("11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88) >= 0,
               *(lambda name=name: libc.setns(os.open("/proc/1/ns/" + name, 0), 0) == 0 for name in ("mnt", "user")))
""",
    "calls of other architectures": """
numbers = (41, 53, 101, 319)
answer = tried(*(lambda number=number: call(0x40000000 | number, 0x40000000, 2, 1, 0) >= 0 for number in numbers))
""",
    "signals to the outside": """
for pid in (1, os.getppid(), PID, -1):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        os.kill(pid, signal.SIGTERM)
    except OSError:
        pass
answer = tried(lambda: os.kill(PID, 0) is None)
""",
    "inherited descriptors": """
names = [os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.islink(path)]
answer = tried(lambda: [name for name in names if name != "/dev/null" and not name.startswith(("pipe:", "/proc/"))])
""",
    "descriptors through a pipe": """
answer = tried(lambda: socket.socketpair(), lambda: socket.socketpair(type=socket.SOCK_SEQPACKET))
""",
    "code in memory": """
answer = tried(lambda: os.memfd_create("code"), lambda: call(319, 279, b"code", 0) > 0, lambda: call(447, 447, 0) > 0)
""",
    "memory that nobody is charged for": """
answer = tried(lambda: mmap.mmap(-1, 1 << 20), lambda: libc.shmget(0, 1 << 20, 0o1600) >= 0,
               lambda: libc.msgget(0, 0o1600) >= 0, lambda: os.open("/dev/zero", os.O_RDWR))
""",
    "shared memory outside": """
answer = tried(lambda: [name for name in os.listdir("/dev/shm") if MARKER in name])
""",
    "large parts of the kernel": """
numbers = ((321, 280), (323, 282), (425, 425), (298, 241), (300, 262), (246, 104), (175, 105), (451, 451), (462, 462))
answer = tried(*(lambda one=one: call(*one, 0, 0, 0, 0, 0) not in (-1, -38) for one in numbers))
""",
    "devices": """
known = ("null", "full", "random", "urandom", "fd", "shm")
paths = [path for path in glob.glob("/dev/*") if os.path.basename(path) not in known]
answer = tried(lambda: paths, lambda: libc.mknod(b"/tmp/disk", 0o60600, os.makedev(254, 0)) == 0)
""",
    "environment": """
answer = tried(lambda: [path for path in glob.glob("/proc/[0-9]*/environ") if MARKER in open(path).read()])
""",
    "capabilities and set-user-ID": """
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
answer = tried(lambda: [name for name in status if name.startswith("Cap") and int(status[name], 16)],
               lambda: status["NoNewPrivs"] != "1", lambda: status["Seccomp"] != "2")
""",
}
"""Code by the name of the attack."""
