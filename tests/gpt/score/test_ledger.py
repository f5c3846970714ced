"""The ledger: each target is scored once, and learned from only after it was scored."""

import pytest

from birdie.errors import RuleError
from birdie.gpt.score.ledger import Ledger


def test_a_target_is_scored_once() -> None:
    ledger = Ledger(10)
    ledger.score(0, 6)
    with pytest.raises(RuleError, match="target 5 "):
        ledger.score(5, 8)
    with pytest.raises(RuleError, match=r"4 of 10 targets .* 6"):
        ledger.close()
    ledger.score(6, 10)
    ledger.close()


def test_learning_comes_after_scoring() -> None:
    ledger = Ledger(10)
    ledger.score(0, 6)
    ledger.learn((0, 3), (2, 6))
    assert (ledger.learned, ledger.steps) == (7, 1)
    with pytest.raises(RuleError, match="target 6 "):
        ledger.learn((0, 2), (4, 8))


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_positions_are_those_of_the_stream(first: int, stop: int) -> None:
    ledger = Ledger(10)
    with pytest.raises(IndexError, match="10"):
        ledger.score(first, stop)
    with pytest.raises(IndexError, match="10"):
        ledger.learn((first, stop))


def test_the_mask_of_scored_targets_is_read_only() -> None:
    ledger = Ledger(4)
    ledger.score(1, 3)
    assert ledger.scored_mask.tolist() == [False, True, True, False]
    with pytest.raises(ValueError, match="read-only"):
        ledger.scored_mask[0] = True
