"""The clock of an evaluation: everything counts, and an exceeded budget is predicted early."""

import pytest

from birdie.gpt.score import clock as clock_module
from birdie.gpt.score.clock import EvaluationClock


class FakeTime:
    """Time as a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake_time = FakeTime()
    monkeypatch.setattr(clock_module, "time", fake_time)
    return fake_time


def test_all_time_is_in_a_part_or_other(fake: FakeTime) -> None:
    clock = EvaluationClock(10.0, import_seconds=2.0)
    for name, seconds in (("decode", 3.0), ("score", 2.5), ("decode", 0.5)):
        with clock.part(name):
            fake.now += seconds
    fake.now += 1.5
    assert clock.seconds == {"import": 2.0, "decode": 3.5, "compile": 0.0, "score": 2.5, "adapt": 0.0, "other": 1.5}
    assert clock.total == 9.5
    clock.reassign("score", "adapt", 2.0)
    assert (clock.seconds["score"], clock.seconds["adapt"], clock.total) == (0.5, 2.0, 9.5)


@pytest.mark.parametrize(("budget", "warnings"), [(600.0, 1), (800.0, 0), (0.0, 0)])
@pytest.mark.parametrize("begun", [0, 300])
def test_the_total_is_predicted_from_the_first_per_cent_on(
    fake: FakeTime, budget: float, warnings: int, begun: int
) -> None:
    lines: list[str] = []
    seen: list[tuple[float, float | None]] = []
    clock = EvaluationClock(budget, lines.append, import_seconds=10.0)
    with clock.part("decode"):
        fake.now += 20.0
    update = clock.watch(lambda done, total: seen.append((done, total)))
    update(begun, 1000)
    fake.now += 0.5
    update(begun + 5, 1000)
    assert clock.predicted is None
    fake.now += 6.5 * (1000 - begun) / 1000
    update(begun + 10, 1000)
    assert clock.predicted == pytest.approx(clock.total + (fake.now - 120.0) * (990 - begun) / 10)
    fake.now += 100
    update(begun + 20, 1000)
    fake.now += 100
    update(begun + 30, 1000)
    assert len(lines) == (warnings or (budget == 800.0))  # at most once
    assert seen == [(begun + done, 1000) for done in (0, 5, 10, 20, 30)]
    if warnings and not begun:
        assert "730 s" in lines[0]
        assert "600 s" in lines[0]
