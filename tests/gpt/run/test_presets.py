"""Presets keep the fractions of a recipe; the shrunk recipe is valid and trains."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from birdie.cli import main
from birdie.compress.rate.target import parse_size
from birdie.errors import ConfigError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import Layout, prepare
from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.gpt.run.events import Validated
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.presets import PRESETS, apply_preset
from birdie.gpt.run.recipe_registry import RegisteredRecipe, find, shipped_recipes
from birdie.gpt.run.recipe_settings import CalibrationSettings, DataSettings, Recipe
from birdie.gpt.run.run_estimate import parameters
from birdie.gpt.train.loop import Step

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


def test_a_preset_does_not_change_the_batch_of_a_small_recipe() -> None:
    laptop = find("laptop").recipe()
    small = apply_preset(laptop, "cpu")
    assert small.train.train_batch_tokens == laptop.train.train_batch_tokens
    assert small.train.warmdown_fraction == laptop.train.warmdown_fraction


def test_an_unknown_preset_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no preset 'moon'; choose --preset cpu or smoke"):
        apply_preset(Recipe(), "moon")


def run_json(capsys: pytest.CaptureFixture[str], *tokens: Any, code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main([str(token) for token in (*tokens, "--json")])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert ended.value.code == code, answer
    return answer


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
    folder = str(Layout.of(root, tokenizer.name).folder)
    return ["--data.path", folder, "--data.tokenizer", "bytes", "--model.vocab-size", str(tokenizer.vocab_size)]


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


@pytest.mark.nightly
def test_the_smallest_preset_of_the_baseline_learns_on(text: list[str], tmp_path: Path) -> None:
    """Its learning rates are those of batches that are 256 times as large, so they must be lower."""
    recipe = find("baseline").recipe("smoke")
    recipe = dataclasses.replace(
        recipe,
        data=DataSettings(path=text[1], tokenizer="bytes"),
        model=dataclasses.replace(recipe.model, vocab_size=int(text[-1])),
        train=dataclasses.replace(recipe.train, iterations=40),
        device="cpu",
    )
    (score,) = [event.score.val_loss for event in Run(recipe, tmp_path).train() if isinstance(event, Validated)]
    assert score < 0.5 * math.log(recipe.model.vocab_size), "nats of a model that knows nothing"


@pytest.mark.parametrize("recipe", [["baseline"], []])
def test_flags_override_the_preset_and_the_preset_overrides_the_recipe_if_there_is_one(
    recipe: list[str], text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--preset=smoke", *text, "--train.iterations", "2", "--export.effort", "fast"]
    answer = run_json(capsys, "train", *recipe, "--folder", tmp_path / "run", *flags)
    assert answer["steps"] == 2
    assert find(str(tmp_path / "run" / "recipe.toml")).recipe().model.model_dim == 64


def test_an_unknown_recipe_is_an_error_that_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "train", "basline", "--preset", "cpu", code=1)
    assert answer["error"]["message"].startswith("there is no recipe 'basline'; did you mean baseline")


def test_a_recipe_after_the_flags_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "train", "--folder", "x", "baseline", code=1)
    assert answer["error"]["message"] == "name the recipe first: birdie train baseline …"
