"""A run is never silent for long."""

from hypothesis import given
from hypothesis import strategies as st

from birdie.gpt.run.events import LogPace
from birdie.gpt.run.recipe_settings import RunSettings
from birdie.system.callbacks import LONGEST_SILENCE


@given(st.lists(st.floats(0, 40), min_size=1, max_size=60), st.integers(1, 50))
def test_a_step_gets_a_line_by_its_number_or_after_a_silence(seconds: list[float], every: int) -> None:
    now, spoken = 0.0, 0.0
    pace = LogPace(RunSettings(log_every=every), clock=lambda: now)
    for step, passed in enumerate(seconds, 1):
        now += passed
        due = now - spoken >= LONGEST_SILENCE or step <= 10 or step % every == 0
        assert pace.due(step) == due
        spoken = now if due else spoken


def test_a_run_without_lines_stays_silent() -> None:
    now = 0.0
    pace = LogPace(RunSettings(log_every=0), clock=lambda: now)
    now = 1000.0
    assert not pace.due(1)
