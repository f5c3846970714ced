"""Guard of tests that open pipes: whatever waits for a writer fails instead of hanging."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest


@contextmanager
def waiting_fails(seconds: int = 60) -> Iterator[None]:
    """Fail the test if the body of the context takes longer than `seconds`; for the main thread."""

    def handle(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail("waited for a pipe")  # not an Exception, which readers would take for damage of the file

    previous = signal.signal(signal.SIGALRM, handle)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
