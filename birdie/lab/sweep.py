"""Sweeps: many trials of a recipe, searched by Optuna, each a training in a process group of its own.

    SweepRun(read_sweep(file), folder).work(parallel=2) ─► workers ─► claim a trial ─► train ─► report, prune ─► result

    FOLDER/sweep.toml      recipe, search space and method; another sweep is refused
    FOLDER/study.log       Optuna's journal of the trials, unless a storage is given
    FOLDER/runs/0007/      run folder of trial 7, locked by the worker that has it
    FOLDER/best.toml       recipe of the best trial

All trials are entered in the storage as waiting; a worker claims one by making it running, which storages do
atomically, so no trial runs twice. The lock of the run folder tells that its worker lives: a running trial whose lock
is free belonged to a worker that died, and the next worker continues it from its checkpoint. Workers of other machines
share the folder, or only the storage (a database); then each machine continues the trials whose folders it has.
"""

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from birdie.errors import BirdieError, ConfigError, OutputError
from birdie.gpt.run.dataset import open_shards
from birdie.gpt.train.checkpoint import remove_checkpoints
from birdie.lab.experiment import Experiment, resolved
from birdie.lab.ledger import RECIPE, RunRecord, read_run
from birdie.lab.space import Sweep
from birdie.system.callbacks import Notify, no_message
from birdie.system.child import Watch
from birdie.system.files import write_bytes
from birdie.system.locks import open_locked
from birdie.system.outputs import require_folder, require_own_folder, require_writable

SWEEP, JOURNAL = "sweep.toml", "study.log"
REASON = "reason"
_WORKER = ".worker"
_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


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


class _PrunedError(Exception):
    """The pruner stopped the trial."""


class _StoppedError(Exception):
    """The sweep is being stopped; its trials continue when it is started again."""


class SweepRun(Experiment):
    """A sweep and its folder.

    Args:
        sweep: as `read_sweep` returns it.
        folder: created if it does not exist.
        storage: URL of a database that workers share; None: a journal in the folder.
        notify: called with one-line messages.
    """

    def __init__(self, sweep: Sweep, folder: Path, storage: str | None = None, notify: Notify = no_message) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", ExperimentalWarning)
        super().__init__(folder)
        self.notify = notify
        self.recipe = resolved(sweep.recipe)
        self.sweep = sweep
        require_writable(require_own_folder(self.folder, SWEEP, folders=["runs"]))
        path, text = self.folder / SWEEP, sweep.to_toml()
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{self.folder} has another sweep (see {path}); give another --folder, or delete it")
        write_bytes(path, text.encode())
        self._in_folder = storage is None
        self._database = storage.partition("///")[2] if storage and storage.startswith("sqlite") else None
        self.name = self.folder.resolve().name
        self.storage = _open_storage(storage, self.folder / JOURNAL)
        study = self._study(NopPruner(), RandomSampler())
        known = study.user_attrs.get("sweep")
        if known is None:
            study.set_user_attr("sweep", text)
        elif known != text:
            raise ConfigError(f"the storage has another sweep of the name {self.name}; give a --folder of another name")

    def results(self) -> list[TrialResult]:
        """Return the trials by number."""
        trials = self._study(NopPruner(), RandomSampler()).get_trials(deepcopy=False)
        return [_result(trial) for trial in trials if trial.number < self.sweep.trials or trial.state.is_finished()]

    @property
    def best(self) -> TrialResult | None:
        """The complete trial with the lowest score."""
        done = [trial for trial in self.results() if trial.state == "complete" and trial.score is not None]
        return min(done, key=lambda trial: (trial.score, trial.number), default=None)

    def work(self, parallel: int = 1, on_trial: Callable[[TrialResult], None] = lambda _: None) -> None:
        """Work until no trial waits or lies abandoned; write the best recipe.

        Args:
            parallel: trials at a time on this machine; each has one of its GPUs, by turns, or a part of its cores.
            on_trial: called when a trial has ended.
        """
        if parallel < 1:
            raise ConfigError(f"{parallel} trials at a time cannot run; give --parallel 1 or more")
        open_shards(self.recipe.data)  # else every trial would fail
        study = self._study(NopPruner(), RandomSampler())
        while len(study.get_trials(deepcopy=False)) < self.sweep.trials:
            study.enqueue_trial({})
        stop = threading.Event()
        with ThreadPoolExecutor(parallel) as pool:
            workers = [pool.submit(self._work, slot, parallel, stop, on_trial) for slot in range(parallel)]
            try:
                wait(workers, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
        for worker in workers:
            with suppress(_StoppedError):
                worker.result()
        if (best := self.best) is not None and (path := self.run_folder(name_of(best.number)) / RECIPE).is_file():
            write_bytes(self.folder / "best.toml", path.read_bytes())

    def _work(self, slot: int, parallel: int, stop: threading.Event, on_trial: Callable[[TrialResult], None]) -> None:
        environment = _share(slot, parallel)
        while not stop.is_set():
            with self._claimed() as number:
                if number is None:
                    return
                on_trial(self._run_trial(number, environment, stop))

    def _run_trial(self, number: int, environment: dict[str, str], stop: threading.Event) -> TrialResult:
        study = self._study(_pruner(self.sweep), _sampler(self.sweep, number))
        trial = Trial(study, self._id(number))
        folder = self.run_folder(name_of(number))
        try:
            recipe, watch = resolved(self.sweep.suggest(trial)), self._watch(trial, folder, stop)
            record = self.run(recipe, folder.name, score=self.sweep.score, watch=watch, environment=environment)
            study.tell(trial, record.columns[self.sweep.score])
        except _PrunedError:
            study.tell(trial, state=TrialState.PRUNED)
        except OutputError:  # a full disk is no property of the trial
            raise
        except BirdieError as error:
            trial.set_user_attr(REASON, str(error))
            study.tell(trial, state=TrialState.FAIL)
        remove_checkpoints(folder / "checkpoints")  # the trial has ended, so nothing continues from them
        return _result(self.storage.get_trial(self._id(number)))

    def _watch(self, trial: Trial, folder: Path, stop: threading.Event) -> Watch:
        """Return what is called during the training: it reports new validations, and ends the trial by an exception."""
        reported = set(self.storage.get_trial(self._id(trial.number)).intermediate_values)
        last = self.recipe.train.last_step

        def watch() -> None:
            if stop.is_set():
                raise _StoppedError
            for line in _history(folder):
                step = int(line["step"])
                if step in reported or not math.isfinite(line.get("bpb", math.nan)):
                    continue
                reported.add(step)
                if step:  # the random weights of step 0 tell nothing
                    trial.report(line["bpb"], step)
                    if step < last and trial.should_prune():
                        raise _PrunedError

        return watch

    @contextmanager
    def _claimed(self) -> Iterator[int | None]:
        """Yield the number of a trial that this worker has until the end of the context; None if there is none."""
        number, lock = None, -1
        trials = self._study(NopPruner(), RandomSampler()).get_trials(deepcopy=False)
        unfinished = [one for one in trials if not one.state.is_finished() and one.number < self.sweep.trials]
        for trial in sorted(unfinished, key=lambda one: (one.state == TrialState.WAITING, one.number)):
            folder = self.run_folder(name_of(trial.number))
            if trial.state == TrialState.RUNNING and not (self._in_folder or (folder / RECIPE).is_file()):
                continue  # it belongs to a machine with another folder
            lock = self._lock(folder)
            if lock >= 0 and self._take(trial):
                number = trial.number
                break
            if lock >= 0:
                self._release(folder, lock)
        try:
            yield number
        finally:
            if number is not None:
                self._release(self.run_folder(name_of(number)), lock)

    def _take(self, trial: FrozenTrial) -> bool:
        """Make a waiting trial running; return whether this worker has it, given that it holds the lock."""
        with suppress(UpdateFinishedTrialError):
            if trial.state == TrialState.RUNNING:  # its worker died, unless it ended between the list and the lock
                return bool(self.storage.get_trial(self._id(trial.number)).state == TrialState.RUNNING)
            with self._one_at_a_time():
                return bool(self.storage.set_trial_state_values(self._id(trial.number), TrialState.RUNNING))
        return False

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Exclude the other workers if the storage is SQLite, which cannot lock a trial that is read."""
        if self._database is None:
            yield
            return
        lock = -1
        while lock < 0:
            try:
                lock = open_locked(Path(f"{self._database}.lock"))
            except BlockingIOError:
                time.sleep(0.01)
        try:
            yield
        finally:
            os.close(lock)

    def _release(self, folder: Path, lock: int) -> None:
        (folder / _WORKER).unlink(missing_ok=True)
        os.close(lock)
        with suppress(OSError):
            folder.rmdir()  # unless the trial has run here

    def _lock(self, folder: Path) -> int:
        require_writable(require_folder(folder, overwrite=True))
        try:
            return open_locked(folder / _WORKER)
        except BlockingIOError:
            return -1
        except OSError as error:
            raise OutputError(
                f"{folder} cannot be locked ({error.strerror or error}); give a --folder on a disk that has file locks"
            ) from error

    def _id(self, number: int) -> int:
        study = self.storage.get_study_id_from_name(self.name)
        return int(self.storage.get_trial_id_from_study_id_trial_number(study, number))

    def _study(self, pruner: BasePruner, sampler: BaseSampler) -> optuna.Study:
        return optuna.create_study(
            storage=self.storage, study_name=self.name, load_if_exists=True, sampler=sampler, pruner=pruner
        )


def _sampler(sweep: Sweep, number: int) -> BaseSampler:
    """Return a sampler of its own for each trial, so that a trial draws the same numbers whenever it runs."""
    if sweep.sampler == "grid":
        return PartialFixedSampler(sweep.grid()[number], RandomSampler())
    seed = sweep.seed * 100_003 + number
    if sweep.sampler == "random":
        return RandomSampler(seed=seed)
    return TPESampler(seed=seed, constant_liar=True)  # a running trial counts as poor: parallel ones keep apart


def _pruner(sweep: Sweep) -> BasePruner:
    if sweep.pruner == "median":
        return MedianPruner(n_startup_trials=5)
    if sweep.pruner == "hyperband":
        return HyperbandPruner(sweep.recipe.validation.every, sweep.recipe.train.last_step)
    return NopPruner()


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


def _history(folder: Path) -> list[dict[str, float]]:
    return read_run(folder).history if (folder / RECIPE).is_file() else []


def _result(trial: FrozenTrial) -> TrialResult:
    step = trial.last_step
    score = trial.value if trial.state == TrialState.COMPLETE else trial.intermediate_values.get(step or 0)
    reason = str(trial.user_attrs.get(REASON, ""))
    return TrialResult(trial.number, _STATES[trial.state], score, step, dict(trial.params), reason)


def name_of(number: int) -> str:
    """Return the name of the run of a trial."""
    return f"{number:04d}"


def record_of(run: SweepRun, result: TrialResult) -> RunRecord | None:
    """Return the run of a trial, if this machine has its folder."""
    folder = run.run_folder(name_of(result.number))
    return read_run(folder) if (folder / RECIPE).is_file() else None
