"""What runs inside the sandbox: fences itself in, then loads a script and does what it is asked, line by line.

    birdie.golf.audit.sandbox ──JSON lines──► this ──► the script
                         ◄──JSON lines──

It is started as a file of its own (`python -I inside.py IN OUT SCRATCH LIMITS SCRIPT`) and imports nothing but the
standard library before the fences stand. The fences are Linux's: namespaces of its own for users, network, mounts,
processes and messages, the file system read-only and without devices but for a scratch folder in memory, no capability
that could undo this, and resource limits. Where they cannot be had nothing is run.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import resource
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
AT_FDCWD, AT_RECURSIVE, NR_MOUNT_SETATTR = -100, 0x8000, 442
RDONLY, NOSUID, NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 38, 47
CLEAR_AMBIENT, CAPABILITY_VERSION, CAPABILITIES, SIGKILL = 4, 0x20080522, 64, 9
DEVICES = ("null", "zero", "full", "random", "urandom")
"""Of /dev, what may be opened: nothing is kept in them."""
MOST_NOTED = 2000
"""Files, and attempts at the network, that are noted."""
SHRUNK = {
    "num_layers": 4,
    "n_layer": 4,
    "model_dim": 64,
    "n_embd": 64,
    "dim": 64,
    "num_heads": 4,
    "n_head": 4,
    "num_kv_heads": 2,
    "embedding_dim": 64,
    "bigram_vocab_size": 64,
    "train_seq_len": 64,
    "eval_seq_len": 64,
}
"""Sizes of the model that is tried."""


def fence(scratch: str, limits: dict[str, int], pipes: tuple[int, ...]) -> str | None:
    """Shut this process in; returns why that is not possible, or None. What follows then runs in a grandchild of it:

        this one, in the caller's session ──► 1: ours, ends when 2 does, and all others with it ──► 2: the script

    The first process of a namespace takes everything in it along when it is killed, and cannot be killed from within.
    So it is no part of the script, which could let go of its parent and stay.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEWUSER | NEWNET | NEWNS | NEWPID | NEWIPC):
        return f"no namespace can be made here ({os.strerror(ctypes.get_errno())})"
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    except OSError as error:
        return f"the namespace has no user ({error.strerror})"
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    first = os.fork()
    if first:
        _wait_for(first)
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    refused = _close_files(libc, scratch, limits["scratch"]) or _give_up_rights(libc)
    if refused is not None:
        return refused
    os.chdir(scratch)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # nor can the script reach into its memory
    second = os.fork()
    if second:
        for pipe in pipes:
            os.close(pipe)
        _wait_for(second)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    for kind, most in (
        (resource.RLIMIT_CPU, limits["cpu"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))
    return None


def _wait_for(child: int) -> NoReturn:
    """End as `child` does, by the code a shell would give; until then take up whoever else is left without a parent."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _close_files(libc: ctypes.CDLL, scratch: str, most: int) -> str | None:
    """Make everything read-only but `scratch`, where `most` bytes of memory are mounted; returns why not, or None."""
    attributes = ctypes.c_uint64 * 4
    place, devices = scratch.encode(), [f"/dev/{name}".encode() for name in DEVICES if Path(f"/dev/{name}").exists()]
    small = f"size={most},nr_inodes=4096,mode=700".encode()

    def change(path: bytes, deep: int, to: int, no_longer: int) -> int:
        said = ctypes.byref(attributes(to, no_longer, 0, 0))
        return int(libc.syscall(NR_MOUNT_SETATTR, AT_FDCWD, path, deep, said, 32))

    def hide(path: bytes) -> int:
        return (
            int(libc.mount(b"none", path, b"tmpfs", MS_NOSUID | MS_NODEV, b"size=4096"))
            if Path(path.decode()).is_dir()
            else 0
        )

    for name, text in (("self/oom_score_adj", "1000"), ("sys/user/max_user_namespaces", "0")):
        # if memory ends, end this first; and no namespace in this one, where it would have all rights again. Where
        # /proc is read-only that stays possible: what is read-only here is locked in there
        with contextlib.suppress(OSError):
            Path("/proc", name).write_text(text)
    steps: tuple[Callable[[], int], ...] = (
        lambda: libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
        lambda: hide(b"/run"),  # sockets of services
        lambda: libc.mount(b"none", place, b"tmpfs", MS_NOSUID | MS_NODEV, small),
        *(lambda node=node: libc.mount(node, node, None, MS_BIND, None) for node in devices),
        lambda: change(b"/", AT_RECURSIVE, RDONLY | NOSUID | NODEV, 0),  # disks can be written to on read-only mounts
        lambda: change(place, 0, 0, RDONLY),
        *(lambda node=node: change(node, 0, 0, NODEV) for node in devices),
    )
    for step in steps:
        if step():
            return f"the file system cannot be made read-only ({os.strerror(ctypes.get_errno())})"
    return None


def _give_up_rights(libc: ctypes.CDLL) -> str | None:
    """Drop every capability for good, with which mounts could be changed back; returns why that failed, or None."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, CLEAR_AMBIENT, 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    try:
        said = dict(
            line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
        )
    except OSError as error:
        return f"whether rights were given up cannot be seen ({error.strerror})"
    sets = [value for name, value in said.items() if name.startswith("Cap")]
    if len(sets) < 4 or any(int(each, 16) for each in sets) or said.get("NoNewPrivs") != "1":
        return "rights within the namespace cannot be given up"
    return None


class Watch:
    """Notes which files the interpreter opens for reading, and what reaches for the network."""

    def __init__(self, scratch: str) -> None:
        self.opened: dict[str, int] = {}
        self.tried: list[str] = []
        places = (sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.__file__).parent), scratch)
        self.own = tuple({os.path.realpath(place) for place in places})
        self.own += ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/lib64", "/opt/conda")
        self.on = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            self._open(args[0], args[2])
            return
        network = event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname")
        if network and len(self.tried) < MOST_NOTED:
            self.tried.append(f"{event} {str(args[-1])[:80]}")

    def _open(self, path: Any, flags: Any) -> None:
        if not isinstance(path, str | bytes) or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
            return
        self.on = False
        try:
            where = os.path.realpath(os.fsdecode(path))
            if not any(where == own or where.startswith(own + "/") for own in self.own):
                about = Path(where).stat()
                if stat.S_ISREG(about.st_mode) and len(self.opened) < MOST_NOTED:
                    self.opened[where] = about.st_size
        except OSError:
            pass
        finally:
            self.on = True


class Inside:
    """The script, and what is asked of it."""

    def __init__(self, script: str, watch: Watch) -> None:
        self.script, self.watch = script, watch
        self.module: Any = None
        self.scorer: Any = None

    def load(self) -> dict[str, Any]:
        """Run the script's top level, under another name than __main__."""
        sys.path.insert(0, str(Path(self.script).parent))
        sys.argv = [self.script]
        began = time.perf_counter()
        spec = importlib.util.spec_from_file_location("foreign_script", self.script)
        if spec is None or spec.loader is None:
            raise ImportError("it is no Python file")
        self.module = importlib.util.module_from_spec(spec)
        sys.modules["foreign_script"] = self.module
        self.watch.on = True
        spec.loader.exec_module(self.module)
        vocabulary = getattr(self.module, "VOCABULARY", None)
        if vocabulary is None:
            vocabulary = getattr(getattr(self.module, "Hyperparameters", None), "vocab_size", None)
        return {
            "seconds": time.perf_counter() - began,
            "score": callable(getattr(self.module, "score", None)),
            "scorer": callable(getattr(self.module, "scorer", None)),
            "model": isinstance(getattr(self.module, "GPT", None), type),
            "vocabulary": _counted(vocabulary),
        }

    def score(self, tokens: list[int]) -> list[float]:
        """Nats of the targets of `tokens`."""
        return _floats(self.module.score(_array(tokens)))

    def begin(self) -> None:
        """A new scorer."""
        self.scorer = self.module.scorer()

    def predict(self) -> list[float]:
        return _floats(self.scorer.predict())

    def reveal(self, token: int) -> None:
        self.scorer.reveal(token)

    def log(self) -> dict[str, Any]:
        return {"opened": sorted(self.watch.opened.items()), "tried": self.watch.tried}

    def model(self, length: int) -> dict[str, Any]:
        """Build GPT small and have it predict `length` tokens, twice: the second time the later half is other ones."""
        import torch

        torch.manual_seed(0)
        vocabulary = int(getattr(self._settings({}), "vocab_size", 1024))
        failed = ""
        for sizes in (SHRUNK, {k: v for k, v in SHRUNK.items() if "layer" not in k}, {}):
            try:
                model = self._built(sizes).float().eval()
                ids = torch.randint(0, vocabulary, (1, length))
                other = ids.clone()
                other[:, length // 2 :] = (ids[:, length // 2 :] + 1) % vocabulary
                with torch.no_grad():
                    first, second = self._logits(model, ids), self._logits(model, other)
                half = length // 2
                return {
                    "shape": list(first.shape),
                    "vocabulary": vocabulary,
                    "finite": bool(torch.isfinite(first).all()),
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "leak": float((first[:, :half] - second[:, :half]).abs().max()),
                    "shrunk": bool(sizes),
                }
            except Exception as error:
                failed = failed or f"{type(error).__name__}: {str(error)[:300]}"
        raise RuntimeError(failed)

    def _settings(self, sizes: dict[str, int]) -> Any:
        kind = getattr(self.module, "Hyperparameters", None)
        settings = kind() if kind is not None else type("Settings", (), {})()
        for name, size in sizes.items():
            if hasattr(settings, name):
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(settings, name, size)
        return settings

    def _built(self, sizes: dict[str, int]) -> Any:
        settings = self._settings(sizes)
        given = {}
        for name, parameter in inspect.signature(self.module.GPT).parameters.items():
            if name in sizes:
                given[name] = sizes[name]
            elif hasattr(settings, name):
                given[name] = getattr(settings, name)
            elif parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            ):
                given[name] = settings
        return self.module.GPT(**given)

    def _logits(self, model: Any, ids: Any) -> Any:
        """(1, T, vocabulary): asked for, or seen on their way into the loss."""
        import torch.nn.functional as functional

        ways: list[Callable[[], Any]] = []
        if hasattr(model, "forward_logits"):
            ways.append(lambda: model.forward_logits(ids))
        caught: list[Any] = []
        real = functional.cross_entropy

        def watching(logits: Any, *args: Any, **kwargs: Any) -> Any:
            caught.append(logits)
            return real(logits, *args, **kwargs)

        def through_loss() -> Any:
            functional.cross_entropy = watching  # type: ignore[assignment]
            try:
                model(ids, ids)
            finally:
                functional.cross_entropy = real
            return caught[-1]

        ways += [through_loss, lambda: model(ids)]
        failed: Exception = RuntimeError("GPT gives no logits")
        for way in ways:
            try:
                return way().float().reshape(1, ids.shape[1], -1)
            except Exception as error:
                failed = error
        raise failed


def _counted(said: Any) -> int | None:
    """A size that a script names; None where it is no number, as of a field that is not filled yet."""
    try:
        return int(said)
    except (TypeError, ValueError, OverflowError):
        return None


def _array(tokens: list[int]) -> Any:
    try:
        import numpy
    except ImportError:
        return tokens
    return numpy.asarray(tokens, dtype=numpy.int64)


def _floats(said: Any) -> list[float]:
    for method in ("detach", "cpu"):
        said = getattr(said, method)() if hasattr(said, method) else said
    said = said.tolist() if hasattr(said, "tolist") else list(said)
    return [float(each) for each in said]


def main() -> None:
    """Serve until the pipe closes."""
    source, sink, scratch, limits, script = sys.argv[1:6]
    answers = os.fdopen(int(sink), "w", encoding="utf-8")
    requests = os.fdopen(int(source), encoding="utf-8")

    def answer(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    refused = fence(scratch, json.loads(limits), (int(source), int(sink)))
    answer(refused=refused)
    if refused is not None or not script:
        return
    watch = Watch(scratch)
    inside = Inside(script, watch)
    sys.addaudithook(watch)
    for line in requests:
        asked = json.loads(line)
        try:
            answer(value=getattr(inside, asked["op"])(*asked.get("args", [])))
        except MemoryError:
            answer(error="it ran out of memory", kind="MemoryError")
        except BaseException as error:
            answer(error=f"{type(error).__name__}: {str(error)[:400]}", kind=type(error).__name__)


if __name__ == "__main__":
    main()
