"""The ablation changes one setting at a time, repeats no run, and compares at equal time."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ablation
from benchmarks.ablation import CHANGES, RATIO_STEP, Results, Texts, Trial, recipe_of, run_trials
from birdie.errors import ConfigError
from birdie.run.registry import changes


class NoTexts(Texts):
    """Texts without data, for tests that do not train."""

    def __init__(self) -> None:
        pass

    def settings(self, vocabulary: int) -> dict[str, Any]:  # noqa: ARG002
        return {}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_settings_of_its_name_only(change: str) -> None:
    base, other = (recipe_of(Trial(name, 0, 100), NoTexts()).to_dict() for name in ("", change))
    differing = {name for name, _, _ in changes(base, other)}
    named = {name if "." in name else f"model.{name}" for name in CHANGES[change]}
    assert differing == named - {"train.iterations"}, "the steps are those of the trial"


def test_equal_time_is_the_number_of_steps_times_their_cost() -> None:
    assert ablation._equal_time_steps("XSA, all", 1.0, 240) == 240
    assert ablation._equal_time_steps("XSA, all", 1.25 + RATIO_STEP / 3, 240) == 300
    assert ablation._equal_time_steps("twice the steps", 1.0, 240) == 480


def test_a_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    results = Results(path)
    trial = Trial("XSA, all", 1, 100)
    results.add(results.key("run", trial.change, trial.seed, trial.steps), {"bpb": 2.5, "parameters": 7})
    run_trials([trial], Results(path), tmp_path, 1)  # would fail without text
    monkeypatch.setitem(ablation.CHANGES, "XSA, all", {"xsa_last_n": 3})
    assert Results.key("run", trial.change, trial.seed, trial.steps) not in Results(path).known


def test_missing_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIRDIE_DATA", raising=False)
    with pytest.raises(ConfigError, match="BIRDIE_DATA"):
        Texts(tmp_path)


@pytest.mark.nightly  # prepares the text under two tokenizers
def test_every_vocabulary_is_scored_on_the_same_text(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIRDIE_DATA", str(shared_data))
    base, other = (ablation.run_trial(Trial(change, 0, 2), tmp_path) for change in ("", "vocabulary 4,096"))
    assert base["bytes"] == pytest.approx(other["bytes"], rel=0.02), "except for an incomplete window at the end"
    assert other["parameters"] - base["parameters"] == (4096 - 1024) * 96


def test_rows_have_the_pinned_keys_and_differences_to_the_base(tmp_path: Path) -> None:
    options = argparse.Namespace(seeds=2, steps=100)
    results = Results(tmp_path / "results.jsonl")
    for change, bpb in (("", 2.5), ("XSA, all", 2.4)):
        for seed in range(2):
            row = {"bpb": bpb + seed / 10, "parameters": 7}
            results.add(results.key("run", change, seed, 100), row)
            results.add(results.key("run", change, seed, 120), row | {"bpb": row["bpb"] - 0.05})
    base, changed = ablation._base_row(options, results), ablation._row("XSA, all", 1.2, 120, options, results)
    keys = ["change", "parameters", "step", "steps", "bpb, same steps", "± ", "base's steps", "bpb, same time", " ±"]
    assert list(base) == list(changed) == keys
    assert base["bpb, same steps"] == pytest.approx(2.55)
    assert (changed["bpb, same steps"], changed["bpb, same time"]) == pytest.approx((-0.1, -0.05))
