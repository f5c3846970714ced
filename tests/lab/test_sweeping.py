"""A sweep runs every trial once, however its workers end; poor trials are pruned, and a crash costs one trial."""

import json
import math
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ConfigError, DataError
from birdie.gpt.run.recipe_settings import Recipe
from birdie.lab import sweeping as module
from birdie.lab.experiment import Experiment
from birdie.lab.run_ledger import RunRecord, read_run
from birdie.lab.sweeping import Sweep, SweepRun, read_sweep
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


def test_an_interrupted_sweep_continues_with_the_values_of_its_trial(trainer: Trainer, tmp_path: Path) -> None:
    trainer.die_at = 4
    with pytest.raises(KeyboardInterrupt):
        SweepRun(spec(tmp_path), tmp_path / "b").work()
    again = SweepRun(spec(tmp_path), tmp_path / "b")
    interrupted = again.results()
    assert Counter(trial.state for trial in interrupted) == {"complete": 3, "running": 1}
    trainer.die_at = math.inf
    again.work()
    assert Counter(trainer.ended) == dict.fromkeys((f"{number:04d}" for number in range(6)), 1)
    values = [tuple(trial.values.values()) for trial in again.results()]
    assert values[:4] == [tuple(trial.values.values()) for trial in interrupted]
    assert len(set(values)) == 6


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


@pytest.mark.usefixtures("trainer")
def test_another_sweep_in_the_folder_is_refused(tmp_path: Path) -> None:
    SweepRun(spec(tmp_path), tmp_path / "s")
    SweepRun(spec(tmp_path, trials=30), tmp_path / "s")  # more trials of the same sweep
    with pytest.raises(ConfigError, match="another sweep"):
        SweepRun(spec(tmp_path, rates="low = 0.1, high = 0.2"), tmp_path / "s")


WORKER = """
import json, os, sys, time
from pathlib import Path
from birdie.lab import sweeping as sweep
from birdie.lab.experiment import Experiment
from birdie.lab.run_ledger import read_run

def train(work, recipe, name, *, watch, **_):
    folder = work.run_folder(name)
    if (folder / "summary.json").is_file():  # killed before the study knew
        return read_run(folder)
    (folder / "recipe.toml").write_text(recipe.to_toml())
    for step in range(10):
        time.sleep(0.02)
        watch()
    (folder / "new").write_text(json.dumps({"evaluation": {"bpb": recipe.optimizer.matrix_lr}}))
    os.replace(folder / "new", folder / "summary.json")
    with open(folder / "finished", "a") as file:
        file.write("x")
    return read_run(folder)

Experiment.run, sweep.open_shards = train, lambda _: None
sweep.SweepRun(sweep.read_sweep(Path(sys.argv[1])), Path(sys.argv[2])).work(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "trials"), [(1, 8), pytest.param(3, 24, marks=pytest.mark.nightly)])
def test_killed_sweeps_lose_no_trial_and_run_none_twice(kills: int, trials: int, tmp_path: Path) -> None:
    """`kill -9` at random times, and the same command again."""
    spec(tmp_path, trials=trials)
    (tmp_path / "worker.py").write_text(WORKER)
    command = [str(tmp_path / name) for name in ("worker.py", "lr.toml", "s")]
    rng = random.Random(1)
    for _ in range(kills):
        begun = len(list(tmp_path.rglob("recipe.toml")))
        with Program(*command) as victim:
            while len(list(tmp_path.rglob("recipe.toml"))) < min(begun + 2, trials):
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 0.2))
            victim.send_signal(signal.SIGKILL)
            assert victim.wait() == -signal.SIGKILL
    assert run_python(*command).returncode == 0
    results = SweepRun(spec(tmp_path, trials=trials), tmp_path / "s").results()
    assert [(trial.number, trial.state) for trial in results] == [(number, "complete") for number in range(trials)]
    assert [path.read_text() for path in tmp_path.rglob("finished")] == ["x"] * trials


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
    for name in [name for name in sys.modules if name.startswith("birdie.lab.sweeping")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "optuna"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert run(build_app, ["sweep", str(tmp_path / "lr.toml"), "--folder", str(tmp_path / "s")]) == 1
    assert "pip install 'birdie-compress[lab]'" in capsys.readouterr().err


HEAD = 'recipe = "laptop"\n'
RATE = '"optimizer.matrix_lr" = { low = 0.01, high = 0.1, log = true }\n'


def sweep_of(folder: Path, text: str) -> Sweep:
    path = folder / "sweep.toml"
    path.write_text(text)
    return read_sweep(path)


def test_values_are_of_the_settings_type(tmp_path: Path) -> None:
    text = (
        HEAD + f"[search]\n{RATE}num_layers = {{ low = 2, high = 8, step = 2 }}\ntrain.seed = {{ choices = [1, 2] }}\n"
    )
    trial = optuna.create_study().ask()
    sweep_of(tmp_path, text).suggest(trial)
    assert dict(trial.distributions) == {
        "optimizer.matrix_lr": FloatDistribution(0.01, 0.1, log=True),
        "model.num_layers": IntDistribution(2, 8, step=2),
        "train.seed": CategoricalDistribution([1, 2]),
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("recipe = [", "cannot be read"),
        ("[search]\n" + RATE, "name the recipe"),
        ('recipe = "laptup"\n[search]\n' + RATE, "did you mean laptop"),
        (HEAD, "searches nothing"),
        (HEAD + "trails = 3\n[search]\n" + RATE, "'trails' is no setting of a sweep"),
        (HEAD + "trials = 0\n[search]\n" + RATE, "trials of the sweep is 0"),
        (HEAD + 'trials = "many"\n[search]\n' + RATE, "integer"),
        (HEAD + 'sampler = "bayes"\n[search]\n' + RATE, "tpe, random, grid"),
        (HEAD + "[search]\nmatrix_rl = { low = 1, high = 2 }\n", "no setting 'matrix_rl'"),
        (HEAD + "[search]\nmatrix_lr = 0.1\n", "is no range"),
        (HEAD + "[search]\nmatrix_lr = { low = 0.1 }\n", "is no range"),
        (HEAD + '[search]\nmatrix_lr = { low = "a", high = 1 }\n', "matrix_lr is 'a'"),
        (HEAD + "[search]\nmatrix_lr = { low = 0.2, high = 0.1 }\n", "matrix_lr = "),
        (HEAD + "[search]\nmatrix_lr = { low = 0, high = 0.1, log = true }\n", "matrix_lr = "),
        (HEAD + "[search]\nvalue_embed_layers = { choices = [[1, 2]] }\n", "write a list as a text"),
        (HEAD + "[search]\ntie_embeddings = { low = 0, high = 1 }\n", "tie_embeddings is 0"),
        (HEAD + 'sampler = "grid"\n[search]\n' + RATE, "a grid needs the values"),
        (HEAD + "[set]\n'validation.every' = 0\n[search]\n" + RATE, "compares validations during training"),
    ],
)
def test_a_bad_file_gets_one_sentence(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        sweep_of(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "sweep.toml"))
