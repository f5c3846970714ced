"""The schedules start, end and fall as documented, measured in steps and in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birdie.train.schedule import lr_multiplier, muon_momentum


def by_steps(step: int, iterations: int = 100, warmdown: int = 20) -> float:
    return lr_multiplier(step, 123.0, iterations=iterations, warmdown_iters=warmdown, cap_ms=None)


def by_time(step: int, elapsed_ms: float, cap_ms: float = 10_000, warmdown: int = 20) -> float:
    return lr_multiplier(step, elapsed_ms, iterations=10**9, warmdown_iters=warmdown, cap_ms=cap_ms)


def test_without_a_cap_the_last_steps_fall_linearly_to_zero() -> None:
    assert [by_steps(step) for step in (0, 79, 80)] == [1, 1, 1]
    assert [by_steps(step) for step in (81, 90, 99, 100)] == pytest.approx([0.95, 0.5, 0.05, 0])


def test_under_a_cap_the_same_fall_is_measured_in_time() -> None:
    """At a steady pace of 100 ms a step a cap of 100 steps falls like 100 iterations do."""
    assert [by_time(step, 100.0 * step) for step in range(101)] == pytest.approx([by_steps(s) for s in range(101)])


@given(step=st.integers(0, 10**6), elapsed=st.floats(0, 1e9), cap=st.floats(1, 1e8), warmdown=st.integers(0, 10**5))
def test_the_multiplier_is_a_fraction_and_never_grows_with_time(
    step: int, elapsed: float, cap: float, warmdown: int
) -> None:
    now = by_time(step, elapsed, cap, warmdown)
    assert 0 <= now <= 1
    assert by_time(step, elapsed * 1.5 + 1, cap, warmdown) <= now


def test_a_fraction_falls_over_that_share_of_steps_or_of_time() -> None:
    by_fraction = [
        lr_multiplier(step, 0.0, iterations=100, warmdown_iters=1, cap_ms=None, warmdown_fraction=0.4)
        for step in (0, 60, 80, 100)
    ]
    timed = [
        lr_multiplier(7, ms, iterations=1, warmdown_iters=1, cap_ms=1000.0, warmdown_fraction=0.4)
        for ms in (0.0, 600.0, 800.0, 1000.0)
    ]
    assert by_fraction == pytest.approx([1, 1, 0.5, 0])
    assert timed == pytest.approx(by_fraction)


def test_no_warmdown_keeps_the_rate() -> None:
    assert by_steps(100, warmdown=0) == by_time(5, 1e9, warmdown=0) == 1


def test_momentum_rises_linearly_and_stays() -> None:
    values = [muon_momentum(step, start=0.85, final=0.95, warmup_steps=500) for step in (0, 250, 500, 9999)]
    assert values == pytest.approx([0.85, 0.90, 0.95, 0.95])
    assert muon_momentum(0, start=0.85, final=0.95, warmup_steps=0) == 0.95
