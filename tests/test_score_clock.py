"""The clock of an evaluation: everything counts, and what will not do is said early."""

import pytest

from birdie.score import clock as clock_module
from birdie.score.clock import EvaluationClock, process_seconds


class Hands:
    """Time as a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    made = Hands()
    monkeypatch.setattr(clock_module, "time", made)
    return made


def test_parts_add_up_to_all(hands: Hands) -> None:
    clock = EvaluationClock(10.0, started=2.0)
    for name, seconds in (("decode", 3.0), ("score", 4.0), ("decode", 0.5)):
        with clock.part(name):
            hands.now += seconds
    assert clock.seconds == {"import": 2.0, "decode": 3.5, "compile": 0.0, "score": 4.0, "adapt": 0.0}
    assert clock.total == 9.5
    assert clock.within
    with clock.part("adapt"):
        hands.now += 1.0
    assert not clock.within


@pytest.mark.parametrize(("budget", "told"), [(600.0, 1), (800.0, 0), (0.0, 0)])
def test_the_rest_is_foretold_after_the_first_per_cent(hands: Hands, budget: float, told: int) -> None:
    said: list[str] = []
    seen: list[tuple[float, float | None]] = []
    clock = EvaluationClock(budget, said.append, started=10.0)
    with clock.part("decode"):
        hands.now += 20.0
    update = clock.watch(lambda done, total: seen.append((done, total)))
    hands.now += 0.5
    update(5, 1000)
    assert clock.predicted is None
    hands.now += 6.5
    update(10, 1000)
    assert clock.predicted == pytest.approx(10 + 20 + 700)
    hands.now += 100
    update(20, 1000)
    assert len(said) == told  # once, if at all
    assert seen == [(5, 1000), (10, 1000), (20, 1000)]
    if told:
        assert "about 730 s in all, more than its 600 s" in said[0]


def test_a_process_knows_its_age() -> None:
    assert 0 <= process_seconds() < 7 * 86_400
