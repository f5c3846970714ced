"""End-to-end pipeline of a run, from shards to an artifact; callers consume events, nothing is printed.

    Run(recipe, folder) ── train() ──► Started, Step, Validated, Saved … ──► model
            │                                                                  │
            ├── calibrate() ──► sensitivity of the loss ─┐                     │
            └── export(path) ────────────────────────────┴──► model.birdie ◄───┘
                                                                   └──► evaluation

A run folder holds `recipe.toml`, `history.jsonl`, `checkpoints/` and the files of `run_folder`, after the export
`model.birdie`, `checkpoints.birdie/` if every checkpoint is kept, and `profile/` if steps were profiled; while a
process uses it, `.lock.holder` says which.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birdie.artifact.links import link_paths
from birdie.artifact.save import save
from birdie.artifact.summary import Summary
from birdie.chain.chain import Chain
from birdie.compress.rate.target import parse_size
from birdie.errors import BirdieError, ConfigError, DataError, OutputError, WeightsError
from birdie.gpt.data.batches import Batches
from birdie.gpt.model.attention_kernels import best_kernels
from birdie.gpt.model.documents import DocumentFinder
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run import history, preflight
from birdie.gpt.run.calibration import Calibration, calibrate_gpt
from birdie.gpt.run.dataset import open_run_data
from birdie.gpt.run.events import Check, Checked, Event, Interrupted, Profiled, Saved, Started, Validated
from birdie.gpt.run.float_weights import length_of, load_float, save_float
from birdie.gpt.run.onset import not_begun
from birdie.gpt.run.recipe import Recipe, setting_names
from birdie.gpt.run.run_folder import CHAIN, FOLDERS, RECIPE, Metrics, begin_folder, write_environment
from birdie.gpt.score import evaluator
from birdie.gpt.score.accumulator import Score
from birdie.gpt.train.checkpoint import (
    Checkpoint,
    candidate_paths,
    checkpoint_paths,
    load_checkpoint,
    remove_checkpoints,
    remove_newer,
    require_same_checkpoint,
    save_checkpoint,
    step_of,
)
from birdie.gpt.train.compile_report import CompileReport
from birdie.gpt.train.profile import profile
from birdie.gpt.train.resuming import require_resumable
from birdie.gpt.train.training import Training
from birdie.small.qat.fake_quantization import FakeQuantization, storage_rules
from birdie.small.stored_training import BudgetFile, StoredTraining
from birdie.system import provenance
from birdie.system.callbacks import Notify, Progress, StepHook, Stop, never, no_message, no_progress
from birdie.system.device import choose_device, choose_dtype
from birdie.system.distributed import World
from birdie.system.files import remove_abandoned, write_bytes
from birdie.system.locks import locked_folder
from birdie.system.outputs import require_folder, require_writable
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
        replace: True if an earlier run in the folder may be overwritten.
        profiled: True to profile some steps after warm-up, which does not change the run.
        world: this rank and its peers.
        notify: called with one-line messages for the log (fallbacks, warnings about the data, active techniques).
        log: file of the log, if it is not `log.txt` in the folder.
        origins: settings that somebody chose, as TABLE.SETTING → flag, variable or key of a file; None: those unlike
            their defaults. The preflight check names those that have no effect.

    Attributes:
        training: training settings; once training has begun, with the cap that calibration leaves.
        reserved: seconds of the cap that calibration has, once training has begun.
        calibration: result of the calibration, after `calibrate`.
        profile: milliseconds of a step by named range, if steps were profiled.
        weights: the weights in `model`: "the last weights", or the name of their average.
        last: the last validation, if there was one.
        startup: time spent before the training clock started.
        compiling: report on torch.compile, if it is used.
        checks: results of the preflight checks.
        not_begun: a sentence for each technique that the finished run had not begun.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        replace: bool = False,
        profiled: bool = False,
        world: World | None = None,
        notify: Notify = no_message,
        log: Path | None = None,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self.recipe, self.folder, self.replace, self.notify = recipe, Path(folder), replace, notify
        self.profiled, self._log, self._origins = profiled, log, origins
        self.world = world or World()
        self.device = choose_device(recipe.device, self.world.local_rank)
        self.startup = StartupTimer()
        self.compiling: CompileReport | None = None
        self.checks: list[Check] = []
        with self.startup.part("data"):
            data = open_run_data(recipe, notify)
        self.dataset, self.tokenizer = data.dataset, data.tokenizer
        self.val_text = data.text
        if self.world.is_main:
            require_writable(self.folder)
            for name in FOLDERS:  # no link leads out of the run
                require_folder(self.folder / name, overwrite=True)
        torch.manual_seed(recipe.train.seed)
        with self.startup.part("model"):
            self.model = GPT(recipe.model).to(self.device)
        self.model.compute_dtype = choose_dtype(recipe.train.compute_dtype, self.device)
        self.model.kernels = best_kernels(self.device, self.model.compute_dtype, recipe.model.head_dim)
        self.steps = 0
        self._locked = False
        self.training, self.reserved = recipe.train, 0.0
        self.calibration: Calibration | None = None
        self.profile: dict[str, float] | None = None
        self.weights = "the last weights"
        self.last: Validated | None = None
        self.not_begun: list[str] = []
        self._metrics: Metrics | None = None
        self._chain: Chain | None = None
        self._unlinked: dict[int, Path] = {}  # checkpoints that the chain lacks, as another process had it

    @property
    def checkpoints(self) -> Path:
        """Folder of this run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def chain(self) -> Path:
        """Folder of the chain of all checkpoints of this run (birdie.chain.chain), if the recipe asks for one."""
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
            if self.world.is_main:
                try:
                    stack.enter_context(locked_folder(self.folder, self.notify))
                except ConfigError as error:
                    refusal = str(error)
            if refusal := self.world.broadcast(refusal):
                raise ConfigError(refusal)
            if self.world.is_main:
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
        with self.locked():
            yield from self._train(resume, stop, on_warmup)

    def _train(self, resume: bool, stop: Stop, on_warmup: Progress) -> Iterator[Event]:
        job = self.world.broadcast(self.world.job)
        checkpoint = self._common_checkpoint(resume, job)
        about = self._identity() | {"job": job}
        settings = self.training = self.recipe.training
        self.reserved = self.recipe.reserved_seconds
        if self.reserved:
            cap = self.recipe.train.max_wallclock_seconds
            self.notify(f"reserved {self.reserved:.1f} s of {cap:g} s for calibration (calibration.reserve_seconds)")
        yield self._checked()
        batches = Batches(
            self.dataset.train,
            batch_tokens=settings.train_batch_tokens,
            seq_len=settings.train_seq_len,
            accumulation=settings.accumulation,
            rank=self.world.rank,
            world_size=self.world.size,
            order=self.recipe.data.order,
            seed=settings.seed,
            bos_id=self.recipe.model.bos_id,
            vocab_size=self.recipe.model.vocab_size,
            pin_memory=self.device.type == "cuda",
        )
        prepared = self._quantized_training()
        hooks: list[StepHook] = [*([] if prepared is None else [prepared]), *self.model.step_hooks(self.notify)]
        try:
            training = Training(
                self.model,
                batches,
                settings,
                self.recipe.optimizer,
                average=self.recipe.average,
                bandit=self.recipe.bandit,
                hooks=hooks,
                documents=self._documents(),
                saved=checkpoint,
                world=self.world,
                device=self.device,
                stop=stop,
                notify=self.notify,
            )
            if self.world.is_main:
                if checkpoint is not None:
                    remove_newer(checkpoint)
                else:  # a replaced run must not be resumed later
                    if self.checkpoints.exists():
                        remove_checkpoints(self.checkpoints)
                    Chain(self.chain).remove_all()
                if self.recipe.run.checkpoint_deltas:
                    self._chain = Chain(self.chain, follows_run=True, notify=self.notify)
                    if checkpoint is not None and checkpoint.path is not None:  # killed before it was added
                        self._keep(partial(self._link, checkpoint.step, checkpoint.path))
                different = self._stored_changes() if checkpoint is not None else []
                for name, old, new in different:  # `Training` reports its own
                    if name.partition(".")[0] not in ("train", "optimizer", "average", "bandit"):
                        self.notify(f"resuming with {name} = {new}; the checkpoint was trained with {old}")
                write_environment(
                    self.folder,
                    self.recipe.digest,
                    settings.seed,
                    self.device,
                    self.world,
                    resumed_at=None if checkpoint is None else training.number,
                    changes=different,
                    log=self._log,
                    notify=self.notify,
                )
                write_bytes(self.folder / RECIPE, self.recipe.to_toml().encode())
                step = training.number if checkpoint is not None else -1
                history.truncate(self.folder, step, self.notify)
                self._metrics = Metrics(self.folder, step, self.notify)
            yield from self._follow(training, about, on_warmup)
        finally:
            batches.close()
            if prepared is not None:
                prepared.remove()

    def _quantized_training(self) -> FakeQuantization | StoredTraining | None:
        """Prepare the model for quantization-aware training, if the recipe has it."""
        qat, settings = self.recipe.qat, self.recipe.calibration
        if not qat.budget:
            return qat.prepare(self.model, self.notify) if qat.enabled else None
        export = self.recipe.export
        assert export.budget is not None
        return StoredTraining(
            self.model,
            BudgetFile(parse_size(export.budget), export.pinned(), export.coder, self.metadata()),
            lambda state: calibrate_gpt(self.recipe, state, settings, device=self.device, symmetries=False).result,
            settings=qat,
            world=self.world,
            notify=self.notify,
        )

    def _follow(self, loop: Training, about: Mapping[str, Any], on_warmup: Progress) -> Iterator[Event]:
        self.steps = loop.number
        yield self._started(loop)
        save_every, validate_every = self.recipe.run.checkpoint_every, self.recipe.validation.every
        validated = None
        self._warm_up(loop, on_warmup)
        if self.profiled and not loop.interrupted:
            yield from self._profile(loop)
        if loop.number == 0 and validate_every and not loop.interrupted:
            validated = 0
            yield self._validated(loop)
        # when the last step began; where none follows a resumed run's, at its mean pace
        began_ms, ended_ms = loop.clock.ms * max(0, loop.number - 1) / max(1, loop.number), loop.clock.ms
        for step in loop:
            began_ms, ended_ms = ended_ms, step.train_ms
            self.steps = step.number
            if self._metrics is not None and (self.recipe.run.logs(step.number) or step.stopping):
                self._keep(partial(self._metrics.record, step))
            yield step
            if not loop.interrupted and (step.stopping or (validate_every and step.number % validate_every == 0)):
                validated = step.number
                yield self._validated(loop)
            if step.stopping or (save_every and step.number % save_every == 0):
                yield from self._saved(loop, about)
        if loop.interrupted:
            if self.steps == 0:  # stopped during warm-up
                yield from self._saved(loop, about)
            yield Interrupted(loop.number, self.checkpoints)
        elif validated != loop.number:  # resumed after the last step
            yield self._validated(loop)
        if not loop.interrupted:
            self.weights = str(loop.average)
            for line in (*loop.finish(), *self.model.diagnostics()):
                self.notify(f"active: {line}")
            averaged = self.weights != "the last weights"
            self.not_begun = list(not_begun(self.recipe, self.training, self.steps, began_ms, averaged=averaged))
            for line in self.not_begun:
                self.notify(f"never began: {line}")
            if self.compiling is not None:
                self.compiling.end_run()
            if self.world.is_main:
                state = self.model.state_dict()
                last = self.last
                score, train_ms = (None, 0.0) if last is None else (last.score, last.train_ms)
                self._keep(partial(save_float, self.folder, state, score, train_ms, self.steps, self.weights))

    def _keep(self, write: Callable[[], None]) -> None:
        """Call `write`; training must not end because of a file that it does not need."""
        try:
            write()
        except (OSError, BirdieError) as error:
            self.notify(f"warning: the run goes on without a file of its folder: {error}")

    def restore(self) -> None:
        """Load the weights of the folder's finished run, as if it had been trained now: for another export."""
        state, self.steps, self.weights, train_ms, score = load_float(self.folder)
        self.last = None if score is None else Validated(self.steps, train_ms, score, self.weights)
        try:
            self.model.load_state_dict(state)
        except RuntimeError as error:
            raise WeightsError(
                f"the weights in {self.folder} are of another model than the recipe's; leave [model] as it was trained"
            ) from error

    def _saved(self, loop: Training, about: Mapping[str, Any]) -> Iterator[Saved]:
        """Write a checkpoint; if that fails, a run that is not being stopped continues without it."""
        try:
            checkpoint, keep = loop.checkpoint(about), self.recipe.run.keep_checkpoints
            main = self.world.is_main
            path = save_checkpoint(self.checkpoints, checkpoint, keep=keep) if main else self.checkpoints
        except OutputError as error:
            if loop.interrupted:
                raise
            self.notify(f"no checkpoint of step {loop.number}, training goes on: {error}")
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
                self.notify(f"step {row.step}  {share} in {file}, {kind}, {took}")

    def _checked(self) -> Checked:
        """Run the preflight checks before the clock starts; a failure on any rank ends the run on all ranks."""
        with self.startup.part("preflight"):
            facts = preflight.collect_facts(
                self.recipe, self.folder, self.dataset.train, self.dataset.train_tokens, self.device, self.world
            )
            self.checks = preflight.run_checks(self.recipe, facts, self._origins)
            failed = any(check.state == "fail" for check in self.checks)
            if self.world.any(failed, self.device):
                preflight.require_no_failure(self.checks)
                raise ConfigError("the preflight check of another rank failed; see the message of that rank")
        return Checked(tuple(self.checks))

    def _warm_up(self, loop: Training, on_step: Progress) -> None:
        """Warm up, and report what was compiled and the start-up time."""
        if loop.compiled:
            self.compiling = CompileReport(self.notify)
        with self.startup.part("priming"):
            loop.warm_up(on_step)
        if self.compiling is not None:
            if self.world.any(loop.runs_eagerly, self.device) and not loop.runs_eagerly:
                self.notify("torch.compile failed on another rank, which runs eagerly and slows all ranks down")
            self.compiling.end_warmup()
        self.notify(self.startup.line())

    def _profile(self, loop: Training) -> Iterator[Profiled]:
        """Profile steps and undo them; every rank takes them, and rank 0 writes the profile."""
        self.profile = profile(loop, self.device, self.profiles if self.world.is_main else None)
        if self.profile is not None:
            yield Profiled(self.profile, self.profiles)

    def _validated(self, loop: Training) -> Validated:
        """Score the weights that would be exported now, the average if there is one, and record it in the history."""
        with loop.average.in_model():
            score = self.score(self.model)
        if self.world.is_main:
            entry = history.Entry(loop.number, loop.clock.ms, score.bpb)
            self._keep(partial(history.record, self.folder, entry, self.notify))
        self.last = Validated(loop.number, loop.clock.ms, score, str(loop.average))
        return self.last

    def _common_checkpoint(self, resume: bool, job: str) -> Checkpoint | None:
        """Return the checkpoint to resume from, the same on all ranks; an error on any rank ends the run on all."""
        checkpoint, failure = None, None
        restarted = self.world.max_int(self.world.restarts, self.device) > 0
        try:
            checkpoint = self._checkpoint(resume, restarted, job)
        except BirdieError as error:
            failure = error
        if self.world.any(failure is not None, self.device):
            raise failure or ConfigError("another rank cannot start from the run folder; see the message of that rank")
        require_same_checkpoint(checkpoint, self.checkpoints, self.world)
        return checkpoint

    def _checkpoint(self, resume: bool, restarted: bool, job: str) -> Checkpoint | None:
        """Return the checkpoint to resume from, if any."""
        if not candidate_paths(self.checkpoints):
            if link_paths(self.chain) and not self.replace:
                raise ConfigError(
                    f"{self.chain} holds checkpoints of a run, and {self.checkpoints} none; restore one there by "
                    "birdie decompress and continue it with --resume, or choose another --folder"
                )
            if resume:
                self.notify(f"there is no checkpoint in {self.checkpoints}; starting from step 0")
            return None

        def require(newest: Checkpoint) -> None:
            if resume or newest.about.get("job") == job:
                self._require_resumable(newest)

        checkpoint = None
        if resume or restarted:
            self.require_unchanged()
            checkpoint = load_checkpoint(self.checkpoints, notify=self.notify, require=require)
        if checkpoint is None or not (resume or checkpoint.about.get("job") == job):
            if not self.replace:
                raise ConfigError(
                    f"{self.folder} already holds a run; continue it with --resume, or choose another --folder"
                )
            return None
        return checkpoint

    def _require_resumable(self, checkpoint: Checkpoint) -> None:
        """Check that this run can go on from `checkpoint`, whatever its files hold."""
        recipe, about = self.recipe, checkpoint.about
        for name, value in self._identity().items():
            saved = about.get(name, value)
            if saved != value:
                raise ConfigError(
                    f"cannot resume: {name} is {value}, but the run in {self.folder} has {str(saved)[:200]}"
                )
        try:
            require_resumable(checkpoint, self.model, recipe.optimizer, recipe.average, recipe.bandit)
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
            keep_damaged(self.folder / RECIPE, str(error), self.notify)
            return []

    def _documents(self) -> DocumentFinder | None:
        """Return the finder of document boundaries, if rows are packed or the attention kernel takes boundaries."""
        config, packed = self.recipe.model, self.recipe.data.order == "packed"
        if not packed and (not config.isolate_documents or self.model.kernels.varlen is None):
            return None
        return DocumentFinder(config.bos_id, self.device, packed=packed, notify=self.notify)

    def _identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with its checkpoint: model, tokenizer, and the order of the data."""
        values = self.recipe.to_dict()
        train = ("train_batch_tokens", "train_seq_len", "mixed_seq_lens", "accumulation", "seed")
        return {
            **{f"model.{name}": value for name, value in values["model"].items()},
            **{f"train.{name}": values["train"][name] for name in train},
            "data.order": values["data"]["order"],
            "tokenizer": self.tokenizer.digest,
            "train_tokens": self.dataset.train_tokens,
        }

    def _started(self, loop: Training) -> Started:
        return Started(
            parameters=sum(p.numel() for p in self.model.parameters()),
            world_size=self.world.size,
            micro_steps=loop.micro_steps,
            dataset=self.dataset.train[0].parent.name,
            train_shards=len(self.dataset.train),
            train_tokens=self.dataset.train_tokens,
            val_tokens=len(self.val_text.tokens),
            device=str(self.device),
            attention_kernel=self.model.kernels.name,
            compute_dtype=loop.in_effect["compute_dtype"],
            newton_schulz_dtype=loop.in_effect["newton_schulz_dtype"],
            compiled=loop.compiled,
            groups=loop.groups,
            resumed_at=loop.number,
        )

    def score(self, model: GPT) -> Score:
        """Score `model` on the validation tokens; all ranks share the work and return the same score."""
        training = model.training
        model.eval()  # in training mode, QAT would score quantized weights
        try:
            return evaluator.score(
                model,
                self.val_text,
                train_seq_len=self.recipe.train.train_seq_len,
                batch_tokens=self.recipe.validation.batch_tokens,
                device=self.device,
                world=self.world,
            ).score
        finally:
            model.train(training)

    def model_of(self, state: Mapping[str, Tensor]) -> GPT:
        """Return a second model with the weights `state` and this run's shape, device and precision."""
        model = GPT(self.recipe.model)
        model.load_state_dict(state)
        model.compute_dtype, model.kernels = self.model.compute_dtype, self.model.kernels
        return model.to(self.device)

    def calibrate(self, progress: Progress | None = None) -> Calibration | None:
        """Calibrate the model, once, if the recipe has calibration; `export` uses the result.

        Call it on rank 0 alone, which alone exports; the other ranks need not wait.
        """
        settings = self.recipe.calibration
        if self.calibration is None and settings.data != "none":
            state = {name: weight.detach().cpu() for name, weight in self.model.state_dict().items()}
            calibration = calibrate_gpt(self.recipe, state, settings, progress=progress, device=self.device)
            source = "its own samples" if settings.data == "own" else "training data"
            budget = f"; {self.reserved:.1f} s were reserved" if self.training.cap_ms else ""
            self.notify(
                f"calibrated on {calibration.tokens:,} tokens of {source} in {calibration.seconds:.1f} s{budget}"
            )
            self.calibration = calibration
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
        settings = self.recipe.export
        if budget is None and settings.budget is not None:
            budget = parse_size(settings.budget)
        calibration, path = self.calibrate(), path or self.folder / "model.birdie"
        return save(
            self.model,
            path,
            scheme=[
                *storage_rules(self.recipe.qat, self.model),
                *(settings.schemes() if budget is None else settings.pinned()),
            ],
            budget=budget,
            coder=settings.coder,
            calibration=None if calibration is None else calibration.result,
            metadata=self.metadata(),
            progress=progress,
        )

    def metadata(self) -> dict[str, Any]:
        """Return the artifact's metadata: what scoring and sampling need, and the provenance of the weights."""
        tokenizer = {
            "kind": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "sha256": self.tokenizer.digest,
        }
        return {
            "model": "gpt",
            **({"weights": self.weights} if self.recipe.average.kind != "none" else {}),
            "recipe": self.recipe.to_dict(),
            "tokenizer": tokenizer,
            "steps": self.steps,
            "device": str(self.device),
            "versions": provenance.versions(),
            "commit": provenance.commit(),
        }
