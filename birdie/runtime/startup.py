"""Seconds that a run takes before its training clock starts: interpreter and imports, data, model, warm-up."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from birdie.runtime.platform import process_seconds

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
