"""Training on what a file of a byte budget will hold, by `birdie.fine_tune` and in a run by `[qat] budget`."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import birdie
from birdie.artifact.loading import load
from birdie.errors import BudgetError, ConfigError, WeightsError
from birdie.gpt.run.gpt_calibration import calibrate_gpt
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.program import metadata
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_settings import CalibrationSettings, ExportSettings, Recipe, RunSettings
from birdie.small import fine_tuning
from birdie.small.fine_tuning import FineTuneStep, fine_tune
from birdie.small.qat.quantized_layers import parameter
from birdie.small.qat.settings import Qat
from birdie.small.stored_training import BudgetFile, StoredTraining
from birdie.system.context import Context
from birdie.system.distributed import World
from tests.gpt.run.test_run_folder import LENGTH, tiny_recipe
from tests.ranks import run_in_process_group

CPU = torch.device("cpu")

Batch = tuple[Tensor, Tensor]
BUDGET = 12_000  # of a run


class Sorted(nn.Sequential):
    """A network that declares that its hidden units may be sorted: at a bit a weight that counts."""

    def symmetries(self) -> Any:
        """Return the units of both hidden layers."""
        return [((f"{i}.weight", 0, 1), (f"{i}.bias", 0, 1), (f"{i + 2}.weight", 1, 1)) for i in (0, 2)]


def network(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return Sorted(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def data(count: int = 512) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 20, generator=generator)
    return x, (x[:, :10] + 0.5 * x[:, 10:].roll(1, 1)).argmax(1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tune(model: nn.Module, **settings: Any) -> list[FineTuneStep]:
    return list(fine_tune(model, [data()], loss, rate=3e-3, **settings))


@pytest.mark.parametrize("budget", [2_600, 4_000])
def test_the_file_is_just_under_its_budget_and_holds_the_model(budget: int, tmp_path: Path) -> None:
    model = network()
    steps = tune(model, steps=60, budget=budget)
    size = birdie.save(model, tmp_path / "x.birdie").bytes
    assert 0.9 * budget <= size <= budget
    assert [step.number for step in steps] == list(range(1, 61))
    assert steps[-1].bytes == size
    assert steps[-1].loss < steps[0].loss
    decoded = birdie.load(tmp_path / "x.birdie")
    assert all(torch.equal(decoded[name], weight) for name, weight in model.state_dict().items())
    x, _ = data()
    assert torch.equal(birdie.load(tmp_path / "x.birdie", into=network())(x), model(x))


def test_training_tells_how_far_weights_are_from_the_file_and_what_changed() -> None:
    steps = tune(network(), steps=30, budget=2_600)
    errors, changes = zip(*((step.error, step.changed) for step in steps), strict=True)
    assert all(error is not None and 0 < error < 1 for error in errors)
    assert changes[0] == 1.0  # nothing was encoded before
    assert changes[12] is not None
    assert 0 < changes[12] < 1


def test_bits_per_weight_are_of_the_complete_file(tmp_path: Path) -> None:
    model = network()
    tune(model, steps=20, bits=4.0)
    assert birdie.save(model, tmp_path / "x.birdie").bits_per_weight <= 4.0


class Tied(nn.Module):
    """Two layers that share a weight, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 24)
        self.recurrent = nn.LSTM(24, 24, batch_first=True)
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token."""
        logits: Tensor = self.head(self.recurrent(self.table(ids))[0])
        return logits


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_tied_and_recurrent_weights_stay_what_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    names = sorted(model.state_dict())
    ids = torch.arange(64).view(4, 16) % 32
    list(fine_tune(model, [ids], next_token_loss, steps=14, budget=2_400))
    assert birdie.save(model, tmp_path / "x.birdie").bytes <= 2_400
    logits = model(ids)
    assert sorted(model.state_dict()) == names
    assert model.head.weight is model.table.weight
    assert torch.equal(model(ids), logits)
    assert torch.equal(birdie.load(tmp_path / "x.birdie", into=Tied())(ids), logits)


def test_copies_are_saved_alike(tmp_path: Path) -> None:
    model = network()
    tune(model, steps=14, budget=3_000)
    files = [tmp_path / f"{number}.birdie" for number in range(3)]
    for file, one in zip(files, (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))), strict=True):
        birdie.save(one, file)
    assert len({file.read_bytes() for file in files}) == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_model_in_training_computes_with_decoded_weights_in_either_mode(training: bool, tmp_path: Path) -> None:
    model, (x, _) = network().train(training), data()
    steps = fine_tune(model, [data()], loss, steps=30, budget=2_600)
    for _ in range(13):  # the second encoding is that of this step
        next(steps)
    logits, earlier = model(x), copy.deepcopy(model)
    with pytest.raises(WeightsError, match="finish"):
        birdie.save(model, tmp_path / "x.birdie")
    latent = birdie.plain(copy.deepcopy(model), latent=True)
    assert model.state_dict().keys() == latent.state_dict().keys() == network().state_dict().keys()
    assert not torch.allclose(latent(x), logits, atol=1e-3)
    next(steps)
    assert not torch.equal(model(x), logits)
    assert torch.equal(earlier(x), logits)
    assert torch.equal(birdie.plain(earlier)(x), logits)
    assert type(earlier.get_submodule("0")) is nn.Linear
    birdie.save(earlier, tmp_path / "x.birdie", budget=3_000)


def test_weights_that_moved_afterwards_are_not_saved_by_mistake(tmp_path: Path) -> None:
    model = network()
    tune(model, steps=14, budget=3_000)
    with torch.no_grad():
        model.get_parameter("0.weight").add_(0.1)
    with pytest.raises(WeightsError, match=r"'0\.weight'"):
        birdie.save(model, tmp_path / "x.birdie")
    assert birdie.save(birdie.plain(model), tmp_path / "x.birdie", budget=3_000).bytes <= 3_000


def test_spectral_training_begins_with_plain_parameters() -> None:
    model = network()
    tune(model, steps=2, budget=3_000)
    with pytest.raises(ConfigError, match="plain"):
        birdie.spectral(model)
    birdie.spectral(birdie.plain(model))


@pytest.mark.parametrize("target", [{"budget": 0}, {"budget": -5}, {"bits": 0.0}, {"bits": float("nan")}])
def test_absurd_targets_are_errors(target: dict[str, Any]) -> None:
    with pytest.raises((BudgetError, ConfigError)):
        fine_tune(network(), [data()], loss, steps=3, **target)


def test_a_model_can_be_tuned_to_a_smaller_budget(tmp_path: Path) -> None:
    model = network()
    for budget in (4_000, 2_600):
        tune(model, steps=14, budget=budget)
        assert birdie.save(model, tmp_path / "x.birdie").bytes <= budget


def test_what_cannot_be_reached_is_an_error_before_the_first_step() -> None:
    model = network()
    original = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(BudgetError, match="budget"):
        fine_tune(model, [data()], loss, steps=10, budget=100)
    with pytest.raises(ConfigError, match="losslessly"):
        fine_tune(model, [data()], loss, steps=10, budget=1_000_000)
    assert model.state_dict().keys() == original.keys()
    assert all(torch.equal(weight, original[name]) for name, weight in model.state_dict().items())


def test_batches_that_end_with_the_training_are_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last calibration takes batches of the last steps, so a long training is not lost at its end."""
    monkeypatch.setattr(fine_tuning, "_FIRST", 2)
    monkeypatch.setattr(fine_tuning, "_LAST", 4)
    model, once = network(), iter([data()] * (2 + 6))
    assert len(list(fine_tune(model, once, loss, steps=6, budget=3_000))) == 6
    assert birdie.save(model, tmp_path / "x.birdie").bytes <= 3_000


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    tiny = tiny_recipe(tmp_path_factory.mktemp("data"))
    return dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, num_layers=2, model_dim=64),
        train=dataclasses.replace(tiny.train, iterations=12, warmdown_iters=6, warmup_steps=1),
        qat=Qat(budget=True, start=0.5, encodings=4),
        calibration=CalibrationSettings(data="train", tokens=1024),
        export=ExportSettings(effort="fast", budget=str(BUDGET)),
        run=RunSettings(checkpoint_every=0),
    )


def layer_of(run: Run) -> torch.nn.Linear:
    layer = run.model.get_submodule("blocks.0.mlp.fc")
    assert isinstance(layer, torch.nn.Linear)
    return layer


def prepared(recipe: Recipe, run: Run, log: list[str]) -> StoredTraining:
    """Return the model of a run in training on its export."""
    run.model.train()
    return StoredTraining(
        run.model,
        BudgetFile(BUDGET, recipe.export.pinned(), recipe.export.effort, metadata(run.work, run.trained)),
        lambda state: calibrate_gpt(recipe, state, recipe.calibration, symmetries=False).result,
        settings=recipe.qat,
        context=Context(CPU, notify=log.append),
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
    stopped = Run(recipe, tmp_path, Context(CPU, notify=log.append))
    list(stopped.train(stop=lambda: stopped.steps == 7))
    run = Run(recipe, tmp_path, Context(CPU, notify=log.append))
    list(run.train(resume=True))
    lines = [line for line in log if line.startswith("qat budget: ")]
    assert [line.split(",")[0] for line in lines] == [f"qat budget: step {step}" for step in (7, 9, 10, 12)]
    assert all(f"bytes of {BUDGET:,}" in line for line in lines)
    assert all("100 % of their symbols new" in line for line in lines[:2])
    summary = run.export()
    assert 0.9 * BUDGET < summary.bytes <= BUDGET
    run.work.new_model(load(summary.path))


def test_parameters_and_their_names_are_those_of_a_plain_run(recipe: Recipe, tmp_path: Path) -> None:
    """A run that starts late is the same up to there, so checkpoints of either kind can be resumed as the other."""
    states = []
    for number, qat in enumerate((Qat(), recipe.qat)):
        run = Run(dataclasses.replace(recipe, qat=qat), tmp_path / str(number))
        list(run.train(stop=lambda run=run: run.steps == 5))  # type: ignore[misc]
        states.append(run.model.state_dict())
    assert all(torch.equal(states[0][name], weight) for name, weight in states[1].items())


def train_on_a_rank(world: World, folder: Path) -> None:
    run = Run(load_recipe(folder / "ranks.toml"), folder / "run", Context(CPU, world))
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


@pytest.mark.parametrize(("budget", "error"), [(1_500, BudgetError), (500_000, ConfigError)])
def test_a_budget_out_of_reach_is_an_error_before_the_first_step(
    recipe: Recipe, tmp_path: Path, budget: int, error: type[Exception]
) -> None:
    run = Run(dataclasses.replace(recipe, export=ExportSettings(effort="fast", budget=str(budget))), tmp_path)
    with pytest.raises(error, match=f"{budget:,}"):
        list(run.train())
    assert run.steps == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 6}, "set one of them"),
        ({"encodings": 0}, "at least once"),
    ],
)
def test_settings_that_contradict_it_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qat(budget=True, **settings)
