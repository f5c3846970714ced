"""Versions, machine and commit that produced a result, for logs, artifacts and benchmarks."""

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

VERSION = "0.1.0"
"""Version of birdie; pyproject.toml reads it from this line."""
PACKAGES = ("torch", "numpy", "numba")


def versions() -> dict[str, str]:
    """Return the versions of Python, of birdie and of the packages that decide its numbers."""
    by_package = {"python": platform.python_version(), "birdie": VERSION}
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
