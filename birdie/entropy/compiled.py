"""Kernels: functions that numba compiles, kept in its cache where there is a place to keep them."""

from collections.abc import Callable
from typing import Any

import numba


def njit(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` with `options`; with cache=True it compiles anew each time where no folder can be written.

    Numba refuses such a function when it is defined, so that a read-only package in an account without a home could not
    even be imported.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            kernel: Callable[..., Any] = numba.njit(**options)(function)
        except RuntimeError:
            kernel = numba.njit(**options | {"cache": False})(function)
        return kernel

    return compiled
