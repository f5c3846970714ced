"""birdie runs where the names that POSIX alone has are missing: they are used in one module, which can do without."""

import ast
import os
from pathlib import Path

import pytest

from tests.forked import run_python

PACKAGE = Path(__file__).resolve().parents[2] / "birdie"
ALLOWED = ("system/platform.py", "golf/audit/", "golf/start.py")
"""Files that may have the names: their module, what is for Linux alone, and the start of a script."""

MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "posix", "ctypes", "msvcrt"}
NAMES = {
    "os": {
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fchown", "fork"),
        *("getgid", "getloadavg", "getuid", "geteuid", "killpg", "makedev", "mkfifo", "nice", "pread", "pwrite"),
        *("register_at_fork", "sched_getaffinity", "setsid", "statvfs", "sysconf", "uname"),
    },
    "signal": {
        "SIGHUP",
        "SIGKILL",
        "SIGBUS",
        "SIGUSR1",
        "SIGUSR2",
        "SIGALRM",
        "SIGPIPE",
        "SIGCHLD",
        "pidfd_send_signal",
    },
    "mmap": {"MADV_DONTNEED", "MADV_SEQUENTIAL", "MADV_WILLNEED"},
    "time": {"CLOCK_BOOTTIME", "clock_gettime"},
}

WORK = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("birdie", "tests", "hypothesis", "pytest")]:
    del sys.modules[name]
for name in {modules} - {{"ctypes", "posix", "msvcrt"}}:
    sys.modules[name] = None
import mmap, os, signal, time
import multiprocessing.resource_tracker, shutil, subprocess, tempfile
import cyclopts, numba, numpy, rich, safetensors.torch, sentencepiece, torch, torch.distributed
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import filelock
warnings.simplefilter("error", RuntimeWarning)
for module, names in {names}.items():
    for name in (names - {{'statvfs'}}) & set(dir(sys.modules[module])):  # shutil needs that one here
        delattr(sys.modules[module], name)

from pathlib import Path
import birdie
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare

torch.manual_seed(0)
folder = Path(sys.argv[1])
module, x = torch.nn.Linear(64, 64), torch.randn(3, 64)
birdie.save(module, folder / "state.birdie", bits=4.0, effort="fast")
state = birdie.load(folder / "state.birdie")
module.load_state_dict(state)
lazy = birdie.load(folder / "state.birdie", into=torch.nn.Linear(64, 64), lazy=True)
assert torch.equal(lazy(x), module(x))
assert run(build_app, ["decompress", str(folder / "state.birdie"), "-o", str(folder / "state.safetensors")]) == 0
*_, data = prepare(file_corpus([folder / "text.txt"]), "bytes", folder / "data")
command = ["train", "baseline", "--preset", "smoke", "--data.path", str(data.folder), "--data.tokenizer", "bytes"]
command += ["--folder", str(folder / "run"), "--train.iterations", "2", "--train.no-compile"]
command += ["--export.effort", "fast"]
assert run(build_app, command) == 0
assert run(build_app, ["--help"]) == 0
assert (folder / "run" / "model.birdie").is_file()
"""


def used(tree: ast.AST) -> set[str]:
    """Return the names of POSIX in a syntax tree."""
    names_used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names_used |= {name.name for name in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            names_used |= {node.module or ""} & MODULES
            names_used |= {name.name for name in node.names} & NAMES.get(node.module or "", set())
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names_used |= {node.attr} & NAMES.get(node.value.id, set())
        elif isinstance(node, ast.keyword) and node.arg in ("start_new_session", "preexec_fn"):
            names_used.add(node.arg)
    return names_used


def test_names_of_posix_are_used_in_one_module() -> None:
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    names = {
        name: used(ast.parse(path.read_text(encoding="utf-8")))
        for name, path in paths.items()
        if not name.startswith(ALLOWED)
    }
    assert {name: list(names_used) for name, names_used in names.items() if names_used} == {}
    assert used(ast.parse(paths["system/platform.py"].read_text(encoding="utf-8"))), "the search finds something"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is nothing to take away")
@pytest.mark.slow
def test_birdie_works_where_the_names_of_posix_are_missing(tmp_path: Path) -> None:
    """It saves, loads, decodes lazily and in parallel, trains, scores and prints its help."""
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of a text that is short" for i in range(1_000)))
    code = WORK.format(modules=MODULES, names=NAMES)
    home = {"HOME": str(tmp_path), "PYTHONPATH": str(PACKAGE.parent)}
    result = run_python("-c", code, str(tmp_path), variables=home)
    assert result.returncode == 0, result.stderr[-3_000:]
