"""A command that codes says once, on stderr, that kernels are being compiled, and only if they are."""

import pytest
from numba import njit

from birdie.cli.console import compiling_told


def test_a_command_tells_that_kernels_are_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    @njit
    def halved(value):  # type: ignore[no-untyped-def]
        return value / 2

    @compiling_told()
    def command(value: float) -> float:
        return float(halved(value))

    assert command(3.0) == 1.5
    first = capsys.readouterr()
    assert "ompiling" in first.err
    assert first.err.count("\n") == 1
    assert first.out == ""
    assert command(5.0) == 2.5
    assert capsys.readouterr().err == ""


def test_one_rank_speaks_for_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @njit
    def doubled(value):  # type: ignore[no-untyped-def]
        return value + value

    monkeypatch.setenv("RANK", "1")
    with compiling_told():
        assert doubled(3) == 6
    assert capsys.readouterr().err == ""
