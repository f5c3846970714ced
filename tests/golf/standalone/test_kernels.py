"""Kernels that the one-file decoder keeps: what is damaged, another kernel's or no file costs a compilation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import birdie

MODULE = """
from birdie.golf.standalone.kernels import njit
@njit(cache=True)
def double(value):
    return value + value
@njit(cache=True)
def treble(value):
    return 3 * value
"""
PROBE = "import probe; print(probe.double(7), probe.treble(7), len(probe.double._cache_hits))"


def run(folder: Path) -> str:
    """Return the results of both kernels, and how many files of the first were used."""
    paths = [str(folder), str(Path(birdie.__file__).parents[1])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "NUMBA_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_only_the_own_file_of_a_kernel_is_used(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(MODULE)
    assert [run(tmp_path), run(tmp_path)] == ["14 21 0", "14 21 1"]
    first, second = sorted(path for path in (tmp_path / "cache").rglob("probe.*") if path.is_file())
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert [run(tmp_path), run(tmp_path)] == ["14 21 0", "14 21 1"]
    first.unlink()
    os.mkfifo(first)
    assert [run(tmp_path), run(tmp_path)] == ["14 21 0", "14 21 1"]
