"""Numbers, texts and arrays of NumPy in what torch.save wrote: torch opens none of them by itself.

    pickle ──► what NumPy would build, from dtype, shape and bytes ──► leaf, or tensor, of a nested checkpoint

A pickle names the functions of NumPy that build such values. None of them is called: those that follow stand for them.
Whatever else of NumPy a file names, generators for example, is not opened.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUMBERS = re.compile(r"[<>=|]?[biufc][0-9]{1,2}")
_PLAIN = re.compile(r"[<>=|]?(?:[biufc][0-9]{1,2}|[SU][0-9]{1,6})")


class DType:
    """Stands for a dtype, in the arguments of `scalar`."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str):
            self.code = f"{state[1]}{self.code}"


class Array:
    """Stands for an array, in the order in which a pickle builds it: first empty, then with its content."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def content(self) -> NDArray[Any] | None:
        """Return the array; None if it holds no numbers, or is damaged."""
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            return None
        _, shape, kind, is_fortran, data = self.state
        code = getattr(kind, "code", None)
        if not isinstance(code, str) or not _NUMBERS.fullmatch(code) or not isinstance(data, bytes):
            return None
        try:
            return np.frombuffer(data, code).reshape(shape, order="F" if is_fortran else "C")
        except (TypeError, ValueError):
            return None


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
    return [value.dtype.str, value.tobytes()[: value.dtype.itemsize].hex()]  # of an empty text 0


def tensor_of(value: Any) -> Tensor | None:
    """Return the numbers of an array, or of what stands for one; None for anything else."""
    array = value.content() if isinstance(value, Array) else value
    if type(array) is not np.ndarray:
        return None
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError):  # of a kind that torch lacks, or in the order of bytes of other machines
        return None


def opener_of(name: str) -> Callable[..., Any] | None:
    """Return what stands for a class or function of NumPy in a pickle; None for what builds no value."""
    openers: dict[str, Callable[..., Any]] = {"dtype": DType, "scalar": scalar, "_reconstruct": Array}
    return openers.get(name.rpartition(".")[2]) if name.startswith("numpy.") else None
