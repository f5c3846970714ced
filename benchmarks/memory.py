"""Peak memory of a command, and resident memory of this process (Linux), in 10^6 bytes."""

import json
import subprocess
import sys
from pathlib import Path

_LAUNCHER = Path(__file__).with_name("peak.py")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def run_command(command: list[str], folder: Path | None = None, timeout: float | None = None) -> tuple[float, float]:
    """Run a command in `folder` and return (seconds, peak in 10^6 bytes).

    The command is started by a small process (`benchmarks/peak.py`), because a process inherits the peak of its parent.

    Raises:
        RuntimeError: the command failed; the message has the end of its output.
    """
    launcher = [sys.executable, "-I", "-S", str(_LAUNCHER), *command]
    launched = subprocess.run(launcher, cwd=folder, capture_output=True, text=True, timeout=timeout, check=True)
    answer = json.loads(launched.stdout)
    if answer["code"]:
        raise RuntimeError(f"{' '.join(command)} failed with code {answer['code']}: {answer['error'].strip()}")
    return float(answer["seconds"]), float(answer["peak_mb"])


def python_peak(code: str, *arguments: str) -> float:
    """Return the peak of a new Python process that runs `code`, in 10^6 bytes.

    Raises:
        RuntimeError: the code failed.
    """
    return run_command([sys.executable, "-c", code, *arguments])[1]


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
