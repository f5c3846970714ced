"""The benchmark of mixed lengths: mixtures are what their names say, and all have as many tokens."""

import pytest

from benchmarks.lengths import SPANS, measure, mixtures
from birdie.train.mixed_lengths import differ_within_a_rank
from birdie.train.settings import TrainSettings


@pytest.mark.parametrize("ranks", [1, 2])
def test_mixtures_are_what_their_names_say(ranks: int) -> None:
    found = {
        name: TrainSettings(train_batch_tokens=SPANS * 64, train_seq_len=64, accumulation=SPANS, mixed_seq_lens=lengths)
        for name, lengths in mixtures(64, 16, ranks).items()
    }
    assert list(found) == ["long", "by rank", "in every rank", "short"]
    differ = [differ_within_a_rank(settings, ranks) for settings in found.values()]
    assert differ == [False, ranks == 1, True, False]


@pytest.mark.slow
def test_two_ranks_take_turns() -> None:
    rows = measure(2, 64, 16, 0.0, 0)
    assert [row["lengths"] for row in rows] == ["long", "by rank", "in every rank", "short"]
    assert all(row["steps"] >= 3 and len(row["busy_ms"]) == 2 and row["ms"] > 0 for row in rows)
