"""A run with everything that its settings ask for: what `Trainer` needs, and the features around it.

    tables ─► Plan [bandit] · Optimizers · Average ──┐
    compile, fused kernels, fp8 ─────────────────────┴─► Training ─► warm-up ─► steps, until the end or a stop
                                                             └─► checkpoint() ◄─► resume

The module of a feature is imported where the settings ask for it: a packed script has no other (golf/packed_script.py).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from birdie.gpt.train.average import Average
from birdie.gpt.train.compile_report import eager_pass
from birdie.gpt.train.loop import Step, Trainer, tensors_of
from birdie.gpt.train.micro_batches import BatchSource, Documents
from birdie.gpt.train.optimizers import Optimizers
from birdie.gpt.train.plan import Plan, StepPlan, micro_steps
from birdie.gpt.train.settings import TrainingTables
from birdie.gpt.train.size_report import SizeReport
from birdie.system.callbacks import Progress, StepHook, no_progress
from birdie.system.context import Context
from birdie.system.device import choose_dtype, dtype_name, make_current
from birdie.system.torch_compile import CompiledOrEager

if TYPE_CHECKING:
    from birdie.gpt.train.training_checkpoint import TrainingCheckpoint


class Training(Trainer):
    """A `Trainer` that is made of settings; iterating warms up first.

    Args:
        model: with `loss(ids, targets)`, the mean cross-entropy in nats. It is moved to the device.
        batches: this rank's loader.
        context: device, ranks and log. Its `stop` is called after every step: True on any rank makes that step the last
            on all. None: one rank, where the model is.
        hooks: techniques that take part in the steps.
        documents: finds the documents that the loss isolates by their bounds; has `packed` if rows are packed.
        saved: checkpoint that the run resumes, whose weights and state it takes.

    Attributes:
        in_effect: settings of the run with every "auto" resolved, as JSON can hold them.
        compiled: whether torch.compile is used.
        stopped: whether some rank has asked for a stop.
        fp8: whether the model trains in fp8.

    Raises:
        ConfigError: settings contradict the number of ranks, or a parameter is not in exactly one optimizer group.
        WeightsError: the run cannot resume from the checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource,
        tables: TrainingTables,
        context: Context | None = None,
        *,
        hooks: Sequence[StepHook] = (),
        documents: Documents | None = None,
        saved: "TrainingCheckpoint | None" = None,
    ) -> None:
        self.context = context = context or Context(next(model.parameters()).device)
        settings, optimizer, device, notify = tables.train, tables.optimizer, context.device, context.notify
        packed = bool(getattr(documents, "packed", False))
        self.stopped, self._warmed_up = False, False
        make_current(device)
        gpt: Any = model.to(device).train()
        gpt.compute_dtype = choose_dtype(settings.compute_dtype, device)
        newton_schulz_dtype = choose_dtype(optimizer.newton_schulz_dtype, device)
        self.fp8 = False
        if settings.fp8:
            from birdie.gpt.train.fp8 import fp8_supported, train_in_fp8

            self.fp8 = fp8_supported(context.device, context.notify)
            if self.fp8:
                train_in_fp8(model, context.notify)
        optimizers = Optimizers(model, optimizer, newton_schulz_dtype=newton_schulz_dtype, world=context.world)
        self.compiled = device.type == "cuda" if settings.compile is None else settings.compile
        if fuse_loss := getattr(model, "fuse_loss", None):
            fuse_loss(settings.fused, compiled=self.compiled)
        fuse_mlps = getattr(model, "fuse_mlps", lambda _fused: False)
        if not fuse_mlps(settings.fused_mlp and not self.fp8) and settings.fused_mlp:
            notify("fused MLPs need CUDA, Triton, ReLU² or its leaky form, and no fp8; training without them")
        mode = settings.compile_mode
        if mode != "default" and not (self.compiled and device.type == "cuda"):
            notify(f"compile_mode {mode} is not used: it needs torch.compile on CUDA")
            mode = "default"
        if mode == "reduce-overhead":
            optimizers.copy_gradients()
        loss: Callable[..., Tensor] = CompiledOrEager(gpt.loss, notify, mode) if self.compiled else gpt.loss
        if settings.micro_batch_tokens == "auto":
            from birdie.gpt.train.measured_batches import measured_size

            known = None if saved is None else saved.settings.get("micro_batch_tokens")
            tokens = measured_size(model, settings, context, saved=known, uncut=packed)
            settings = dataclasses.replace(settings, micro_batch_tokens=tokens)
        plan = Plan(settings, optimizer, context.world.rank, context.world.size, packed)
        self._sizes = SizeReport(plan, context) if plan.staged or settings.mixed_seq_lens else None
        if self._sizes is not None and settings.mixed_seq_lens:
            notify(self._sizes.mixed_lengths())
        if tables.bandit.every:
            from birdie.gpt.train.bandit import BanditPlan

            plan = BanditPlan(plan, tables.bandit)
        super().__init__(
            model,
            batches,
            plan,
            optimizers,
            Average(tables.average, tensors_of(model)),
            hooks=[*hooks, *([] if self._sizes is None else [self._sizes])],
            documents=documents,
            loss=loss,
        )
        self.in_effect: dict[str, Any] = {
            **dataclasses.asdict(settings),
            "mixed_seq_lens": list(settings.mixed_seq_lens),  # as JSON restores it
            **dataclasses.asdict(optimizer),
            **{f"average.{name}": value for name, value in dataclasses.asdict(tables.average).items()},
            **{f"bandit.{name}": value for name, value in tables.bandit.plain().items()},
            "compile": self.compiled,
            "compile_mode": mode,
            "fp8": self.fp8,
            "compute_dtype": dtype_name(gpt.compute_dtype),
            "newton_schulz_dtype": dtype_name(newton_schulz_dtype),
        }
        if saved is not None:
            from birdie.gpt.train.resuming import changes, require_resumable

            require_resumable(saved, model, tables)
            for line in changes(saved, self.in_effect):
                notify(line)
            self.restore(saved)
            self.send_weights()

    def __iter__(self) -> Iterator[Step]:
        """Warm up, if nobody has, and train to the end. A new iteration continues where the last one stopped."""
        self.warm_up()
        yield from super().__iter__()

    @property
    def remaining(self) -> bool:
        """True while the run has a step to take, and no rank has stopped it."""
        return not self.stopped and super().remaining

    @property
    def interrupted(self) -> bool:
        """True if `stop()` ended the run before its last step."""
        return self.stopped and super().remaining

    @property
    def runs_eagerly(self) -> bool:
        """True if compiling has failed on this rank."""
        return isinstance(self.loss, CompiledOrEager) and self.loss.eager

    @property
    def micro_steps(self) -> int:
        """Micro-batches of a full step on each rank."""
        return micro_steps(self.plan.settings, self.world.size, self.plan.micro_batch_tokens)

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """Tensors, parameters and learning rate of each optimizer group, for the log."""
        return {
            group: {
                "tensors": len(members),
                "parameters": sum(p.numel() for p in members.values()),
                "lr": self.optimizers.rates[group],
            }
            for group, members in self.optimizers.groups.items()
        }

    def warm_up(self, on_step: Progress = no_progress) -> None:
        """Take real steps, then undo everything they did, except compilation and caches; the clock does not run.

        A second call does nothing. If a stop is requested meanwhile, the run ends without a step.

        Args:
            on_step: called with (done, total) after each step.
        """
        if self._warmed_up or not self.remaining:
            return
        if self.compiled and self.plan.settings.warmup_steps:
            eager_pass(self.model, self.plan.settings.train_seq_len, self.device)
        # graphs of later stages of the run, such as longer sequences, are compiled as well
        later = tuple(change for hook in self.hooks for change in getattr(hook, "changes", ()))
        fractions = self.plan.warmup_fractions(later)
        with closing(self.rehearse(fractions)) as steps:
            for done, _ in enumerate(steps, 1):
                on_step(done, len(fractions))
                if self._agree_on_stop():
                    break
        self._warmed_up = True
        if fractions and self.plan.changes and self._sizes is not None and not self.stopped:
            self.context.notify(self._sizes.warmup())

    def timed(self, plan: StepPlan) -> Step:
        """Take one step by `plan`, inside the clock, and agree with the other ranks on whether it is the last."""
        step = super().timed(plan)
        self._agree_on_stop()
        return dataclasses.replace(step, stopping=not self.remaining)

    def checkpoint(self, about: Mapping[str, Any] | None = None) -> "TrainingCheckpoint":
        """Return the state with the settings in effect and notes of the caller. Every rank must call it."""
        from birdie.gpt.train.training_checkpoint import TrainingCheckpoint

        state = self.state()
        parts = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        return TrainingCheckpoint(**parts, settings=self.in_effect, about=dict(about or {}))

    def finish(self) -> list[str]:
        """Put the average of the weights, if there is one, into the model; return diagnostics of active features.

        The run is over then: it can neither continue nor be saved. Every rank must call it.
        """
        settings = self.plan.settings
        lines = [
            self.average.finish(),
            self.plan.diagnostics(),
            self._sizes.trained() if self._sizes is not None and settings.mixed_seq_lens else None,
        ]
        if settings.force_stop_step:
            cap, seconds = settings.max_wallclock_seconds, self.clock.ms / 1000
            over = f", beyond the cap of {cap:g} s that a submission must keep" if cap and seconds > cap else ""
            lines.append(f"forced last step: {settings.force_stop_step:,}, reached after {seconds:.1f} s{over}")
        return [line for line in lines if line is not None]

    def _agree_on_stop(self) -> bool:
        """Return whether any rank stops: a rank that stopped alone would leave the others waiting for it."""
        self.stopped = self.world.any(self.context.stop(), self.device)
        return self.stopped
