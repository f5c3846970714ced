"""Commands print one line on stderr when kernels have to be compiled, and none otherwise."""

import pytest
from numba import njit

from birdie.cli.console import compiling_notice


def test_a_compilation_is_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    @njit
    def halved(value):  # type: ignore[no-untyped-def]
        return value / 2

    @compiling_notice()
    def command(value: float) -> float:
        return float(halved(value))

    assert command(3.0) == 1.5
    first = capsys.readouterr()
    assert "ompiling" in first.err
    assert first.err.count("\n") == 1
    assert first.out == ""
    assert command(5.0) == 2.5
    assert capsys.readouterr().err == ""


def test_only_rank_0_announces_a_compilation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @njit
    def doubled(value):  # type: ignore[no-untyped-def]
        return value + value

    monkeypatch.setenv("RANK", "1")
    with compiling_notice():
        assert doubled(3) == 6
    assert capsys.readouterr().err == ""
