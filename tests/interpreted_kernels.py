"""Run Triton kernels under Triton's interpreter, on a CPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_interpreted(script: str) -> dict[str, dict[str, Any]]:
    """Run `script`, a path below tests, in another process: the interpreter must be chosen before Triton is imported.

    The script prints what it found as JSON.
    """
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / script)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in process.stderr:
        pytest.skip("the interpreter of this Triton does not work with this NumPy")
    assert process.returncode == 0, process.stderr[-2000:]
    results: dict[str, dict[str, Any]] = json.loads(process.stdout)
    return results
