"""Benchmarks of training: alternatives start equal, changes change one setting, turns and fits are right."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import birdie
from benchmarks import ablation, contest, estimate, lazy, offload, optimizer, processes, schemes, train
from benchmarks.ablation import CHANGES, Texts
from birdie.gpt.model.gpt import GPTConfig
from birdie.gpt.run.recipe_registry import changes
from birdie.gpt.run.recipe_settings import Recipe

CPU = torch.device("cpu")


class NoTexts(Texts):
    """Texts without data, for tests that do not train."""

    def __init__(self) -> None:
        pass

    def settings(self, vocabulary: int) -> dict[str, Any]:  # noqa: ARG002
        return {}


def test_a_change_changes_the_settings_of_its_name_only() -> None:
    base = ablation.recipe_of("", 0, 100, NoTexts()).to_dict()
    for change, values in CHANGES.items():
        other = ablation.recipe_of(change, 0, 100, NoTexts()).to_dict()
        named = {name if "." in name else f"model.{name}" for name in values}
        assert {name for name, _, _ in changes(base, other)} == named - {"train.iterations"}, change


def test_equal_time_is_the_number_of_steps_times_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"": {100: [2.5, 2.6], 120: [2.45, 2.55]}, "XSA, all": {100: [2.4, 2.5]}}
    monkeypatch.setattr(ablation.Bench, "bpb", lambda _self, change, steps: scores[change][steps])
    monkeypatch.setattr(ablation.Bench, "ratio", lambda _self, _change: 1.21)
    options = argparse.Namespace(seeds=2, steps=100)
    base, changed = ablation.Bench(NoTexts(), options).rows(["XSA, all"])
    assert base["bpb, same steps"] == pytest.approx(2.55)
    assert changed["base's steps"] == 120
    assert (changed["bpb, same steps"], changed["bpb, same time"]) == pytest.approx((-0.1, -0.05))


def test_the_run_whose_clock_is_behind_trains_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[str] = []

    class Clock:
        """A contestant without training: its steps take as many milliseconds as its name says."""

        def __init__(self, name: str, _recipe: object, _folder: Path) -> None:
            self.name, self.clock_ms, self.finished = name, 0.0, False

        def advance(self) -> None:
            turns.append(self.name)
            self.clock_ms += float(self.name)
            self.finished = self.clock_ms >= 4

        def row(self, size: str, budget: int | None) -> dict[str, object]:
            bpb = (4 + turns.count("1") / 3) / float(self.name)
            return {"recipe": self.name, "size": size, "bytes": budget or 1000, "bpb_artifact": bpb}

    monkeypatch.setattr(contest, "Contestant", Clock)
    monkeypatch.setattr(contest, "Texts", lambda *_, **__: None)
    monkeypatch.setattr(contest, "recipe_of", lambda *_: None)
    contest.main(["1", "2", "--seeds", "2", "--sizes", "own,500B", "--json", "--folder", str(tmp_path)])
    assert turns == 2 * ["1", "2", "1", "1", "2", "1"]
    *rows, first, _, _, other = json.loads(capsys.readouterr().out)["rows"]
    assert [row["bytes"] for row in rows] == 2 * [1000, 1000, 500, 500]
    assert [row["less"] for row in rows] == 4 * [0, 0.5]
    assert (first["bpb_artifact"], first["bpb_artifact ±"]) == pytest.approx((6, 2 / 3))  # of 4 + 4 / 3 and 4 + 8 / 3
    assert (other["size"], other["recipe"], other["less"], other["less ±"]) == ("500B", "2", 0.5, 0)


def test_the_plain_loop_and_birdie_start_at_the_same_loss() -> None:
    config, settings = train.SMALL
    plain = train.PlainLoop(config, settings, 0, CPU, torch.float32).step()
    birdies = next(iter(train.birdie_run(config, settings, 0, CPU, "float32", compiled=False))).loss
    assert plain == pytest.approx(birdies, rel=1e-5)


def test_all_optimizers_take_the_same_step_and_ratios_are_to_the_baseline() -> None:
    rows = {row["step"]: row for row in optimizer.one_process(0.0, 0, CPU, layers=1, dim=32)}
    assert rows["birdie, banks"]["difference"] < 0.1
    first, second = optimizer.rows_of({"torch": [0.004, 0.006, 0.005], "banks": [0.002, 0.0025, 0.003]}, "torch", 2)
    assert (first["median_ms"], first["best_ms"], first["ratio"], second["ratio"]) == (5.0, 4.0, 1.0, 2.0)


@pytest.mark.nightly  # two processes that import torch
def test_two_ranks_are_measured() -> None:
    rows = optimizer.several_processes(0.0, 0, CPU, 2, layers=1, dim=32)
    assert [row["step"] for row in rows] == ["replicated", "parallel"]


def test_the_fit_of_estimates_has_no_negative_constant_and_finds_those_of_synthetic_runs() -> None:
    matrix = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert estimate._nonnegative(matrix, matrix @ [2.0, 3.0]) == pytest.approx([2, 3])
    assert estimate._nonnegative(matrix, matrix @ [2.0, -1.0]) == pytest.approx([1.5, 0])
    recurrent = Recipe(model=GPTConfig(num_loops=1, loop_start=1, loop_end=2, enable_looping_at=0.25))
    entries = [np.array([1.0, 0.0, 0.0, 1.0]), np.array([3.0, 0.0, 0.0, 1.0])]
    mean = estimate.mean_ms(recurrent, entries, np.array([1.0, 0.0, 0.0]))
    assert mean == pytest.approx(1 / (0.25 / 2 + 0.75 / 4)), "the harmonic mean of its phases"
    constants = np.array([2.0, 5.0, 10.0])
    parts = np.random.default_rng(0).uniform(1, 9, (5, 4))
    runs = [(Recipe(), [part], estimate.mean_ms(Recipe(), [part], constants)) for part in parts]
    assert estimate.fitted(runs) == pytest.approx(constants, rel=1e-3)


def test_no_file_of_normal_numbers_beats_the_bound_and_the_grid_is_its_own_reference() -> None:
    rows = {row["scheme"]: row for row in schemes.rows(schemes.normal(64), ["int4", "int8"])}
    assert min(row["gap"] for row in rows.values()) > 0.2
    assert rows["sigma:0.4"]["grid_error"] == 1


@pytest.mark.skipif(not processes.can_measure(), reason="needs /proc")
def test_every_way_of_loading_computes_the_same_output(tmp_path: Path) -> None:
    path = lazy.saved(tmp_path, 5, 32, "int4")
    ways = ("eager", "eager, assigned", "lazy", "lazy, half cached")
    assert len({lazy.measure_way(str(path), 5, 32, way)["output"] for way in ways}) == 1


@pytest.mark.nightly  # calibrates and compresses
def test_both_ways_of_calibration_have_the_same_sums_and_sizes(tmp_path: Path) -> None:
    def done(method: str, *, save: bool) -> dict[str, float]:
        return offload.done(offload.Job(method, 2, 64, 256, 2, save), tmp_path)

    for key, save, tolerance in (("fisher", False, 1e-4), ("bytes", True, 0.02)):
        one, two = (done(method, save=save)[key] for method in offload.METHODS)
        assert two == pytest.approx(one, rel=tolerance)
    assert birdie.load(tmp_path / "model.birdie")
