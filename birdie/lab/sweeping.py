"""Sweeps: many trials of a recipe, searched by Optuna, each a training in a process group of its own.

    SweepRun(read_sweep(file), folder).work(parallel=2) ─► study.ask ─► train ─► report, prune ─► study.tell

    FOLDER/sweep.toml      recipe, search space and method; another sweep is refused
    FOLDER/study.log       Optuna's journal of the trials, unless a storage is given
    FOLDER/runs/0007/      run folder of trial 7
    FOLDER/best.toml       recipe of the best trial

A sweep file:

    recipe = "laptop"              # a name that `birdie recipe list` shows, or a .toml file
    preset = "cpu"                 # optional, as for `birdie train`
    trials = 20                    # a grid has as many as it has combinations
    sampler = "tpe"                # tpe, random or grid
    pruner = "median"              # median, hyperband or none: stops poor trials by their validations
    score = "bpb_artifact"         # or bpb_float: what is minimized
    seed = 0                       # of the sampler

    [set]                          # changes of the recipe that all trials have
    "train.iterations" = 400

    [search]
    "optimizer.matrix_lr" = { low = 0.01, high = 0.08, log = true }
    "model.num_layers" = { choices = [7, 9, 11] }

One process works in a folder at a time. A trial that is still running when it starts was interrupted, and continues
from its checkpoint if its run folder is here; machines with folders of their own share a database (`storage`).
"""

import itertools
import math
import os
import threading
import tomllib
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import optuna
import torch
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from birdie.errors import BirdieError, ConfigError, OutputError
from birdie.gpt.run.recipe_registry import find
from birdie.gpt.run.recipe_settings import Recipe, to_toml
from birdie.gpt.run.run_data import open_shards
from birdie.gpt.train.training_checkpoint import remove_checkpoints
from birdie.lab.assignments import kind_of, typed, with_settings
from birdie.lab.experiment import Experiment, resolved
from birdie.lab.run_ledger import RECIPE, flat, read_run
from birdie.system.callbacks import Notify, no_message
from birdie.system.child import Watch
from birdie.system.files import write_bytes
from birdie.system.locks import HOLDER, LOCK, locked_folder
from birdie.system.outputs import require_own_folder, require_writable

SWEEP, JOURNAL = "sweep.toml", "study.log"
REASON = "reason"
Sampler = Literal["tpe", "random", "grid"]
Pruner = Literal["median", "hyperband", "none"]
Score = Literal["bpb_artifact", "bpb_float"]

_SETTINGS = ("trials", "sampler", "pruner", "score", "seed")
_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


@dataclass(frozen=True, slots=True)
class Sweep:
    """The content of a sweep file.

    Attributes:
        recipe: that every trial starts from.
        search: full name of a setting → arguments of Optuna's suggestion: choices, or low, high, log, step.
        sampler, pruner: of Optuna.
        score: column of the run that is minimized.
    """

    recipe: Recipe
    search: Mapping[str, Mapping[str, Any]]
    trials: int = 20
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    score: Score = "bpb_artifact"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.search:
            raise ConfigError(
                'the sweep searches nothing; add [search] with "optimizer.matrix_lr" = { low = …, high = … }'
            )
        for name, words in (("sampler", get_args(Sampler)), ("pruner", get_args(Pruner)), ("score", get_args(Score))):
            if getattr(self, name) not in words:
                raise ConfigError(f"{name} of the sweep is {getattr(self, name)!r}; give {', '.join(words)}")
        for name, least in (("trials", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} of the sweep is {value!r}; give an integer of at least {least}")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():  # Optuna corrects an uneven step
            warnings.simplefilter("ignore")
            self.suggest(optuna.create_study(sampler=RandomSampler()).ask())  # refuses what no trial could have
        if self.sampler == "grid":
            object.__setattr__(self, "trials", min(self.trials, len(self.grid())))

    @property
    def prunes(self) -> bool:
        """True if trials can be stopped by their validations: the recipe has some before its last step."""
        return self.pruner != "none" and 0 < self.recipe.validation.every < self.recipe.train.last_step

    def grid(self) -> list[dict[str, Any]]:
        """Return the combinations of a grid, in the order of the trials."""
        if without := [name for name, table in self.search.items() if "choices" not in table]:
            raise ConfigError(f"a grid needs the values of {without[0]}; give choices = […]")
        rows = itertools.product(*(table["choices"] for table in self.search.values()))
        return [dict(zip(self.search, row, strict=True)) for row in itertools.islice(rows, 10_000)]

    def suggest(self, trial: Trial) -> Recipe:
        """Return the recipe of a trial, whose values are chosen if they are not yet."""
        return with_settings(
            self.recipe, typed({name: _suggest(trial, name, table) for name, table in self.search.items()}, self.recipe)
        )

    def to_toml(self) -> str:
        """Return all facts that make trials comparable, as TOML; the number of trials may be raised later."""
        head = {name: getattr(self, name) for name in _SETTINGS if name != "trials"}
        search = {name: dict(table) for name, table in self.search.items()}
        return to_toml({**head, "search": search, "recipe": self.recipe.to_dict()})


def _suggest(trial: Trial, name: str, table: Mapping[str, Any]) -> Any:
    try:
        if set(table) == {"choices"}:
            return trial.suggest_categorical(name, table["choices"])
        if kind_of(name) in (int, int | None):
            return trial.suggest_int(name, **table)
        return trial.suggest_float(name, **table)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name} = {dict(table)} is no range ({error}); give choices = […], or low and high with log = true or step"
        ) from error


def read_sweep(path: Path, trials: int | None = None) -> Sweep:
    """Return the sweep of a file.

    Args:
        trials: number of trials instead of the file's.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path} cannot be read: {reason}; give a sweep file, such as examples/learning_rate.toml"
        ) from error
    try:
        return _sweep(values if trials is None else values | {"trials": trials}, path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _sweep(values: dict[str, Any], path: Path) -> Sweep:
    name, preset, changes, search = (values.pop(key, None) for key in ("recipe", "preset", "set", "search"))
    if unknown := [key for key in values if key not in _SETTINGS]:
        names = ", ".join(("recipe", "preset", "set", "search", *_SETTINGS))
        raise ConfigError(f"{unknown[0]!r} is no setting of a sweep; there are {names}")
    if not isinstance(name, str) or not isinstance(preset, str | None):
        raise ConfigError('name the recipe, as in recipe = "laptop", and the preset, if any, as text')
    if not all(isinstance(table, dict | None) for table in (changes, search)):
        raise ConfigError("[set] and [search] are tables; write them so")
    recipe = find(str(path.parent / name) if name.endswith(".toml") else name).recipe(preset)
    recipe = with_settings(recipe, typed(flat(changes or {}), recipe))
    return Sweep(recipe, dict(_range(*leaf, recipe) for leaf in _leaves(search or {})), **values)


def _leaves(tables: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return name and search range: `optimizer.matrix_lr = …` and `"optimizer.matrix_lr" = …` are the same."""
    leaves = []
    for key, value in tables.items():
        if isinstance(value, Mapping) and value and all(isinstance(item, Mapping) for item in value.values()):
            leaves += _leaves(value, f"{prefix}{key}.")
        else:
            leaves.append((prefix + key, value))
    return leaves


def _range(name: str, table: Any, recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """Return the full name of a setting and its range, whose ends or choices are values of the setting."""
    ends = list(table.get("choices", [table.get("low"), table.get("high")])) if isinstance(table, Mapping) else []
    if not ends or None in ends:
        raise ConfigError(f"{name} = {table!r} is no range; give {{ choices = […] }}, or {{ low = …, high = … }}")
    if any(isinstance(value, list | dict) for value in ends):
        raise ConfigError(f'{name}: choices are numbers or texts; write a list as a text, as in "9,10"')
    key = next(iter(typed({name: ends[0]}, recipe)))
    numbers = [typed({key: value}, recipe)[key] for value in ends]  # refuses what is no value of the setting
    return key, table if "choices" in table else {**table, "low": numbers[0], "high": numbers[1]}


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A trial of a sweep.

    Attributes:
        number: from 0.
        state: complete, pruned, failed, running or waiting.
        score: bits per byte that the sweep minimizes; of a pruned trial its last validation; None if unknown.
        step: of the last validation; None if there was none.
        values: full name of a setting → value.
        reason: of a failure; empty without one.
    """

    number: int
    state: str
    score: float | None
    step: int | None
    values: dict[str, Any]
    reason: str


class _StoppedError(Exception):
    """The sweep is being stopped; its trials continue when it is started again."""


class SweepRun(Experiment):
    """A sweep and its folder.

    Args:
        sweep: as `read_sweep` returns it.
        folder: created if it does not exist.
        storage: URL of a database that machines share; None: a journal in the folder.
        notify: called with one-line messages.
    """

    def __init__(self, sweep: Sweep, folder: Path, storage: str | None = None, notify: Notify = no_message) -> None:
        warnings.simplefilter("ignore", ExperimentalWarning)
        super().__init__(folder)
        self.notify, self.sweep, self.recipe = notify, sweep, resolved(sweep.recipe)
        require_writable(require_own_folder(self.folder, SWEEP, beside=[LOCK, HOLDER], folders=["runs"]))
        path, text = self.folder / SWEEP, sweep.to_toml()
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{self.folder} has another sweep (see {path}); give another --folder, or delete it")
        write_bytes(path, text.encode())
        name = self.folder.resolve().name
        self.study = optuna.create_study(
            storage=_open_storage(storage, self.folder / JOURNAL),
            study_name=name,
            load_if_exists=True,
            pruner=_pruner(sweep),
        )
        self.study.sampler = _sampler(sweep, len(self._trials()))
        if self.study.user_attrs.get("sweep", text) != text:
            raise ConfigError(f"the storage has another sweep of the name {name}; give a --folder of another name")
        self.study.set_user_attr("sweep", text)
        self._is_shared = storage is not None
        self._lock, self._stop = threading.Lock(), threading.Event()

    def _trials(self) -> list[FrozenTrial]:
        return list(self.study.get_trials(deepcopy=False))

    def results(self) -> list[TrialResult]:
        """Return the trials by number."""
        return [_result(trial) for trial in self._trials()]

    @property
    def best(self) -> TrialResult | None:
        """The complete trial with the lowest score."""
        done = [trial for trial in self.results() if trial.state == "complete" and trial.score is not None]
        return min(done, key=lambda trial: (trial.score, trial.number), default=None)

    def work(self, parallel: int = 1, on_trial: Callable[[TrialResult], None] = lambda _: None) -> None:
        """Work until the sweep has its trials; write the best recipe.

        Args:
            parallel: trials at a time on this machine; each has one of its GPUs, by turns, or a part of its cores.
            on_trial: called when a trial has ended.
        """
        if parallel < 1:
            raise ConfigError(f"{parallel} trials at a time cannot run; give --parallel 1 or more")
        open_shards(self.recipe.data)  # else every trial would fail
        with locked_folder(self.folder, self.notify):
            self._stop.clear()
            if self.sweep.sampler == "grid":
                for row in self.sweep.grid()[: self.sweep.trials]:
                    self.study.enqueue_trial(row, skip_if_exists=True)
            interrupted = [trial for trial in self._trials() if trial.state == TrialState.RUNNING]
            if self._is_shared:  # those of other machines are left alone
                interrupted = [trial for trial in interrupted if self.run_folder(name_of(trial.number)).is_dir()]
            with ThreadPoolExecutor(parallel) as pool:
                workers = [pool.submit(self._work, slot, parallel, interrupted, on_trial) for slot in range(parallel)]
                try:
                    wait(workers, return_when=FIRST_EXCEPTION)
                finally:
                    self._stop.set()
            for worker in workers:
                with suppress(_StoppedError):
                    worker.result()
        if (best := self.best) is not None and (path := self.run_folder(name_of(best.number)) / RECIPE).is_file():
            write_bytes(self.folder / "best.toml", path.read_bytes())

    def _work(
        self, slot: int, parallel: int, interrupted: list[FrozenTrial], on_trial: Callable[[TrialResult], None]
    ) -> None:
        environment = _share(slot, parallel)
        while not self._stop.is_set() and (trial := self._next(interrupted)) is not None:
            self._run_trial(trial, environment)
            on_trial(_result(self._trials()[trial.number]))

    def _next(self, interrupted: list[FrozenTrial]) -> Trial | None:
        """Return an interrupted trial, else a new one; None if the sweep has its trials.

        Machines that ask a shared database at the same time may begin a trial more.
        """
        with self._lock:
            if interrupted:
                return Trial(self.study, interrupted.pop(0)._trial_id)
            begun = [trial for trial in self._trials() if trial.state != TrialState.WAITING]
            return self.study.ask() if len(begun) < self.sweep.trials else None

    def _run_trial(self, trial: Trial, environment: dict[str, str]) -> None:
        folder = self.run_folder(name_of(trial.number))
        require_writable(folder)
        try:
            recipe, watch = resolved(self.sweep.suggest(trial)), self._watch(trial, folder)
            record = self.run(recipe, folder.name, score=self.sweep.score, watch=watch, environment=environment)
            self.study.tell(trial, record.columns[self.sweep.score])
        except optuna.TrialPruned:
            self.study.tell(trial, state=TrialState.PRUNED)
        except OutputError:  # a full disk is no property of the trial
            raise
        except BirdieError as error:
            trial.set_user_attr(REASON, str(error))
            self.study.tell(trial, state=TrialState.FAIL)
        remove_checkpoints(folder / "checkpoints")  # the trial has ended, so nothing continues from them

    def _watch(self, trial: Trial, folder: Path) -> Watch:
        """Return what is called during the training: it reports new validations, and ends the trial by an exception."""
        reported = set(self._trials()[trial.number].intermediate_values)
        last = self.recipe.train.last_step

        def watch() -> None:
            if self._stop.is_set():
                raise _StoppedError
            for line in read_run(folder).history if (folder / RECIPE).is_file() else []:
                step, bpb = int(line["step"]), line.get("bpb", math.nan)
                if step and step not in reported and math.isfinite(bpb):  # random weights of step 0 tell nothing
                    reported.add(step)
                    trial.report(bpb, step)
                    if step < last and trial.should_prune():
                        raise optuna.TrialPruned

        return watch


def _sampler(sweep: Sweep, begun: int) -> BaseSampler:
    """Return the sampler; a sweep that continues after `begun` trials does not draw the same numbers again."""
    if sweep.sampler == "tpe":
        return TPESampler(seed=sweep.seed + begun, constant_liar=True)  # a running trial counts as poor
    return RandomSampler(seed=sweep.seed + begun)


def _pruner(sweep: Sweep) -> BasePruner:
    if not sweep.prunes:
        return NopPruner()
    if sweep.pruner == "median":
        return MedianPruner()
    return HyperbandPruner(sweep.recipe.validation.every, sweep.recipe.train.last_step)


def _open_storage(url: str | None, journal: Path) -> BaseStorage:
    try:
        return JournalStorage(JournalFileBackend(str(journal))) if url is None else RDBStorage(url)
    except Exception as error:  # the database's driver has errors of its own, and a journal may be damaged anywhere
        where = journal if url is None else "the storage"
        raise ConfigError(f"{where} cannot be opened ({type(error).__name__}: {error}); correct --storage") from error


def _share(slot: int, parallel: int) -> dict[str, str]:
    """Return the environment of a worker's trainings: its GPU, or its part of the cores."""
    if (gpus := torch.cuda.device_count()) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        return {"CUDA_VISIBLE_DEVICES": visible[slot % gpus]}
    if parallel == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // parallel))}


def _result(trial: FrozenTrial) -> TrialResult:
    step = trial.last_step
    score = trial.value if trial.state == TrialState.COMPLETE else trial.intermediate_values.get(step or 0)
    reason = str(trial.user_attrs.get(REASON, ""))
    return TrialResult(trial.number, _STATES[trial.state], score, step, dict(trial.params), reason)


def name_of(number: int) -> str:
    """Return the name of the run of a trial."""
    return f"{number:04d}"
