"""A recipe that is shrunk keeps its shares, is a valid recipe, and runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from birdie.cli import main
from birdie.cli.recipe import parameters, settings_of
from birdie.compress.rate.size import parse_size
from birdie.data.corpus import file_corpus
from birdie.data.prepare import Layout, prepare
from birdie.data.tokenizer import load_tokenizer
from birdie.errors import ConfigError
from birdie.run.pipeline import Run
from birdie.run.presets import SCALES, scaled
from birdie.run.recipe import CalibrationSettings, DataSettings, Recipe
from birdie.run.registry import Known, book, find
from birdie.train.loop import Step

RECORDS = [known for known in book() if known.about.source and known.about.runs is None]
EACH = pytest.mark.parametrize("known", RECORDS, ids=lambda known: known.name)


@EACH
@pytest.mark.parametrize("scale", SCALES)
def test_shares_are_kept(known: Known, scale: str) -> None:
    whole, small = known.recipe(), settings_of(known, scale)
    before, after = whole.model, small.model
    assert parameters(small) < parameters(whole) / 4
    assert before.num_heads // before.num_kv_heads == after.num_heads // after.num_kv_heads
    assert after.vocab_size == before.vocab_size
    assert (before.xsa_last_n == before.num_layers) == (after.xsa_last_n == after.num_layers)
    assert bool(before.value_embed_layers) == bool(after.value_embed_layers)
    assert bool(before.bigram_vocab_size) == bool(after.bigram_vocab_size)
    assert abs(after.rotary_dims / after.head_dim - before.rotary_dims / before.head_dim) <= 2 / after.head_dim
    if before.num_loops and after.num_layers >= 3:
        assert after.loop_end < after.num_layers - 1, "what follows the loop still does"
    assert (before.parallel_start_layer is None) == (after.parallel_start_layer is None)
    if whole.export.budget is not None and small.export.budget is not None:
        per_weight = parse_size(whole.export.budget) / parameters(whole)
        assert parse_size(small.export.budget) / parameters(small) == pytest.approx(per_weight, rel=1e-3)
    assert small.train.max_wallclock_seconds <= SCALES[scale].seconds
    assert small.train.train_batch_tokens <= SCALES[scale].batch_tokens


@EACH
def test_what_is_counted_in_steps_becomes_a_share_of_the_run(known: Known) -> None:
    whole, small = known.recipe(), settings_of(known, "cpu")
    if whole.train.warmdown_fraction is not None:
        assert small.train.warmdown_fraction == whole.train.warmdown_fraction
    elif known.about.step_ms is not None:
        steps = 1000 * whole.train.max_wallclock_seconds / known.about.step_ms
        assert small.train.warmdown_fraction == pytest.approx(whole.train.warmdown_iters / steps, rel=1e-3)
    assert small.optimizer.matrix_lr == whole.optimizer.matrix_lr


def test_what_is_small_already_keeps_its_time_and_batch() -> None:
    laptop = find("laptop").recipe()
    small = scaled(laptop, "cpu")
    assert small.train.train_batch_tokens == laptop.train.train_batch_tokens
    assert small.train.warmdown_fraction == laptop.train.warmdown_fraction


def test_another_scale_is_told() -> None:
    with pytest.raises(ConfigError, match="moon"):
        scaled(Recipe(), "moon")


def told(capsys: pytest.CaptureFixture[str], *tokens: Any, code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main([str(token) for token in (*tokens, "--json")])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert ended.value.code == code, answer
    return answer


def test_show_says_what_train_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "recipe", "show", "sota", "--preset", "cpu")
    assert Recipe.from_dict(shown["recipe"]) == settings_of(find("sota"), "cpu")
    assert set(shown["expected"].values()) == {None}, "a record's figures are not those of the scaled"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that point at a few documents whose tokens are bytes, and fit the model to them."""
    root = tmp_path_factory.mktemp("text")
    (root / "text.txt").write_text("\n".join(f"def f{n}(x): return x + {n}" for n in range(3000)))
    for _ in prepare(file_corpus([str(root / "text.txt")], documents="line"), "bytes", root):
        pass
    tokenizer = load_tokenizer("bytes")
    folder = str(Layout.of(root, tokenizer.name).folder)
    return ["--data.path", folder, "--data.tokenizer", "bytes", "--model.vocab-size", str(tokenizer.vocab_size)]


@EACH
def test_every_record_trains_at_the_smallest_scale(known: Known, text: list[str], tmp_path: Path) -> None:
    recipe = settings_of(known, "smoke")
    recipe = dataclasses.replace(
        recipe,
        data=DataSettings(path=text[1], tokenizer="bytes"),
        model=dataclasses.replace(recipe.model, vocab_size=int(text[-1])),
        calibration=CalibrationSettings(),
        device="cpu",
    )
    run = Run(recipe, tmp_path)
    steps = [event for event in run.train() if isinstance(event, Step)]
    assert len(steps) == SCALES["smoke"].iterations
    assert steps[-1].loss < steps[0].loss


def test_flags_win_over_the_scale_and_the_scale_over_the_recipe(
    text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--preset=smoke", *text, "--train.iterations", "2"]
    answer = told(capsys, "train", "baseline", "--folder", tmp_path / "run", *flags)
    assert answer["steps"] == 2
    assert find(str(tmp_path / "run" / "recipe.toml")).recipe().model.model_dim == 64


def test_a_scale_needs_no_recipe(text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "train", "--preset", "smoke", "--folder", tmp_path, *text)
    assert answer["steps"] == SCALES["smoke"].iterations


def test_a_name_that_is_no_recipe_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "train", "basline", "--preset", "cpu", code=1)
    assert answer["error"]["message"].startswith("there is no recipe 'basline'; did you mean baseline")


def test_a_recipe_that_was_not_read_is_not_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "train", "--folder", "x", "baseline", code=1)
    assert answer["error"]["message"] == "name the recipe first: birdie train baseline …"
