"""Kernels compile where nothing can be kept, come from disk where it can, and a compilation is announced once."""

import importlib
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import numba
import pytest
from numba.core.dispatcher import Dispatcher

from birdie.system import kernels
from birdie.system.kernels import KernelCache, njit

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("entropy", "compress", "compress/schemes", "compress/spectral", "compress/trellis", "score")
MODULE = "from birdie.system.kernels import njit\n@njit(cache=True)\ndef double(value):\n    return value + value\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that has a kernel; files of kernels go to its folder `cache`."""
    (tmp_path / "probe.py").write_text(MODULE)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def came_from_disk(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Call the kernel as a new process does."""
    kernels._stamp.cache_clear()
    monkeypatch.delitem(sys.modules, "probe", raising=False)
    double = importlib.import_module("probe").double
    assert double(21) == 42
    return bool(double.stats.cache_hits)


def test_a_kernel_without_a_cache_folder_is_compiled_anyway(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As for a function that was typed in, and for an account that can write nowhere."""
    namespace: dict[str, object] = {}
    exec(compile("def double(value):\n    return value + value\n", "<no file>", "exec"), namespace)
    double = namespace["double"]
    assert callable(double)
    assert njit(cache=True)(double)(21) == 42
    monkeypatch.setattr(numba.config, "CACHE_DIR", "/proc/none")
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (folder / "__pycache__").write_bytes(b"")  # as good as a folder that cannot be written
    assert not came_from_disk(monkeypatch)


def test_damage_and_a_change_of_any_module_beside_the_source_cost_a_compilation(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """A kernel contains the kernels that it calls, whatever their file."""
    assert [came_from_disk(monkeypatch) for _ in range(2)] == [False, True]
    for path in list((folder / "cache").rglob("double*")):
        content = path.read_bytes()
        for damaged in (content[:-9], b""):
            path.write_bytes(damaged)
            assert not came_from_disk(monkeypatch), path
            assert came_from_disk(monkeypatch)
    (folder / "called.py").write_text("CONSTANT = 1\n")
    assert [came_from_disk(monkeypatch) for _ in range(2)] == [False, True]
    os.utime(folder / "called.py", (0, 0))
    assert came_from_disk(monkeypatch)  # images of containers round times


def test_a_kernel_from_disk_loads_without_what_numba_compiles_with(folder: Path) -> None:
    """Numba takes as long as a third of the import of torch to get ready to compile, and imports scipy."""
    program = "import sys, probe; assert probe.double(21) == 42; print('numba.np.arraymath' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "NUMBA_CACHE_DIR": str(folder / "cache")}
    for loaded in ("True", "False"):
        process = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=True)
        assert process.stdout.decode().strip() == loaded


def test_a_kernel_calls_kernels_of_its_own_folder_only() -> None:
    """A kept kernel contains those that it calls, and is dropped when a module of its folder changes."""
    count = 0
    for path in sorted(path for folder in FOLDERS for path in (ROOT / "birdie" / folder).glob("*.py")):
        if "system.kernels" not in path.read_text(encoding="utf-8"):
            continue
        module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for kernel in vars(module).values():
            if isinstance(kernel, Dispatcher) and kernel.py_func.__module__ == module.__name__:
                count += 1
                called = [kernel.py_func.__globals__.get(name) for name in kernel.py_func.__code__.co_names]
                folders = {
                    Path(other.py_func.__code__.co_filename).parent for other in called if isinstance(other, Dispatcher)
                }
                assert folders <= {path.parent}, kernel
    assert count > 50


def test_no_module_uses_njit_of_numba_directly() -> None:
    direct = [path.name for path in (ROOT / "birdie").rglob("*.py") if "from numba import njit" in path.read_text()]
    assert not direct


@pytest.mark.parametrize(("rank", "kept"), [("0", True), ("0", False), ("1", True)])
def test_the_first_compilation_is_logged_by_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path, rank: str, kept: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(kernels._compilations, "is_logged", False)
    if not kept:
        monkeypatch.setattr(KernelCache, "__init__", Mock(side_effect=RuntimeError))
    assert numba.njit(lambda value: value)(1) == 1  # somebody else's
    assert not caplog.messages
    assert not came_from_disk(monkeypatch)
    assert importlib.import_module("probe").double(1.5) == 3.0  # compiled again, for floats
    where = str(folder) if kept else "NUMBA_CACHE_DIR"
    assert [where in message for message in caplog.messages] == ([True] if rank == "0" else [])
