"""Clock of a whole evaluation: import, decode, compile, score and adapt; the challenge allows 600 s in total.

Whether compiling and decoding count was never ruled, so everything counts. The total is predicted from the pace once
one per cent of the work is done, so that an evaluation that will exceed its budget says so early.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from birdie.system.callbacks import Notify, Progress, no_message

PARTS = ("import", "decode", "compile", "score", "adapt")
MIN_SHARE = 0.01  # of the work, before which nothing is predicted


class EvaluationClock:
    """Elapsed time in total and by part, running since it was constructed.

    Args:
        budget: seconds; 0: unlimited.
        notify: receives one line if the prediction exceeds the budget.
        import_seconds: time already spent on imports.

    Attributes:
        predicted: predicted total in seconds; None until there is a prediction.
    """

    def __init__(self, budget: float, notify: Notify = no_message, import_seconds: float = 0.0) -> None:
        self.budget, self._notify, self._warned = budget, notify, False
        self._began = time.perf_counter() - import_seconds
        self._parts = dict.fromkeys(PARTS, 0.0) | {"import": import_seconds}
        self.predicted: float | None = None

    @property
    def total(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._began

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part; time in no part, such as opening the data, is "other"."""
        return self._parts | {"other": max(0.0, self.total - sum(self._parts.values()))}

    def reassign(self, source: str, destination: str, seconds: float) -> None:
        """Count time that was measured as one part as another."""
        self._parts[source] -= seconds
        self._parts[destination] += seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside the block as part `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] += time.perf_counter() - began

    def watch(self, progress: Progress | None = None) -> Progress:
        """Return a callback that passes progress on and predicts the total from the pace since its first call."""
        start: tuple[float, float] | None = None

        def update(done: float, total: float | None) -> None:
            nonlocal start
            if progress is not None:
                progress(done, total)
            now = time.perf_counter()
            if start is None:
                start = done, now
            elif total and done - start[0] >= MIN_SHARE * total:
                self.predicted = self.total + (now - start[1]) * (total - done) / (done - start[0])
                self._warn(self.predicted)

        return update

    def _warn(self, predicted: float) -> None:
        if self.budget and predicted > self.budget and not self._warned:
            self._warned = True
            self._notify(
                f"evaluation will take about {predicted:,.0f} s, more than its budget of {self.budget:,.0f} s; "
                "use a larger stride, streaming evaluation or larger batches"
            )
