"""Compiled kernels on disk: damage, hostile files and missing space cost a compilation and a line, never a result."""

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from birdie.runtime import kernels
from birdie.runtime.files import read_trusted

PROBE = """
import sys
from birdie.runtime import files, kernels
from birdie.entropy.rans import __name__ as other  # all kernels of the package are defined
def full(path, data, private):
    raise OSError(28, "No space left on device")
def homeless():
    raise RuntimeError("Could not determine home directory.")
if "homeless" in sys.argv:
    kernels.user_cache = homeless
if "full" in sys.argv:
    kernels.write_trusted = full
import probe
print(probe.double(21), len(probe.double._cache_hits))
"""
MODULE = "from birdie.runtime.kernels import njit\n@njit(cache=True)\ndef double(value):\n    return value + value\n"


class Ran:
    """Unpickling this creates the file `name`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str, int]]:
        return os.open, (self.name, os.O_CREAT)


class Probe:
    """A kernel in a folder of its own, called in subprocesses; `cache` is the folder of `NUMBA_CACHE_DIR`."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache, self.private = root, root / "cache", root / "user" / "birdie" / "kernels"
        (root / "probe.py").write_text(MODULE)

    def run(self, *arguments: str, **more: str) -> tuple[bool, str]:
        """Call the kernel, with `more` variables; return whether it came from the cache, and stderr."""
        paths = [str(self.root), str(Path(kernels.__file__).parents[2])]
        variables = {"NUMBA_CACHE_DIR": str(self.cache), "XDG_CACHE_HOME": str(self.root / "user")}
        environment = os.environ | variables | more | {"PYTHONPATH": os.pathsep.join(paths), "HOME": str(self.root)}
        command = [sys.executable, "-W", "error::ResourceWarning", "-c", PROBE, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        result, hits = done.stdout.split()
        assert result == "42"
        return hits == "1", done.stderr

    def file(self) -> Path:
        """Return the file of the kernel in `cache`."""
        (path,) = self.cache.rglob("*.kernel")
        return path


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    return Probe(tmp_path)


def signed(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest() + payload


@pytest.mark.slow
def test_damage_is_noticed_and_repaired(probe: Probe) -> None:
    assert probe.run() == (False, "")
    assert probe.run() == (True, "")
    path = probe.file()
    sound = path.read_bytes()
    flipped = bytearray(sound)
    flipped[len(sound) // 2] ^= 1
    for content in (
        sound[:-9],
        bytes(flipped),
        b"",
        signed(b"garbage"),
        signed(pickle.dumps(Path("of another class"))),
    ):
        path.write_bytes(content)
        cached, stderr = probe.run()
        assert not cached
        assert len(stderr.splitlines()) == 1, stderr
        assert str(path) in stderr
        assert path.read_bytes()[32:] != content[32:]
    assert probe.run() == (True, "")


@pytest.mark.slow
def test_a_file_under_the_name_of_another_kernel_is_not_used(probe: Probe) -> None:
    """It costs a compilation, not a wrong result or an error at every call."""
    double = MODULE + MODULE.split("\n", 1)[1].replace("double", "treble").replace("value + value", "3 * value")
    (probe.root / "probe.py").write_text(double + "treble(21)\n")
    assert probe.run() == (False, "")
    first, second = sorted(probe.cache.rglob("*.kernel"))
    assert (first.name.split(".")[1], second.name.split(".")[1]) == ("double", "treble")
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert not probe.run()[0]
    assert probe.run()[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_opened_and_another_folder_takes_the_kernel(kind: str, probe: Probe) -> None:
    probe.run()
    path = probe.file()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert not probe.run()[0]
    assert probe.run()[0]


@pytest.mark.slow
def test_code_that_another_user_could_have_written_does_not_run(probe: Probe, tmp_path: Path) -> None:
    probe.run()
    path, mark = probe.file(), tmp_path / "ran"
    path.write_bytes(signed(pickle.dumps(Ran(str(mark)))))
    path.chmod(0o666)
    assert not probe.run()[0]  # and the file is replaced by one that only this user can write
    assert read_trusted(path)
    path.write_bytes(signed(pickle.dumps(Ran(str(mark)))))
    path.parent.chmod(0o777)
    cached, stderr = probe.run()
    assert not cached
    assert "other users" in stderr
    assert list((probe.root / "__pycache__").glob("*.kernel"))  # rebuilt where only this user can write
    assert probe.run()[0]
    assert not mark.exists()
    path.parent.chmod(0o755)
    probe.run()
    assert mark.exists()  # the file would have run: else this test proves nothing


@pytest.mark.slow
def test_without_space_every_process_compiles_and_says_so_once(probe: Probe) -> None:
    cached, stderr = probe.run("full")
    assert not cached
    assert len(stderr.splitlines()) == 1
    assert "no space left" in stderr.lower()
    assert not list(probe.root.rglob("*.kernel"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "missing parent", "link to nowhere"])
def test_a_folder_that_cannot_be_written_is_no_obstacle(probe: Probe, kind: str) -> None:
    if kind == "file":
        probe.cache.write_bytes(b"")
    elif kind == "missing parent":
        probe.cache = Path("/proc/none/cache")
    else:
        probe.cache.symlink_to("/proc/none")
    assert probe.run() == (False, "")
    assert probe.run() == (True, "")  # beside the source


@pytest.mark.slow
def test_a_change_of_any_module_beside_the_source_costs_a_compilation(probe: Probe) -> None:
    """A kernel contains the kernels that it calls, whatever their file."""
    (probe.root / "called.py").write_text("CONSTANT = 1\n")
    assert probe.run() == (False, "")
    assert probe.run() == (True, "")
    os.utime(probe.root / "called.py", (0, 0))
    assert probe.run() == (True, "")  # images of containers round times
    (probe.root / "called.py").write_text("CONSTANT = 2\n")
    assert probe.run() == (False, "")
    assert len(list(probe.cache.rglob("*.kernel"))) == 1  # the older one is replaced


@pytest.mark.slow
def test_kernels_for_every_processor_serve_each_one_and_not_the_reverse(probe: Probe) -> None:
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert probe.run() == (False, "")
    assert probe.run(**generic) == (False, "")
    (native, _) = sorted(probe.cache.rglob("*.kernel"), key=lambda path: path.stat().st_mtime_ns)
    native.unlink()
    assert probe.run() == (True, "")


@pytest.mark.slow
def test_an_account_without_a_home_directory_reads_what_is_beside_the_source(probe: Probe) -> None:
    probe.cache = Path("/proc/none/cache")
    assert probe.run("homeless") == (False, "")
    assert probe.run("homeless") == (True, "")
    (path,) = (probe.root / "__pycache__").glob("*.kernel")
    assert path.stat().st_mode & 0o777 == 0o644  # users share it


@pytest.mark.slow
def test_kernels_in_the_cache_folder_of_a_user_are_private(probe: Probe) -> None:
    probe.cache = Path("/proc/none/cache")
    (probe.root / "__pycache__").write_bytes(b"")  # as good as a folder that cannot be written
    assert probe.run() == (False, "")
    assert probe.run() == (True, "")
    (path,) = probe.private.rglob("*.kernel")
    assert path.stat().st_mode & 0o777 == 0o600
    assert probe.private.stat().st_mode & 0o777 == 0o700
