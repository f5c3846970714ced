"""The road from shards to an artifact, without printing: callers consume events.

    Run(recipe, folder) ── train() ──► Started, Step, Validated, Saved … ──► model
            │                                                                  │
            ├── calibrate() ──► what the loss minds ─┐                         │
            └── export(path) ────────────────────────┴──► model.birdie ◄───────┘
                                                               └──► evaluation

A run folder holds `recipe.toml`, `history.jsonl`, `checkpoints/` and, once exported, `model.birdie`; where steps were
profiled, `profile/`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birdie.artifact.save import save
from birdie.artifact.summary import Summary
from birdie.compress.rate.size import parse_size
from birdie.data.batches import Batches
from birdie.errors import ConfigError, OutputError
from birdie.model.attention_kernels import best_kernels
from birdie.model.documents import DocumentFinder
from birdie.model.gpt import GPT
from birdie.run import history, preflight
from birdie.run.calibration import Calibrated, calibrated
from birdie.run.calibration_budget import MARGIN, expected, less_reserve
from birdie.run.dataset import read
from birdie.run.events import Checked, Event, Interrupted, Profiled, Saved, Started, Validated
from birdie.run.recipe import Recipe
from birdie.runtime import provenance
from birdie.runtime.callbacks import Notify, Progress, no_message, no_progress
from birdie.runtime.device import choose_device, choose_dtype
from birdie.runtime.distributed import World
from birdie.runtime.files import require_writable, write_bytes
from birdie.runtime.startup import StartupTimer
from birdie.score.bpb import Score, bits_per_byte
from birdie.train.checkpoint import POINTER, Checkpoint, load_checkpoint, require_same_checkpoint
from birdie.train.compilation import CompileReport, compile_cache, distinct_ranks
from birdie.train.fp8 import MULTIPLE, Float8, remove_fp8
from birdie.train.loop import Fit, fit
from birdie.train.profile import Profile, profile
from birdie.train.protocols import StepHook


class Run:
    """A training run on this rank: its data, its model and the folder it leaves behind.

    Args:
        recipe: every setting.
        folder: the run folder; made if need be.
        replace: whether an earlier run in the folder may be overwritten.
        profiled: whether steps are profiled after warm-up, which changes nothing of the run.
        world: this rank among its peers.
        notify: gets one-line remarks (a fallback taken, a doubt about the data).

    Attributes:
        training: the recipe's settings for training; once it has begun, with the cap less what is kept of it.
        reserved: seconds of the cap kept for calibration.
        calibration: what calibration found out, once it was made.
        profile: where a step goes, once that was looked at.
        weights: what `model` holds: "the last weights", or which average of them.
        startup: what it took before the clock started.
        compiling: what torch.compile did, if it was used.
        checks: what was looked at before the clock started.

    Raises:
        DataError, ConfigError: shards, tokenizer and settings do not fit together.
        OutputError: the folder cannot be written.
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
    ) -> None:
        self.recipe, self.folder, self.replace, self.notify = recipe, Path(folder), replace, notify
        self.profiled = profiled
        self.world = world or World()
        self.device = choose_device(recipe.device, self.world.local_rank)
        self.startup = StartupTimer()
        self.compiling: CompileReport | None = None
        self.checks: list[preflight.Check] = []
        with self.startup.part("data"):
            text = read(recipe, notify)
        self.dataset, self.tokenizer = text.dataset, text.tokenizer
        self.val_tokens, self.byte_counts = text.val_tokens, text.byte_counts
        if self.world.is_main:
            require_writable(self.folder)
        torch.manual_seed(recipe.train.seed)
        with self.startup.part("model"):
            self.model = GPT(recipe.model).to(self.device)
        self.model.compute_dtype = choose_dtype(recipe.train.compute_dtype, self.device)
        self.model.kernels = best_kernels(self.device, self.model.compute_dtype)
        self.steps = 0
        self.training, self.reserved = recipe.train, 0.0
        self.calibration: Calibrated | None = None
        self.profile: Profile | None = None
        self.weights = "the last weights"

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints lie."""
        return self.folder / "checkpoints"

    def train(
        self, *, resume: bool = False, stop: Callable[[], bool] = lambda: False, on_warmup: Progress = no_progress
    ) -> Iterator[Event]:
        """Train to the last step, the wall-clock cap, or until `stop()`; yields what happens as it happens.

        Args:
            resume: go on from the latest checkpoint of the folder if there is one; done unasked where torchrun has
                started all ranks anew and the checkpoint is of the same job.
            stop: asked after every step; True on any rank ends the run on all, after a checkpoint.
            on_warmup: called with (done, total) after each warm-up step.

        Raises:
            ConfigError: the loss is no longer finite, the ranks do not divide the batch, or calibration needs all
                the time there is.
            WeightsError: the checkpoint does not fit the model.
        """
        job = self.world.broadcast_string(self.world.job)
        checkpoint = self._checkpoint(resume, job)
        require_same_checkpoint(checkpoint, self.checkpoints, self.world)
        about = self._identity() | self._reserve(checkpoint) | {"job": job}
        settings = self.training
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
            pin_memory=self.device.type == "cuda",
        )
        qat = self.recipe.qat
        prepared = qat.prepare(self.model, self.notify) if qat.enabled else None
        model_hooks = self.model.step_hooks(self.notify)
        hooks: list[StepHook] = [*([] if prepared is None else [prepared]), *model_hooks]
        try:
            going = fit(
                self.model,
                batches,
                settings,
                self.recipe.optimizer,
                world=self.world,
                device=self.device,
                resume=checkpoint,
                about=about,
                notify=self.notify,
                on_warmup=on_warmup,
                stop=stop,
                hooks=hooks,
                changes=[change for hook in model_hooks for change in hook.changes],
                average=self.recipe.average,
                bandit=self.recipe.bandit,
                documents=self._documents(),
            )
            if self.world.is_main:
                write_bytes(self.folder / "recipe.toml", self.recipe.to_toml().encode())
                history.cut(self.folder, going.step if checkpoint is not None else -1)
                if checkpoint is None:  # those of a replaced run must not be gone on from
                    (self.checkpoints / POINTER).unlink(missing_ok=True)
            yield from self._follow(going)
            if going.float8 is not None and not going.interrupted:
                self._tell_of(going.float8, *batches.next())
        finally:
            batches.close()
            remove_fp8(self.model)
            if prepared is not None:
                prepared.remove()

    def _follow(self, going: Fit) -> Iterator[Event]:
        self.steps = going.step
        yield self._started(going)
        save_every, validate_every = self.recipe.run.checkpoint_every, self.recipe.validation.every
        validated = None
        self._warm_up(going)
        if self.profiled and not going.interrupted:
            yield from self._profile(going)
        if going.step == 0 and validate_every and not going.interrupted:
            validated = 0
            yield self._validated(going)
        for step in going:
            self.steps = step.number
            yield step
            if not going.interrupted and (step.stopping or (validate_every and step.number % validate_every == 0)):
                validated = step.number
                yield self._validated(going)
            if step.stopping or (save_every and step.number % save_every == 0):
                yield from self._saved(going)
        if going.interrupted:
            if self.steps == 0:  # stopped during warm-up
                yield from self._saved(going)
            yield Interrupted(going.step, self.checkpoints)
        elif validated != going.step:  # resumed after the last step
            yield self._validated(going)
        if not going.interrupted:
            self.weights = str(going.average)
            for line in (*going.finish(), *self.model.diagnostics()):
                self.notify(f"active: {line}")
            if self.compiling is not None:
                self.compiling.end_run()

    def _saved(self, going: Fit) -> Iterator[Saved]:
        """Write a checkpoint; a run that is not being stopped goes on without."""
        try:
            path = going.save(self.checkpoints)
        except OutputError as error:
            if going.interrupted:
                raise
            self.notify(f"no checkpoint of step {going.step}, training goes on: {error}")
        else:
            yield Saved(going.step, path)

    def _checked(self) -> Checked:
        """Look before the clock starts; a failure on any rank ends all."""
        with self.startup.part("preflight"):
            facts = preflight.facts_here(
                self.recipe, self.folder, self.dataset.train, self.dataset.train_tokens, self.device, self.world
            )
            self.checks = preflight.checks(self.recipe, facts)
            failed = any(check.state == "fail" for check in self.checks)
            if self.world.any(failed, self.device):
                preflight.require(self.checks)
                raise ConfigError("another rank fails its preflight and says why")
        return Checked(tuple(self.checks))

    def _warm_up(self, going: Fit) -> None:
        """Warm up with the compile cache of an earlier run, and report the start-up time."""
        if going.facts["compiled"]:
            cache = compile_cache(self.recipe.to_dict(), self.world.rank, self.world.size, self.device)
            self.compiling = CompileReport(cache, self.notify)
            with self.startup.part("compile cache"):
                self.compiling.begin_warmup()
        with self.startup.part("priming"):
            going.warm_up()
        if self.compiling is not None:
            with self.startup.part("compile cache"):
                self.compiling.end_warmup(save=self.world.rank < distinct_ranks(self.recipe.to_dict()))
        self.notify(self.startup.line())

    def _profile(self, going: Fit) -> Iterator[Profiled]:
        """Profile steps that are undone; every rank takes them, and rank 0 writes what it saw."""
        folder = self.folder / "profile"
        found = profile(going, self.model, self.device, folder if self.world.is_main else None)
        if found is not None:
            self.profile = found
            yield Profiled(found, folder)

    def _tell_of(self, float8: Float8, ids: Tensor, targets: Tensor) -> None:
        length = self.training.train_seq_len  # a packed row is far longer than what attention should see at once
        few = MULTIPLE // math.gcd(length, MULTIPLE)  # sequences: as many tokens as fp8 wants, and no more
        ids, targets = (each.reshape(-1, length)[:few].to(self.device) for each in (ids, targets))
        self.notify(f"active: {float8.diagnostics(lambda: self.model.loss(ids, targets))}")

    def _validated(self, going: Fit) -> Validated:
        """Score what would be exported now, the average of weights if there is one, and note it in the folder."""
        with going.average.in_model():
            score = self.score(self.model)
        if self.world.is_main:
            history.record(self.folder, history.Entry(going.step, going.train_ms, score.bpb))
        return Validated(going.step, going.train_ms, score, str(going.average))

    def _checkpoint(self, resume: bool, job: str) -> Checkpoint | None:
        """What to go on from; refuses to overwrite a run unasked and to go on with another model or other data."""
        again = self.world.max_int(self.world.restarts, self.device) > 0
        if not (self.checkpoints / POINTER).is_file():
            if resume:
                self.notify(f"there is no checkpoint in {self.checkpoints} yet; starting from the beginning")
            return None
        checkpoint = load_checkpoint(self.checkpoints) if resume or again else None
        if checkpoint is None or not (resume or checkpoint.about.get("job") == job):
            if not self.replace:
                raise ConfigError(f"{self.folder} holds a run already; go on with --resume, or choose another --folder")
            return None
        for name, now in self._identity().items():
            before = checkpoint.about.get(name, now)
            if before != now:
                raise ConfigError(f"cannot resume: {name} is {now}, but the run in {self.folder} has {before}")
        return checkpoint

    def _reserve(self, checkpoint: Checkpoint | None) -> dict[str, Any]:
        """Keep time for calibration; returns what a checkpoint shall remember, so that going on keeps the same time."""
        settings, cap = self.recipe.calibration, self.recipe.train.max_wallclock_seconds
        if settings.data == "none" or self.recipe.train.cap_ms is None:
            return {}
        asked = {**asdict(settings), "device": self.device.type}
        before: dict[str, Any] = {} if checkpoint is None else checkpoint.about.get("calibration", {})
        if settings.reserve_seconds is not None:
            self.reserved, why = settings.reserve_seconds, "as asked"
        elif before.get("asked") == asked:
            self.reserved, why = before["reserved"], "as before"
        else:  # rank 0 will do the work, but all must end training at one time
            seconds = expected(self.recipe, self.device).seconds if self.world.is_main else 0.0
            self.reserved = MARGIN * self.world.max_int(round(1000 * seconds), self.device) / 1000
            why = f"{self.reserved / MARGIN:.1f} s expected"
        self.training = less_reserve(self.recipe.train, self.reserved)
        self.notify(f"reserved {self.reserved:.1f} s of {cap:g} s for calibration ({why})")
        return {"calibration": {"asked": asked, "reserved": self.reserved}}

    def _documents(self) -> DocumentFinder | None:
        """What finds the bounds of documents, if rows are packed or a kernel takes them."""
        config, packed = self.recipe.model, self.recipe.data.order == "packed"
        if not packed and (not config.isolate_documents or self.model.kernels.varlen is None):
            return None
        return DocumentFinder(config.bos_id, self.device, packed=packed, notify=self.notify)

    def _identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and going on from it: model, tokenizer, and the order of data."""
        values = self.recipe.to_dict()
        train = ("train_batch_tokens", "train_seq_len", "mixed_seq_lens", "accumulation", "seed")
        return {
            **{f"model.{name}": value for name, value in values["model"].items()},
            **{f"train.{name}": values["train"][name] for name in train},
            "data.order": values["data"]["order"],
            "tokenizer": self.tokenizer.digest,
            "train_tokens": self.dataset.train_tokens,
        }

    def _started(self, going: Fit) -> Started:
        return Started(
            parameters=sum(p.numel() for p in self.model.parameters()),
            world_size=self.world.size,
            micro_steps=going.facts["micro_steps"],
            dataset=self.dataset.train[0].parent.name,
            train_shards=len(self.dataset.train),
            train_tokens=self.dataset.train_tokens,
            val_tokens=len(self.val_tokens),
            device=str(self.device),
            attention_kernel=self.model.kernels.name,
            compute_dtype=going.facts["compute_dtype"],
            newton_schulz_dtype=going.facts["newton_schulz_dtype"],
            compiled=going.facts["compiled"],
            groups=going.facts["groups"],
            resumed_at=going.step,
        )

    def score(self, model: GPT) -> Score:
        """Score `model` on this run's validation stream; all ranks share the work and get the answer."""
        training = model.training
        model.eval()  # the float weights, whatever training sees of them
        try:
            return bits_per_byte(
                model,
                self.val_tokens,
                self.byte_counts,
                seq_len=self.recipe.train.train_seq_len,
                batch_tokens=self.recipe.validation.batch_tokens,
                bos_id=self.tokenizer.bos_id,
                device=self.device,
                world=self.world,
            )
        finally:
            model.train(training)

    def model_of(self, state: Mapping[str, Tensor]) -> GPT:
        """A second model of this run's shape, device and precision that holds the weights `state`."""
        model = GPT(self.recipe.model)
        model.load_state_dict(state)
        model.compute_dtype = self.model.compute_dtype
        return model.to(self.device)

    def calibrate(self, progress: Progress | None = None) -> Calibrated | None:
        """Learn what the loss minds, if the recipe wants it and it was not done yet; `export` uses it.

        Rank 0 alone does it, since it alone exports; the others have nothing to wait for.

        Raises:
            DataError: there are too few training tokens, or activations are not finite.
        """
        settings = self.recipe.calibration
        if self.calibration is None and settings.data != "none":
            state = {name: weight.detach().cpu() for name, weight in self.model.state_dict().items()}
            found = calibrated(self.recipe, state, settings, progress, device=self.device)
            of = "its own samples" if settings.data == "own" else "training data"
            kept = f"; {self.reserved:.1f} s were reserved" if self.training.cap_ms else ""
            self.notify(f"calibrated on {found.tokens:,} tokens of {of} in {found.seconds:.1f} s{kept}")
            self.calibration = found
        return self.calibration

    def export(
        self, path: Path | None = None, *, budget: int | None = None, progress: Progress | None = None
    ) -> Summary:
        """Compress the trained weights into one file: the recipe's schemes, or what fits `budget` bytes.

        Calibrates first where the recipe wants it; several exports of one model share that. Rank 0 writes; call it
        there alone.
        """
        settings = self.recipe.export
        if budget is None and settings.budget is not None:
            budget = parse_size(settings.budget)
        known = self.calibrate()
        return save(
            self.model,
            path or self.folder / "model.birdie",
            scheme=[
                *self.recipe.qat.storage_rules(self.model),
                *(settings.schemes() if budget is None else settings.pinned()),
            ],
            budget=budget,
            coder=settings.coder,
            calibration=None if known is None else known.knowledge,
            metadata=self.metadata(),
            progress=progress,
        )

    def metadata(self) -> dict[str, Any]:
        """What the artifact must say so that it can be scored and sampled, and where it came from."""
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
