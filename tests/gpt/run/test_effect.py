"""Settings without effect are said, before a run and after it."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.gpt.run.effect import no_effect, unread
from birdie.gpt.run.onset import not_begun
from birdie.gpt.run.recipe_file import OVERRIDES
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_registry import RegisteredRecipe, find, shipped_recipes
from birdie.gpt.run.recipe_settings import Recipe
from birdie.lab.assignments import parse, with_settings
from tests.gpt.run.test_run_folder import changed, tiny_recipe

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


STEPS = 10
END = {"train": {"iterations": STEPS, "max_wallclock_seconds": 0, "warmdown_iters": 5}}
LATE: dict[str, tuple[dict[str, dict[str, Any]], int, str]] = {
    "late QAT": ({"qat": {"bits": 6, "below": 0.5}}, 8, "quantization-aware training (start 0, below 0.5)"),
    "QAT from a fraction on": ({"qat": {"bits": 6, "start": 0.75}}, 8, "quantization-aware training (start 0.75)"),
    "QAT for a budget": (
        {"qat": {"budget": True, "start": 0.75}, "export": {"budget": "1MB"}, "calibration": {"data": "train"}},
        8,
        "quantization-aware training (start 0.75)",
    ),
    "depth recurrence": (
        {"model": {"num_loops": 1, "loop_start": 1, "loop_end": 2, "enable_looping_at": 0.65}},
        7,
        "depth recurrence (enable_looping_at 0.65)",
    ),
    "sequences": ({"train": {"seq_len_start": 256, "seq_schedule_fraction": 0.5}}, 5, "sequences of full length"),
    "batches": ({"train": {"batch_tokens_start": 65_536, "batch_schedule_fraction": 0.5}}, 5, "batches of full size"),
    "taper": ({"optimizer": {"decay_full": 0.7, "adam_weight_decay": 0.1}}, 8, "taper of weight decay"),
}
"""Technique → settings, the first step (from 0) that has it, and how its sentence begins."""


@pytest.mark.parametrize("technique", LATE)
def test_a_technique_is_said_exactly_if_no_step_had_it(technique: str) -> None:
    tables, first, sentence = LATE[technique]
    tables = {**tables, "train": {**END["train"], **tables.get("train", {})}}
    recipe = changed(Recipe(), tables)
    for steps in range(1, STEPS + 1):
        lines = list(not_begun(recipe, steps, 0.0, averaged=False))
        assert any(line.startswith(sentence) for line in lines) == (steps - 1 < first), (steps, lines)


LATE_RUN: dict[str, dict[str, Any]] = {
    "train": {"warmdown_iters": 0},
    "qat": {"bits": 6, "below": 0.5},
    "export": {"effort": "fast"},
}


def test_the_log_and_the_summary_of_a_run_say_it(tmp_path: Path) -> None:
    recipe = changed(tiny_recipe(tmp_path / "data"), LATE_RUN)
    file, folder = tmp_path / "late.toml", tmp_path / "run"
    file.write_text(recipe.to_toml())
    assert run(build_app, ["train", str(file), "--folder", str(folder)]) == 0
    (line,) = json.loads((folder / "summary.json").read_text())["never_began"]
    assert line.startswith("quantization-aware training (start 0, below 0.5)")
    assert f"never began: {line}" in (folder / "log.txt").read_text().splitlines()
    assert run(build_app, ["train", str(file), "--folder", str(folder), "--resume"]) == 0
    (resumed,) = json.loads((folder / "summary.json").read_text())["never_began"]
    assert resumed == line, "of the same run, whether its last step was taken now or then"
