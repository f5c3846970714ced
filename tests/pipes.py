"""Guard of tests that open pipes: whatever waits for a writer fails instead of hanging."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def waiting_fails(seconds: int = 60) -> Iterator[None]:
    """Raise TimeoutError in the body of the context after `seconds`; for the main thread."""

    def handle(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError("waited for a pipe")

    previous = signal.signal(signal.SIGALRM, handle)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
