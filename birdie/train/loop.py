"""The training loop: `fit` yields a `Step` after each optimizer step; callers score, print and save between steps.

    for step in (run := fit(model, batches, TrainSettings(), OptimizerSettings(), device=device)):
        if step.number % 100 == 0:
            run.save(folder)

Notable: the clock runs only inside `fit`, never while it is suspended at a yield; warm-up takes real steps for caches
and compilation and then restores weights, optimizer state, random generators and loader; the wall-clock cap and the
learning rate follow the clock of the slowest rank, so that all ranks take the same decisions; several ranks compute the
gradient that one rank would.

Source: the challenge's baseline script.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError, WeightsError
from birdie.runtime.callbacks import Notify, Stop, never, no_message
from birdie.runtime.device import choose_dtype, dtype_name, make_current, synchronize
from birdie.runtime.distributed import World
from birdie.runtime.nvtx import nvtx_range, profiler_attached
from birdie.runtime.torch_compile import CompiledOrEager
from birdie.train.average import Average
from birdie.train.bandit import Bandit, BanditSettings
from birdie.train.checkpoint import Checkpoint, rng_state, save_checkpoint, set_rng_state
from birdie.train.compilation import eager_pass
from birdie.train.fp8 import prepare_fp8
from birdie.train.micro_batches import MicroBatch, MicroBatches
from birdie.train.optimizers import Optimizers
from birdie.train.profile import Capture, layer_ranges
from birdie.train.protocols import Batches, DocumentFinder, StepHook, Trainable
from birdie.train.resuming import require_resumable
from birdie.train.schedule import decay_multiplier, fraction_done, muon_momentum, scheduled_lr_multiplier
from birdie.train.settings import AverageSettings, OptimizerSettings, TrainSettings
from birdie.train.size_schedule import SizeSchedule, warmup_fractions
from birdie.train.step_graph import Rates, StepGraphs, graph_backend


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one optimizer step.

    Attributes:
        number: finished steps, this one included.
        loss: mean cross-entropy in nats over the tokens of all ranks, before the update.
        train_ms: training time since the first step, without suspensions at a yield.
        lr_multiplier: factor on the learning rates, a bandit's included.
        momentum: of Muon.
        tokens: of this step, over all ranks.
        grad_norm: norm of the gradient of all parameters before clipping.
        stopping: whether it is the last step.
    """

    number: int
    loss: float
    train_ms: float
    lr_multiplier: float
    momentum: float
    tokens: int
    grad_norm: float
    stopping: bool


class Fit:
    """A run in progress: iterate over it for its steps; between two steps it can be saved.

    Attributes:
        facts: choices made at the start (dtypes, groups, ranks), for the log.
        float8: the model's training in fp8, or None.
        average: of the weights so far; its `in_model()` puts it into the model for scoring.
    """

    def __init__(
        self,
        model: Trainable,
        batches: Batches,
        settings: TrainSettings,
        optimizer_settings: OptimizerSettings,
        *,
        world: World,
        device: torch.device,
        resume: Checkpoint | None,
        about: Mapping[str, Any],
        stop: Stop,
        notify: Notify,
        on_warmup: Callable[[int, int], None],
        hooks: Sequence[StepHook],
        changes: Sequence[float],
        average: AverageSettings,
        bandit: BanditSettings,
        documents: DocumentFinder | None,
    ) -> None:
        settings.check_ranks(world.size)
        self._model, self._batches, self._world, self._device = model, batches, world, device
        self._settings, self._optimizer_settings = settings, optimizer_settings
        self._about, self._stop, self._on_warmup, self._hooks = dict(about), stop, on_warmup, tuple(hooks)
        self._notify, self._changes = notify, tuple(changes)
        self._sizes = SizeSchedule(settings, world.size, notify)
        make_current(device)
        model.to(device)
        model.train()
        model.compute_dtype = choose_dtype(settings.compute_dtype, device)
        self.float8 = prepare_fp8(cast(nn.Module, model), settings.fp8, device, model.compute_dtype, notify)
        newton_schulz_dtype = choose_dtype(optimizer_settings.newton_schulz_dtype, device)
        self._optimizers = Optimizers(
            cast(nn.Module, model), optimizer_settings, newton_schulz_dtype=newton_schulz_dtype, world=world
        )
        compiles = device.type == "cuda" if settings.compile is None else settings.compile
        if fuse_loss := getattr(model, "fuse_loss", None):
            fuse_loss(settings.fused, compiled=compiles)
        fuse_mlps = getattr(model, "fuse_mlps", lambda _fused: False)
        if not fuse_mlps(settings.fused_mlp and not self.float8) and settings.fused_mlp:
            notify("fused MLPs need CUDA, Triton, ReLU² or its leaky form, and no fp8; training without them")
        self._loss: Callable[..., Tensor] = CompiledOrEager(model.loss, notify) if compiles else model.loss
        self._step, self._clock_ms = 0, 0.0
        self._stop_agreed = self._inside_step = self._warmed_up = False
        saved_size = None if resume is None else resume.settings.get("micro_batch_tokens")
        self._micro_batches = MicroBatches(
            model, batches, settings, world, device, documents=documents, saved=saved_size, notify=notify
        )
        self._resolved = {
            **dataclasses.asdict(settings),
            "micro_batch_tokens": self._micro_batches.tokens,
            "mixed_seq_lens": list(settings.mixed_seq_lens),  # as JSON restores it
            **dataclasses.asdict(optimizer_settings),
            **{f"average.{name}": value for name, value in dataclasses.asdict(average).items()},
            **{f"bandit.{name}": value for name, value in bandit.plain().items()},
            "compile": compiles,
            "fp8": settings.fp8 if self.float8 else "off",
            "compute_dtype": dtype_name(model.compute_dtype),
            "newton_schulz_dtype": dtype_name(newton_schulz_dtype),
        }
        self.facts: dict[str, Any] = {
            "compute_dtype": dtype_name(model.compute_dtype),
            "newton_schulz_dtype": dtype_name(newton_schulz_dtype),
            "compiled": compiles,
            "fp8": settings.fp8 if self.float8 else "off",
            "world_size": world.size,
            "micro_steps": self._micro_batches.micro_steps,
            "groups": {
                group: {
                    "tensors": len(members),
                    "parameters": sum(p.numel() for p in members.values()),
                    "lr": self._optimizers.rates[group],
                }
                for group, members in self._optimizers.groups.items()
            },
        }
        self.average = Average(average, self._tensors(), notify)
        self._graphs = self._step_graphs(documents)
        self._bandit = Bandit(bandit, settings.seed) if bandit.every else None
        if resume is not None:
            require_resumable(resume, cast(nn.Module, model), optimizer_settings, average, bandit)
            self._report_changes(resume, notify)
            self._restore(resume)
        for tensor in (*self._tensors().values(), *self.average.tensors()):
            world.broadcast_(tensor)

    def __iter__(self) -> Iterator[Step]:
        """Train to the end. A new iteration continues where the last one stopped."""
        self.warm_up()
        with layer_ranges(self._model, profiler_attached() and not self.facts["compiled"]), Capture() as capture:
            while self._remaining():
                capture.before_step()
                yield self._timed_step()

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self._step

    @property
    def train_ms(self) -> float:
        """Training time so far."""
        return self._clock_ms

    @property
    def runs_eagerly(self) -> bool:
        """True if compiling has failed on this rank."""
        return isinstance(self._loss, CompiledOrEager) and self._loss.eager

    @property
    def interrupted(self) -> bool:
        """True if `stop()` ended the run before its last step."""
        return self._stop_agreed and self._step < self._settings.last_step and self._in_time()

    def warm_up(self) -> None:
        """Take real steps, then undo everything they did, except compilation and caches; the clock does not run.

        Iterating calls it if nobody has; a second call does nothing. If a stop is requested meanwhile, the run ends
        without a step.
        """
        if self._warmed_up or not self._settings.warmup_steps or not self._remaining():
            return
        start = self.state()
        if self.facts["compiled"]:
            eager_pass(self._model, self._settings.train_seq_len, self._device)
        # graphs of later stages of the run, such as longer sequences, are compiled as well
        fractions = warmup_fractions((*self._changes, *self._sizes.changes), self._settings.warmup_steps)
        for done, fraction in enumerate(fractions, 1):
            self._take_step(pretended_fraction=fraction)
            self._on_warmup(done, len(fractions))
            if self._agree_on_stop():
                break
        synchronize(self._device)
        self._restore(start)
        self._warmed_up = True
        if self._sizes.changes and not self._stop_agreed:
            self._notify(self._sizes.warmup_report())

    def rehearse(self, steps: int, fraction: float) -> Iterator[None]:
        """Take `steps` steps as if `fraction` of the run were done, then undo everything they did, the clock included.

        Yields before each step and after the last one; a requested stop ends it early.
        """
        start = self.state()
        try:
            for _ in range(steps):
                yield
                self._timed_step(pretended_fraction=fraction)
                if self._stop_agreed:
                    return
            yield
        finally:
            self._restore(start)

    def state(self) -> Checkpoint:
        """Return everything that is needed to resume from here. With several ranks, every one must call it."""
        if self._inside_step:
            raise WeightsError(
                f"training was interrupted inside step {self._step + 1}, so its state is inconsistent; resume from the "
                "last checkpoint"
            )
        return Checkpoint(
            step=self._step,
            clock_ms=self._clock_ms,
            weights={name: tensor.detach().clone() for name, tensor in self._tensors().items()},
            optimizer=self._optimizers.full_state(),
            rng=rng_state(),
            loader=self._batches.state_dict(),
            settings=self._resolved,
            about=self._about,
            average=self.average.state(),
            bandit={} if self._bandit is None else self._bandit.state(),
        )

    def save(self, folder: str | Path, *, keep: int = 2) -> Path:
        """Write `state()` as the newest checkpoint of `folder`, and keep `keep` of them.

        Rank 0 writes; every rank must call it, and none waits.

        Returns:
            Path of the checkpoint on rank 0, `folder` on the others.
        """
        checkpoint = self.state()
        return save_checkpoint(folder, checkpoint, keep=keep) if self._world.is_main else Path(folder)

    def finish(self) -> list[str]:
        """Put the average of the weights, if there is one, into the model; return diagnostics of active techniques.

        The run is over then: it can neither continue nor be saved. Every rank must call it.
        """
        lines = (
            self.average.finish(),
            None if self._bandit is None else self._bandit.diagnostics(),
            self._micro_batches.diagnostics(self._world),
            None if self._graphs is None else self._graphs.diagnostics(),
            self._settings.forced_stop(self._clock_ms),
        )
        return [line for line in lines if line is not None]

    def _in_time(self) -> bool:
        cap_ms = self._settings.cap_ms
        return cap_ms is None or self._clock_ms < cap_ms

    def _remaining(self) -> bool:
        return self._step < self._settings.last_step and self._in_time() and not self._stop_agreed

    def _agree_on_stop(self) -> bool:
        """Return whether any rank stops: a rank that stopped alone would leave the others waiting for it."""
        self._stop_agreed = self._world.any(self._stop(), self._device)
        return self._stop_agreed

    def _timed_step(self, pretended_fraction: float | None = None) -> Step:
        """Take one step inside the clock, which then shows the time of the slowest rank on every rank."""
        with nvtx_range("step"):
            with nvtx_range("bookkeeping"):
                synchronize(self._device)
                self._world.barrier()  # the time that one rank spent at a yield does not count for the others
                start = time.perf_counter()
            step = self._take_step(pretended_fraction)
            with nvtx_range("bookkeeping"):
                synchronize(self._device)
                microseconds = round(1000 * self._clock_ms + 1e6 * (time.perf_counter() - start))
                self._clock_ms = self._world.max_int(microseconds, self._device) / 1000
                self._agree_on_stop()
        return dataclasses.replace(step, train_ms=self._clock_ms, stopping=not self._remaining())

    def _take_step(self, pretended_fraction: float | None = None) -> Step:
        """Compute the gradient, clip it and update; clock and end are left to the caller.

        Args:
            pretended_fraction: of the run, for hooks and sizes of a step that will be undone; None: the real one.
        """
        self.average.require_last("train")
        settings, optimizer_settings = self._settings, self._optimizer_settings
        multiplier = scheduled_lr_multiplier(settings, self._step, self._clock_ms)
        momentum = muon_momentum(
            self._step,
            start=optimizer_settings.muon_momentum_warmup_start,
            final=optimizer_settings.muon_momentum,
            warmup_steps=optimizer_settings.muon_momentum_warmup_steps,
        )
        fraction = fraction_done(settings, self._step, self._clock_ms)
        progress = (self._step, fraction) if pretended_fraction is None else (-1, pretended_fraction)
        with nvtx_range("techniques"):
            for hook in self._hooks:
                hook.before_step(*progress, multiplier)
        size = self._sizes.begin_step(*progress)
        self._inside_step = True
        batches = self._micro_batches.of_step(size, counted=pretended_fraction is None)
        factor = multiplier if self._bandit is None else multiplier * self._bandit.factor()
        decay = decay_multiplier(fraction, full=optimizer_settings.decay_full, final=optimizer_settings.decay_final)
        if self._graphs is not None:
            at_once = list(batches)
            tokens = sum(batch.ids.numel() for batch in at_once)
            loss, grad_norm = self._graphs.step(at_once, Rates(factor, momentum, decay), self._check_finite)
        else:
            local_loss, tokens = self._accumulate(batches)
            with nvtx_range("optimizer"):
                loss, grad_norm = self._optimizers.step(
                    local_loss, factor, momentum, decay_multiplier=decay, check=self._check_finite
                )
        if self._bandit is not None:
            self._bandit.observe(loss)
        self._step += 1
        self.average.update(self._step, multiplier)
        self._inside_step = False
        tokens *= self._world.size
        return Step(self._step, loss, self._clock_ms, factor, momentum, tokens, grad_norm, stopping=False)

    def _accumulate(self, batches: Iterable[MicroBatch]) -> tuple[Tensor, int]:
        """Leave this rank's share of the gradient in the parameters.

        Returns:
            This rank's share of the loss (0-d), and its tokens.
        """
        with nvtx_range("bookkeeping"):
            self._optimizers.zero_grad()
            total = torch.zeros((), device=self._device)
        tokens = 0
        for batch in batches:
            tokens += batch.ids.numel()
            with nvtx_range("forward"):
                loss = self._loss(batch.ids, batch.targets, **batch.arguments) / (self._world.size * batch.parts)
            with nvtx_range("backward"):
                torch.autograd.backward(loss)
            total += loss.detach()
        with nvtx_range("techniques"):
            for hook in self._hooks:
                if (penalty := hook.penalty()) is not None:
                    torch.autograd.backward(penalty / self._world.size)
        return total, tokens

    def _step_graphs(self, documents: DocumentFinder | None) -> StepGraphs | None:
        """Return what runs steps as graphs, if the settings ask for it and nothing is in the way."""
        if not self._settings.step_graphs:
            return None
        backend = graph_backend(self._device)
        reasons = {
            f"they need CUDA, and this is {self._device.type}": backend is None,
            "they run on one rank only": self._world.size > 1,
            "the bounds of documents differ in number from step to step": documents is not None,
            "techniques act between steps": bool(self._hooks),
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None or backend is None:
            self._notify(f"CUDA graphs: not used, {reason}")
            return None
        return StepGraphs(
            backend,
            self._optimizers,
            lambda batches: self._accumulate(batches)[0],
            lambda: list(self._tensors().values()),
            self._device,
            self._notify,
        )

    def _check_finite(self, loss: float, norm: float) -> None:
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise ConfigError(
                    f"the {name} of step {self._step + 1} is {value}; lower the learning rates or check the data"
                )

    def _tensors(self) -> dict[str, Tensor]:
        return {
            **{name: p.data for name, p in self._model.named_parameters()},
            **dict(self._model.named_buffers()),
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(checkpoint.weights[name])
        self._optimizers.load_state(checkpoint.optimizer)
        self._batches.load_state_dict(checkpoint.loader)
        self.average.load_state(checkpoint.average)
        if self._bandit is not None:
            self._bandit.load_state(checkpoint.bandit)
        self._step, self._clock_ms = checkpoint.step, checkpoint.clock_ms
        set_rng_state(checkpoint.rng)

    def _report_changes(self, resume: Checkpoint, notify: Notify) -> None:
        """Report each setting that differs from the checkpoint's."""
        for name, value in self._resolved.items():
            if name in resume.settings and resume.settings[name] != value:
                notify(f"resuming with {name} = {value}; the checkpoint was trained with {resume.settings[name]}")


def fit(
    model: nn.Module,
    batches: Batches,
    settings: TrainSettings,
    optimizer_settings: OptimizerSettings,
    *,
    world: World | None = None,
    device: torch.device | None = None,
    resume: Checkpoint | None = None,
    about: Mapping[str, Any] | None = None,
    stop: Stop = never,
    notify: Notify = no_message,
    on_warmup: Callable[[int, int], None] = lambda _done, _total: None,
    hooks: Sequence[StepHook] = (),
    changes: Sequence[float] = (),
    average: AverageSettings | None = None,
    bandit: BanditSettings | None = None,
    documents: DocumentFinder | None = None,
) -> Fit:
    """Return a run that trains `model` in place, one `Step` per iteration.

    Args:
        model: with `loss` and `compute_dtype` as in `Trainable`. The weights of rank 0 are sent to every rank.
        batches: this rank's loader.
        settings: length, batch, precision.
        optimizer_settings: learning rates and momenta.
        world: of this process; None: one rank.
        device: where to train; None: torch's default device.
        resume: a loaded checkpoint to resume from, clock included.
        about: notes of the caller that checkpoints keep, as JSON can hold them.
        stop: called after every step; True on any rank makes that step the last on all.
        notify: called with lines for the log.
        on_warmup: called with (done, total) after each warm-up step.
        hooks: techniques that take part in the steps; their penalties are not part of the loss that steps report.
        changes: fractions of the run at which another graph begins to run; warm-up visits each.
        average: of the weights, which `Fit.finish` puts into the model; None: the last weights are the result.
        bandit: varies the learning rates; None: only the schedule does.
        documents: finds the documents that the loss isolates by their bounds.

    Raises:
        ConfigError: the ranks do not divide the accumulation, or a parameter is not in exactly one optimizer group.
        WeightsError: the run cannot resume from the checkpoint.
    """
    return Fit(
        cast(Trainable, model),
        batches,
        settings,
        optimizer_settings,
        world=world or World(),
        device=device or torch.get_default_device(),
        resume=resume,
        about=about or {},
        stop=stop,
        notify=notify,
        on_warmup=on_warmup,
        hooks=hooks,
        changes=changes,
        average=average or AverageSettings(),
        bandit=bandit or BanditSettings(),
        documents=documents,
    )
