"""One clock around a whole evaluation: import, decode, compile, score, adapt; the challenge allows 600 s in all.

Whether compiling and decoding count was never ruled, so all of it counts here. After the first per cent of the work the
rest is foretold from its pace, so that a run that will not make it is known at once.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PARTS = ("import", "decode", "compile", "score", "adapt")
SHARE = 0.01  # of the work, after which the rest is foretold


class EvaluationClock:
    """Time by part.

    Args:
        budget: seconds; 0: any.
        notify: gets one line when the budget will not do, and none otherwise.
        started: seconds already gone, which were import.

    Attributes:
        seconds: by part.
        predicted: seconds in all, foretold; None before that can be.
    """

    def __init__(self, budget: float, notify: Callable[[str], None] = lambda _: None, started: float = 0.0) -> None:
        self.budget, self._notify = budget, notify
        self.seconds = dict.fromkeys(PARTS, 0.0) | {"import": started}
        self.predicted: float | None = None

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())

    @property
    def within(self) -> bool:
        """Whether the budget did."""
        return not self.budget or self.total <= self.budget

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside counts as `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def watch(
        self, progress: Callable[[float, float | None], None] | None = None
    ) -> Callable[[float, float | None], None]:
        """A `progress` to hand on, which foretells from the pace of the part that begins now."""
        before, began = self.total, time.perf_counter()

        def update(done: float, total: float | None) -> None:
            if progress is not None:
                progress(done, total)
            if self.predicted is None and total and SHARE * total <= done:
                self.predicted = before + (time.perf_counter() - began) * total / done
                if self.budget and self.predicted > self.budget:
                    self._notify(
                        f"evaluation will take about {self.predicted:,.0f} s in all, more than its "
                        f"{self.budget:,.0f} s; a larger stride, a stream or larger batches take less"
                    )

        return update


def process_seconds() -> float:
    """Seconds since this process began; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # starttime, field 22 of the line
        up = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
