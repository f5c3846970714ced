"""Foreign code, loaded in a sandbox of bubblewrap; without bubblewrap nothing is run.

    load(train_gpt.py) ──► bwrap: an empty root with Python and the system's libraries, the script's folder, /tmp
                              └──► loader: limits, then the script as a module ──► it loads, or its error

All of the machine that the sandbox shows is read-only. It has no network, no other process and an empty environment.
Isolation is bubblewrap's (github.com/containers/bubblewrap), limits are the kernel's; birdie adds nothing to either.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from birdie.golf.audit.rules import RUNS, Finding, Result
from birdie.system.regular import require_regular

SECONDS = 120.0
MEMORY = 4 * 2**30
"""Bytes of address space of each process."""
FILE_BYTES = 64 * 2**20
"""Bytes of each file that is written."""
SCRATCH_BYTES = 256 * 2**20
"""Bytes of all files in /tmp, and in /dev/shm."""

_PACKAGE = Path(__file__).resolve().parents[2]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
_OPTIONS = (
    *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    *("--proc", "/proc", "--dev", "/dev", "--size", str(SCRATCH_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
    *("--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"),
)
_MISSING = (
    "the script was not run: bubblewrap (bwrap) is not installed; `apt install bubblewrap`, or load the script in a "
    "container: docker run --rm --network none --read-only --tmpfs /tmp --memory 4g -v {}:/submission:ro IMAGE "
    "python -c \"import runpy; runpy.run_path('/submission/{}')\""
)
_LOADER = """
import importlib.util, os, resource, sys
script, *limits = sys.argv[1:]
for name, limit in zip(("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE"), map(int, limits)):
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard < 0 else min(limit, hard),) * 2)
answers = os.fdopen(os.dup(1), "w")
nothing = os.open(os.devnull, os.O_RDWR)
for standard in (0, 1, 2):
    os.dup2(nothing, standard)
print("begun", file=answers, flush=True)
sys.argv = [script]
sys.path[:] = ["/submission", *sys.path, "/birdie"]
spec = importlib.util.spec_from_file_location("foreign_script", script)
module = sys.modules["foreign_script"] = importlib.util.module_from_spec(spec)
try:
    spec.loader.exec_module(module)
    print("loaded", file=answers)
except BaseException as error:
    kind = "OSError" if isinstance(error, OSError) else type(error).__name__
    print(kind, repr(str(error)[:300]), file=answers)
answers.flush()
os._exit(0)
"""


def load(script: Path, *, seconds: float = SECONDS, memory: int = MEMORY) -> Finding:
    """Load `script` in the sandbox, as a module, and return whether it loads; "unknown" where it was not run."""
    require_regular(script)
    result, evidence = _load(script, seconds, memory)
    return Finding(RUNS, result, evidence, "run", str(script))


def _load(script: Path, seconds: float, memory: int) -> tuple[Result, str]:
    program, folder = shutil.which("bwrap"), script.parent.resolve()
    if program is None:
        return "unknown", _MISSING.format(folder, script.name)
    shown = [*_pythons(), folder]
    if any(Path.home().resolve().is_relative_to(path) for path in shown):
        return "unknown", "the script was not run: its folder, or Python's, holds the home folder; move it out of there"
    if (special := _special_file(folder)) is not None:  # a way out, however read-only the folder is
        return "unknown", f"the script was not run: {special} is a pipe, socket or device; remove it"
    binds = [*((path, path) for path in _SYSTEM), *((str(path), str(path)) for path in shown[:-1])]
    binds += [(str(folder), "/submission"), (str(_PACKAGE), f"/birdie/{_PACKAGE.name}")]
    limits = (memory, int(seconds) + 5, FILE_BYTES, 256, 512, 0)
    command = [program, *_OPTIONS, *(part for pair in binds for part in ("--ro-bind-try", *pair)), "--remount-ro", "/"]
    command += ["--", sys.executable, "-I", "-B", "-c", _LOADER, f"/submission/{script.name}", *map(str, limits)]
    started = time.perf_counter()
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as errors:
        try:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=answers,
                stderr=errors,
                env=_environment(),
                cwd="/",
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return "unknown", f"it did not load within {seconds:g} s"
        first, last = (_text(file.fileno()) for file in (answers, errors))
    if not first.startswith("begun"):
        return "unknown", f"the script was not run: {last.strip()[-300:] or 'bubblewrap failed'}"
    kind, _, message = first.removeprefix("begun").strip().partition(" ")
    if kind == "loaded":
        seconds = time.perf_counter() - started
        return "pass", f"it loads in {seconds:.1f} s on a CPU, in a sandbox of bubblewrap without network"
    if kind in ("ModuleNotFoundError", "ImportError"):
        return "unknown", f"a module that it imports is not installed: {message}"
    if kind == "SystemExit":
        return "unknown", "it exits when it is loaded; its main part belongs under if __name__ == '__main__'"
    if kind == "OSError":
        return "unknown", f"it stops in the sandbox, which has limits, no network and no other files: {message}"
    if kind == "MemoryError":
        return "unknown", f"it needs more than {memory:,} bytes of memory"
    if kind == "":
        return "unknown", f"its process ended with code {code}: by itself, or killed by a limit"
    return "fail", f"it does not load on a CPU: {kind}: {message}"


def _pythons() -> Iterator[Path]:
    """Yield the folders that Python and its packages are installed in, and what they are links to."""
    folders = {Path(folder) for folder in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)}
    yield from sorted(folders | {folder.resolve() for folder in folders})


def _special_file(folder: Path) -> Path | None:
    """Return a file in `folder` that is neither regular nor a link nor a folder, if there is one."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFLNK):
                return path
    return None


def _environment() -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/tmp", "CUDA_VISIBLE_DEVICES": "", **threads}


def _text(descriptor: int) -> str:
    return os.pread(descriptor, 4096, 0).decode(errors="replace")
