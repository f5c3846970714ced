"""Alternatives take turns: each runs equally often, in order, and only turns after the warm-up are timed."""

import time

from benchmarks.timing import duration, take_turns


def test_works_take_turns_in_order_and_the_warm_up_is_not_timed() -> None:
    calls: list[str] = []
    durations = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, turns=2)
    assert calls == ["a", "b"] * 3
    assert [len(turns) for turns in durations.values()] == [2, 2]
    calls.clear()
    take_turns({"a": lambda: calls.append("a")}, turns=2, warm_up=False)
    assert calls == ["a"] * 2


def test_turns_go_on_until_the_time_is_over() -> None:
    durations = take_turns({"sleep": lambda: time.sleep(0.01)}, seconds=0.05, turns=1)
    assert len(durations["sleep"]) > 1
    assert min(durations["sleep"]) >= 0.01


def test_a_duration_is_by_the_clock_passed_in() -> None:
    ticks = iter([3.0, 5.0])
    assert duration(lambda: None, clock=lambda: next(ticks)) == 2
