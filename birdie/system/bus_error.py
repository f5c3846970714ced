"""A note instead of death by SIGBUS where a mapped file is cut.

    read beyond the new end ──SIGBUS──► native handler: a page of zeros instead, and Python is told
                                        └─► Python's handler, in the main thread: `faults`

A handler in Python alone cannot do that: the instruction that failed would run again before it. The native one calls
only mmap and PyErr_SetInterruptEx, which are safe in a signal handler and need no interpreter lock. Python's raises
nothing, because an exception between any two instructions would leave threads behind. On Linux of 64 bits; on other
systems nothing is guarded.
"""

import ctypes
import functools
import mmap
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba import cfunc, types

_PAGE = mmap.PAGESIZE
_READ_WRITE, _PRIVATE_FIXED_ANONYMOUS = 3, 0x32
_SA_SIGINFO = 4
_mmap: Any = types.ExternalFunction(
    "mmap", types.intp(types.intp, types.uintp, types.int32, types.int32, types.int32, types.int64)
)
_tell: Any = types.ExternalFunction("PyErr_SetInterruptEx", types.int32(types.int32))
_exit: Any = types.ExternalFunction("_exit", types.void(types.int32))


class _Action(ctypes.Structure):
    """`struct sigaction` of glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


faults: list[int] = []  # a number for each page that could not be read since the guard began
_guards = 0


@contextmanager
def guarded() -> Iterator[None]:
    """Put zeros instead of the pages of mapped files that cannot be read, and count them in `faults`.

    Whoever reads mapped files looks at `faults` before anything that was computed is kept, in the main thread, where
    Python runs handlers of signals. In other threads than that, a guard does nothing.
    """
    global _guards
    main = threading.current_thread() is threading.main_thread()
    is_linux = sys.platform.startswith("linux") and sys.maxsize > 1 << 32 and hasattr(signal, "SIGBUS")
    if not (main and is_linux) or _guards:
        yield
        return
    former, native = _Action(), _Action(_handler().address, flags=_SA_SIGINFO)
    sigaction = ctypes.CDLL(None).sigaction
    faults.clear()
    sigaction(signal.SIGBUS, None, ctypes.byref(former))
    handler = signal.signal(signal.SIGBUS, lambda number, _: faults.append(number))
    sigaction(signal.SIGBUS, ctypes.byref(native), None)
    _guards += 1
    try:
        yield
    finally:
        _guards -= 1
        signal.signal(signal.SIGBUS, signal.SIG_DFL if handler is None else handler)
        sigaction(signal.SIGBUS, ctypes.byref(former), None)


@functools.cache
def _handler() -> Any:
    """Return the native handler, kept until the process ends."""

    pointer: Any = types.CPointer

    @cfunc(types.void(types.int32, pointer(types.intp), types.voidptr))
    def handle(number, info, _):  # type: ignore[no-untyped-def]
        page = info[2] & -_PAGE  # si_addr
        if _mmap(page, _PAGE, _READ_WRITE, _PRIVATE_FIXED_ANONYMOUS, -1, 0) == -1:
            _exit(128 + number)
        _tell(number)

    return handle
