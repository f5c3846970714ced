"""A run whose recipe asks for it calibrates its export inside the wall-clock cap, alike when it was resumed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from birdie.artifact.load import inspect, load
from birdie.artifact.save import save
from birdie.compress.qat import Qat
from birdie.data.corpus import file_corpus
from birdie.data.prepare import prepare
from birdie.errors import ConfigError, DataError, WeightsError
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.calibration import Calibrated, calibrated, calibration_batches
from birdie.run.calibration_budget import expected, less_reserve
from birdie.run.events import Saved
from birdie.run.pipeline import Run
from birdie.run.recipe import CalibrationSettings, DataSettings, ExportSettings, Recipe, RunSettings
from birdie.score.bpb import ValidationSettings
from birdie.train.loop import Step
from birdie.train.settings import TrainSettings
from tests.ranks import birdie_command, run_as_ranks

CPU = torch.device("cpu")
LENGTH = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSettings:
    root = tmp_path_factory.mktemp("data")
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=root))
    return DataSettings(path=str(next((root / "datasets").iterdir())), tokenizer="bytes")


@pytest.fixture
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
        export=ExportSettings(coder="fast"),
        run=RunSettings(checkpoint_every=0),
        device="cpu",
    )  # fmt: skip


def capped(recipe: Recipe, seconds: float, **calibration: Any) -> Recipe:
    """Steps without end, so that the clock decides."""
    return dataclasses.replace(
        recipe,
        train=dataclasses.replace(recipe.train, iterations=10**6, max_wallclock_seconds=seconds),
        calibration=dataclasses.replace(recipe.calibration, **calibration),
    )


def finished(recipe: Recipe, folder: Path, *, resume: bool = False, stop_after: int | None = None) -> tuple[Run, list]:
    told: list[str] = []
    run = Run(recipe, folder, notify=told.append)
    events = []
    for event in run.train(resume=resume, stop=lambda: run.steps + 1 == stop_after):
        events.append(event)
    run.told = told  # type: ignore[attr-defined]
    return run, events


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in run.model.state_dict().items()}


@pytest.mark.parametrize("source", ["train", "own"])
def test_the_export_follows_what_the_loss_minds(recipe: Recipe, tmp_path: Path, source: Any) -> None:
    """Units lie in the order that calibration gives them; the model computes what it did."""
    recipe = dataclasses.replace(recipe, calibration=dataclasses.replace(recipe.calibration, data=source))
    run, _ = finished(recipe, tmp_path / "run")
    decoded = load(run.export().path)
    assert run.calibration is not None
    assert any(line.startswith("calibrated on ") for line in run.told)  # type: ignore[attr-defined]
    run.recipe, run.calibration = dataclasses.replace(recipe, calibration=CalibrationSettings()), None
    blind = load(run.export(tmp_path / "blind.birdie").path)
    assert run.calibration is None
    name = "blocks.0.mlp.fc.weight"
    assert not torch.equal(decoded[name], blind[name])
    torch.testing.assert_close(decoded[name].norm(dim=1).sort().values, blind[name].norm(dim=1).sort().values)
    ids = torch.arange(200)[None]
    torch.testing.assert_close(run.model_of(decoded)(ids), run.model_of(blind)(ids), rtol=1e-2, atol=1e-2)


def test_calibration_and_its_trial_leave_training_as_it_was(recipe: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, max_wallclock_seconds=1000.0))
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, warmdown_iters=0))
    with_it, _ = finished(recipe, tmp_path / "a")
    without, _ = finished(dataclasses.replace(recipe, calibration=CalibrationSettings()), tmp_path / "b")
    assert with_it.reserved > 0 == without.reserved
    before = weights(with_it)
    for name, weight in weights(without).items():
        assert torch.equal(weight, before[name])
    with_it.calibrate()
    for name, weight in weights(with_it).items():
        assert torch.equal(weight, before[name])


def test_what_is_reserved_is_taken_from_the_cap_and_told(recipe: Recipe, tmp_path: Path) -> None:
    run, events = finished(capped(recipe, 2.0, reserve_seconds=1.5), tmp_path / "run")
    steps = [event for event in events if isinstance(event, Step)]
    before_last = steps[-2].train_ms if len(steps) > 1 else 0.0
    assert before_last < 500 <= steps[-1].train_ms
    run.export()
    reserved, took = (next(line for line in run.told if word in line) for word in ("reserved 1.5 s", "calibrated"))  # type: ignore[attr-defined]
    assert "of 2 s" in reserved
    assert "1.5 s were reserved" in took


def test_going_on_keeps_the_same_time(recipe: Recipe, tmp_path: Path) -> None:
    recipe = capped(recipe, 60.0)
    first, events = finished(recipe, tmp_path / "run", stop_after=2)
    assert first.reserved > 0
    assert any(isinstance(event, Saved) for event in events)
    second = Run(recipe, tmp_path / "run")
    going = second.train(resume=True)
    next(going)
    assert second.reserved == first.reserved
    going.close()
    changed = capped(recipe, 60.0, reserve_seconds=7.0)
    third = Run(changed, tmp_path / "run")
    going = third.train(resume=True)
    next(going)
    assert third.reserved == 7.0
    assert third.training.max_wallclock_seconds == 53.0
    going.close()


def test_a_resumed_run_exports_the_same_bytes(recipe: Recipe, tmp_path: Path) -> None:
    whole, _ = finished(recipe, tmp_path / "whole")
    finished(recipe, tmp_path / "parts", stop_after=3)
    resumed, _ = finished(recipe, tmp_path / "parts", resume=True)
    assert resumed.steps == whole.steps == 8
    ours, theirs = (load(run.export().path) for run in (whole, resumed))
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_a_cap_that_calibration_would_use_up_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(capped(recipe, 3.0, reserve_seconds=3.0), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"3\.0 s of a cap of 3 s"):
        next(run.train())
    assert less_reserve(TrainSettings(max_wallclock_seconds=0), 3.0).max_wallclock_seconds == 0


def test_more_tokens_are_expected_to_take_longer(recipe: Recipe) -> None:
    few, many = (expected(capped(recipe, 60.0, tokens=n), CPU) for n in (8192, 8192 * 100))
    assert many.batches > 10 * few.batches
    assert few.sampling == 0
    assert expected(capped(recipe, 60.0, data="own"), CPU).sampling > 0


def test_own_samples_are_the_same_twice_and_follow_seed_and_weights(recipe: Recipe) -> None:
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


def test_own_samples_need_no_data(recipe: Recipe, tmp_path: Path) -> None:
    nowhere = dataclasses.replace(recipe, data=DataSettings(path=str(tmp_path), tokenizer="bytes"))
    state = GPT(recipe.model).state_dict()
    told: list[tuple[float, float | None]] = []
    found = calibrated(nowhere, state, CalibrationSettings("own", 512), lambda *each: told.append(each))
    assert isinstance(found, Calibrated)
    assert found.tokens == 512
    with pytest.raises(DataError):
        calibrated(nowhere, state, CalibrationSettings("train", 512))
    with pytest.raises(ConfigError, match="nothing to calibrate on"):
        calibrated(nowhere, state, CalibrationSettings())


def test_weights_that_are_not_finite_write_nothing(recipe: Recipe) -> None:
    state = GPT(recipe.model).state_dict()
    state["tok_emb.weight"][7, 3] = torch.nan
    with pytest.raises(WeightsError, match=r"tok_emb\.weight.*mend"):
        calibrated(recipe, state, CalibrationSettings("own", 512))


@pytest.mark.parametrize("source", ["train", "own"])
def test_progress_ends_at_its_total(recipe: Recipe, source: Any) -> None:
    told: list[tuple[float, float | None]] = []
    settings = CalibrationSettings(source, 4096 * 6)
    calibrated(recipe, GPT(recipe.model).state_dict(), settings, lambda *each: told.append(each))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": "val"}, "'val'; choose"),
        ({"tokens": 0}, "0 tokens"),
        ({"reserve_seconds": -1.0}, "reserve_seconds is -1.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CalibrationSettings(**change)


@pytest.mark.slow
def test_ranks_calibrate_without_waiting_for_each_other(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(capped(recipe, 4.0).to_toml())
    command = ("train", str(file), "--folder", str(tmp_path / "two"), "--json")
    answer = json.loads(run_as_ranks(birdie_command, command, 2, tmp_path / "ranks", {}))
    assert answer["calibration"]["data"] == "train"
    assert answer["calibration"]["reserved_seconds"] > 0
    assert answer["train_seconds"] < 4.0
    assert (tmp_path / "ranks" / "stderr").read_text().count("calibrated on") == 1


@pytest.mark.parametrize("budget", [None, "40kB"])
@pytest.mark.parametrize(("embedding", "as_scheme"), [("fp16", "fp16"), ("int7", "int7"), (None, "int8")])
def test_the_embedding_is_stored_as_it_was_told_budget_or_not(
    recipe: Recipe, tmp_path: Path, budget: str | None, embedding: str | None, as_scheme: str
) -> None:
    """To the bit what the scheme makes of it alone; without a word of its own it is as all matrices are."""
    export = dataclasses.replace(recipe.export, embedding=embedding, budget=budget)
    none = dataclasses.replace(recipe.calibration, data="none")
    run, _ = finished(dataclasses.replace(recipe, export=export, calibration=none), tmp_path)
    run.export(tmp_path / "model.birdie")
    save({"x": run.model.tok_emb.weight}, tmp_path / "alone.birdie", scheme=as_scheme)
    held, alone = load(tmp_path / "model.birdie")["tok_emb.weight"], load(tmp_path / "alone.birdie")["x"]
    assert torch.equal(held, alone) == (embedding is not None or budget is None)
    stored = {each.name: each.scheme for each in inspect(tmp_path / "model.birdie").tensors}
    assert stored["tok_emb.weight"] == ("fp16" if embedding == "fp16" else "grid")


def test_an_embedding_of_its_own_is_calibrated_like_the_rest(recipe: Recipe, tmp_path: Path) -> None:
    told = dataclasses.replace(
        recipe, export=dataclasses.replace(recipe.export, embedding="gptq:bits=7,clip_sigmas=14")
    )
    run, _ = finished(told, tmp_path)
    run.export(tmp_path / "known.birdie", budget=30_000)
    run.calibration = None
    run.recipe = dataclasses.replace(told, calibration=dataclasses.replace(told.calibration, data="none"))
    run.export(tmp_path / "blind.birdie", budget=30_000)
    known, blind = (load(tmp_path / f"{name}.birdie")["tok_emb.weight"] for name in ("known", "blind"))
    assert not torch.equal(known, blind)
    for held in (known, blind):
        assert (held - run.model.tok_emb.weight).norm() < 0.1 * run.model.tok_emb.weight.norm()


@pytest.mark.parametrize("budget", [None, 60_000])
def test_what_was_trained_on_levels_is_stored_on_them(recipe: Recipe, tmp_path: Path, budget: int | None) -> None:
    """The layers of the file are what layers saw in training; the embedding saw no levels and keeps its precision."""
    qat = Qat(levels="ternary", group=32, tensors=("blocks.*",))
    model = dataclasses.replace(recipe.model, model_dim=64)
    none = dataclasses.replace(recipe.calibration, data="none")
    run, _ = finished(dataclasses.replace(recipe, qat=qat, model=model, calibration=none), tmp_path)
    run.export(tmp_path / "model.birdie", budget=budget)
    held, trained = load(tmp_path / "model.birdie"), dict(run.model.named_parameters())
    names = [name for name, _ in qat.storage_rules(run.model)]
    assert "blocks.1.mlp.fc.weight" in names
    for name in names:
        torch.testing.assert_close(held[name], qat.quantized(trained[name], torch.tensor(1.0)))
    assert (held["tok_emb.weight"] - trained["tok_emb.weight"]).norm() < 0.02 * trained["tok_emb.weight"].norm()
