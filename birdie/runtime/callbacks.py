"""How long work reports to its caller: progress and one-line messages. Without a caller nothing is reported."""

from collections.abc import Callable

Progress = Callable[[float, float | None], None]
"""Called with (done, total) in the unit of the work; total is None while it is unknown."""

Notify = Callable[[str], None]
"""Called with one line for the log, without a newline."""

Stop = Callable[[], bool]
"""Asked between units of work; True ends the work early."""


def no_progress(_done: float, _total: float | None) -> None:
    """Report progress to nobody."""


def no_message(_line: str) -> None:
    """Send a message to nobody."""


def never() -> bool:
    """Return False: nobody asks the work to stop."""
    return False
