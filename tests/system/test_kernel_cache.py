"""Compiled kernels on disk: damage, hostile files and missing space cost a compilation and a line, never a result."""

import hashlib
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest

from birdie.system import kernels
from birdie.system.files import read_trusted

MODULE = "from birdie.system.kernels import njit\n@njit(cache=True)\ndef double(value):\n    return value + value\n"


class Ran:
    """Unpickling this creates the file `name`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str, int]]:
        return os.open, (self.name, os.O_CREAT)


class Probe:
    """A kernel in a folder of its own; `cache` is the folder of `NUMBA_CACHE_DIR`."""

    def __init__(self, root: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.root, self.cache, self.private = root, root / "cache", root / "user" / "birdie" / "kernels"
        self.caplog = caplog
        (root / "probe.py").write_text(MODULE)

    def run(self, **replaced: Callable[..., Any]) -> tuple[bool, str]:
        """Call the kernel as a new process does, with functions of `kernels` replaced.

        Returns:
            Whether the kernel came from the cache, and the log.
        """
        self.caplog.clear()
        kernels._stamp.cache_clear()
        kernels._warned.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(numba.config, "CACHE_DIR", str(self.cache))
            patch.setenv("XDG_CACHE_HOME", str(self.root / "user"))
            for name, function in replaced.items():
                patch.setattr(kernels, name, function)
            patch.syspath_prepend(self.root)
            patch.delitem(sys.modules, "probe", raising=False)
            double = importlib.import_module("probe").double
            assert double(21) == 42
            del sys.modules["probe"]
        return bool(double._cache_hits), "\n".join(self.caplog.messages)

    def file(self) -> Path:
        """Return the file of the kernel in `cache`."""
        (path,) = self.cache.rglob("*.kernel")
        return path


@pytest.fixture
def probe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Probe:
    return Probe(tmp_path, caplog)


def signed(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest() + payload


def test_checkouts_of_equal_sources_share_their_kernels(
    probe: Probe, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path_factory.mktemp("other") / probe.root.name  # as packages have the same name in every checkout
    root.mkdir()
    other = Probe(root, caplog)
    other.cache = probe.cache
    assert [probe.run()[0], other.run()[0]] == [False, True]
    (other.root / "probe.py").write_text(MODULE + "\n")
    assert [other.run()[0], probe.run()[0]] == [False, True]


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
        cached, log = probe.run()
        assert not cached
        assert len(log.splitlines()) == 1, log
        assert str(path) in log
        assert path.read_bytes()[32:] != content[32:]
    assert probe.run() == (True, "")


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


def test_code_that_another_user_could_have_written_does_not_run(probe: Probe, tmp_path: Path) -> None:
    probe.run()
    path, mark = probe.file(), tmp_path / "ran"
    path.write_bytes(signed(pickle.dumps(Ran(str(mark)))))
    path.chmod(0o666)
    assert not probe.run()[0]  # and the file is replaced by one that only this user can write
    assert read_trusted(path)
    path.write_bytes(signed(pickle.dumps(Ran(str(mark)))))
    path.parent.chmod(0o777)
    cached, log = probe.run()
    assert not cached
    assert "other users" in log
    assert list((probe.root / "__pycache__").glob("*.kernel"))  # rebuilt where only this user can write
    assert probe.run()[0]
    assert not mark.exists()
    path.parent.chmod(0o755)
    probe.run()
    assert mark.exists()  # the file would have run: else this test proves nothing


def test_without_space_every_process_compiles_and_says_so_once(probe: Probe) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    cached, log = probe.run(write_trusted=full)
    assert not cached
    assert len(log.splitlines()) == 1
    assert "no space left" in log.lower()
    assert not list(probe.root.rglob("*.kernel"))


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


def test_a_change_of_any_module_beside_the_source_costs_a_compilation(probe: Probe) -> None:
    """A kernel contains the kernels that it calls, whatever their file."""
    (probe.root / "called.py").write_text("CONSTANT = 1\n")
    assert probe.run() == (False, "")
    assert probe.run() == (True, "")
    os.utime(probe.root / "called.py", (0, 0))
    assert probe.run() == (True, "")  # images of containers round times
    (probe.root / "called.py").write_text("CONSTANT = 2\n")
    assert probe.run() == (False, "")
    (probe.root / "called.py").write_text("CONSTANT = 1\n")
    assert probe.run() == (True, "")  # those of other sources stay


@pytest.mark.slow
def test_kernels_for_every_processor_serve_each_one_and_not_the_reverse(probe: Probe) -> None:
    """In processes of their own, because numba chooses its processor once."""

    def run(**processor: str) -> str:
        code = "import probe; print(probe.double(21), len(probe.double._cache_hits))"
        paths = os.pathsep.join([str(probe.root), str(Path(kernels.__file__).parents[2])])
        variables = {**os.environ, "NUMBA_CACHE_DIR": str(probe.cache), "PYTHONPATH": paths, **processor}
        command = [sys.executable, "-W", "error::ResourceWarning", "-c", code]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout

    assert run() == "42 0\n"
    native = probe.file()
    assert run(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="") == "42 0\n"
    native.unlink()
    assert run() == "42 1\n"


def test_an_account_without_a_home_directory_reads_what_is_beside_the_source(probe: Probe) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    probe.cache = Path("/proc/none/cache")
    assert probe.run(user_cache=homeless) == (False, "")
    assert probe.run(user_cache=homeless) == (True, "")
    (path,) = (probe.root / "__pycache__").glob("*.kernel")
    assert path.stat().st_mode & 0o777 == 0o644  # users share it


def test_kernels_in_the_cache_folder_of_a_user_are_private(probe: Probe) -> None:
    probe.cache = Path("/proc/none/cache")
    (probe.root / "__pycache__").write_bytes(b"")  # as good as a folder that cannot be written
    assert probe.run() == (False, "")
    assert probe.run() == (True, "")
    (path,) = probe.private.rglob("*.kernel")
    assert path.stat().st_mode & 0o777 == 0o600
    assert probe.private.stat().st_mode & 0o777 == 0o700
