"""Memory that work in several threads shares: some of it waits until there is enough."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Room:
    """Room of a size. Work that is larger than all of it is done alone."""

    def __init__(self, size: int) -> None:
        self._size, self._used, self._changed = size, 0, threading.Condition()

    @contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Wait until there is room for `amount`, and take it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + amount <= self._size)
            self._used += amount
        try:
            yield
        finally:
            with self._changed:
                self._used -= amount
                self._changed.notify_all()
