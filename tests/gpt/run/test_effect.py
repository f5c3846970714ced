"""A setting that is given is never dead in silence: the later source wins, and what still has no effect is said."""

import dataclasses
from operator import attrgetter
from pathlib import Path

import pytest

from birdie.errors import ConfigError
from birdie.gpt.run.effect import UNREAD, no_effect, unread
from birdie.gpt.run.recipe_file import OVERRIDES
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_registry import RegisteredRecipe, find, shipped_recipes
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.train.plan import lr_multiplier
from birdie.lab.assignments import parse, with_settings

RECIPES = [entry for entry in shipped_recipes() if entry.about.runs is None]


def lines(*flags: str, file: Path | None = None) -> list[str]:
    origins: dict[str, str] = {}
    return list(no_effect(load_recipe(file, flags, origins), origins))


@pytest.mark.parametrize("name", ["baseline", "laptop"])  # the one in steps, the other as a fraction
def test_the_later_length_of_the_warmdown_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipe < variable < flag, whichever of the two settings a source uses."""
    entry = find(name)
    monkeypatch.setenv("WARMDOWN_ITERS", "20")
    train = load_recipe(entry.path).train
    assert (train.warmdown_iters, train.warmdown_fraction) == (20, None)
    train = load_recipe(entry.path, ["--train.warmdown-fraction", "0.25"]).train
    assert train.warmdown_fraction == 0.25
    monkeypatch.setenv("WARMDOWN_FRACTION", "0.5")
    monkeypatch.delenv("WARMDOWN_ITERS")
    train = load_recipe(entry.path, ["--train.warmdown-iters", "30"]).train
    assert (train.warmdown_iters, train.warmdown_fraction) == (30, None)


def test_the_learning_rate_follows_the_warmdown_that_was_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = next(entry for entry in RECIPES if entry.name == "laptop")
    monkeypatch.setenv("WARMDOWN_ITERS", "20")
    train = dataclasses.replace(load_recipe(laptop.path).train, iterations=100, max_wallclock_seconds=0)
    assert [lr_multiplier(train, step, 0.0) for step in (0, 80, 90)] == [1.0, 1.0, 0.5]


def test_a_preset_does_not_resist_either(monkeypatch: pytest.MonkeyPatch) -> None:
    from birdie.cli.train import build_app

    monkeypatch.setenv("WARMDOWN_ITERS", "20")
    tokens = ["laptop", "--preset", "cpu"]
    _, bound, _ = build_app(tokens).parse_args(tokens, exit_on_error=False, print_error=False)
    train = bound.kwargs["recipe"].train
    assert (train.warmdown_iters, train.warmdown_fraction) == (20, None)


def test_of_one_source_the_other_one_has_no_effect_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--train.warmdown-iters", "20", "--train.warmdown-fraction", "0.5")
    reason = "has no effect: train.warmdown_fraction is the length of the warmdown"
    assert lines(*flags) == [f"--train.warmdown-iters {reason}"]
    monkeypatch.setenv("WARMDOWN_ITERS", "20")
    assert lines(*flags[2:]) == [f"WARMDOWN_ITERS {reason}"]


RIVALS = {
    "train.warmdown_fraction": 'warmdown_fraction = 0.5\n',
    "train.force_stop_step": "force_stop_step = 7\n",
    "data.train": 'train = ["a.bin"]\nval = ["b.bin"]\n',
    "data.val": 'train = ["a.bin"]\nval = ["b.bin"]\n',
}  # fmt: skip
VALUES = {
    "data.path": "elsewhere",
    "train.warmdown_iters": "20",
    "train.iterations": "400",
    "train.max_wallclock_seconds": "60",
}


@pytest.mark.parametrize(("setting", "rival"), [(name, rival) for name in OVERRIDES for rival in OVERRIDES[name]])
def test_what_a_later_source_gives_has_an_effect(setting: str, rival: str, tmp_path: Path) -> None:
    """Without the rule, the flag would be one of those that nothing reads: the rule is needed, and it holds."""
    file = tmp_path / "recipe.toml"
    file.write_text(f"[{rival.partition('.')[0]}]\n{RIVALS[rival]}")
    earlier, flag = load_recipe(file), f"--{setting.replace('_', '-')}"
    assert setting in unread(earlier)
    assert lines(flag, VALUES[setting], file=file) == []
    by_flag = load_recipe(file, [flag, VALUES[setting]])
    by_set = with_settings(earlier, parse([f"{setting}={VALUES[setting]}"], earlier))
    for recipe in (by_flag, by_set):
        assert setting not in unread(recipe)
        assert attrgetter(rival)(recipe) == attrgetter(rival)(Recipe())


@pytest.mark.parametrize(
    ("flags", "dead"),
    [
        (["--average.ema-decay", "0.9"], "--average.ema-decay"),
        (["--average.kind", "lawa", "--average.swa-every", "5"], "--average.swa-every"),
        (["--qat.start", "0.5"], "--qat.start"),
        (["--qat.bits", "6", "--qat.group-size", "64"], "--qat.group-size"),
        (["--qat.bits", "6", "--qat.encodings", "5"], "--qat.encodings"),
        (["--evaluation.stride", "64", "--evaluation.mode", "streaming"], "--evaluation.stride"),
        (["--evaluation.ttt-lora.rank", "4"], "--evaluation.ttt-lora.rank"),
        (["--evaluation.ngram.beta", "2"], "--evaluation.ngram.beta"),
        (["--export.budget", "1MB", "--export.scheme", "int6"], "--export.scheme"),
        (["--export.budget", "1MB", "--export.int4-layers", "1"], "--export.int4-layers"),
        (["--calibration.tokens", "4096"], "--calibration.tokens"),
        (["--model.loop-end", "2"], "--model.loop-end"),
        (["--model.leaky-slope", "0.1"], "--model.leaky-slope"),
        (["--model.gate-window", "8"], "--model.gate-window"),
        (["--optimizer.head-lr", "0.1"], "--optimizer.head-lr"),
        (["--train.seq-schedule-fraction", "0.5"], "--train.seq-schedule-fraction"),
        (["--train.force-stop-step", "5", "--train.iterations", "9"], "--train.iterations"),
        (["--train.warmdown-iters", "0", "--train.min-lr", "0.1"], "--train.min-lr"),
        (["--bandit.discount", "0.5"], "--bandit.discount"),
    ],
)
def test_a_setting_of_a_technique_that_is_off_is_said(flags: list[str], dead: str) -> None:
    (line,) = lines(*flags)
    assert line.startswith(f"{dead} has no effect: ")


def test_a_setting_that_is_read_is_not_said() -> None:
    assert lines("--average.kind", "ema", "--average.ema-decay", "0.9", "--qat.bits", "6", "--qat.start", "0.5") == []
    assert lines("--evaluation.mode", "ttt-multi-phase", "--evaluation.ttt-lora.rank", "4") == []


def test_variables_and_keys_of_a_file_are_said_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("[average]\nswa_every = 7\n")
    monkeypatch.setenv("EMA_ENABLED", "0")
    monkeypatch.setenv("EMA_DECAY", "0.9")
    monkeypatch.setenv("TTT_EPOCHS", "2")
    assert [line.partition(" has no effect")[0] for line in lines(file=file)] == [
        "EMA_DECAY",
        f"{file}: average.swa_every",
        "TTT_EPOCHS",
    ]


@pytest.mark.parametrize("entry", RECIPES, ids=lambda entry: entry.name)
def test_shipped_recipes_give_nothing_without_effect(entry: RegisteredRecipe) -> None:
    origins: dict[str, str] = {}
    recipe = load_recipe(entry.path, (), origins)
    assert list(no_effect(recipe, origins)) == list(no_effect(recipe)) == []


def test_the_recipe_of_a_run_gives_nothing_without_effect(tmp_path: Path) -> None:
    """It states everything, and nobody chose each of its settings."""
    record = tmp_path / "recipe.toml"
    record.write_text(find("sota").recipe().to_toml())
    assert lines(file=record) == []


def test_what_the_table_declares_exists() -> None:
    recipe = Recipe()
    rivals = [name for names in OVERRIDES.values() for name in names]
    for name in (*(name for row in UNREAD for name in row.settings), *rivals):
        attrgetter(name)(recipe)  # raises, if it is no setting
    assert set(OVERRIDES) <= {name for row in UNREAD for name in row.settings}


def test_a_contradiction_stays_an_error() -> None:
    with pytest.raises(ConfigError, match="set one of them"):
        load_recipe(flags=["--qat.bits", "6", "--qat.levels", "ternary"])
