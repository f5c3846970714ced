"""Calibration of a run: inside the wall-clock cap, without changing training, and the same in a resumed run."""

import copy
import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from birdie.artifact.inspection import inspect
from birdie.artifact.loading import load
from birdie.artifact.saving import save
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ConfigError, DataError, WeightsError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import prepare
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run.events import Event
from birdie.gpt.run.gpt_calibration import Calibration, calibrate_gpt, calibration_batches
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe_settings import CalibrationSettings, DataSettings, ExportSettings, Recipe, RunSettings
from birdie.gpt.score.settings import ValidationSettings
from birdie.gpt.train.loop import Step
from birdie.gpt.train.settings import TrainSettings
from birdie.small.qat.fake_quantization import quantized, storage_rules
from birdie.small.qat.settings import Qat
from birdie.system.context import Context
from tests.ranks import birdie_command, run_as_ranks

CPU = torch.device("cpu")
LENGTH = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSettings:
    root = tmp_path_factory.mktemp("data")
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=root))
    return DataSettings(path=str(next((root / "datasets").iterdir())), tokenizer="bytes")


@pytest.fixture(scope="module")
def recipe(data: DataSettings) -> Recipe:
    return Recipe(
        data=data,
        model=GPTConfig(vocab_size=260, num_layers=2, model_dim=32, num_heads=2, num_kv_heads=1),
        train=TrainSettings(
            iterations=8, warmdown_iters=4, warmup_steps=0, train_batch_tokens=4 * LENGTH, train_seq_len=LENGTH,
            accumulation=2, max_wallclock_seconds=0, compute_dtype="float32",
        ),
        validation=ValidationSettings(every=0, max_tokens=500),
        calibration=CalibrationSettings(data="train", tokens=2048),
        export=ExportSettings(effort="fast"),
        run=RunSettings(checkpoint_every=0),
        device="cpu",
    )  # fmt: skip


def capped(recipe: Recipe, seconds: float, **calibration: Any) -> Recipe:
    """Return the recipe with the wall-clock cap as the only limit on its steps."""
    return dataclasses.replace(
        recipe,
        train=dataclasses.replace(recipe.train, iterations=10**6, max_wallclock_seconds=seconds),
        calibration=dataclasses.replace(recipe.calibration, **calibration),
    )


class LoggedRun(Run):
    """A run that keeps the lines of its log."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.log: list[str] = []
        super().__init__(recipe, folder, Context(CPU, notify=self.log.append))


def train(
    recipe: Recipe, folder: Path, *, resume: bool = False, stop_after: int | None = None
) -> tuple[LoggedRun, list[Event]]:
    run = LoggedRun(recipe, folder)
    return run, list(run.train(resume=resume, stop=lambda: run.steps + 1 == stop_after))


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> LoggedRun:
    return train(recipe, tmp_path_factory.mktemp("finished") / "run")[0]


def as_trained(run: Run, recipe: Recipe) -> Run:
    """Return the finished run of a recipe that differs in nothing that training reads."""
    other = copy.copy(run)
    other.work, other.calibration = dataclasses.replace(run.work, recipe=recipe), None
    return other


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in run.model.state_dict().items()}


@pytest.mark.parametrize("source", ["train", "own"])
def test_a_calibrated_export_sorts_units_and_computes_the_same(
    recipe: Recipe, finished: LoggedRun, tmp_path: Path, source: Any
) -> None:
    """Calibration sorts the hidden units by sensitivity; the outputs of the model do not change."""
    recipe = dataclasses.replace(recipe, calibration=dataclasses.replace(recipe.calibration, data=source))
    run = as_trained(finished, recipe)
    decoded = load(run.export(tmp_path / "calibrated.birdie").path)
    assert run.calibration is not None
    assert any(line.startswith("calibrated on ") for line in finished.log)
    run = as_trained(finished, dataclasses.replace(recipe, calibration=CalibrationSettings()))
    uncalibrated = load(run.export(tmp_path / "uncalibrated.birdie").path)
    assert run.calibration is None
    name = "blocks.0.mlp.fc.weight"
    assert not torch.equal(decoded[name], uncalibrated[name])
    torch.testing.assert_close(decoded[name].norm(dim=1).sort().values, uncalibrated[name].norm(dim=1).sort().values)
    ids = torch.arange(200)[None]
    calibrated, plain = (run.work.new_model(state)(ids) for state in (decoded, uncalibrated))
    torch.testing.assert_close(calibrated, plain, rtol=1e-2, atol=1e-2)


def test_calibration_does_not_change_training(recipe: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, max_wallclock_seconds=1000.0))
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, warmdown_iters=0))
    calibrated, _ = train(recipe, tmp_path / "a")
    plain, _ = train(dataclasses.replace(recipe, calibration=CalibrationSettings()), tmp_path / "b")
    assert calibrated.recipe.reserved_seconds == 15 > 0 == plain.recipe.reserved_seconds
    expected = weights(calibrated)
    for name, weight in weights(plain).items():
        assert torch.equal(weight, expected[name])
    calibrated.calibrate()
    for name, weight in weights(calibrated).items():
        assert torch.equal(weight, expected[name])


def test_the_calibration_time_budget_is_subtracted_from_the_cap_and_logged(recipe: Recipe, tmp_path: Path) -> None:
    run, events = train(capped(recipe, 2.0, reserve_seconds=1.5), tmp_path / "run")
    steps = [event for event in events if isinstance(event, Step)]
    previous_ms = steps[-2].train_ms if len(steps) > 1 else 0.0
    assert previous_ms < 500 <= steps[-1].train_ms
    run.export()
    parts = "reserved 1.5 s", "calibrated on"
    reserved, calibrated = (next(line for line in run.log if part in line) for part in parts)
    assert "of 2 s" in reserved
    assert "1.5 s were reserved" in calibrated


def test_a_cap_that_calibration_would_use_up_is_an_error(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(capped(recipe, 3.0, reserve_seconds=3.0), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"3\.0 s of a cap of 3 s"):
        next(run.train())
    assert recipe.training == recipe.train  # no cap


def test_own_samples_are_deterministic_and_depend_on_the_seed(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = GPT(recipe.model).eval()
    settings = CalibrationSettings(data="own", tokens=20 * LENGTH)
    batches = calibration_batches(recipe, model, settings)
    ids, targets = batches[0]
    assert ids.shape == targets.shape == (20, LENGTH)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert set(ids[:, 0].tolist()) == {1}  # the tokenizer's BOS
    assert torch.equal(calibration_batches(recipe, model, settings)[0][0], ids)
    other = calibration_batches(recipe, model, dataclasses.replace(settings, seed=1))
    assert not torch.equal(other[0][0], ids)


def test_calibration_on_own_samples_needs_no_data(recipe: Recipe, tmp_path: Path) -> None:
    no_data = dataclasses.replace(recipe, data=DataSettings(path=str(tmp_path), tokenizer="bytes"))
    state = GPT(recipe.model).state_dict()
    calibration = calibrate_gpt(no_data, state, CalibrationSettings("own", 512))
    assert isinstance(calibration, Calibration)
    assert calibration.tokens == 512
    with pytest.raises(DataError):
        calibrate_gpt(no_data, state, CalibrationSettings("train", 512))
    with pytest.raises(ConfigError, match="nothing to calibrate on"):
        calibrate_gpt(no_data, state, CalibrationSettings())


def test_a_model_with_nan_weights_cannot_be_sampled(recipe: Recipe) -> None:
    state = GPT(recipe.model).state_dict()
    state["tok_emb.weight"][7, 3] = torch.nan
    with pytest.raises(WeightsError, match=r"tok_emb\.weight.*cannot be sampled"):
        calibrate_gpt(recipe, state, CalibrationSettings("own", 512))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "val"}, "'val'; choose"),
        ({"tokens": 0}, "0 tokens"),
        ({"reserve_seconds": -1.0}, "reserve_seconds is -1.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_out_of_range_are_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CalibrationSettings(**change)


@pytest.mark.nightly
@pytest.mark.slow
def test_rank_0_alone_calibrates_within_the_cap(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(capped(recipe, 2.0, reserve_seconds=1.0).to_toml())
    command = ("train", str(file), "--folder", str(tmp_path / "two"), "--json")
    answer = json.loads(run_as_ranks(birdie_command, command, 2, tmp_path / "ranks", {}))
    assert answer["calibration"]["data"] == "train"
    assert answer["calibration"]["reserved_seconds"] == 1
    assert answer["train_seconds"] < 2.0
    assert (tmp_path / "ranks" / "stderr").read_text().count("calibrated on") == 1


@pytest.mark.parametrize(
    ("budget", "embedding", "as_scheme"),
    [
        (None, "fp16", "fp16"),
        (None, None, "int8"),
        ("40kB", "int7", "int7"),
        pytest.param(None, "int7", "int7", marks=pytest.mark.nightly),
        pytest.param("40kB", "fp16", "fp16", marks=pytest.mark.nightly),
        pytest.param("40kB", None, "int8", marks=pytest.mark.nightly),
    ],
)
def test_the_embedding_is_stored_by_its_own_scheme_with_and_without_a_budget(
    recipe: Recipe,
    finished: LoggedRun,
    tmp_path: Path,
    budget: str | None,
    embedding: str | None,
    as_scheme: str,
) -> None:
    """Its bits are those of the scheme applied to it alone; without a scheme it is stored like all matrices."""
    export = dataclasses.replace(recipe.export, embedding=embedding, budget=budget)
    none = dataclasses.replace(recipe.calibration, data="none")
    run = as_trained(finished, dataclasses.replace(recipe, export=export, calibration=none))
    run.export(tmp_path / "model.birdie")
    save({"x": run.model.tok_emb.weight}, tmp_path / "alone.birdie", scheme=as_scheme)
    decoded, alone = load(tmp_path / "model.birdie")["tok_emb.weight"], load(tmp_path / "alone.birdie")["x"]
    assert torch.equal(decoded, alone) == (embedding is not None or budget is None)
    stored = {tensor.name: tensor.scheme for tensor in inspect(tmp_path / "model.birdie").tensors}
    searched = embedding is None and budget is not None
    assert stored["tok_emb.weight"] == ("trellis" if searched else "fp16" if embedding == "fp16" else "grid")


def compress(*arguments: object, ranks: int, folder: Path) -> int:
    """Run `birdie compress --offload`, calibrated on a run, in `ranks` processes; return the bytes of the file."""
    tokens = [*map(str, arguments), "--calibration-tokens", "512", "--bits", "4", "--effort", "fast"]
    if ranks > 1:
        run_as_ranks(birdie_command, ("compress", *tokens, "--offload"), ranks, folder, {})
    else:
        assert run(build_app, ["compress", *tokens, "--offload"]) == 0
    return Path(tokens[tokens.index("-o") + 1]).stat().st_size


def test_the_command_calibrates_with_files_and_leaves_none(recipe: Recipe, finished: LoggedRun, tmp_path: Path) -> None:
    """A checkpoint in bfloat16 is calibrated as it is: nothing is copied to float32."""
    state = {name: weight.bfloat16() for name, weight in GPT(recipe.model).state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    arguments = tmp_path / "model.safetensors", "--calibrate", finished.folder, "-o"
    out = tmp_path / "out"
    for name in ("a.birdie", "b.birdie"):
        compress(*arguments, out / name, ranks=1, folder=tmp_path)
    assert (out / "a.birdie").read_bytes() == (out / "b.birdie").read_bytes()
    gc.collect()
    assert sorted(path.name for path in out.iterdir()) == ["a.birdie", "b.birdie"]


@pytest.mark.slow
def test_ranks_calibrate_together(recipe: Recipe, finished: LoggedRun, tmp_path: Path) -> None:
    save_file(GPT(recipe.model).state_dict(), tmp_path / "model.safetensors")
    arguments = tmp_path / "model.safetensors", "--calibrate", finished.folder, "-o"
    sizes = [
        compress(*arguments, tmp_path / f"{ranks}.birdie", ranks=ranks, folder=tmp_path / "ranks") for ranks in (1, 2)
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    one, two = (load(tmp_path / f"{ranks}.birdie") for ranks in (1, 2))
    for name, weight in one.items():
        assert float((weight - two[name]).norm()) <= 0.1 * float(weight.norm()), name


@pytest.mark.parametrize("budget", [None, pytest.param(30_000, marks=pytest.mark.nightly)])
def test_an_embedding_with_its_own_scheme_is_calibrated(
    recipe: Recipe, finished: LoggedRun, tmp_path: Path, budget: int | None
) -> None:
    pinned = dataclasses.replace(
        recipe, export=dataclasses.replace(recipe.export, embedding="gptq:bits=7,clip_sigmas=14")
    )
    run = as_trained(finished, pinned)
    run.export(tmp_path / "calibrated.birdie", budget=budget)
    none = dataclasses.replace(pinned.calibration, data="none")
    as_trained(run, dataclasses.replace(pinned, calibration=none)).export(
        tmp_path / "uncalibrated.birdie", budget=budget
    )
    calibrated, uncalibrated = (
        load(tmp_path / f"{name}.birdie")["tok_emb.weight"] for name in ("calibrated", "uncalibrated")
    )
    assert not torch.equal(calibrated, uncalibrated)
    for decoded in (calibrated, uncalibrated):
        assert (decoded - run.model.tok_emb.weight).norm() < 0.1 * run.model.tok_emb.weight.norm()


@pytest.mark.parametrize("budget", [None, pytest.param(60_000, marks=pytest.mark.nightly)])
def test_weights_trained_on_levels_are_stored_on_these_levels(
    recipe: Recipe, tmp_path: Path, budget: int | None
) -> None:
    """Decoded layers equal the quantized weights of training; the embedding, not quantized, keeps its precision."""
    qat = Qat(levels="ternary", group_size=32, tensors=("blocks.*",))
    model = dataclasses.replace(recipe.model, model_dim=64)
    none = dataclasses.replace(recipe.calibration, data="none")
    run, _ = train(dataclasses.replace(recipe, qat=qat, model=model, calibration=none), tmp_path)
    run.export(tmp_path / "model.birdie", budget=budget)
    decoded, trained = load(tmp_path / "model.birdie"), dict(run.model.named_parameters())
    names = [name for name, _ in storage_rules(qat, run.model)]
    assert "blocks.1.mlp.fc.weight" in names
    for name in names:
        torch.testing.assert_close(decoded[name], quantized(qat, trained[name]))
    assert (decoded["tok_emb.weight"] - trained["tok_emb.weight"]).norm() < 0.02 * trained["tok_emb.weight"].norm()
