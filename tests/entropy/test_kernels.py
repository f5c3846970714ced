"""Compiling is told once and only when it happens."""

from numba import njit

from birdie.runtime.kernels import on_compiling


def test_compiling_is_told_once_and_only_when_it_happens() -> None:
    @njit
    def doubled(value):  # type: ignore[no-untyped-def]
        return value + value

    told: list[str] = []
    with on_compiling(lambda: told.append("compiling")):
        assert (doubled(1), doubled(1.5)) == (2, 3.0)  # two kernels, one remark
    assert told == ["compiling"]
    with on_compiling(lambda: told.append("again")):
        assert doubled(4) == 8
    assert told == ["compiling"]
