"""The clock of an evaluation: everything counts, and what will not do is said early."""

import pytest

from birdie.score import clock as clock_module
from birdie.score.clock import EvaluationClock


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


def test_all_is_counted_in_a_part_or_other(hands: Hands) -> None:
    clock = EvaluationClock(10.0, started=2.0)
    for name, seconds in (("decode", 3.0), ("score", 2.5), ("decode", 0.5)):
        with clock.part(name):
            hands.now += seconds
    hands.now += 1.5
    assert clock.seconds == {"import": 2.0, "decode": 3.5, "compile": 0.0, "score": 2.5, "adapt": 0.0, "other": 1.5}
    assert clock.total == 9.5
    assert clock.within
    clock.went_on("score", 1.0)
    assert not clock.within
    clock.move("score", "adapt", 2.0)
    assert (clock.seconds["score"], clock.seconds["adapt"], clock.total) == (1.5, 2.0, 10.5)


@pytest.mark.parametrize(("budget", "told"), [(600.0, 1), (800.0, 0), (0.0, 0)])
@pytest.mark.parametrize("begun", [0, 300])
def test_the_rest_is_foretold_from_the_first_per_cent_on(hands: Hands, budget: float, told: int, begun: int) -> None:
    said: list[str] = []
    seen: list[tuple[float, float | None]] = []
    clock = EvaluationClock(budget, said.append, started=10.0)
    with clock.part("decode"):
        hands.now += 20.0
    update = clock.watch(lambda done, total: seen.append((done, total)))
    update(begun, 1000)
    hands.now += 0.5
    update(begun + 5, 1000)
    assert clock.predicted is None
    hands.now += 6.5 * (1000 - begun) / 1000
    update(begun + 10, 1000)
    assert clock.predicted == pytest.approx(clock.total + (hands.now - 120.0) * (990 - begun) / 10)
    hands.now += 100
    update(begun + 20, 1000)
    hands.now += 100
    update(begun + 30, 1000)
    assert len(said) == (told or (budget == 800.0))  # once, if at all
    assert seen == [(begun + done, 1000) for done in (0, 5, 10, 20, 30)]
    if told and not begun:
        assert "about 730 s in all, more than its 600 s" in said[0]


def test_learning_between_two_calls_is_foretold(hands: Hands) -> None:
    """Chunks that are scored fast, and learned from for long: the second tells what the first could not."""
    said: list[str] = []
    clock = EvaluationClock(300.0, said.append)
    update = clock.watch()
    for done in (10, 20):
        hands.now += 0.1
        update(done, 100)
    assert not said
    hands.now += 90
    update(30, 100)
    assert "evaluation will take about" in said[0]
