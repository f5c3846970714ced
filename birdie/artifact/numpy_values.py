"""Numbers and texts of NumPy in what torch.save wrote: torch opens none of them by itself.

A pickle names the functions of NumPy that build them. Those that follow do the same from the bytes alone, without any
of NumPy's own code for pickles; whatever else of NumPy a file names is no number, and is not opened.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

_PLAIN = re.compile(r"[<>=|]?(?:[biufc][0-9]{1,2}|[SU][0-9]{1,6})")


class DType:
    """Stands for a dtype, in the arguments of `scalar`."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str):
            self.code = f"{state[1]}{self.code}"


class NumPyValue:
    """Stands for a value that is neither a number nor a text."""


def scalar(kind: Any, data: Any) -> Any:
    """Return a number or a text of NumPy from its dtype and its bytes, or what stands for another value."""
    try:
        return number(getattr(kind, "code", kind), data)
    except ValueError:
        return NumPyValue()


def number(code: Any, data: Any) -> Any:
    """Return a number or a text of NumPy from the code of its dtype and its bytes.

    Raises:
        ValueError: they are not those of one.
    """
    if not isinstance(code, str) or not _PLAIN.fullmatch(code) or not isinstance(data, bytes):
        raise ValueError("a value of NumPy that is neither a number nor a text")
    try:
        dtype = np.dtype(code)
    except TypeError as error:
        raise ValueError(f"a value of NumPy of the kind {code}") from error
    if dtype.itemsize != len(data):
        raise ValueError(f"a value of NumPy of {len(data)} bytes, of a kind that has {dtype.itemsize}")
    return np.frombuffer(data, dtype)[0] if data else dtype.type()


def put(value: Any) -> list[str] | None:
    """Return the dtype and the bytes of a number or a text of NumPy, in hexadecimal; None for anything else."""
    if not isinstance(value, np.generic) or not _PLAIN.fullmatch(value.dtype.str):
        return None
    return [value.dtype.str, value.tobytes().hex()]


def opener_of(name: str) -> Callable[..., Any] | None:
    """Return what stands for a class or function of NumPy in a pickle; None for what builds no number."""
    openers: dict[str, Callable[..., Any]] = {"dtype": DType, "scalar": scalar}
    return openers.get(name.rpartition(".")[2]) if name.startswith("numpy.") else None
