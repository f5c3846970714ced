"""Kernels compile where nothing can be kept: a read-only package, an account without a home."""

from pathlib import Path

import numba
import pytest

from birdie.entropy import compiled
from birdie.runtime.kernels import njit

DOUBLE = "def double(value):\n    return value + value\n"


def test_a_kernel_without_a_place_for_its_cache_is_compiled_all_the_same() -> None:
    space: dict[str, object] = {}
    exec(compile(DOUBLE, "<no file>", "exec"), space)
    double = space["double"]
    assert callable(double)
    with pytest.raises(RuntimeError, match="no locator"):  # else this proves nothing
        numba.njit(cache=True)(double)
    kernel = njit(nogil=True, cache=True)(double)
    assert kernel(21) == 42
    assert kernel.nopython_signatures  # type: ignore[attr-defined]


def test_a_kernel_with_a_place_is_kept_there() -> None:
    def triple(value):  # type: ignore[no-untyped-def]
        return 3 * value

    assert type(njit(cache=True)(triple)._cache).__name__ == "FunctionCache"  # type: ignore[attr-defined]
    assert type(njit()(triple)._cache).__name__ == "NullCache"  # type: ignore[attr-defined]


def test_no_kernel_goes_around_it() -> None:
    package = Path(compiled.__file__).parents[1]
    around = [path.name for path in package.rglob("*.py") if "from numba import njit" in path.read_text()]
    assert not around
