"""The benchmark of averages changes the settings of its names, and computes all averages along one run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks import averages
from benchmarks.ablation import Texts
from benchmarks.averages import AVERAGES, BASE, SCHEDULES, recipe_with
from birdie.data.corpus import file_corpus
from birdie.data.prepare import prepare
from birdie.run.recipe import Recipe
from birdie.run.registry import changes
from birdie.train.settings import AverageSettings
from tests.data.random_text import random_lines


class RandomBytes(Texts):
    """Random text, as bytes."""

    def __init__(self, root: Path) -> None:
        text = root / "text.txt"
        text.write_text(random_lines(200), encoding="utf-8")
        list(prepare(file_corpus([text], validation_fraction=0.1), tokenizer="bytes", root=root))
        self.path = str(next((root / "datasets").iterdir()))

    def settings(self, vocabulary: int) -> dict[str, Any]:  # noqa: ARG002
        return {"path": self.path, "tokenizer": "bytes"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> RandomBytes:
    return RandomBytes(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_changes_the_settings_of_its_name_only(schedule: str, texts: RandomBytes) -> None:
    base, other = (recipe_with(name, 0, 8, 1.0, texts).to_dict() for name in (BASE, schedule))
    tables = {"warmdown_fraction": "train", "min_lr": "train", "bandit": "bandit"}
    assert {name.partition(".")[0] for name, _, _ in changes(base, other)} == {tables[n] for n in SCHEDULES[schedule]}


def test_all_learning_rates_are_scaled(texts: RandomBytes) -> None:
    one, half = (recipe_with(BASE, 0, 8, rate, texts).to_dict() for rate in (1.0, 0.5))
    assert {name: scaled / rate for name, rate, scaled in changes(one, half)} == {
        f"optimizer.{name}": 0.5 for name in ("matrix_lr", "tied_embed_lr", "scalar_lr")
    }


@pytest.mark.slow  # five runs of eight steps
def test_averages_along_one_run_equal_those_of_separate_runs(texts: RandomBytes) -> None:
    def small(schedule: str) -> Recipe:
        recipe = recipe_with(schedule, 0, 8, 1.0, texts)
        return dataclasses.replace(
            recipe,
            model=dataclasses.replace(recipe.model, num_layers=2),
            train=dataclasses.replace(recipe.train, train_batch_tokens=256),
        )

    recipe = small(BASE)
    kinds = {name: AVERAGES[name] for name in ("last weights", "EMA 0.9")} | {
        "SWA": AverageSettings("swa", swa_every=2, swa_below=0.9)
    }
    together, message = averages.scores(recipe, kinds)
    assert message == ""
    assert len(set(together.values())) == 3
    for name, kind in kinds.items():
        assert averages.scores(recipe, {name: kind})[0][name] == together[name]
    _, message = averages.scores(small("bandit, 4 steps"), {"last weights": AverageSettings()})
    assert "learning-rate bandit: 2 choices of 4 steps" in message


def test_a_rows_difference_is_paired_by_seed() -> None:
    row = averages.row("constant", "EMA 0.9", [2.4, 2.7], [2.5, 2.6])
    assert list(row) == ["schedule", "weights", "bpb", "to the base", "±"]
    assert (row["bpb"], row["to the base"], row["±"]) == pytest.approx((2.55, 0.0, 0.1))
    assert averages.row("constant", "EMA 0.9", [2.4], [2.5])["±"] is None
