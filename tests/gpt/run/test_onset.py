"""A technique that was asked for and that no step of a run had is said at the end, in the log and in the summary."""

import json
from pathlib import Path
from typing import Any

import pytest

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.gpt.run.onset import not_begun
from birdie.gpt.run.recipe_settings import Recipe
from tests.gpt.run.test_run_folder import changed, tiny_recipe

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


def test_an_average_without_a_term_is_said() -> None:
    recipe = changed(Recipe(), {**END, "average": {"kind": "swa", "swa_below": 0.5, "swa_every": 3}})
    (line,) = not_begun(recipe, STEPS, 0.0, averaged=False)
    assert line.startswith("average of weights swa (every 3 steps, below 0.5), so the last weights are the result")
    assert list(not_begun(recipe, STEPS, 0.0, averaged=True)) == []


def test_a_warmdown_by_the_clock_that_the_last_step_outran_is_said() -> None:
    """Under a cap the warmdown begins by the time that is left, and this run ends by its steps long before."""
    recipe = changed(Recipe(), {"train": {"iterations": STEPS, "max_wallclock_seconds": 600, "warmdown_iters": 5}})
    (line,) = not_begun(recipe, STEPS, 1000.0, averaged=False)
    assert line.startswith("warmdown of the learning rates: the last step began at 0.9 of the run")


def test_a_recipe_without_late_techniques_says_nothing() -> None:
    recipe = changed(Recipe(), END)
    assert list(not_begun(recipe, STEPS, 0.0, averaged=False)) == []


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
