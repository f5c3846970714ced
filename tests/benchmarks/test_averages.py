"""The benchmark of averages changes what its names say, and takes all averages along one run."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import averages
from benchmarks.ablation import Texts
from benchmarks.averages import AVERAGES, BASE, SCHEDULES, recipe_with
from birdie.data.corpus import file_corpus
from birdie.data.prepare import prepare
from birdie.run.registry import changes
from birdie.train.average import AverageSettings


class Bytes(Texts):
    """Some of our sources, by bytes."""

    def __init__(self, root: Path) -> None:
        list(
            prepare(
                file_corpus(sorted((Path(__file__).parents[1] / "train").glob("*.py"))), tokenizer="bytes", root=root
            )
        )
        self.path = str(next((root / "datasets").iterdir()))

    def settings(self, vocabulary: int) -> dict[str, Any]:  # noqa: ARG002
        return {"path": self.path, "tokenizer": "bytes"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    return Bytes(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_what_its_name_says_and_nothing_else(schedule: str, texts: Bytes) -> None:
    base, other = (recipe_with(each, 0, 8, 1.0, texts).to_dict() for each in (BASE, schedule))
    tables = {"warmdown_fraction": "train", "min_lr": "train", "bandit": "bandit"}
    assert {name.partition(".")[0] for name, _, _ in changes(base, other)} == {tables[n] for n in SCHEDULES[schedule]}


def test_rates_are_all_scaled(texts: Bytes) -> None:
    one, half = (recipe_with(BASE, 0, 8, rate, texts).to_dict() for rate in (1.0, 0.5))
    assert {name: there / here for name, here, there in changes(one, half)} == {
        f"optimizer.{name}": 0.5 for name in ("matrix_lr", "tied_embed_lr", "scalar_lr")
    }


def test_averages_along_one_run_are_those_of_runs_of_their_own(texts: Bytes) -> None:
    recipe = recipe_with(BASE, 0, 8, 1.0, texts)
    kinds = {name: AVERAGES[name] for name in ("last weights", "EMA 0.9")} | {
        "SWA": AverageSettings("swa", swa_every=2, swa_below=0.9)
    }
    together, told = averages.scores(recipe, kinds)
    assert told == ""
    assert len(set(together.values())) == 3
    for name, kind in kinds.items():
        assert averages.scores(recipe, {name: kind})[0][name] == together[name]
    _, told = averages.scores(recipe_with("bandit, 4 steps", 0, 8, 1.0, texts), {"last weights": AverageSettings()})
    assert "learning-rate bandit: 2 choices of 4 steps" in told
