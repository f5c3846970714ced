"""Functions that numba compiles (kernels): the decorators that all of them use, and notice of a compilation.

A kernel is compiled on first use and kept on disk by numba: in the folder of the environment variable
`NUMBA_CACHE_DIR`, else in `__pycache__` beside the source, else in numba's cache folder of the user. Two processes may
compile and write the same one.

What a process needs to save and load a small model takes most of its first seconds, so kernels are written for the
compiler as well. Measured, from the costliest habit down:

    a division in a loop that LLVM turns into 64 guarded ones      computed by numpy, outside
    a second kernel for the other direction or another dtype      an argument, one dtype for all
    np.zeros, np.max, slices of arrays: a kernel each             arrays from the caller, loops
    counts of references, for each use of an array                `_nrt=False`: kernels that make no array hold none
    entries for calls from Python and C                           `inner`: kernels that only kernels call have neither
    numba's search for expressions of arrays                      `no_rewrites=True`: kernels are loops
"""

import gc
import hashlib
import inspect
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.runtime.nrt import rtsys

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_folders: dict[Callable[..., Any], str | None] = {}  # function → where its kernel is kept, if it can be


def njit(*, cache: bool = False, **options: Any) -> _Decorator:
    """`numba.njit` with `options`, without an entry for C; with `cache` the kernel is kept on disk if that is possible.

    A kernel that makes no array, not even by a slice that it returns, does well with `_nrt=False`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        settings: dict[str, Any] = {"no_cfunc_wrapper": True, "no_rewrites": True, **options}
        kernel: Any = numba.njit(**settings)(function)
        if cache:
            _folders[function] = None
            with suppress(OSError, RuntimeError):  # its source is not a file, or no folder can be written
                kernel._cache = KernelCache(function)
                _folders[function] = kernel._cache.cache_path
        compiled: Callable[..., Any] = kernel
        return compiled

    return decorate


inner = njit(no_cpython_wrapper=True, _nrt=False)  # of functions that only kernels call
inlined = njit(no_cpython_wrapper=True, _nrt=False, forceinline=True)  # the same, for a few operations


class KernelCache(FunctionCache):
    """Numba's files of one kernel. Whatever goes wrong with them costs a compilation, nothing else."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        # Numba's own stamp is that of one file, and a kernel contains those that it calls.
        self._cache_file._source_stamp = _stamp(Path(inspect.getfile(function)).absolute().parent)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the compiled kernel for a signature, or None."""
        try:
            # Numba's method refreshes `context` first: types and functions to compile with, and scipy's BLAS, take a
            # third of the time of torch's import. What was compiled needs only the symbols of numba's runtime.
            rtsys.initialize(context)
            return self._load_overload(signature, context)  # type: ignore[no-untyped-call]
        except Exception:  # whatever unpickling of a damaged or outdated file raises
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a compiled kernel, if its folder can still be written and has room."""
        with suppress(OSError):
            super().save_overload(signature, result)  # type: ignore[no-untyped-call]


class _Compilations(event.Listener):
    """Listener of numba's: the first compilation of a kernel is logged, with where kernels are kept.

    While numba compiles, nothing looks for garbage among all objects of torch, which takes a tenth of the time.
    """

    def __init__(self) -> None:
        self._nested = 0
        self._was_on = False
        self.is_logged = False

    def on_start(self, event: event.Event) -> None:
        function = event.data["dispatcher"].py_func
        if not self.is_logged and function in _folders and os.environ.get("RANK", "0") == "0":
            self.is_logged = True
            folder = _folders[function]
            logging.getLogger("birdie").warning(
                "compiling kernels that are not compiled yet: some seconds to half a minute of one core, %s",
                "in every process, as no folder can be written to keep them; name one in NUMBA_CACHE_DIR"
                if folder is None
                else f"once, as they are kept in {folder}",
            )
        if not self._nested:
            self._was_on = gc.isenabled()
            gc.disable()
        self._nested += 1

    def on_end(self, event: event.Event) -> None:  # noqa: ARG002 (numba's signature)
        self._nested -= 1
        if not self._nested and self._was_on:
            gc.enable()


_compilations = _Compilations()
event.register("numba:compile", _compilations)  # type: ignore[no-untyped-call]


@cache
def _stamp(sources: Path) -> bytes:
    """Return a digest of the modules in a folder."""
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()
