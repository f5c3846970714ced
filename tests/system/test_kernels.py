"""Kernels compile even where nothing can be cached, and a compilation is announced once, only when it happens."""

from pathlib import Path

import numba
import pytest

from birdie.system import kernels
from birdie.system.kernels import njit, on_compiling

DOUBLE = "def double(value):\n    return value + value\n"


def test_a_kernel_without_a_cache_folder_is_compiled_anyway() -> None:
    """As for a function that was typed in."""
    namespace: dict[str, object] = {}
    exec(compile(DOUBLE, "<no file>", "exec"), namespace)
    double = namespace["double"]
    assert callable(double)
    with pytest.raises(RuntimeError, match="no locator"):  # else this proves nothing
        numba.njit(cache=True)(double)
    kernel = njit(nogil=True, cache=True)(double)
    assert kernel(21) == 42
    assert kernel.nopython_signatures  # type: ignore[attr-defined]


def test_a_kernel_with_a_cache_folder_is_kept_there() -> None:
    def triple(value):  # type: ignore[no-untyped-def]
        return 3 * value

    assert type(njit(cache=True)(triple)._cache).__name__ == "KernelCache"  # type: ignore[attr-defined]
    assert type(njit()(triple)._cache).__name__ == "NullCache"  # type: ignore[attr-defined]


def test_no_module_uses_njit_of_numba_directly() -> None:
    package = Path(kernels.__file__).parents[1]
    direct = [path.name for path in package.rglob("*.py") if "from numba import njit" in path.read_text()]
    assert not direct


def test_a_compilation_is_announced_once_and_only_when_it_happens() -> None:
    @numba.njit
    def doubled(value):  # type: ignore[no-untyped-def]
        return value + value

    messages: list[str] = []
    with on_compiling(lambda: messages.append("compiling")):
        assert (doubled(1), doubled(1.5)) == (2, 3.0)  # two kernels, one message
    assert messages == ["compiling"]
    with on_compiling(lambda: messages.append("again")):
        assert doubled(4) == 8
    assert messages == ["compiling"]
