"""What a run takes before its clock starts: interpreter and imports, data, model, priming; in seconds."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

_runs = count()


class Startup:
    """Seconds by part, in the order in which they came.

    Attributes:
        seconds: "import" is from the start of the process to this object: of its first run only, on Linux.
    """

    def __init__(self) -> None:
        since = process_seconds()
        self.seconds: dict[str, float] = {} if next(_runs) or since is None else {"import": since}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block under `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.seconds.values())

    def line(self) -> str:
        """In words."""
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        return f"start-up: {self.total:.1f} s ({parts})"


def process_seconds() -> float | None:
    """Age of this process, or None where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd of all, in ticks since the machine started
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
