"""Callback types by which long work reports progress and messages, and can be stopped. The defaults do nothing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[float, float | None], None]
"""Called with (done, total) in the unit of the work; total is None while it is unknown."""

Notify = Callable[[str], None]
"""Called with one line for the log, without a newline."""

Stop = Callable[[], bool]
"""Called between units of work; True ends the work early."""


def reporting(progress: Progress | bool | None, description: str, unit: str) -> AbstractContextManager[Progress | None]:
    """Return a context that yields the callback of an argument `progress` of the Python API, or None.

    Args:
        progress: a callback; True: that of a progress bar on stderr, or in the notebook; False or None: nothing.
        description: of the work, beside the bar.
        unit: of the work, for its rate.
    """
    if progress is not True:
        return nullcontext(progress or None)
    from birdie.runtime.progress import bar  # imported late: rich is for those who look

    return bar(description, unit)


def no_progress(_done: float, _total: float | None) -> None:
    """Ignore the progress."""


def no_message(_line: str) -> None:
    """Ignore the message."""


def never() -> bool:
    """Return False: the work runs to its end."""
    return False
