"""Recipes and presets by their names, on the command line and in Python."""

import dataclasses
import json
import math
from dataclasses import replace
from functools import reduce, wraps
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from birdie.cli import build_app, main, train
from birdie.cli.console import run
from birdie.compress.rate.target import parse_size
from birdie.errors import ConfigError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import Layout, prepare
from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.presets import PRESETS, with_minutes
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_registry import RegisteredRecipe, changes, find, shipped_recipes
from birdie.gpt.run.recipe_settings import CalibrationSettings, DataSettings, Recipe
from birdie.gpt.run.run_estimate import parameters
from birdie.gpt.train.loop import Step

RECIPES = [entry for entry in shipped_recipes() if entry.about.runs is None]
SPECTRAL = find("resnet_spectral")


@pytest.mark.parametrize("entry", RECIPES, ids=lambda entry: entry.name)
def test_registry_and_command_line_read_the_same_recipe(entry: RegisteredRecipe) -> None:
    assert entry.recipe() == load_recipe(entry.path)


@pytest.mark.parametrize("entry", [entry for entry in RECIPES if entry.about.parameters], ids=lambda entry: entry.name)
def test_parameters_equal_those_of_the_record(entry: RegisteredRecipe) -> None:
    assert parameters(entry.recipe()) == entry.about.parameters


def test_the_records_are_shipped() -> None:
    names = {entry.name for entry in shipped_recipes()}
    assert names >= {"baseline", "10l_mixed_precision", "parallel_muon", "leaky_ttt", "no_flash_mixed_q456"}
    assert names >= {"simple_sota", "sota", "ternary", "bench", "laptop", "demo", "cpu_best", "resnet_spectral"}
    assert find("baseline").recipe() == Recipe()


def test_an_unknown_recipe_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no recipe 'sotta'; did you mean sota"):
        find("sotta")
    with pytest.raises(ConfigError, match="there are 10l_mixed_precision, baseline"):
        find("zzzzzz")


def test_the_error_for_a_recipe_of_another_program_names_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = "is not a recipe of birdie train; run it with: python -m benchmarks.spectral_tune --recipe"
    for read in (SPECTRAL.recipe, lambda: load_recipe(SPECTRAL.path)):
        with pytest.raises(ConfigError, match=message):
            read()
    with pytest.raises(SystemExit) as ended:
        main(["train", str(SPECTRAL.path)])
    assert ended.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[about]\nruns = "python -m x"\n', "go together"),
        ("[program]\nsteps = 3\n", "go together"),
        ('[about]\nruns = "python -m x"\n[program]\n[model]\nnum_layers = 3\n', "for one of them"),
        ("program = 3\n", r"write \[program\]"),
    ],
)
def test_a_recipe_is_for_one_program(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find(str(tmp_path / "x.toml"))


def test_applying_the_changes_turns_one_recipe_into_the_other() -> None:
    one, other = find("simple_sota").recipe().to_dict(), find("sota").recipe().to_dict()
    assert not list(changes(one, one))
    for name, old, new in changes(one, other):
        *tables, key = name.split(".")
        values = reduce(getitem, tables, one)
        assert values[key] == old
        values[key] = new
    assert one == other


def recipe_json(capsys: pytest.CaptureFixture[str], *tokens: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["recipe", *tokens, "--json"])
    assert ended.value.code == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_command_lists_shows_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {facts["name"]: facts for facts in recipe_json(capsys, "list")["recipes"]}
    assert listed["sota"]["parameters"] == 35_945_671
    assert listed["sota"]["expected"]["bpb"] == 1.0611
    shown = recipe_json(capsys, "show", "ternary")
    assert Recipe.from_dict(shown["recipe"]) == find("ternary").recipe()
    assert "z-loss 1e-4" in shown["needs"]
    differences = recipe_json(capsys, "diff", "baseline", "10l_mixed_precision")["differences"]
    assert {"setting": "model.num_layers", "baseline": 9, "10l_mixed_precision": 10} in differences


def test_the_command_lists_shows_and_compares_recipes_of_another_program(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    listed = {facts["name"]: facts for facts in recipe_json(capsys, "list")["recipes"]}["resnet_spectral"]
    assert listed["runs"] == f"python -m benchmarks.spectral_tune --recipe {SPECTRAL.path}"
    assert (listed["parameters"], listed["expected"]["accuracy"], listed["expected"]["bpb"]) == (464_154, 0.8256, None)
    assert recipe_json(capsys, "show", "resnet_spectral")["recipe"]["program"]["smaller"] == [28]
    with pytest.raises(SystemExit):
        main(["recipe", "show", "resnet_spectral"])
    (tmp_path / "shown.toml").write_text(capsys.readouterr().out)
    assert find(str(tmp_path / "shown.toml")).settings() == SPECTRAL.settings()
    (tmp_path / "shown.toml").write_text(SPECTRAL.path.read_text().replace("steps = 6000", "").replace("[28]", "[20]"))
    differences = recipe_json(capsys, "diff", "resnet_spectral", str(tmp_path / "shown.toml"))["differences"]
    assert differences == [
        {"setting": "program.smaller", "resnet_spectral": [28], "shown": [20]},
        {"setting": "program.steps", "resnet_spectral": 6000, "shown": None},
    ]
    with pytest.raises(SystemExit):
        main(["recipe", "diff", "resnet_spectral", "sota"])
    assert "different programs" in capsys.readouterr().err


RECORDS = [entry for entry in shipped_recipes() if entry.about.source and entry.about.runs is None]
EVERY_RECORD = pytest.mark.parametrize("entry", RECORDS, ids=lambda entry: entry.name)


@EVERY_RECORD
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_keeps_the_fractions_of_a_recipe(entry: RegisteredRecipe, preset: str) -> None:
    full, small = entry.recipe(), entry.recipe(preset)
    old, new = full.model, small.model
    assert parameters(small) < parameters(full) / 4
    assert old.num_heads // old.num_kv_heads == new.num_heads // new.num_kv_heads
    assert new.vocab_size == old.vocab_size
    assert (old.xsa_last_n == old.num_layers) == (new.xsa_last_n == new.num_layers)
    assert bool(old.value_embed_layers) == bool(new.value_embed_layers)
    assert bool(old.bigram_vocab_size) == bool(new.bigram_vocab_size)
    assert abs(new.rotary_dims / new.head_dim - old.rotary_dims / old.head_dim) <= 2 / new.head_dim
    if old.num_loops and new.num_layers >= 3:
        assert new.loop_end < new.num_layers - 1, "layers after the repeated ones must remain"
    assert (old.parallel_start_layer is None) == (new.parallel_start_layer is None)
    if full.export.budget is not None and small.export.budget is not None:
        per_weight = parse_size(full.export.budget) / parameters(full)
        assert parse_size(small.export.budget) / parameters(small) == pytest.approx(per_weight, rel=1e-3)
    assert small.train.max_wallclock_seconds <= PRESETS[preset].seconds
    assert small.train.train_batch_tokens <= PRESETS[preset].batch_tokens


@EVERY_RECORD
def test_a_warmdown_in_steps_becomes_a_fraction_of_the_run(entry: RegisteredRecipe) -> None:
    full, small = entry.recipe(), entry.recipe("cpu")
    if full.train.warmdown_fraction is not None:
        assert small.train.warmdown_fraction == full.train.warmdown_fraction
    elif entry.about.step_ms is not None:
        steps = 1000 * full.train.max_wallclock_seconds / entry.about.step_ms
        assert small.train.warmdown_fraction == pytest.approx(full.train.warmdown_iters / steps, rel=1e-3)
    assert small.optimizer.matrix_lr == full.optimizer.matrix_lr


def run_json(capsys: pytest.CaptureFixture[str], *tokens: Any, code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main([str(token) for token in (*tokens, "--json")])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert ended.value.code == code, answer
    return answer


@pytest.mark.parametrize("name", ["laptop", "sota", "baseline"])
def test_minutes_set_the_clock_and_what_is_counted_in_steps(name: str) -> None:
    full = find(name).recipe()
    small = with_minutes(full, 3)
    assert small.train.cap_ms == 180_000
    assert small.train.iterations == full.train.iterations
    shares = small.optimizer.muon_momentum_warmup_steps / full.optimizer.muon_momentum_warmup_steps
    assert shares == pytest.approx(180_000 / (full.train.cap_ms or 180_000), abs=0.01)
    assert small.model == full.model
    assert replace(small, train=full.train, optimizer=full.optimizer, average=full.average) == full
    for minutes in (0, -1, math.inf, math.nan):
        with pytest.raises(ConfigError, match=f"--minutes is {minutes:g}"):
            with_minutes(full, minutes)


def test_show_prints_the_recipe_that_train_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_json(capsys, "recipe", "show", "sota", "--preset", "cpu")
    assert Recipe.from_dict(shown["recipe"]) == find("sota").recipe("cpu")
    assert set(shown["expected"].values()) == {None}, "a record's figures do not hold under a preset"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a data set of a few documents with bytes as tokens, and for a model of its vocabulary."""
    root = tmp_path_factory.mktemp("text")
    (root / "text.txt").write_text("\n".join(f"def f{n}(x): return x + {n}" for n in range(3000)))
    for _ in prepare(file_corpus([str(root / "text.txt")], documents="line"), "bytes", root):
        pass
    tokenizer = load_tokenizer("bytes")
    folder = str(Layout.of(root, "text", tokenizer.name).folder)
    return ["--data.path", folder, "--data.tokenizer", "bytes", "--model.vocab-size", str(tokenizer.vocab_size)]


def test_minutes_without_a_recipe_train_that_of_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str | None, Recipe]] = []

    @wraps(train.command)
    def remembered(name: str | None = None, /, *, recipe: Recipe, **_: Any) -> None:
        calls.append((name, recipe))

    monkeypatch.setattr(train, "command", remembered)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(build_app, ["train", "--minutes", "3", "--train.seed", "7"]) == 0
    expected = with_minutes(find("laptop").recipe(), 3)
    assert calls == [("laptop", replace(expected, train=replace(expected.train, seed=7)))]


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.name, marks=[] if entry.name == "sota" else pytest.mark.nightly)
        for entry in RECORDS
    ],
)
def test_every_record_trains_under_the_smallest_preset(
    entry: RegisteredRecipe, text: list[str], tmp_path: Path
) -> None:
    recipe = entry.recipe("smoke")
    recipe = dataclasses.replace(
        recipe,
        data=DataSettings(path=text[1], tokenizer="bytes"),
        model=dataclasses.replace(recipe.model, vocab_size=int(text[-1])),
        calibration=CalibrationSettings(),
        device="cpu",
    )
    run = Run(recipe, tmp_path)
    steps = [event for event in run.train() if isinstance(event, Step)]
    assert len(steps) == PRESETS["smoke"].iterations
    assert steps[-1].loss < steps[0].loss


@pytest.mark.parametrize("recipe", [["baseline"], []])
def test_flags_override_the_preset_and_the_preset_overrides_the_recipe_if_there_is_one(
    recipe: list[str], text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--preset=smoke", *text, "--train.iterations", "2", "--export.effort", "fast"]
    answer = run_json(capsys, "train", *recipe, "--folder", tmp_path / "run", *flags)
    assert answer["steps"] == 2
    assert find(str(tmp_path / "run" / "recipe.toml")).recipe().model.model_dim == 64


def test_the_output_of_show_is_a_recipe_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["recipe", "show", "sota"])
    (tmp_path / "shown.toml").write_text(capsys.readouterr().out)
    assert load_recipe(tmp_path / "shown.toml") == find("sota").recipe()
