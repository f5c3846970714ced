"""Findings that a recipe settles before anything is trained are those of the audit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from birdie.golf.audit.plan import foreseen
from birdie.golf.audit.rules import CAP_BYTES, COVERAGE, SEEDS, SIZE, TRAIN_TIME, VALIDATION
from birdie.gpt.data.shards import write_shard
from birdie.gpt.run.recipe_settings import DataSettings, ExportSettings, Recipe
from birdie.gpt.train.settings import TrainSettings

TARGETS = 62_021_632  # of the whole split


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe with shards of as many tokens as the challenge's validation split."""
    folder = tmp_path_factory.mktemp("shards")
    write_shard(folder / "a_train_000000.bin", np.ones(10, np.uint16))
    write_shard(folder / "a_val_000000.bin", np.ones(TARGETS + 1, np.uint16))
    return Recipe(data=DataSettings(path=str(folder)))


def results(
    recipe: Recipe, seeds: tuple[int, ...] = (1, 2, 3), code: int = 1000, cap: int = CAP_BYTES
) -> dict[str, str]:
    return {finding.rule.name: finding.result for finding in foreseen(recipe, seeds, code, cap)}


def test_a_recipe_by_the_rules_has_no_findings(recipe: Recipe) -> None:
    assert results(recipe) == {}


def test_what_breaks_a_rule_is_found(recipe: Recipe, tmp_path: Path) -> None:
    partial = replace(recipe, validation=replace(recipe.validation, max_tokens=131_072))
    assert results(partial) == {COVERAGE.name: "unknown"}
    assert results(recipe, seeds=(1,)) == {SEEDS.name: "unknown"}
    assert results(replace(recipe, train=TrainSettings(max_wallclock_seconds=700))) == {TRAIN_TIME.name: "fail"}
    assert results(recipe, cap=CAP_BYTES + 1) == {SIZE.name: "fail"}
    assert results(replace(recipe, export=ExportSettings(budget="15MB")), cap=CAP_BYTES + 1) == {}
    shards = (str(Path(recipe.data.path) / "a_val_000000.bin"),)
    assert results(replace(recipe, data=DataSettings(train=shards, val=shards))) == {VALIDATION.name: "fail"}
    assert results(replace(recipe, data=DataSettings(path=str(tmp_path / "none")))) == {}
