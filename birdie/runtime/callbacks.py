"""Callback types by which long work reports progress and messages, and can be stopped. The defaults do nothing."""

from collections.abc import Callable

Progress = Callable[[float, float | None], None]
"""Called with (done, total) in the unit of the work; total is None while it is unknown."""

Notify = Callable[[str], None]
"""Called with one line for the log, without a newline."""

Stop = Callable[[], bool]
"""Called between units of work; True ends the work early."""


def no_progress(_done: float, _total: float | None) -> None:
    """Ignore the progress."""


def no_message(_line: str) -> None:
    """Ignore the message."""


def never() -> bool:
    """Return False: the work runs to its end."""
    return False
