"""A sweep runs every trial once, however its workers end; poor trials are pruned, and a crash costs one trial."""

import json
import math
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ConfigError, DataError, OutputError
from birdie.gpt.run.recipe import Recipe
from birdie.lab import sweep as module
from birdie.lab.experiment import Experiment
from birdie.lab.ledger import RunRecord, read_run
from birdie.lab.space import Sweep, read_sweep
from birdie.lab.sweep import SweepRun
from birdie.system.child import Watch
from tests.forked import Program, run_python

SPEC = """recipe = "laptop"
trials = {trials}
sampler = "{sampler}"
pruner = "{pruner}"
[set]
train.iterations = 40
validation.every = 10
[search]
matrix_lr = {{ {rates} }}
"""
RANGE = "low = 0.001, high = 1.0, log = true"


def spec(folder: Path, trials: int = 6, sampler: str = "tpe", pruner: str = "none", rates: str = RANGE) -> Sweep:
    path = folder / "lr.toml"
    path.write_text(SPEC.format(trials=trials, sampler=sampler, pruner=pruner, rates=rates))
    return read_sweep(path)


class Trainer:
    """Stands for training: bits per byte that depend on the learning rate, with validations on the way."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.die_at, self.fail_at = math.inf, math.inf
        self._lock = threading.Lock()

    @property
    def as_run(self) -> Callable[..., RunRecord]:
        """`Experiment.run` that calls `train`."""
        return lambda work, recipe, name, *, watch, **_: self.train(recipe, work.run_folder(name), watch)

    def train(self, recipe: Recipe, folder: Path, watch: Watch) -> RunRecord:
        with self._lock:
            self.started.append(folder.name)
            number = len(self.started)
        bpb = 2 + math.log(recipe.optimizer.matrix_lr / 0.05) ** 2
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "recipe.toml").write_text(recipe.to_toml())
        for step in (0, 10, 20, 30, 40):
            with (folder / "history.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "train_ms": step, "bpb": bpb + 1 / (step + 1)}) + "\n")
            watch()
        if number == self.die_at:
            raise KeyboardInterrupt
        if number == self.fail_at:
            raise DataError("the loss is no longer finite")
        (folder / "summary.json").write_text(json.dumps({"bpb_float": bpb, "evaluation": {"bpb": bpb}}))
        self.ended.append(folder.name)
        return read_run(folder)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    stub = Trainer()
    monkeypatch.setattr(Experiment, "run", stub.as_run)
    monkeypatch.setattr(module, "open_shards", lambda _: None)
    return stub


@pytest.mark.parametrize("parallel", [1, 3])
def test_every_trial_runs_once_and_the_best_recipe_is_kept(trainer: Trainer, parallel: int, tmp_path: Path) -> None:
    work = SweepRun(spec(tmp_path), tmp_path / "s")
    work.work(parallel)
    assert sorted(trainer.started) == [f"{number:04d}" for number in range(6)]
    assert {trial.state for trial in work.results()} == {"complete"}
    assert work.best is not None
    assert work.best.score == min(trial.score for trial in work.results() if trial.score is not None)
    assert (tmp_path / "s" / "best.toml").read_bytes() == (
        work.run_folder(module.name_of(work.best.number)) / "recipe.toml"
    ).read_bytes()
    work.work(parallel)
    assert len(trainer.started) == 6
    assert not list(tmp_path.rglob("checkpoints"))


def test_an_interrupted_sweep_continues_with_the_same_values(trainer: Trainer, tmp_path: Path) -> None:
    steady = SweepRun(spec(tmp_path), tmp_path / "a")
    steady.work()
    trainer.started.clear()
    trainer.die_at = 4
    with pytest.raises(KeyboardInterrupt):
        SweepRun(spec(tmp_path), tmp_path / "b").work()
    again = SweepRun(spec(tmp_path), tmp_path / "b")
    assert Counter(trial.state for trial in again.results()) == {"complete": 3, "running": 1, "waiting": 2}
    trainer.die_at = math.inf
    again.work()
    assert Counter(trainer.ended[6:]) == dict.fromkeys((f"{number:04d}" for number in range(6)), 1)
    assert [trial.values for trial in again.results()] == [trial.values for trial in steady.results()]


def test_a_trial_of_a_living_worker_is_left_alone(trainer: Trainer, tmp_path: Path) -> None:
    first, second = (SweepRun(spec(tmp_path, trials=1), tmp_path / "s") for _ in range(2))
    seen = []

    def join(*_: object, **__: object) -> RunRecord:
        second.work()  # while the first worker trains
        seen.append(list(trainer.started))
        raise DataError("enough")

    first.work()  # enters the trial and ends it
    assert len(trainer.started) == 1
    more = spec(tmp_path, trials=2)
    first, second = SweepRun(more, tmp_path / "s"), SweepRun(more, tmp_path / "s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "run", join)
        first.work()
    assert seen == [["0000"]]
    assert [trial.state for trial in first.results()] == ["complete", "failed"]


def test_a_crash_costs_one_trial(trainer: Trainer, tmp_path: Path) -> None:
    trainer.fail_at = 3
    work = SweepRun(spec(tmp_path), tmp_path / "s")
    work.work()
    failed = [trial for trial in work.results() if trial.state == "failed"]
    assert [(trial.number, trial.reason) for trial in failed] == [(2, "the loss is no longer finite")]
    assert Counter(trial.state for trial in work.results())["complete"] == 5


@pytest.mark.usefixtures("trainer")
def test_a_grid_covers_its_values(tmp_path: Path) -> None:
    work = SweepRun(spec(tmp_path, 99, "grid", rates="choices = [0.1, 0.2, 0.4]"), tmp_path / "s")
    work.work(2)
    assert [trial.values for trial in work.results()] == [{"optimizer.matrix_lr": rate} for rate in (0.1, 0.2, 0.4)]


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
@pytest.mark.usefixtures("trainer")
def test_poor_trials_are_pruned_and_the_best_is_not(pruner: str, tmp_path: Path) -> None:
    work = SweepRun(spec(tmp_path, 14, "random", pruner), tmp_path / "s")
    work.work()
    pruned = [trial for trial in work.results() if trial.state == "pruned"]
    assert pruned
    assert all(0 < (trial.step or 0) < 40 for trial in pruned)
    assert work.best is not None
    assert work.best.score is not None
    assert all(work.best.score < (trial.score or 0) for trial in pruned)


def test_two_workers_share_a_database(trainer: Trainer, tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    url = f"sqlite:///{tmp_path / 'study.db'}"
    workers = [SweepRun(spec(tmp_path), tmp_path / disk / "s", url) for disk in ("one", "two")]
    threads = [threading.Thread(target=worker.work) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(trainer.ended) == [f"{number:04d}" for number in range(6)]
    folders = [path for disk in ("one", "two") for path in (tmp_path / disk / "s" / "runs").glob("*/summary.json")]
    assert len(folders) == 6


@pytest.mark.usefixtures("trainer")
def test_another_sweep_in_the_folder_is_refused(tmp_path: Path) -> None:
    SweepRun(spec(tmp_path), tmp_path / "s")
    SweepRun(spec(tmp_path, trials=30), tmp_path / "s")  # more trials of the same sweep
    with pytest.raises(ConfigError, match="another sweep"):
        SweepRun(spec(tmp_path, rates="low = 0.1, high = 0.2"), tmp_path / "s")


@pytest.mark.usefixtures("trainer")
def test_a_full_disk_ends_the_sweep_and_not_the_trial(tmp_path: Path) -> None:
    work = SweepRun(spec(tmp_path), tmp_path / "s")

    def full(*_: object, **__: object) -> RunRecord:
        raise OutputError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "run", full)
        with pytest.raises(OutputError):
            work.work()
    assert work.results()[0].state == "running"
    work.work()
    assert {trial.state for trial in work.results()} == {"complete"}


def test_missing_data_costs_no_trial(tmp_path: Path) -> None:
    path = tmp_path / "lr.toml"
    path.write_text(
        'recipe = "laptop"\n[set]\ndata.path = "nowhere"\n[search]\nmatrix_lr = { low = 0.1, high = 0.2 }\n'
    )
    work = SweepRun(read_sweep(path), tmp_path / "s")
    with pytest.raises(DataError, match="nowhere"):
        work.work()
    assert work.results() == []


WORKER = """
import json, os, sys, time
from pathlib import Path
from birdie.lab import sweep
from birdie.lab.experiment import Experiment
from birdie.lab.ledger import read_run
from birdie.lab.space import read_sweep

def train(work, recipe, name, *, watch, **_):
    folder = work.run_folder(name)
    if (folder / "summary.json").is_file():  # killed before the study knew
        return read_run(folder)
    (folder / "recipe.toml").write_text(recipe.to_toml())
    state = folder / "state"
    for step in range(int(state.read_text()) if state.is_file() else 0, 10):  # resumes
        time.sleep(0.02)
        watch()
        with open(folder / "steps", "a") as file:
            file.write(f"{step}\\n")
        state.with_name("new").write_text(str(step + 1))
        os.replace(state.with_name("new"), state)
    study, allowed, trials = folder.parent, Path(sys.argv[3]), int(sys.argv[4])
    while len(list(study.rglob("finished"))) >= trials - 2 and not allowed.exists():  # both workers live until then
        time.sleep(0.02)
        watch()
    state.with_name("new").write_text(json.dumps({"evaluation": {"bpb": recipe.optimizer.matrix_lr}}))
    os.replace(state.with_name("new"), folder / "summary.json")
    with open(folder / "finished", "a") as file:
        file.write("x")
    return read_run(folder)

Experiment.run, sweep.open_shards = train, lambda _: None
sweep.SweepRun(read_sweep(Path(sys.argv[1])), Path(sys.argv[2])).work(2)
"""


@pytest.fixture
def workers() -> Iterator[list[Program]]:
    with ExitStack() as stack:
        processes: list[Program] = []
        yield processes
        for process in processes:
            stack.enter_context(process)  # which kills it


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "trials"), [(1, 8), pytest.param(3, 24, marks=pytest.mark.nightly)])
def test_killed_workers_lose_no_trial_and_run_none_twice(
    kills: int, trials: int, workers: list[Program], tmp_path: Path
) -> None:
    """`kill -9` of one of two processes on one study, at random times, and the same command again.

    The last two trials wait for a file, so that no worker has ended before it is killed.
    """
    spec(tmp_path, trials=trials)
    (tmp_path / "worker.py").write_text(WORKER)
    allowed = tmp_path / "allowed"
    command = [*(str(tmp_path / name) for name in ("worker.py", "lr.toml", "s")), str(allowed), str(trials)]
    rng = random.Random(1)
    workers += [Program(*command) for _ in range(2)]
    for _ in range(kills):
        begun = len(list(tmp_path.rglob("steps")))
        while len(list(tmp_path.rglob("steps"))) < min(begun + 3, trials):
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 0.3))
        with workers.pop(rng.randrange(2)) as victim:
            victim.send_signal(signal.SIGKILL)
            assert victim.wait() == -signal.SIGKILL
        workers.append(Program(*command))
    allowed.touch()
    assert [worker.wait() for worker in workers] == [0, 0]
    assert run_python(*command).returncode == 0  # takes over what the last one killed had
    results = SweepRun(spec(tmp_path, trials=trials), tmp_path / "s").results()
    assert [(trial.number, trial.state) for trial in results] == [(number, "complete") for number in range(trials)]
    for path in tmp_path.rglob("finished"):
        assert path.read_text() == "x"


def test_the_command_lists_trials(trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec(tmp_path)
    file, folder = str(tmp_path / "lr.toml"), str(tmp_path / "s")
    assert run(build_app, ["sweep", file, "--folder", folder, "--trials", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [trial["state"] for trial in answer["trials"]] == ["complete"] * 3
    assert run(build_app, ["sweep", file, "--folder", folder, "--show"]) == 0
    assert "matrix_lr" in capsys.readouterr().out
    assert len(trainer.started) == 3


def test_without_optuna_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("birdie.lab.sweep", "birdie.lab.space"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "optuna"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert run(build_app, ["sweep", str(tmp_path / "lr.toml"), "--folder", str(tmp_path / "s")]) == 1
    assert "pip install 'birdie-compress[lab]'" in capsys.readouterr().err
