"""Functions that numba compiles (kernels): the decorator that all of them use, and notice of a compilation.

A kernel is compiled on first use, which takes seconds, and kept in numba's cache on disk.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
from numba.core import event


def njit(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` with `options`, which with cache=True still works where no cache folder can be written.

    Numba refuses such a function when it is defined, so a read-only package in an account without a home directory
    could not even be imported. Here it is compiled anew in every process.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            kernel: Callable[..., Any] = numba.njit(**options)(function)
        except RuntimeError:
            kernel = numba.njit(**options | {"cache": False})(function)
        return kernel

    return decorate


@contextmanager
def on_compiling(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify` before the first kernel that has to be compiled; not at all where the cache holds every kernel."""
    # Numba announces a compilation, and is silent when it loads a kernel from the cache.
    with event.install_listener("numba:compile", _OnFirstStart(notify)):
        yield


class _OnFirstStart(event.Listener):
    """Listener of numba's that calls a function once."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify: Callable[[], None] | None = notify

    def on_start(self, event: event.Event) -> None:  # noqa: ARG002 (numba's signature)
        notify, self._notify = self._notify, None
        if notify is not None:
            notify()

    def on_end(self, event: event.Event) -> None:
        pass
