"""The training loop: `fit` yields a `Step` after each optimizer step, and callers score, print and save in between.

    for step in (run := fit(model, batches, TrainSettings(), OptimizerSettings(), device=device)):
        if step.number % 100 == 0:
            run.save(folder)

Notable: the clock runs only inside `fit`, never while it is suspended at a yield; priming runs real steps for caches
and compilation and then restores weights, optimizer state, random generators and loader; the wall-clock cap and the
learning rate follow the slowest rank's clock, so that all ranks take the same decisions; several ranks compute the
gradient that one rank would.

Source: the challenge's baseline script.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError, WeightsError
from birdie.runtime.device import choose_dtype, dtype_name, synchronize
from birdie.runtime.distributed import World
from birdie.runtime.nvtx import nvtx_range, profiler_attached
from birdie.runtime.torch_compile import compile_or_eager
from birdie.train.average import Average, AverageSettings
from birdie.train.bandit import Bandit, BanditSettings
from birdie.train.checkpoint import Checkpoint, rng_state, save_checkpoint, set_rng_state
from birdie.train.compilation import first_pass
from birdie.train.groups import Optimizers, OptimizerSettings
from birdie.train.growth import Growth, Stage, moments
from birdie.train.micro import Feed
from birdie.train.precision import prepare_fp8
from birdie.train.profile import Capture, layers
from birdie.train.protocols import Batches, Documents, Preparation, Trainable
from birdie.train.schedule import decay_multiplier, muon_momentum, scheduled, share_done
from birdie.train.settings import TrainSettings
from birdie.train.step import Step as Step


class Fit:
    """A run in progress: iterate over it for its steps; between two of them it can be saved.

    Attributes:
        facts: what was resolved at the start (dtypes, groups, ranks), to be logged.
        float8: the model's training in fp8, if it does that.
        average: of the weights so far; its `in_model()` puts it into the model for as long as it takes to score it.
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
        stop: Callable[[], bool],
        notify: Callable[[str], None],
        on_priming: Callable[[int, int], None],
        prepared: Sequence[Preparation],
        changes: Sequence[float],
        average: AverageSettings,
        bandit: BanditSettings,
        documents: Documents | None,
    ) -> None:
        if settings.accumulation % world.size:
            raise ConfigError(
                f"{world.size} ranks do not divide accumulation {settings.accumulation}; choose a divisor"
            )
        self._model, self._batches, self._world, self._device = model, batches, world, device
        self._settings, self._optimizer_settings = settings, optimizer_settings
        self._about, self._stop, self._on_priming, self._prepared = dict(about), stop, on_priming, tuple(prepared)
        self._notify, self._changes = notify, tuple(changes)
        self._growth = Growth(settings, world.size, notify)
        model.to(device)
        model.train()
        model.compute_dtype = choose_dtype(settings.compute_dtype, device)
        self.float8 = prepare_fp8(cast(nn.Module, model), settings.fp8, device, model.compute_dtype, notify)
        newton_schulz_dtype = choose_dtype(optimizer_settings.newton_schulz_dtype, device)
        self._optimizers = Optimizers(
            model.named_parameters(), optimizer_settings, newton_schulz_dtype=newton_schulz_dtype, world=world
        )
        compiles = device.type == "cuda" if settings.compile is None else settings.compile
        if fuse := getattr(model, "fuse", None):
            fuse(settings.fused, compiled=compiles)
        fuse_mlps = getattr(model, "fuse_mlps", lambda _wanted: False)
        if not fuse_mlps(settings.fused_mlp and not self.float8) and settings.fused_mlp:
            notify("fused MLPs need CUDA, Triton, ReLU² or its leaky form, and no fp8; training without them")
        self._loss: Callable[..., Tensor] = compile_or_eager(model.loss, notify) if compiles else model.loss
        self._step, self._clock_ms = 0, 0.0
        self._stop_agreed = self._inside_step = self._primed = False
        before = None if resume is None else resume.settings.get("micro_batch_tokens")
        self._feed = Feed(model, batches, settings, world, device, documents=documents, before=before, notify=notify)
        self._resolved = {
            **dataclasses.asdict(settings),
            "micro_batch_tokens": self._feed.tokens,
            "mixed_seq_lens": list(settings.mixed_seq_lens),  # as JSON brings it back
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
            "micro_steps": self._feed.micro_steps,
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
        self._bandit = Bandit(bandit, settings.seed)
        if resume is not None:
            self._report_changes(resume, notify)
            self._restore(resume)
        for tensor in (*self._tensors().values(), *self.average.tensors()):
            world.broadcast_(tensor)

    def __iter__(self) -> Iterator[Step]:
        """Train to the end. Iterating anew goes on where the last iteration left off.

        Raises:
            ConfigError: the loss or the gradient is no longer finite; the weights are those before that step.
        """
        self.prime()
        with layers(self._model, profiler_attached() and not self.facts["compiled"]), Capture() as capture:
            while self._remaining():
                capture.before_step()
                yield self._timed_step()

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step

    @property
    def train_ms(self) -> float:
        """Training time so far."""
        return self._clock_ms

    @property
    def interrupted(self) -> bool:
        """Whether `stop()` ended the run before its last step."""
        return self._stop_agreed and self._step < self._settings.last_step and self._in_time()

    def prime(self) -> None:
        """Take real steps, then undo all they did: compilation and caches stay, state and clock do not.

        Iterating does it when it was not done before; a second call does nothing. A stop asked for meanwhile ends the
        run with no step taken.
        """
        if self._primed or not self._settings.warmup_steps or not self._remaining():
            return
        before = self.state()
        if self.facts["compiled"]:
            first_pass(self._model, self._settings.train_seq_len, self._device)
        shares = moments((*self._changes, *self._growth.changes), self._settings.warmup_steps)
        for done, share in enumerate(shares, 1):  # what comes on late is primed too
            self._take_step(at=share)
            self._on_priming(done, len(shares))
            if self._agree_on_stop():
                break
        synchronize(self._device)
        self._restore(before)
        self._primed = True
        if self._growth.changes and not self._stop_agreed:
            self._notify(self._growth.primed())

    def rehearse(self, steps: int, share: float) -> Iterator[None]:
        """Take `steps` steps as if `share` of the run were done, then undo all they did, the clock included.

        Yields before each step and after the last; a stop asked for ends it early.
        """
        before = self.state()
        try:
            for _ in range(steps):
                yield
                self._timed_step(at=share)
                if self._stop_agreed:
                    return
            yield
        finally:
            self._restore(before)

    def state(self) -> Checkpoint:
        """All that is needed to go on from here. With several ranks every one must call it.

        Raises:
            WeightsError: an exception left the run in the middle of a step.
        """
        if self._inside_step:
            raise WeightsError(
                f"training was interrupted inside step {self._step + 1}, so its state is neither before nor after it; "
                "go on from the last checkpoint"
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
            bandit=self._bandit.state(),
        )

    def save(self, folder: str | Path) -> Path:
        """Write `state()` as the latest checkpoint of `folder`; rank 0 writes, every rank must call it, and none waits.

        Returns:
            Where it lies (on rank 0), or `folder`.

        Raises:
            OutputError: it could not be written.
            WeightsError: as `state`.
        """
        checkpoint = self.state()
        return save_checkpoint(folder, checkpoint) if self._world.is_main else Path(folder)

    def finish(self) -> list[str]:
        """Make the average of the weights, if there is one, the model's own; returns evidence of what was at work.

        The run is over then: it can neither go on nor be saved. Every rank must call it.

        Raises:
            WeightsError: it was done before.
        """
        forced = self._settings.forced_stop(self._clock_ms)
        lines = (self.average.settle(), self._bandit.evidence(), self._feed.evidence(self._world), forced)
        return [line for line in lines if line is not None]

    def _in_time(self) -> bool:
        cap_ms = self._settings.cap_ms
        return cap_ms is None or self._clock_ms < cap_ms

    def _remaining(self) -> bool:
        return self._step < self._settings.last_step and self._in_time() and not self._stop_agreed

    def _agree_on_stop(self) -> bool:
        """Whether any rank wants to stop: one that left alone would leave the others waiting."""
        self._stop_agreed = self._world.any(self._stop(), self._device)
        return self._stop_agreed

    def _timed_step(self, at: float | None = None) -> Step:
        """One step inside the clock, which then shows the same on every rank: the slowest's."""
        with nvtx_range("step"):
            with nvtx_range("bookkeeping"):
                synchronize(self._device)
                self._world.barrier()  # what one rank did at a yield is not on the others' clock
                start = time.perf_counter()
            done = self._take_step(at)
            with nvtx_range("bookkeeping"):
                synchronize(self._device)
                microseconds = round(1000 * self._clock_ms + 1e6 * (time.perf_counter() - start))
                self._clock_ms = self._world.max_int(microseconds, self._device) / 1000
                self._agree_on_stop()
        return dataclasses.replace(done, train_ms=self._clock_ms, stopping=not self._remaining())

    def _take_step(self, at: float | None = None) -> Step:
        """Gradient, clipping and update, clock and end left to the caller; `at`: the share of the run to pretend."""
        self.average.require_last("train")
        settings, optimizer_settings = self._settings, self._optimizer_settings
        multiplier = scheduled(settings, self._step, self._clock_ms)
        momentum = muon_momentum(
            self._step,
            start=optimizer_settings.muon_momentum_warmup_start,
            final=optimizer_settings.muon_momentum,
            warmup_steps=optimizer_settings.muon_momentum_warmup_steps,
        )
        share = share_done(settings, self._step, self._clock_ms)
        where = (self._step, share) if at is None else (-1, at)
        with nvtx_range("techniques"):
            for each in self._prepared:
                each.before_step(*where, multiplier)
        stage = self._growth.begin(*where)
        self._inside_step = True
        share_of_loss, tokens = self._accumulate(stage, counts=at is None)
        factor = multiplier * self._bandit.factor()
        with nvtx_range("optimizer"):
            decay = decay_multiplier(share, full=optimizer_settings.decay_full, final=optimizer_settings.decay_final)
            loss, grad_norm = self._optimizers.step(
                share_of_loss, factor, momentum, decay_multiplier=decay, check=self._check
            )
        self._bandit.observe(loss)
        self._step += 1
        self.average.update(self._step, multiplier)
        self._inside_step = False
        return Step(self._step, loss, self._clock_ms, factor, momentum, tokens, grad_norm, stopping=False)

    def _accumulate(self, stage: Stage, *, counts: bool) -> tuple[Tensor, int]:
        """Leave this rank's share of the mean gradient in the parameters; (its share of the loss, tokens of all)."""
        with nvtx_range("bookkeeping"):
            self._optimizers.zero_grad()
            total = torch.zeros((), device=self._device)
        tokens = 0
        for micro in self._feed.step(stage, counts=counts):
            tokens += micro.ids.numel()
            with nvtx_range("forward"):
                loss = self._loss(micro.ids, micro.targets, **micro.more) / (self._world.size * micro.parts)
            with nvtx_range("backward"):
                torch.autograd.backward(loss)
            total += loss.detach()
        with nvtx_range("techniques"):
            for each in self._prepared:
                if (penalty := each.penalty()) is not None:
                    torch.autograd.backward(penalty / self._world.size)
        return total, tokens * self._world.size

    def _check(self, loss: float, norm: float) -> None:
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise ConfigError(
                    f"the {name} of step {self._step + 1} is {value}; lower the learning rates or look at the data"
                )

    def _tensors(self) -> dict[str, Tensor]:
        return {
            **{name: p.data for name, p in self._model.named_parameters()},
            **dict(self._model.named_buffers()),
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        tensors = self._tensors()
        if odd := sorted(tensors.keys() ^ checkpoint.weights.keys()):
            raise WeightsError(
                f"model and checkpoint differ in tensor {odd[0]!r}; resume with the model that was saved"
            )
        for name, tensor in tensors.items():
            saved = checkpoint.weights[name]
            if saved.shape != tensor.shape:
                raise WeightsError(
                    f"tensor {name!r} has shape {tuple(saved.shape)} in the checkpoint and {tuple(tensor.shape)} in "
                    "the model; resume with the model that was saved"
                )
            tensor.copy_(saved)
        self._optimizers.load_state(checkpoint.optimizer)
        self._batches.load_state_dict(checkpoint.loader)
        self.average.load_state(checkpoint.average)
        self._bandit.load_state(checkpoint.bandit)
        self._step, self._clock_ms = checkpoint.step, checkpoint.clock_ms
        set_rng_state(checkpoint.rng)

    def _report_changes(self, resume: Checkpoint, notify: Callable[[str], None]) -> None:
        """One line for each setting that is not what the checkpoint was trained with so far."""
        for name, now in self._resolved.items():
            if name in resume.settings and resume.settings[name] != now:
                notify(f"resuming with {name} = {now}; the checkpoint was trained with {resume.settings[name]}")


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
    stop: Callable[[], bool] = lambda: False,
    notify: Callable[[str], None] = lambda _: None,
    on_priming: Callable[[int, int], None] = lambda _done, _total: None,
    prepared: Sequence[Preparation] = (),
    changes: Sequence[float] = (),
    average: AverageSettings | None = None,
    bandit: BanditSettings | None = None,
    documents: Documents | None = None,
) -> Fit:
    """A run that trains `model` in place, one `Step` at each iteration.

    Args:
        model: with `loss` and `compute_dtype` as in `Trainable`; rank 0's weights go to every rank.
        batches: this rank's loader.
        settings: length, batch, precision.
        optimizer_settings: rates and momenta.
        world: this process among its peers; None is one rank.
        device: where to train; None is the CPU.
        resume: a loaded checkpoint to go on from, clock included.
        about: what checkpoints shall remember for the caller, as JSON can hold it.
        stop: asked after every step; True on any rank makes that step the last on all.
        notify: gets lines worth telling the user.
        on_priming: called with (done, total) after each priming step.
        prepared: what trains along; penalties act on the weights and are not part of the loss that steps report.
        changes: shares of the run at which another graph begins to run: priming visits each.
        average: of the weights, which `Fit.finish` makes the model's own; None: the last weights are the result.
        bandit: that varies the learning rates; None: the schedule alone does.
        documents: finds the documents that the loss is to keep apart by their bounds.

    Raises:
        ConfigError: the ranks do not divide the accumulation, or a parameter is in no or two optimizer groups.
        WeightsError: the checkpoint does not fit the model.
    """
    return Fit(
        cast(Trainable, model),
        batches,
        settings,
        optimizer_settings,
        world=world or World(),
        device=device or torch.device("cpu"),
        resume=resume,
        about=about or {},
        stop=stop,
        notify=notify,
        on_priming=on_priming,
        prepared=prepared,
        changes=changes,
        average=average or AverageSettings(),
        bandit=bandit or BanditSettings(),
        documents=documents,
    )
