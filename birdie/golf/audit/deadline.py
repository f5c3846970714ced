"""The audit's own time limit: work asks between its parts whether time is left, and stops where none is."""

import time

from birdie.errors import BirdieError
from birdie.runtime.callbacks import Progress

FOLDER_SECONDS = 30.0
"""Limit for all that is read of a folder or a script; records need one to five seconds."""


class OutOfTimeError(BirdieError):
    """The time limit of the audit has passed."""


class Deadline:
    """A limit of `seconds` from now; None: there is none."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """True when no time is left."""
        return self._end is not None and time.monotonic() > self._end

    def extend(self, seconds: float) -> None:
        """Move the end: the time of work that is done only once on a machine does not count."""
        if self._end is not None:
            self._end += seconds

    def check(self) -> None:
        """Raise OutOfTimeError once the limit has passed."""
        if self.passed:
            raise OutOfTimeError(f"out of time: the audit's limit of {self.seconds:g} s has passed")

    def watch(self, progress: Progress) -> Progress:
        """Return `progress` with a check at every report."""

        def report(done: float, total: float | None) -> None:
            self.check()
            progress(done, total)

        return report
