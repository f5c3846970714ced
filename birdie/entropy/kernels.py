"""Word of compilation: the coder's kernels are compiled on first use and kept in numba's cache, which takes seconds.

Numba says when it compiles, and is silent when it loads from the cache; this passes the first such moment on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event


class _First(event.Listener):
    """Calls `tell` once."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def on_start(self, event: event.Event) -> None:  # noqa: ARG002 (numba's signature)
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def on_end(self, event: event.Event) -> None:
        pass


@contextmanager
def on_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Within, call `tell` before the first kernel that has to be compiled; never where the cache has them all."""
    with event.install_listener("numba:compile", _First(tell)):
        yield
