"""Measured work: durations of alternatives that take turns, and memory of processes (Linux), in 10^6 bytes."""

import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from birdie.system.device import synchronize

Work = Callable[[], object]

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")

# The kernel keeps a process's peak when the process executes another program, so a command that a large process starts
# would inherit the peak of its parent. This small one, of the standard library alone, starts it instead.
_LAUNCHER = """
import json, os, subprocess, sys, tempfile, time
with tempfile.TemporaryFile() as messages:
    start = time.perf_counter()
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=messages, stderr=messages)
    _, status, usage = os.wait4(child.pid, 0)
    seconds, code = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
    child.returncode = code
    messages.seek(0)
    error = messages.read()[-400:].decode(errors="replace") if code else ""
unit = 1e6 if sys.platform == "darwin" else 1e6 / 1024  # Linux counts in KiB
print(json.dumps({"seconds": seconds, "peak_mb": usage.ru_maxrss / unit, "code": code, "error": error}))
"""


def duration(work: Work, device: torch.device = CPU, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that `work` takes, until the device has finished."""
    synchronize(device)
    start = clock()
    work()
    synchronize(device)
    return clock() - start


def take_turns(
    works: Mapping[str, Work],
    *,
    seconds: float = 0.0,
    turns: int = 3,
    warm_up: bool = True,
    device: torch.device = CPU,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run the works in turns, so that other load slows all alike; return the duration of each turn in seconds by name.

    Args:
        works: name → work.
        seconds: the turns go on for so long.
        turns: minimum number of turns.
        warm_up: run each work once before, untimed: it allocates, compiles or fills caches.
        device: device to synchronize before the clock is read.
        clock: `time.process_time` excludes other load on a CPU.
    """
    if warm_up:
        for work in works.values():
            work()
    durations: dict[str, list[float]] = {name: [] for name in works}
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or count < turns:
        for name, work in works.items():
            durations[name].append(duration(work, device, clock))
        count += 1
    return durations


def median_seconds(work: Work, device: torch.device = CPU, turns: int = 9) -> float:
    """Return the median of the seconds that `work` takes, after one run more."""
    return statistics.median(take_turns({"": work}, turns=turns, device=device)[""])


def run_command(command: list[str], folder: Path | None = None, timeout: float | None = None) -> tuple[float, float]:
    """Run a command in `folder` and return (seconds, peak in 10^6 bytes).

    Raises:
        RuntimeError: the command failed; the message has the end of its output.
    """
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command]
    launched = subprocess.run(launcher, cwd=folder, capture_output=True, text=True, timeout=timeout, check=True)
    answer = json.loads(launched.stdout)
    if answer["code"]:
        raise RuntimeError(f"{' '.join(command)} failed with code {answer['code']}: {answer['error'].strip()}")
    return float(answer["seconds"]), float(answer["peak_mb"])


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of a module returns in a new process; arguments and result go through JSON.

    Raises:
        RuntimeError: the process failed; the message has the end of its output.
    """
    name = function.__module__ if function.__module__ != "__main__" else f"benchmarks.{Path(sys.argv[0]).stem}"
    command = [sys.executable, "-m", "benchmarks.processes", name, function.__name__, json.dumps(arguments)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{name}.{function.__name__} failed: {process.stderr.strip()[-400:]}")
    return json.loads(process.stdout.splitlines()[-1])


def can_measure() -> bool:
    """Return whether this system has the files that `resident` and `reset_peak` need."""
    return _CLEAR_REFS.exists()


def resident(field: str = "VmRSS") -> float:
    """Return a field of this process's status in 10^6 bytes: "VmRSS" (now), or "VmHWM" (peak)."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


def reset_peak() -> None:
    """Reset "VmHWM" of this process to its current resident memory."""
    _CLEAR_REFS.write_text("5")  # proc(5): 5 resets the peak


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*json.loads(sys.argv[3]))))
