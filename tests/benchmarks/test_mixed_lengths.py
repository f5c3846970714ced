"""The benchmark of mixed sequence lengths: mixtures are what their names promise, with the same number of tokens."""

import pytest

from benchmarks.mixed_lengths import CHUNKS, measure, mixtures, rows_of
from birdie.train.plan import differ_within_a_rank
from birdie.train.settings import TrainSettings

NAMES = ["long", "by rank", "in every rank", "short"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_mixtures_are_what_their_names_promise(ranks: int) -> None:
    tokens = {"train_batch_tokens": CHUNKS * 64, "train_seq_len": 64, "accumulation": CHUNKS}
    settings = {
        name: TrainSettings(**tokens, mixed_seq_lens=lengths)  # type: ignore[arg-type]
        for name, lengths in mixtures(64, 16, ranks).items()
    }
    assert list(settings) == NAMES
    assert [differ_within_a_rank(mixture, ranks) for mixture in settings.values()] == [False, ranks == 1, True, False]


def test_rows_have_the_slowest_ranks_step_and_every_ranks_passes() -> None:
    ranks = [
        {"long": [[8.0, 7.0]] * 3, "short": [[4.0, 2.0]] * 3},
        {"long": [[8.0, 5.0]] * 3, "short": [[4.0, 3.0]] * 3},
    ]
    long, short = rows_of(ranks)  # type: ignore[arg-type]
    assert long == {"lengths": "long", "ms": 8.0, "best_ms": 8.0, "steps": 3, "busy_ms": [7.0, 5.0], "ratio": 1.0}
    assert (short["ratio"], short["busy_ms"]) == (2.0, [2.0, 3.0])


@pytest.mark.nightly  # two processes that import torch
def test_two_ranks_take_turns() -> None:
    rows = measure(2, 64, 16, 0.0, 0)
    assert [row["lengths"] for row in rows] == NAMES
    assert all(row["steps"] >= 3 and len(row["busy_ms"]) == 2 and row["ms"] > 0 for row in rows)
