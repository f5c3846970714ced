"""Start-up time is the sum of its parts, and only a process's first timer counts the imports."""

import pytest

from birdie.system.platform import process_seconds
from birdie.system.provenance import StartupTimer


def test_start_up_time_is_the_sum_of_its_parts() -> None:
    timer = StartupTimer()
    for _ in range(2):
        with timer.part("data"):
            pass
    assert timer.total == pytest.approx(sum(timer.seconds.values()))
    assert timer.line().startswith("start-up: ")
    assert "import" not in StartupTimer().seconds
    age = process_seconds()
    assert age is None or age > 0
