"""Events for TensorBoard hold what the metrics of the run hold."""

import sys
from pathlib import Path

import pytest

from birdie.cli.tensorboard_events import Board
from birdie.errors import ConfigError
from birdie.gpt.run.events import Validated
from birdie.gpt.score.accumulator import Score
from birdie.gpt.train.loop import Step


def step(number: int) -> Step:
    return Step(number, 5.0 / number, 100.0 * number, 0.5, 0.9, 64, 1.0, number == 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_events_are_those_of_the_run(tmp_path: Path) -> None:
    board = Board(tmp_path)
    for number in range(1, 4):
        board.record(step(number))
    board.record(Validated(3, 300.0, Score(1.5, 3.0, 10, 20, 1, 0.1, 0.2)))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss_nats")]
    assert losses == [(1, 5.0), (2, 2.5), (3, pytest.approx(5 / 3))]
    assert [(event.step, event.value) for event in events.Scalars("validation/bpb")] == [(3, 1.5)]


def test_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="tensorboard is not installed"):
        Board(tmp_path)
