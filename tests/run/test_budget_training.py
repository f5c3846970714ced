"""Training on what the export stores: layers use it, the parameters stay plain, and the size follows the budget."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from birdie.artifact.load import load
from birdie.compress.qat.fake_quantization import parameter
from birdie.compress.qat.settings import Qat
from birdie.errors import BudgetError, ConfigError
from birdie.run.budget_training import BudgetTraining
from birdie.run.calibration import calibrate_gpt
from birdie.run.loading import load_recipe
from birdie.run.pipeline import Run
from birdie.run.recipe import CalibrationSettings, ExportSettings, Recipe, RunSettings
from birdie.runtime.distributed import World
from tests.ranks import run_in_process_group
from tests.run.test_run_folder import LENGTH, tiny_recipe

BUDGET = 12_000


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    tiny = tiny_recipe(tmp_path_factory.mktemp("data"))
    return dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, num_layers=2, model_dim=64),
        train=dataclasses.replace(tiny.train, iterations=12, warmdown_iters=6, warmup_steps=1),
        qat=Qat(budget=True, start=0.5, encodings=4),
        calibration=CalibrationSettings(data="train", tokens=1024),
        export=ExportSettings(coder="fast", budget=str(BUDGET)),
        run=RunSettings(checkpoint_every=0),
    )


def layer_of(run: Run) -> torch.nn.Linear:
    layer = run.model.get_submodule("blocks.0.mlp.fc")
    assert isinstance(layer, torch.nn.Linear)
    return layer


def prepared(recipe: Recipe, run: Run, log: list[str]) -> BudgetTraining:
    """Return the model of a run in training on its export."""
    run.model.train()
    return BudgetTraining(
        recipe,
        run.model,
        lambda state: calibrate_gpt(recipe, state, recipe.calibration, symmetries=False).result,
        rules=recipe.export.pinned(),
        metadata=run.metadata(),
        world=World(),
        notify=log.append,
    )


def test_layers_use_what_a_file_of_the_budget_holds(recipe: Recipe, tmp_path: Path) -> None:
    run, log = Run(recipe, tmp_path), list[str]()
    fc = layer_of(run)
    plain = fc.weight.detach().clone()
    training = prepared(recipe, run, log)
    training.before_step(0, 0.4, 1.0)
    assert torch.equal(fc.weight, plain)  # too early
    training.before_step(6, 0.5, 1.0)
    used = fc.weight.detach()
    assert not torch.equal(used, plain)
    assert torch.equal(parameter(fc, "weight"), plain)
    assert torch.equal(layer_of(run).eval().weight, plain)  # validation scores the float model
    assert training.last is not None
    assert 0.9 * BUDGET < training.last.bytes <= BUDGET
    assert 0 < training.last.error < 1
    scales = used.abs().amax(1)  # few levels a row are what a trellis of one or two bits leaves
    assert all(len(row.unique()) < 30 for row in used[scales > 0])
    training.remove()
    assert fc.train().weight is parameter(fc, "weight")


def test_the_movement_since_the_last_encoding_counts_and_the_gradient_goes_straight_through(
    recipe: Recipe, tmp_path: Path
) -> None:
    run = Run(recipe, tmp_path)
    training = prepared(recipe, run, [])
    training.before_step(6, 0.5, 1.0)
    fc = layer_of(run)
    used, latent = fc.weight.detach().clone(), parameter(fc, "weight")
    (fc.weight * used).sum().backward()
    torch.testing.assert_close(latent.grad, used)
    with torch.no_grad():
        latent.add_(0.25)
    torch.testing.assert_close(fc.weight, used + 0.25)
    training.before_step(7, 0.55, 1.0)  # not yet time for the next encoding
    torch.testing.assert_close(fc.weight, used + 0.25)
    training.before_step(9, 0.7, 1.0)
    assert (fc.weight - used - 0.25).abs().max() > 1e-3


def test_an_encoding_reaches_a_compiled_graph_without_a_new_one(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(recipe, tmp_path)
    training, ids = prepared(recipe, run, []), torch.arange(LENGTH)[None]
    with torch.no_grad():  # layers into the residual stream begin at zero, where no encoding shows
        for weight in run.model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.2)
    plain = run.model.loss(ids, ids).item()  # also makes the rotary tables, which graphs depend on
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda: run.model.loss(ids, ids), backend=counter, fullgraph=True)
    assert compiled().item() == pytest.approx(plain, abs=1e-6)
    training.before_step(6, 0.5, 1.0)
    quantized = run.model.loss(ids, ids).item()
    assert abs(quantized - plain) > 0.01
    assert compiled().item() == pytest.approx(quantized, abs=1e-6)
    assert counter.frame_count == 1


def test_a_run_says_how_far_its_weights_are_from_the_file_and_exports_it(recipe: Recipe, tmp_path: Path) -> None:
    """Also a resumed one, which encodes at its first step."""
    log: list[str] = []
    stopped = Run(recipe, tmp_path, notify=log.append)
    list(stopped.train(stop=lambda: stopped.steps == 7))
    run = Run(recipe, tmp_path, notify=log.append)
    list(run.train(resume=True))
    lines = [line for line in log if line.startswith("qat budget: ")]
    assert [line.split(",")[0] for line in lines] == [f"qat budget: step {step}" for step in (7, 9, 10, 12)]
    assert all(f"bytes of {BUDGET:,}" in line for line in lines)
    assert all("100 % of their symbols new" in line for line in lines[:2])
    summary = run.export()
    assert 0.9 * BUDGET < summary.bytes <= BUDGET
    run.model_of(load(summary.path))


def test_parameters_and_their_names_are_those_of_a_plain_run(recipe: Recipe, tmp_path: Path) -> None:
    """A run that starts late is the same up to there, so checkpoints of either kind can be resumed as the other."""
    states = []
    for number, qat in enumerate((Qat(), recipe.qat)):
        run = Run(dataclasses.replace(recipe, qat=qat), tmp_path / str(number))
        list(run.train(stop=lambda run=run: run.steps == 5))  # type: ignore[misc]
        states.append(run.model.state_dict())
    assert all(torch.equal(states[0][name], weight) for name, weight in states[1].items())


def train_on_a_rank(world: World, folder: Path) -> None:
    run = Run(load_recipe(folder / "ranks.toml"), folder / "run", world=world)
    list(run.train())
    torch.save(run.model.state_dict(), folder / f"{world.rank}.pt")


@pytest.mark.nightly
def test_all_ranks_train_on_what_rank_0_encodes(recipe: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipe, qat=dataclasses.replace(recipe.qat, encodings=1))
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, iterations=4, warmdown_iters=2))
    (tmp_path / "ranks.toml").write_text(recipe.to_toml())
    run_in_process_group(train_on_a_rank, 2, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(first[name], weight) for name, weight in second.items())


@pytest.mark.parametrize("changes", [{"export": ExportSettings()}, {"calibration": CalibrationSettings()}])
def test_a_recipe_without_budget_or_calibration_is_refused(recipe: Recipe, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="qat budget trains"):
        dataclasses.replace(recipe, **changes)


def test_patterns_that_match_no_matrix_are_refused_before_the_first_step(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(dataclasses.replace(recipe, qat=Qat(budget=True, tensors=("nothing.*",))), tmp_path)
    with pytest.raises(ConfigError, match="match no matrix"):
        list(run.train())


@pytest.mark.parametrize(("budget", "error"), [(1_500, BudgetError), (500_000, ConfigError)])
def test_a_budget_out_of_reach_is_an_error_before_the_first_step(
    recipe: Recipe, tmp_path: Path, budget: int, error: type[Exception]
) -> None:
    run = Run(dataclasses.replace(recipe, export=ExportSettings(coder="fast", budget=str(budget))), tmp_path)
    with pytest.raises(error, match=f"{budget:,}"):
        list(run.train())
    assert run.steps == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 6}, "set one of them"),
        ({"rounding": "soft"}, "leave rounding and rate out"),
        ({"rate": 0.1}, "leave rounding and rate out"),
        ({"encodings": 0}, "at least once"),
    ],
)
def test_settings_that_contradict_it_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qat(budget=True, **settings)
