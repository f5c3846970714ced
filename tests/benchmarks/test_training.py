"""Benchmarks of training: alternatives start equal, changes change one setting, turns and fits are right."""

import json
from pathlib import Path

import pytest
import torch

import birdie
from benchmarks import contest, lazy, offload, optimizer, processes, train

CPU = torch.device("cpu")


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
