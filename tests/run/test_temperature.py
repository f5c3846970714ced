"""The temperature is fitted on training tokens alone, lowers their loss, and is stored beside unchanged weights."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from birdie.artifact.inspect import inspect
from birdie.artifact.load import load
from birdie.errors import ConfigError
from birdie.run.calibration import Batch
from birdie.run.evaluation import evaluate
from birdie.run.pipeline import Run
from birdie.run.recipe import ExportSettings, Recipe
from birdie.run.temperature import RESERVED, fit_temperature
from birdie.score.request import EvaluationRequest
from birdie.score.settings import EvaluationSettings
from tests.run.test_run_folder import tiny_recipe

TABLE = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)) * 3


def table_logits(ids: Tensor) -> Tensor:
    return TABLE[ids]


def drawn_at(temperature: float, seed: int) -> list[Batch]:
    """Return tokens whose targets follow the table at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(4):
        ids = torch.randint(50, (20, 200), generator=generator)
        probabilities = (TABLE[ids].flatten(0, 1) / temperature).softmax(1)
        batches.append((ids, torch.multinomial(probabilities, 1, generator=generator).reshape(ids.shape)))
    return batches


def loss_at(temperature: float, batches: list[Batch]) -> float:
    losses = [F.cross_entropy(table_logits(ids).flatten(0, 1) / temperature, y.flatten()) for ids, y in batches]
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize("true", [0.5, 0.9, 1.0, 1.6, 3.0])
def test_the_temperature_of_the_text_is_recovered(true: float) -> None:
    batches = drawn_at(true, seed=1)
    fitted, gain = fit_temperature(table_logits, batches)
    assert fitted == pytest.approx(true, rel=0.04)
    assert gain <= 1e-7
    assert gain == pytest.approx(loss_at(fitted, batches) - loss_at(1.0, batches), abs=1e-5)
    for other in (0.97 * fitted, 1.03 * fitted):
        assert loss_at(fitted, batches) < loss_at(other, batches)


def test_it_stays_in_its_range() -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    best = TABLE[0].argmax().expand(1, 8)
    assert fit_temperature(table_logits, [(ids, best)])[0] == 0.25
    worst = TABLE[0].argmin().expand(1, 8)
    assert fit_temperature(table_logits, [(ids, worst)])[0] == 4.0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return tiny_recipe(tmp_path_factory.mktemp("data"))


def test_an_export_stores_it_beside_the_same_weights(recipe: Recipe, tmp_path: Path) -> None:
    fitted = dataclasses.replace(recipe, export=ExportSettings(budget="40kB", fit_temperature=True))
    lines: list[str] = []
    work = Run(fitted, tmp_path / "run", notify=lines.append)
    list(work.train())
    summary = work.export()
    assert summary.bytes == (tmp_path / "run" / "model.birdie").stat().st_size <= 40_000
    temperature = summary.metadata["recipe"]["evaluation"]["temperature"]
    assert temperature != 1.0
    assert any(line.startswith(f"temperature {temperature:g}: -") for line in lines)
    work.recipe = dataclasses.replace(recipe, export=ExportSettings(budget="40kB"))
    plain = work.export(tmp_path / "plain.birdie", budget=40_000 - RESERVED)
    assert inspect(tmp_path / "run" / "model.birdie").tensors == plain.tensors
    first, again = load(tmp_path / "run" / "model.birdie"), load(tmp_path / "plain.birdie")
    assert all(torch.equal(first[name], again[name]) for name in first)
    path = tmp_path / "run" / "model.birdie"
    scores = [evaluate(path, EvaluationRequest(device="cpu")).score.val_loss for _ in range(2)]
    assert scores[0] == scores[1]
    at_one = evaluate(path, EvaluationRequest(device="cpu", settings=EvaluationSettings())).score.val_loss
    assert math.isfinite(at_one)
    assert at_one != scores[0]


def test_a_mode_without_temperature_is_refused(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="fit_temperature"):
        dataclasses.replace(
            recipe,
            export=ExportSettings(fit_temperature=True),
            evaluation=dataclasses.replace(recipe.evaluation, mode="ttt-lora"),
        )
