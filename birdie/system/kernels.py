"""Functions that numba compiles (kernels): the decorator that all of them use, and notice of a compilation.

A kernel is compiled on first use, which takes seconds, and kept on disk, one file for each kernel and argument types:

    SHA-256 of the rest │ pickle of ((stamp of the sources, name of the file), numba's compiled kernel)

Unpickling runs code, and so does the kernel. Files are therefore read from folders alone that no other user but root
can write to, and only with a matching digest; numba's own files have neither. The name of a file says which kernel it
is, for which types and processor, so a file under another's name is not used. Three folders are read, in this order:

    1. a folder in `NUMBA_CACHE_DIR`, if that is set
    2. `__pycache__` beside the source
    3. a folder in birdie's cache folder

Those of 1 and 3 are named by a digest of the sources, so checkouts with equal ones share them. The first one that can
be written takes new kernels. None of them has to be: `birdie kernels` compiles everything ahead, and a read-only file
system then has what it needs. Whatever goes wrong with a file costs a compilation and a warning, nothing else.
"""

import errno
import hashlib
import inspect
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.core.caching import FunctionCache, NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from birdie.system.files import read_trusted, user_cache, write_trusted

PORTABLE = "generic", ""
"""Name and features of the processor whose kernels run on every processor of its architecture (`NUMBA_CPU_NAME`)."""

_warned: list[str] = []  # one warning in a process is enough


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` with `options`; with `cache` a compiled kernel is kept on disk, if that is possible."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        kernel: Any = numba.njit(**options)(function)
        if cache:
            with suppress(OSError):  # its source is not a file
                kernel._cache = KernelCache(function)
        compiled: Callable[..., Any] = kernel
        return compiled

    return decorate


class KernelCache(NullCache):
    """Cache of one kernel, which numba reads and writes through two methods: verified files instead of numba's own.

    Attributes:
        folders: folder → whether its files are for this user alone. They are read and written in this order.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        source = Path(inspect.getfile(function)).absolute()
        self._py_func, self._stamp = function, _stamp(source.parent)
        self._name = f"{source.stem}.{function.__name__}"
        self.folders = _folders(source.parent)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the compiled kernel for a signature, or None."""
        context.refresh()
        problem = ""
        for path in self.paths(signature, context.codegen()):
            try:
                content = read_trusted(path)
                if hashlib.sha256(content[32:]).digest() != content[:32]:
                    raise ValueError("it is damaged")
                identity, reduced = pickle.loads(content[32:])
                if identity == (self._stamp, path.name):
                    return CompileResult._rebuild(context, *reduced)  # type: ignore[no-untyped-call]
            except Exception as error:  # whatever unpickling raises, in this or another version of numba
                if not isinstance(error, OSError) or error.errno == errno.EPERM:  # else it cannot be opened: no file
                    problem = problem or f"the compiled kernel in {path} is not used ({_reason(error)}); compiling anew"
        if problem:
            _warn(problem)
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a compiled kernel in the first folder that can be written."""
        problem: Exception | None = None
        try:
            if result.library.has_dynamic_globals:  # addresses of this process
                return
            paths = list(islice(self.paths(signature, result.codegen), len(self.folders)))  # of one name
            payload = dumps(((self._stamp, paths[0].name), result._reduce()))  # type: ignore[no-untyped-call]
            content = hashlib.sha256(payload).digest() + payload
            for path in paths:
                try:
                    write_trusted(path, content, private=self.folders[path.parent])
                    return
                except OSError as error:
                    problem = error
        except Exception as error:  # as above
            problem = error
        advice = "every process compiles them anew; run `birdie kernels` once where their folder can be written"
        _warn(f"compiled kernels are not kept ({_reason(problem)}); {advice}")

    def paths(self, signature: Any, codegen: Any) -> Iterator[Path]:
        """Yield the files of a signature: those for this processor, then those for every one of its architecture."""
        _, processor, code = FunctionCache._index_key(self, signature, codegen)  # type: ignore[no-untyped-call,arg-type]
        for target in dict.fromkeys((processor, (processor[0], *PORTABLE))):
            key = repr((sys.version, numba.__version__, signature, target, code)).encode()
            for folder in self.folders:
                yield folder / f"{self._name}.{hashlib.sha256(key).hexdigest()[:16]}.kernel"


def _folders(sources: Path) -> dict[Path, bool]:
    """Return the folders that may have kernels of the modules in `sources`, as `KernelCache` has them."""
    name = f"{sources.name}-{_stamp(sources).hex()[:16]}"
    root: str = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    folders = {Path(root).absolute() / name: False} if root else {}
    folders[sources / "__pycache__"] = False
    with suppress(RuntimeError):  # an account without a home directory
        folders[user_cache().absolute() / "kernels" / name] = True
    return folders


@cache
def _stamp(sources: Path) -> bytes:
    """Return a digest of the modules in `sources`: a compiled kernel contains those that it calls, whatever their file.

    Times of files do not count, because images of containers round them.
    """
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class KernelStatistics:
    """Kernels that this process called, one for each function and types of arguments.

    Attributes:
        compiled: kernels that were compiled.
        read: kernels that were read from disk.
        lost: kernels without a file, which the next process compiles again.
        folders: where the files are.
        processor: name of the processor for which they are compiled; "generic" runs on every one of its architecture.
    """

    compiled: int
    read: int
    lost: int
    folders: tuple[Path, ...]
    processor: str


def statistics() -> KernelStatistics:
    """Return how many kernels of the imported modules were compiled, read and kept so far."""
    compiled = read = lost = 0
    folders = set()
    codegen: Any = cpu_target.target_context.codegen()
    for name in [name for name in sys.modules if name.startswith("birdie.")]:
        for kernel in vars(sys.modules[name]).values():
            cache = getattr(kernel, "_cache", None)
            if isinstance(cache, KernelCache) and kernel.py_func.__module__ == name:
                compiled += sum(kernel.stats.cache_misses.values())
                read += sum(kernel.stats.cache_hits.values())
                for signature in kernel.signatures:
                    files = [path.parent for path in cache.paths(signature, codegen) if path.is_file()]
                    folders.update(files[:1])
                    lost += not files
    return KernelStatistics(compiled, read, lost, tuple(sorted(folders)), codegen.magic_tuple()[1])


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
