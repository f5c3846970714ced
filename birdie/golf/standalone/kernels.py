"""`birdie.runtime.kernels` for the one-file decoder: the same law in fewer bytes.

Kernels are kept in one folder, the one numba chooses, without a warning if that fails.
"""

import os
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
from numba.core.serialize import dumps

from birdie.runtime.reading import require_regular


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` with `options`; with `cache` a compiled kernel is kept on disk, if that is possible."""

    def decorate(function: Callable[..., Any]) -> Any:
        kernel: Any = numba.njit(**options)(function)
        try:
            if cache:
                kernel.enable_caching()
                _keep_verified(kernel._cache)
        except Exception:  # no folder can be written, or numba is another version
            kernel = numba.njit(**options)(function)
        return kernel

    return decorate


def _keep_verified(cache: Any) -> None:
    def path(signature: Any, codegen: Any) -> Path:
        folder = Path(cache.cache_path)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:  # others can write the code that would be run
            raise OSError
        key = repr((numba.__version__, cache._cache_file._source_stamp, cache._index_key(signature, codegen)))
        return folder / f"{cache._impl.filename_base}.{sha256(key.encode()).hexdigest()}"

    def digest(file: Path, content: bytes) -> bytes:  # a file under another kernel's name does not have it
        return sha256(file.name.encode() + content).digest()

    def read(signature: Any, context: Any) -> Any:
        context.refresh()
        try:
            file = require_regular(path(signature, context.codegen()))
            content = file.read_bytes()
            if digest(file, content[32:]) == content[:32]:
                return cache._impl.rebuild(context, pickle.loads(content[32:]))
        except Exception:  # whatever unpickling raises
            pass

    def write(signature: Any, result: Any) -> None:
        try:
            target, content = path(signature, result.codegen), dumps(cache._impl.reduce(result))  # type: ignore[no-untyped-call]
            temporary = Path(f"{target}.{os.getpid()}")
            temporary.write_bytes(digest(target, content) + content)
            temporary.replace(target)
        except Exception:  # a full disk, or a kernel that cannot be pickled
            pass

    cache.load_overload, cache.save_overload = read, write
