"""The process inside the sandbox: it isolates itself, then loads a script and answers requests, line by line.

    birdie.golf.audit.sandbox ──JSON lines──► this process ──► the script
                              ◄──JSON lines──

It is started as a file (`python -I sandbox_child.py IN OUT SCRATCH LIMITS SCRIPT`) and imports nothing but the standard
library before it is isolated: by Linux namespaces for users, network, mounts, processes and messages, a file system
that is read-only and without devices but for a scratch folder in memory, no capability that could undo this, and
resource limits. Where one of these is missing nothing is run.
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
"""Devices that may be opened: they store nothing."""
MAX_LOGGED = 2000
"""Files, and attempts to use the network, that are logged."""
SMALL = {
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
"""Sizes of the model in the smoke test."""


def isolate(scratch: str, limits: dict[str, int], pipes: tuple[int, ...]) -> str | None:
    """Isolate this process and return None, or why that is not possible. The code after it runs in a grandchild:

        this process, in the caller's session ──► 1: ours, ends when 2 does, and all others with it ──► 2: the script

    When the first process of a namespace is killed all others die with it, and it cannot be killed from within. So it
    must not run the script, which could detach from its parent and stay alive.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEWUSER | NEWNET | NEWNS | NEWPID | NEWIPC):
        return f"no namespace can be created ({os.strerror(ctypes.get_errno())})"
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
    problem = _lock_files(libc, scratch, limits["scratch"]) or _drop_capabilities(libc)
    if problem is not None:
        return problem
    os.chdir(scratch)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # nor can the script reach into its memory
    second = os.fork()
    if second:
        for pipe in pipes:
            os.close(pipe)
        _wait_for(second)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    for kind, wanted in (
        (resource.RLIMIT_CPU, limits["cpu"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (limit, limit))
    return None


def _wait_for(child: int) -> NoReturn:
    """Exit as `child` does, with a shell's exit code; until then reap processes that lost their parent."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _lock_files(libc: ctypes.CDLL, scratch: str, limit: int) -> str | None:
    """Make everything read-only but `scratch`, where `limit` bytes of memory are mounted; return why not, or None."""
    attributes = ctypes.c_uint64 * 4
    folder, devices = scratch.encode(), [f"/dev/{name}".encode() for name in DEVICES if Path(f"/dev/{name}").exists()]
    small = f"size={limit},nr_inodes=4096,mode=700".encode()

    def change(path: bytes, depth: int, add: int, remove: int) -> int:
        flags = ctypes.byref(attributes(add, remove, 0, 0))
        return int(libc.syscall(NR_MOUNT_SETATTR, AT_FDCWD, path, depth, flags, 32))

    def hide(path: bytes) -> int:
        return (
            int(libc.mount(b"none", path, b"tmpfs", MS_NOSUID | MS_NODEV, b"size=4096"))
            if Path(path.decode()).is_dir()
            else 0
        )

    for name, text in (("self/oom_score_adj", "1000"), ("sys/user/max_user_namespaces", "0")):
        # Without memory this process is killed first. And no namespaces in this one, where it would have all
        # capabilities again; where /proc is read-only that stays possible, but read-only mounts are locked in there
        with contextlib.suppress(OSError):
            Path("/proc", name).write_text(text)
    steps: tuple[Callable[[], int], ...] = (
        lambda: libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
        lambda: hide(b"/run"),  # sockets of services
        lambda: libc.mount(b"none", folder, b"tmpfs", MS_NOSUID | MS_NODEV, small),
        *(lambda node=node: libc.mount(node, node, None, MS_BIND, None) for node in devices),
        lambda: change(b"/", AT_RECURSIVE, RDONLY | NOSUID | NODEV, 0),  # disks can be written to on read-only mounts
        lambda: change(folder, 0, 0, RDONLY),
        *(lambda node=node: change(node, 0, 0, NODEV) for node in devices),
    )
    for step in steps:
        if step():
            return f"the file system cannot be made read-only ({os.strerror(ctypes.get_errno())})"
    return None


def _drop_capabilities(libc: ctypes.CDLL) -> str | None:
    """Drop every capability for good, as one could change mounts back; return why that failed, or None."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, CLEAR_AMBIENT, 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError as error:
        return f"the capabilities cannot be read ({error.strerror})"
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    sets = [value for name, value in status.items() if name.startswith("Cap")]
    if len(sets) < 4 or any(int(value, 16) for value in sets) or status.get("NoNewPrivs") != "1":
        return "capabilities within the namespace cannot be dropped"
    return None


class AuditHook:
    """Logs which files the interpreter opens for reading, and attempts to use the network."""

    def __init__(self, scratch: str) -> None:
        self.opened: dict[str, int] = {}
        self.network: list[str] = []
        folders = (sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.__file__).parent), scratch)
        self.ignored = tuple({os.path.realpath(folder) for folder in folders})
        self.ignored += ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/lib64", "/opt/conda")
        self.enabled = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.enabled:
            return
        if event == "open":
            self._log_open(args[0], args[2])
            return
        network = event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname")
        if network and len(self.network) < MAX_LOGGED:
            self.network.append(f"{event} {str(args[-1])[:80]}")

    def _log_open(self, path: Any, flags: Any) -> None:
        if not isinstance(path, str | bytes) or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
            return
        self.enabled = False  # realpath and stat may raise events of their own
        try:
            real = os.path.realpath(os.fsdecode(path))
            if not any(real == folder or real.startswith(folder + "/") for folder in self.ignored):
                status = Path(real).stat()
                if stat.S_ISREG(status.st_mode) and len(self.opened) < MAX_LOGGED:
                    self.opened[real] = status.st_size
        except OSError:
            pass
        finally:
            self.enabled = True


class Host:
    """The script, and the operations that the parent process can ask for."""

    def __init__(self, script: str, hook: AuditHook) -> None:
        self.script, self.hook = script, hook
        self.module: Any = None
        self.current: Any = None

    def load(self) -> dict[str, Any]:
        """Run the script's top level, under another name than __main__."""
        sys.path.insert(0, str(Path(self.script).parent))
        sys.argv = [self.script]
        started = time.perf_counter()
        spec = importlib.util.spec_from_file_location("foreign_script", self.script)
        if spec is None or spec.loader is None:
            raise ImportError("it is no Python file")
        self.module = importlib.util.module_from_spec(spec)
        sys.modules["foreign_script"] = self.module
        self.hook.enabled = True
        spec.loader.exec_module(self.module)
        vocabulary: Any = getattr(self.module, "VOCABULARY", None)
        if vocabulary is None:
            vocabulary = getattr(getattr(self.module, "Hyperparameters", None), "vocab_size", None)
        try:
            vocabulary = int(vocabulary)
        except (TypeError, ValueError, OverflowError):  # a dataclass field without a value, say
            vocabulary = None
        return {
            "seconds": time.perf_counter() - started,
            "score": callable(getattr(self.module, "score", None)),
            "scorer": callable(getattr(self.module, "scorer", None)),
            "model": isinstance(getattr(self.module, "GPT", None), type),
            "vocabulary": vocabulary,
        }

    def score(self, tokens: list[int]) -> list[float]:
        """Return the nats of the targets of `tokens`."""
        try:
            import numpy
        except ImportError:
            return _floats(self.module.score(tokens))
        return _floats(self.module.score(numpy.asarray(tokens, dtype=numpy.int64)))

    def begin(self) -> None:
        """Create a new scorer."""
        self.current = self.module.scorer()

    def predict(self) -> list[float]:
        """Return the scorer's log-probabilities of the next token."""
        return _floats(self.current.predict())

    def reveal(self, token: int) -> None:
        """Give the scorer the next token."""
        self.current.reveal(token)

    def log(self) -> dict[str, Any]:
        """Return what the audit hook logged."""
        return {"opened": sorted(self.hook.opened.items()), "network": self.hook.network}

    def model(self, length: int) -> dict[str, Any]:
        """Build GPT small and have it predict `length` tokens, twice: the second time with another second half."""
        import torch

        torch.manual_seed(0)
        vocabulary = int(getattr(self._settings({}), "vocab_size", 1024))
        problem = ""
        for sizes in (SMALL, {name: size for name, size in SMALL.items() if "layer" not in name}, {}):
            try:
                model = self._build(sizes).float().eval()
                ids = torch.randint(0, vocabulary, (1, length))
                half = length // 2
                changed = ids.clone()
                changed[:, half:] = (ids[:, half:] + 1) % vocabulary
                with torch.no_grad():
                    first, second = self._logits(model, ids), self._logits(model, changed)
                return {
                    "shape": list(first.shape),
                    "vocabulary": vocabulary,
                    "finite": bool(torch.isfinite(first).all()),
                    "parameters": sum(parameter.numel() for parameter in model.parameters()),
                    "leak": float((first[:, :half] - second[:, :half]).abs().max()),
                    "shrunk": bool(sizes),
                }
            except Exception as error:
                problem = problem or f"{type(error).__name__}: {str(error)[:300]}"
        raise RuntimeError(problem)

    def _settings(self, sizes: dict[str, int]) -> Any:
        kind = getattr(self.module, "Hyperparameters", None)
        settings = kind() if kind is not None else type("Settings", (), {})()
        for name, size in sizes.items():
            if hasattr(settings, name):
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(settings, name, size)
        return settings

    def _build(self, sizes: dict[str, int]) -> Any:
        settings = self._settings(sizes)
        arguments = {}
        for name, parameter in inspect.signature(self.module.GPT).parameters.items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if name in sizes:
                arguments[name] = sizes[name]
            elif hasattr(settings, name):
                arguments[name] = getattr(settings, name)
            elif parameter.default is parameter.empty and not variadic:
                arguments[name] = settings
        return self.module.GPT(**arguments)

    def _logits(self, model: Any, ids: Any) -> Any:
        """Return logits (1, T, vocabulary): of `forward_logits`, of the input of the loss, or of the model itself."""
        import torch.nn.functional as functional

        real = functional.cross_entropy
        inputs: list[Any] = []

        def recording(logits: Any, *args: Any, **kwargs: Any) -> Any:
            inputs.append(logits)
            return real(logits, *args, **kwargs)

        def input_of_loss() -> Any:
            functional.cross_entropy = recording  # type: ignore[assignment]
            try:
                model(ids, ids)
            finally:
                functional.cross_entropy = real
            return inputs[-1]

        attempts: list[Callable[[], Any]] = [input_of_loss, lambda: model(ids)]
        if hasattr(model, "forward_logits"):
            attempts.insert(0, lambda: model.forward_logits(ids))
        problem: Exception = RuntimeError("GPT gives no logits")
        for attempt in attempts:
            try:
                return attempt().float().reshape(1, ids.shape[1], -1)
            except Exception as error:
                problem = error
        raise problem


def _floats(values: Any) -> list[float]:
    for method in ("detach", "cpu"):
        values = getattr(values, method)() if hasattr(values, method) else values
    return [float(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]


def main() -> None:
    """Answer requests until the pipe closes."""
    source, sink, scratch, limits, script = sys.argv[1:6]
    answers = os.fdopen(int(sink), "w", encoding="utf-8")
    requests = os.fdopen(int(source), encoding="utf-8")

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    problem = isolate(scratch, json.loads(limits), (int(source), int(sink)))
    answer(refused=problem)
    if problem is not None or not script:
        return
    hook = AuditHook(scratch)
    host = Host(script, hook)
    sys.addaudithook(hook)
    for line in requests:
        request = json.loads(line)
        try:
            answer(value=getattr(host, request["op"])(*request.get("args", [])))
        except MemoryError:
            answer(error="it ran out of memory", kind="MemoryError")
        except BaseException as error:
            answer(error=f"{type(error).__name__}: {str(error)[:400]}", kind=type(error).__name__)


if __name__ == "__main__":
    main()
