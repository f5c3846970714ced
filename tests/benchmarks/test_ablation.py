"""The ablation changes one thing at a time, makes no run twice, and gives equal time to both."""

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ablation
from benchmarks.ablation import CHANGES, NEAREST, Results, Texts, Trial, recipe_of, run_trials
from birdie.errors import ConfigError
from birdie.run.registry import changes


class NoTexts(Texts):
    """Where no text is wanted."""

    def __init__(self) -> None:
        pass

    def settings(self, vocabulary: int) -> dict[str, Any]:  # noqa: ARG002
        return {}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_what_its_name_says_and_nothing_else(change: str) -> None:
    base, other = (recipe_of(Trial(each, 0, 100), NoTexts()).to_dict() for each in ("", change))
    differing = {name for name, _, _ in changes(base, other)}
    named = {name if "." in name else f"model.{name}" for name in CHANGES[change]}
    assert differing == named - {"train.iterations"}, "steps are the trial's"


def test_equal_time_is_steps_times_their_cost() -> None:
    assert ablation._as_long("XSA, all", 1.0, 240) == 240
    assert ablation._as_long("XSA, all", 1.25 + NEAREST / 3, 240) == 300
    assert ablation._as_long("twice the steps", 1.0, 240) == 480


def test_what_was_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    results = Results(path)
    trial = Trial("XSA, all", 1, 100)
    results.add(results.key("run", trial.change, trial.seed, trial.steps), {"bpb": 2.5, "parameters": 7})
    run_trials([trial], Results(path), tmp_path, 1)  # without text nothing could be trained
    monkeypatch.setitem(ablation.CHANGES, "XSA, all", {"xsa_last_n": 3})  # type: ignore[arg-type]
    assert Results.key("run", trial.change, trial.seed, trial.steps) not in Results(path).known


def test_it_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIRDIE_DATA", raising=False)
    with pytest.raises(ConfigError, match="set BIRDIE_DATA"):
        Texts(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("BIRDIE_DATA"), reason="BIRDIE_DATA is unset")
def test_it_trains_and_scores_the_same_text_under_each_vocabulary(tmp_path: Path) -> None:
    base, other = (ablation.trained(Trial(change, 0, 2), tmp_path) for change in ("", "vocabulary 4,096"))
    assert base["bytes"] == pytest.approx(other["bytes"], rel=0.02), "but for what does not fill a window at the end"
    assert other["parameters"] - base["parameters"] == (4096 - 1024) * 96
