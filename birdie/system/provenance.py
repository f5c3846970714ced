"""Origin of a result: versions, machine, commit, and the seconds that its start took, for logs and artifacts."""

import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from itertools import count
from pathlib import Path

from birdie.system.platform import process_seconds

__version__ = "0.1.0"
"""Version of birdie; pyproject.toml reads it from this line."""
PACKAGES = ("torch", "numpy", "numba")


def versions() -> dict[str, str]:
    """Return the versions of Python, of birdie and of the packages that decide its numbers."""
    by_package = {"python": platform.python_version(), "birdie": __version__}
    for package in PACKAGES:
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            by_package[package] = "not installed"
    return by_package


@cache
def commit() -> str | None:
    """Return the commit birdie runs from, with "+" if tracked files have changed; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> str:
    """Return the processor's name and its number of cores, as in "Xeon 8481C, 8 cores"."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        if models:
            return f"{models[0]}, {len(models)} cores"
    return name


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return result.stdout.strip()


_timers = count()


class StartupTimer:
    """Seconds of each part of the start, in the order in which the parts ran.

    Attributes:
        seconds: part → seconds. "import" is the time from the start of the process to the creation of this object; only
            the first timer of a process has it, and only on Linux.
    """

    def __init__(self) -> None:
        age = process_seconds()
        self.seconds: dict[str, float] = {} if next(_timers) or age is None else {"import": age}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to part `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        """Sum of all parts, in seconds."""
        return sum(self.seconds.values())

    def line(self) -> str:
        """Return the line for the log."""
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        return f"start-up: {self.total:.1f} s ({parts})"
