"""The benchmark of budgets: budgets are reproducible, and files over, far under or padded to a budget are missed."""

from pathlib import Path

import pytest

from benchmarks import budgets
from birdie.artifact.save import save
from birdie.errors import ArtifactError


def test_budgets_are_between_two_and_eight_bits_and_reproducible() -> None:
    drawn = budgets.draw(1_000_000)
    assert len(drawn) == 50
    assert drawn == sorted(budgets.draw(1_000_000))
    assert drawn != budgets.draw(1_000_000, seed=1)
    assert 250_000 <= drawn[0] < 400_000
    assert 850_000 < drawn[-1] <= 1_000_000


def test_a_file_over_far_under_or_padded_to_its_budget_misses_it() -> None:
    assert budgets.slack_allowed(10_000) == 64
    assert budgets.slack_allowed(1_000_000) == 1000
    assert budgets._row(100_000, 99_950, 0, 1.0, "")["met"]
    assert not budgets._row(100_000, 100_001, 0, 1.0, "")["met"]
    assert not budgets._row(100_000, 99_899, 0, 1.0, "")["met"]
    assert not budgets._row(100_000, 99_950, 3, 1.0, "")["met"]
    refused = budgets._row(100, None, None, 1.0, "too small")
    assert not refused["met"]
    assert refused["slack"] is None


def test_every_byte_of_a_file_belongs_to_the_header_or_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.birdie"
    save(budgets.small_state(), path, scheme="int6", coder="fast", metadata={"a": 1})
    assert budgets.padding(path) == 0
    path.write_bytes(path.read_bytes() + bytes(7))
    with pytest.raises(ArtifactError):
        budgets.padding(path)


@pytest.mark.slow  # each budget takes several codings
def test_budgets_of_a_small_model_are_met() -> None:
    state = budgets.small_state()
    weights = sum(weight.numel() for name, weight in state.items() if name != "lm_head.weight")
    rows = list(budgets.rows(state, budgets.draw(weights, count=3), coder="fast"))
    assert [row["met"] for row in rows] == [True] * 3
    (impossible,) = budgets.rows(state, [500], coder="fast")
    assert "500 bytes" in impossible["reason"]
    assert not impossible["met"]
