"""Packed scripts, each packed once in a worker, and the recipes that they run, at a very small size."""

import lzma
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from birdie.golf.packed_script import Kind, PackedScript, pack
from birdie.gpt.run.recipe_registry import find
from birdie.gpt.run.recipe_settings import Recipe
from tests.forked import run_python

INTERPRETED = {"NUMBA_DISABLE_JIT": "1"}
"""Variables of a process whose kernels Python runs: to compile those of a script takes a minute."""


@cache
def script(kind: Kind) -> PackedScript:
    """Return the file of a kind for the recipe `sota`."""
    return pack(kind, find("sota").recipe())


def script_of(parts: list[str], cut: int = 0) -> bytes:
    """Return a packed script whose first part is what runs first."""
    packed = lzma.compress("\0".join(parts).encode())
    return f"#birdie 0 coding:L1\nPARTS={packed[: len(packed) - cut].decode('latin-1')!r}\n".encode("latin-1")


def tiny(name: str, **model: int) -> Recipe:
    """Return a recipe with the techniques and the evaluation of `name`, at a very small size, changed by `model`."""
    values = find(name).recipe().to_dict()
    values["model"] |= {"vocab_size": 260, "num_layers": 4, "model_dim": 32, "num_heads": 2, "num_kv_heads": 1}
    if name == "sota":
        values["model"] |= {"xsa_last_n": 2, "loop_start": 1, "loop_end": 2, "parallel_start_layer": 3}
    values["model"] |= model
    length = 64 if name == "baseline" else 128
    values["train"] |= {"iterations": 2, "warmup_steps": 1, "train_seq_len": length, "train_batch_tokens": 16 * length}
    values["train"] |= {"max_wallclock_seconds": 0.0, "compute_dtype": "float32"}
    values["validation"] |= {"max_tokens": 1024}
    values["calibration"] |= {"tokens": 512}
    return Recipe.from_dict(values)


def environment_of(folder: Path) -> dict[str, str]:
    """Return variables of a process for which another birdie is installed in `folder`, whose import fails."""
    (folder / "other" / "birdie").mkdir(parents=True, exist_ok=True)
    (folder / "other" / "birdie" / "__init__.py").write_text("raise ImportError('this is not the packed birdie')")
    folder.chmod(0o700)
    other, cache = str(folder / "other"), str(folder / "cache")
    return {"PYTHONPATH": other, "OTHER": other, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}


def start(folder: Path, *arguments: str, variables: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS` in `folder`, where another birdie is installed."""
    command = [sys.executable, "-P", "-W", "ignore", *arguments]
    environment = {**os.environ, **environment_of(folder), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


IN_A_FORK = """
import os, sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("birdie", "tests", "hypothesis", "pytest")]:
    del sys.modules[name]
sys.path[:] = [os.environ["OTHER"], *(path for path in sys.path if path != {root!r})]
import numba, runpy
numba.core.config.reload_config()
runpy.run_path("train_gpt.py", run_name="__main__")
"""


def start_in_a_fork(folder: Path, variables: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run train_gpt.py as `start` does, in a process that has imported torch and numba, and no birdie."""
    environment = {**environment_of(folder), **variables}
    code = IN_A_FORK.format(root=str(Path(__file__).resolve().parents[2]))
    return run_python("-c", code, folder=folder, variables=environment)
