"""Functions that numba compiles (kernels): the decorator that all of them use, and notice of a compilation.

A kernel is compiled on first use, which takes seconds, and kept on disk, one file for each kernel and argument types:

    SHA-256 of the rest │ pickle of (stamp of the source file, numba's compiled kernel)

Unpickling runs code, and so does the kernel. Files are therefore read from folders alone that no other user can write
to, and only with a matching digest; numba's own files have neither. They are in the folder that numba chooses
(`NUMBA_CACHE_DIR`, `__pycache__` beside the source, the user's cache folder) or else in birdie's cache folder. Whatever
goes wrong with them costs a compilation and a warning, nothing else.
"""

import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.core.serialize import dumps

from birdie.runtime.files import read_trusted, user_cache, write_trusted

_warned: list[str] = []  # one warning in a process is enough


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` with `options`; with `cache` a compiled kernel is kept on disk, if that is possible."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        kernel: Any = numba.njit(**options)(function)
        try:
            if cache:
                kernel.enable_caching()
                _keep_verified(kernel._cache)
        except (RuntimeError, AttributeError):  # numba finds no folder that can be written, or is another version
            kernel = numba.njit(**options)(function)
        compiled: Callable[..., Any] = kernel
        return compiled

    return decorate


def _keep_verified(cache: Any) -> None:
    """Replace how numba's `cache` of a kernel reads and writes, by verified files."""
    implementation, name, stamp = cache._impl, cache._impl.filename_base, cache._cache_file._source_stamp
    numbas = Path(cache.cache_path).absolute()
    folders = numbas, user_cache().absolute() / "kernels" / hashlib.sha256(os.fsencode(numbas)).hexdigest()[:16]

    def paths(signature: Any, codegen: Any) -> list[Path]:
        key = repr((numba.__version__, cache._index_key(signature, codegen)))
        return [folder / f"{name}.{hashlib.sha256(key.encode()).hexdigest()[:16]}.kernel" for folder in folders]

    def load(signature: Any, context: Any) -> Any:
        context.refresh()
        for path in paths(signature, context.codegen()):
            try:
                content = read_trusted(path)
                if hashlib.sha256(content[32:]).digest() != content[:32]:
                    raise ValueError("it is damaged")
                source, reduced = pickle.loads(content[32:])
                if source == stamp:
                    return implementation.rebuild(context, reduced)
            except FileNotFoundError:
                pass
            except Exception as error:  # whatever unpickling raises, in this or another version of numba
                _warn(f"the compiled kernel in {path} is not used ({_reason(error)}); compiling anew")
        return None

    def save(signature: Any, result: Any) -> None:
        problem: Exception | None = None
        try:
            if not implementation.check_cachable(result):
                return
            payload = dumps((stamp, implementation.reduce(result)))  # type: ignore[no-untyped-call]
            content = hashlib.sha256(payload).digest() + payload
            for path in paths(signature, result.codegen):
                try:
                    write_trusted(path, content)
                    return
                except OSError as error:
                    problem = error
        except Exception as error:  # as above
            problem = error
        _warn(f"compiled kernels are not kept ({_reason(problem)}); every process compiles them anew")

    cache.load_overload, cache.save_overload = load, save


def _reason(error: Exception | None) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]


def _warn(warning: str) -> None:
    if not _warned:
        _warned.append(warning)
        logging.getLogger("birdie").warning("%s", warning)


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
