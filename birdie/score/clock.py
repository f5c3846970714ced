"""One clock around a whole evaluation: import, decode, compile, score, adapt; the challenge allows 600 s in all.

Whether compiling and decoding count was never ruled, so all of it counts here. From the first per cent of the work on
the rest is foretold from its pace, so that a run that will not make it is known early.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PARTS = ("import", "decode", "compile", "score", "adapt")
SHARE = 0.01  # of the work, after which the rest is foretold


class EvaluationClock:
    """Time in all, and by part; it runs from when it is made.

    Args:
        budget: seconds; 0: any.
        notify: gets one line when the budget will not do, and none otherwise.
        started: seconds already gone, which were import.

    Attributes:
        earlier: seconds that an evaluation that goes on took before.
        predicted: seconds in all, foretold; None before that can be.
    """

    def __init__(self, budget: float, notify: Callable[[str], None] = lambda _: None, started: float = 0.0) -> None:
        self.budget, self._notify, self._told = budget, notify, False
        self._began = time.perf_counter() - started
        self._parts = dict.fromkeys(PARTS, 0.0) | {"import": started}
        self.earlier = 0.0
        self.predicted: float | None = None

    @property
    def total(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._began + self.earlier

    @property
    def within(self) -> bool:
        """Whether the budget did."""
        return not self.budget or self.total <= self.budget

    @property
    def seconds(self) -> dict[str, float]:
        """By part; what is in none, such as opening the data, is "other"."""
        return self._parts | {"other": max(0.0, self.total - sum(self._parts.values()))}

    def went_on(self, name: str, seconds: float) -> None:
        """So many of part `name` were before this clock, in an evaluation that was stopped and goes on."""
        self.earlier += seconds
        self._parts[name] += seconds

    def move(self, name: str, other: str, seconds: float) -> None:
        """So many that count as part `name` are of the `other`."""
        self._parts[name] -= seconds
        self._parts[other] += seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside counts as `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] += time.perf_counter() - began

    def watch(
        self, progress: Callable[[float, float | None], None] | None = None
    ) -> Callable[[float, float | None], None]:
        """A `progress` to hand on, which foretells the rest from the pace since it was first called."""
        first: tuple[float, float] | None = None

        def update(done: float, total: float | None) -> None:
            nonlocal first
            if progress is not None:
                progress(done, total)
            now = time.perf_counter()
            if first is None:
                first = done, now
            elif total and done - first[0] >= SHARE * total:
                self.predicted = self.total + (now - first[1]) * (total - done) / (done - first[0])
                self._warn(self.predicted)

        return update

    def _warn(self, predicted: float) -> None:
        if self.budget and predicted > self.budget and not self._told:
            self._told = True
            self._notify(
                f"evaluation will take about {predicted:,.0f} s in all, more than its "
                f"{self.budget:,.0f} s; a larger stride, a stream or larger batches take less"
            )
