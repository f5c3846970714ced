"""A run in a folder, around the functions of `birdie.gpt.run.program`; callers consume events, nothing is printed.

    Run(recipe, folder) ── train() ──► Started, Step, Validated, Saved … ──► model
            │                                                                  │
            ├── calibrate() ──► sensitivity of the loss ─┐                     │
            └── export(path) ────────────────────────────┴──► model.birdie ◄───┘
                                                                   └──► evaluation

What a run adds to the program: the folder and its lock, preflight checks, checkpoints, metrics, a profile, and errors
of one rank on all. A run folder holds `recipe.toml`, `history.jsonl`, `checkpoints/` and the files of `run_folder`,
after the export `model.birdie`, `checkpoints.birdie/` if every checkpoint is kept, and `profile/` if steps were
profiled; while a process uses it, `.lock.holder` says which.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from birdie.artifact import KIND, Summary, inspect, link_paths
from birdie.chain import Chain
from birdie.compress import parse_size
from birdie.errors import BirdieError, ConfigError, DataError, OutputError, WeightsError
from birdie.gpt.run import history, preflight, program
from birdie.gpt.run.events import Checked, Event, Interrupted, PreflightCheck, Profiled, Saved, Started, Validated
from birdie.gpt.run.float_weights import Trained, length_of, save_float
from birdie.gpt.run.gpt_calibration import Calibration
from birdie.gpt.run.program import Resumable
from birdie.gpt.run.recipe_settings import Recipe, setting_names
from birdie.gpt.run.run_data import open_run_data
from birdie.gpt.run.run_folder import CHAIN, FOLDERS, RECIPE, Metrics, begin_folder, write_environment
from birdie.gpt.run.work import Work
from birdie.gpt.train.compile_report import CompileReport
from birdie.gpt.train.loop import Step
from birdie.gpt.train.profile import profile
from birdie.gpt.train.resuming import require_resumable
from birdie.gpt.train.training import Training
from birdie.gpt.train.training_checkpoint import (
    TrainingCheckpoint,
    candidate_paths,
    checkpoint_paths,
    load_checkpoint,
    remove_checkpoints,
    remove_newer,
    require_same_checkpoint,
    save_checkpoint,
    step_of,
)
from birdie.system.callbacks import Progress, Stop, never, no_progress
from birdie.system.context import Context
from birdie.system.device import choose_device
from birdie.system.files import remove_abandoned, write_bytes
from birdie.system.locks import locked_folder
from birdie.system.outputs import require_folder, require_output, require_writable
from birdie.system.provenance import StartupTimer
from birdie.system.structured import keep_damaged, read_toml

AFTER_TRAINING = frozenset(
    (
        *("data.path", "data.train", "data.val", "data.tokenizer", "validation.batch_tokens", "validation.max_tokens"),
        *("calibration", "export", "evaluation", "run", "device"),
    )
)
"""Settings and tables that may differ where a finished run is resumed: they do not say how it was trained."""


LENGTHS = {"train.iterations", "train.max_wallclock_seconds", "train.force_stop_step"}
"""Settings by which a finished run may be made longer."""


class Run:
    """A training run on this rank: its data, its model and its folder.

    Args:
        recipe: every setting.
        folder: the run folder, which is created if it does not exist.
        context: where it runs, and its log (fallbacks, warnings about the data, active techniques). None: one rank on
            the recipe's device.
        replace: True if an earlier run in the folder may be overwritten.
        profiled: True to profile some steps after warm-up, which does not change the run.
        origins: settings that somebody chose, as TABLE.SETTING → flag, variable or key of a file; None: those unlike
            their defaults. The preflight check names those that have no effect.

    Attributes:
        work: recipe, data and context, for `birdie.gpt.run.program`.
        model: the model that trains.
        trained: facts about the weights in `model`.
        calibration: result of the calibration, after `calibrate`.
        profile: milliseconds of a step by named range, if steps were profiled.
        last: the last validation, if there was one.
        startup: time spent before the training clock started.
        compiling: report on torch.compile, if it is used.
        checks: results of the preflight checks.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        context: Context | None = None,
        *,
        replace: bool = False,
        profiled: bool = False,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        context = context or Context(choose_device(recipe.device))
        self.folder, self.replace, self.profiled, self._origins = Path(folder), replace, profiled, origins
        self.startup = StartupTimer()
        self.compiling: CompileReport | None = None
        self.checks: list[PreflightCheck] = []
        with self.startup.part("data"):
            self.work = Work(recipe, open_run_data(recipe, context.notify), context)
        if context.world.is_main:
            require_writable(self.folder)
            for name in FOLDERS:  # no link leads out of the run
                require_folder(self.folder / name, overwrite=True)
        torch.manual_seed(recipe.train.seed)
        with self.startup.part("model"):
            self.model = self.work.new_model()
        self.steps = 0
        self._locked = False
        self.trained = Trained()
        self.calibration: Calibration | None = None
        self.profile: dict[str, float] | None = None
        self.last: Validated | None = None
        self._metrics: Metrics | None = None
        self._chain: Chain | None = None
        self._unlinked: dict[int, Path] = {}  # checkpoints that the chain lacks, as another process had it

    @property
    def recipe(self) -> Recipe:
        """Every setting of the run."""
        return self.work.recipe

    @property
    def context(self) -> Context:
        """Device, ranks and log."""
        return self.work.context

    @property
    def checkpoints(self) -> Path:
        """Folder of this run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def chain(self) -> Path:
        """Folder of the chain of all checkpoints of this run (birdie.chain), if the recipe asks for one."""
        return self.folder / CHAIN

    @property
    def profiles(self) -> Path:
        """Folder of this run's profile and trace."""
        return self.folder / "profile"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the run folder for this process; every rank must enter it, and `train` does so if the caller has not.

        Temporary files that a killed process left in the folder are removed.
        """
        if self._locked:
            yield
            return
        with ExitStack() as stack:
            refusal = ""
            if self.context.world.is_main:
                try:
                    stack.enter_context(locked_folder(self.folder, self.context.notify))
                except ConfigError as error:
                    refusal = str(error)
            if refusal := self.context.world.broadcast(refusal):
                raise ConfigError(refusal)
            if self.context.world.is_main:
                begin_folder(self.folder)
                for folder in (self.folder, self.checkpoints, self.chain, self.profiles):
                    remove_abandoned(folder)
            self._locked = True
            stack.callback(setattr, self, "_locked", False)
            yield

    def train(
        self, *, resume: bool = False, stop: Stop = never, on_warmup: Progress = no_progress
    ) -> Generator[Event, None, None]:
        """Train to the last step, to the wall-clock cap, or until `stop()`; yield each event when it happens.

        Args:
            resume: continue from the latest checkpoint of the folder, if there is one. This is automatic if torchrun
                restarted all ranks and the checkpoint is from the same job.
            stop: called after every step; True on any rank ends the run on all ranks, after a checkpoint.
            on_warmup: called with (done, total) after each warm-up step.
        """
        work = replace(self.work, context=replace(self.context, stop=stop, progress=on_warmup))
        with self.locked():
            yield from self._train(work, resume)

    def _train(self, work: Work, resume: bool) -> Iterator[Event]:
        recipe, world, notify = self.recipe, self.context.world, self.context.notify
        job = world.broadcast(world.job)
        saved = self._common_checkpoint(resume, job)
        about = self._identity() | {"job": job}
        if seconds := recipe.reserved_seconds:
            left = recipe.training.max_wallclock_seconds
            notify(
                f"reserved {seconds:.1f} s of {left + seconds:g} s for calibration (calibration.reserve_seconds); "
                f"{left:.1f} s are left for training"
            )
        with self.startup.part("preflight"):  # before the clock starts
            self.checks = preflight.checked(self.work, self.folder, self._origins)
        yield Checked(tuple(self.checks))
        with program.training(work, self.model, saved) as training:
            if world.is_main:
                self._begin(training, saved)
            self.steps = training.number
            yield self._started(training)
            self._warm_up(training, work.context.progress)
            if self.profiled and not training.interrupted:
                yield from self._profile(training)
            yield from self._follow(work, training, about)
            if training.interrupted:
                yield Interrupted(training.number, self.checkpoints)
                return
            self.trained = program.finish(work, training, self.last)
            if self.compiling is not None:
                self.compiling.end_run()
            if world.is_main:
                self._keep(partial(save_float, self.folder, self.model.state_dict(), self.trained))

    def _begin(self, training: Training, saved: TrainingCheckpoint | None) -> None:
        """Bring the files of the folder to the step at which the run begins."""
        notify = self.context.notify
        if saved is not None:
            remove_newer(saved)
        else:  # a replaced run must not be resumed later
            if self.checkpoints.exists():
                remove_checkpoints(self.checkpoints)
            Chain(self.chain).remove_all()
        if self.recipe.run.checkpoint_deltas:
            self._chain = Chain(self.chain, follows_run=True, notify=notify)
            if saved is not None and saved.path is not None:  # killed before it was added
                self._keep(partial(self._link, saved.step, saved.path))
        different = self._stored_changes() if saved is not None else []
        for name, old, new in different:  # `Training` reports its own
            if name.partition(".")[0] not in ("train", "optimizer", "average", "bandit"):
                notify(f"resuming with {name} = {new}; the checkpoint was trained with {old}")
        resumed_at = None if saved is None else training.number
        write_environment(self.folder, self.work, resumed_at=resumed_at, changes=different)
        write_bytes(self.folder / RECIPE, self.recipe.to_toml().encode())
        step = training.number if saved is not None else -1
        history.truncate(self.folder, step, notify)
        self._metrics = Metrics(self.folder, step, notify)

    def _follow(self, work: Work, training: Training, about: Mapping[str, Any]) -> Iterator[Event]:
        """Train, and keep what happens in the folder."""
        save_every = self.recipe.run.checkpoint_every
        for event in program.follow(work, training):
            if isinstance(event, Resumable):
                step = event.step
                if step.stopping or (save_every and step.number % save_every == 0):
                    yield from self._saved(training, about)
                continue
            if isinstance(event, Step):
                self.steps = event.number
                if self._metrics is not None and (self.recipe.run.logs(event.number) or event.stopping):
                    self._keep(partial(self._metrics.record, event))
            else:
                self.last = event
                if self.context.world.is_main:
                    entry = history.HistoryEntry(event.step, event.train_ms, event.score.bpb)
                    self._keep(partial(history.record, self.folder, entry, self.context.notify))
            yield event
        if training.interrupted and training.number == 0:  # stopped during warm-up
            yield from self._saved(training, about)

    def _keep(self, write: Callable[[], None]) -> None:
        """Call `write`; training must not end because of a file that it does not need."""
        try:
            write()
        except (OSError, BirdieError) as error:
            self.context.notify(f"warning: the run goes on without a file of its folder: {error}")

    def _saved(self, loop: Training, about: Mapping[str, Any]) -> Iterator[Saved]:
        """Write a checkpoint; if that fails, a run that is not being stopped continues without it."""
        try:
            checkpoint, keep = loop.checkpoint(about), self.recipe.run.keep_checkpoints
            main = self.context.world.is_main
            path = save_checkpoint(self.checkpoints, checkpoint, keep=keep) if main else self.checkpoints
        except OutputError as error:
            if loop.interrupted:
                raise
            self.context.notify(f"no checkpoint of step {loop.number}, training goes on: {error}")
        else:
            self._keep(partial(self._link, loop.number, path))
            yield Saved(loop.number, path)

    def _link(self, step: int, path: Path) -> None:
        """Add a checkpoint to the chain of the run, if it has one and this rank writes it."""
        if self._chain is None:
            return
        began = time.perf_counter()
        self._chain.require_writable()
        on_disk = {step_of(other): other for other in checkpoint_paths(self.checkpoints)}
        self._unlinked = {number: on_disk[number] for number in self._unlinked if number in on_disk} | {step: path}
        for row in self._chain.extend(self._unlinked, on_disk=on_disk):
            if row.step is not None:
                self._unlinked.pop(row.step, None)
            if row.added:
                kind = f"difference to {Path(row.base).stem}" if row.base else "full"
                took = f"{time.perf_counter() - began:.1f} s"
                share, file = f"{row.bytes:,} of {row.checkpoint_bytes:,} bytes", self.chain / row.name
                self.context.notify(f"step {row.step}  {share} in {file}, {kind}, {took}")

    def _warm_up(self, loop: Training, on_step: Progress) -> None:
        """Warm up, and report what was compiled and the start-up time."""
        world, notify = self.context.world, self.context.notify
        if loop.compiled:
            self.compiling = CompileReport(notify)
        with self.startup.part("warm-up"):
            loop.warm_up(on_step)
        if self.compiling is not None:
            if world.any(loop.runs_eagerly, self.context.device) and not loop.runs_eagerly:
                notify("torch.compile failed on another rank, which runs eagerly and slows all ranks down")
            self.compiling.end_warmup()
        notify(self.startup.line())

    def _profile(self, loop: Training) -> Iterator[Profiled]:
        """Profile steps and undo them; every rank takes them, and rank 0 writes the profile."""
        self.profile = profile(loop, self.context.device, self.profiles if self.context.world.is_main else None)
        if self.profile is not None:
            yield Profiled(self.profile, self.profiles)

    def _common_checkpoint(self, resume: bool, job: str) -> TrainingCheckpoint | None:
        """Return the checkpoint to resume from, the same on all ranks; an error on any rank ends the run on all."""
        checkpoint, failure = None, None
        restarted = self.context.world.max_int(self.context.world.restarts, self.context.device) > 0
        try:
            checkpoint = self._checkpoint(resume, restarted, job)
        except BirdieError as error:
            failure = error
        if self.context.world.any(failure is not None, self.context.device):
            raise failure or ConfigError("another rank cannot start from the run folder; see the message of that rank")
        require_same_checkpoint(checkpoint, self.checkpoints, self.context.world)
        return checkpoint

    def _checkpoint(self, resume: bool, restarted: bool, job: str) -> TrainingCheckpoint | None:
        """Return the checkpoint to resume from, if any."""
        if not candidate_paths(self.checkpoints):
            if link_paths(self.chain) and not self.replace:
                raise ConfigError(
                    f"{self.chain} holds checkpoints of a run, and {self.checkpoints} none; restore one there by "
                    "birdie decompress and continue it with --resume, or choose another --folder"
                )
            if resume:
                self.context.notify(f"there is no checkpoint in {self.checkpoints}; starting from step 0")
            return None

        def require(newest: TrainingCheckpoint) -> None:
            if resume or newest.about.get("job") == job:
                self._require_resumable(newest)

        checkpoint = None
        if resume or restarted:
            self.require_unchanged()
            checkpoint = load_checkpoint(self.checkpoints, notify=self.context.notify, require=require)
        if checkpoint is None or not (resume or checkpoint.about.get("job") == job):
            if not self.replace:
                raise ConfigError(
                    f"{self.folder} already holds a run; continue it with --resume, or choose another --folder"
                )
            return None
        return checkpoint

    def _require_resumable(self, checkpoint: TrainingCheckpoint) -> None:
        """Check that this run can go on from `checkpoint`, whatever its files hold."""
        recipe, about = self.recipe, checkpoint.about
        for name, value in self._identity().items():
            saved = about.get(name, value)
            if saved != value:
                raise ConfigError(
                    f"cannot resume: {name} is {value}, but the run in {self.folder} has {str(saved)[:200]}"
                )
        try:
            require_resumable(checkpoint, self.model, recipe.tables)
            chunks, most = checkpoint.loader.get("spans"), checkpoint.step * recipe.train.accumulation
            if type(chunks) is not int or not checkpoint.step <= chunks <= most:
                raise WeightsError(f"its data are at chunk {str(chunks)[:40]} after {checkpoint.step} steps")
        except WeightsError as error:
            raise WeightsError(f"checkpoint {checkpoint.path} cannot be resumed: {error}") from error

    def require_unchanged(self) -> None:
        """Raise an error if the folder holds a finished run that was trained with other settings than the recipe's.

        To resume it would claim these settings for weights that were trained without them. Those of the export and of
        scoring may differ, because both happen again; a longer run may go on with the training.
        """
        paths = checkpoint_paths(self.checkpoints)
        steps, train_ms = length_of(self.folder) or (-1, 0.0)
        if not paths or steps != step_of(paths[0]):
            return
        try:
            different, train = self._changes(), self.recipe.train
        except (DataError, ConfigError):  # a damaged recipe, of which a copy is kept
            return
        goes_on = steps < train.last_step and (train.cap_ms is None or train_ms < train.cap_ms)
        if different and not (goes_on and {name for name, _, _ in different} <= LENGTHS):
            names = ", ".join(f"{name} {new}, not {old}" for name, old, new in different)
            raise ConfigError(
                f"cannot resume: the run in {self.folder} is finished, and the recipe differs from its own: {names}; "
                "choose another --folder, or leave that out"
            )

    def _changes(self) -> list[tuple[str, Any, Any]]:
        """Return (setting, value in the folder's recipe, value now) of settings of training that differ."""
        path = self.folder / RECIPE
        if not path.exists():
            return []
        stored = Recipe.from_dict(read_toml(path))
        after = AFTER_TRAINING if not self.recipe.qat.budget else AFTER_TRAINING - {"export", "calibration"}
        names = [name for name in setting_names(self.recipe.to_dict()) if not {name, name.partition(".")[0]} & after]
        rows = ((name, attrgetter(name)(stored), attrgetter(name)(self.recipe)) for name in sorted(names))
        return [row for row in rows if row[1] != row[2]]

    def _stored_changes(self) -> list[tuple[str, Any, Any]]:
        """Return the changes of a run that goes on; a damaged recipe is kept in a copy, and tells none."""
        try:
            return self._changes()
        except (DataError, ConfigError) as error:
            keep_damaged(self.folder / RECIPE, str(error), self.context.notify)
            return []

    def _identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with its checkpoint: model, tokenizer, and the order of the data."""
        values = self.recipe.to_dict()
        train = ("train_batch_tokens", "train_seq_len", "mixed_seq_lens", "accumulation", "seed")
        return {
            **{f"model.{name}": value for name, value in values["model"].items()},
            **{f"train.{name}": values["train"][name] for name in train},
            "data.order": values["data"]["order"],
            "tokenizer": self.work.data.tokenizer.digest,
            "train_tokens": self.work.data.dataset.train_tokens,
        }

    def _started(self, loop: Training) -> Started:
        return Started(
            parameters=sum(p.numel() for p in self.model.parameters()),
            world_size=self.context.world.size,
            micro_steps=loop.micro_steps,
            dataset=self.work.data.dataset.train[0].parent.name,
            train_shards=len(self.work.data.dataset.train),
            train_tokens=self.work.data.dataset.train_tokens,
            val_tokens=len(self.work.data.text.tokens),
            device=str(self.context.device),
            attention_kernel=self.model.kernels.name,
            compute_dtype=loop.in_effect["compute_dtype"],
            newton_schulz_dtype=loop.in_effect["newton_schulz_dtype"],
            compiled=loop.compiled,
            groups=loop.groups,
            resumed_at=loop.number,
        )

    def calibrate(self, progress: Progress | None = None) -> Calibration | None:
        """Calibrate the model, once, if the recipe has calibration; `export` uses the result.

        Call it on rank 0 alone, which alone exports; the other ranks need not wait.
        """
        if self.calibration is None:
            self.calibration = program.calibrate(self.work, self.model, progress)
        return self.calibration

    def export(
        self, path: Path | None = None, *, budget: int | None = None, progress: Progress | None = None
    ) -> Summary:
        """Compress the trained weights into one file, by the recipe's schemes or into at most `budget` bytes.

        Calibrates first if the recipe has calibration; several exports share one calibration. Call it on rank 0 alone.

        Args:
            path: of the artifact; None: `model.birdie` in the run folder.
            budget: maximum bytes of the file; None: that of the recipe, if it has one.
            progress: called with (done, total).
        """
        path = require_output(path or self.folder / "model.birdie", kind=KIND, overwrite=None)
        require_writable(path.parent)
        if budget is None and self.recipe.export.budget is not None:
            budget = parse_size(self.recipe.export.budget)
        program.export(
            self.work,
            self.model,
            replace(self.trained, steps=self.steps),
            path,
            budget=budget,
            calibration=self.calibrate(),
            progress=progress,
        )
        return inspect(path)
