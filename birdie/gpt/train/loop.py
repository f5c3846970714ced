"""The training loop: a `Trainer` takes steps; callers score, print and save between two of them.

    trainer = Trainer(model, batches, plan, optimizers, average)
    for step in trainer:
        print(step.number, step.loss)

    plan.at(step, clock) ─► hooks ─► micro-batches ─► forward, backward ─► reduce, clip ─► Muon, AdamW ─► average

Notable: the clock runs only inside `Trainer.step`; the wall-clock cap and the learning rate follow the clock of the
slowest rank, so that all ranks take the same decisions; several ranks compute the gradient that one rank would. Warm-up
is real steps, of which weights, optimizer state, random generators and loader keep no trace.

What a run may ask for besides (checkpoints, compilation, fp8, …) is added by `birdie.gpt.train.training`.

Source: the challenge's baseline script.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError, WeightsError
from birdie.gpt.train.average import Average
from birdie.gpt.train.micro_batches import BatchSource, Documents, MicroBatch, micro_batches
from birdie.gpt.train.optimizers import Optimizers
from birdie.gpt.train.plan import Plan, StepPlan
from birdie.system.device import synchronize
from birdie.system.distributed import World
from birdie.system.ranges import named_range

if TYPE_CHECKING:
    from birdie.system.callbacks import StepHook


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


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of a run between two steps.

    Attributes:
        clock_ms: training time so far.
        weights: parameters and buffers of the model by name.
        optimizer: optimizer tensors by "parameter/tensor".
        rng: states of the random generators, from `rng_state`.
        loader: `state_dict` of the loader, as JSON can hold it.
        bandit: what the plan has learned, as JSON can hold it; empty without a bandit.
    """

    step: int
    clock_ms: float
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    loader: dict[str, Any]
    average: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    bandit: dict[str, Any] = dataclasses.field(default_factory=dict)


class Clock:
    """Training time, the same on all ranks: that of the slowest. It stands still between two steps."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.ms, self._world, self._device = 0.0, world, device

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the block."""
        with named_range("bookkeeping"):
            synchronize(self._device)
            self._world.barrier()  # the time that one rank spent between two steps does not count for the others
            start = time.perf_counter()
        yield
        with named_range("bookkeeping"):
            synchronize(self._device)
            microseconds = round(1000 * self.ms + 1e6 * (time.perf_counter() - start))
            self.ms = self._world.max_int(microseconds, self._device) / 1000


class Trainer:
    """A run in progress: iterate over it for its steps, or call `step`.

    Args:
        model: on its device, in the mode in which it trains. The weights of rank 0 are sent to every rank.
        batches: this rank's loader.
        plan: rates and sizes of the steps.
        optimizers: of the model's parameters; its world is that of the run.
        average: of the weights; its `in_model()` puts it into the model for scoring, `finish()` for good.
        hooks: techniques that take part in the steps.
        documents: finds the documents that the loss isolates by their bounds.
        loss: (ids, targets, **arguments) → mean cross-entropy in nats, 0-d; None: `model.loss`.

    Attributes:
        clock: training time so far.
        began_ms: training time when the last step began; of a restored state, at the mean pace of its steps.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource,
        plan: Plan,
        optimizers: Optimizers,
        average: Average,
        *,
        hooks: Sequence["StepHook"] = (),
        documents: Documents | None = None,
        loss: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model, self.batches, self.plan, self.optimizers, self.average = model, batches, plan, optimizers, average
        self.hooks, self.documents = tuple(hooks), documents
        self.world, self.device = optimizers.world, next(model.parameters()).device
        self.loss: Callable[..., Tensor] = cast(Any, model).loss if loss is None else loss
        self.number, self.clock, self.began_ms = 0, Clock(self.world, self.device), 0.0
        self._inside_step = False
        self.send_weights()

    def __iter__(self) -> Iterator[Step]:
        """Train to the end. A new iteration continues where the last one stopped."""
        while self.remaining:
            yield self.step()

    @property
    def remaining(self) -> bool:
        """True while the run has a step to take."""
        return not self.plan.ends(self.number, self.clock.ms)

    def step(self) -> Step:
        """Take the next step of the run, inside the clock."""
        return self.timed(self.plan.at(self.number, self.clock.ms))

    def timed(self, plan: StepPlan) -> Step:
        """Take one step by `plan`, inside the clock."""
        self.began_ms = self.clock.ms
        with named_range("step"), self.clock.running():
            step = self.take(plan)
        return dataclasses.replace(step, train_ms=self.clock.ms, stopping=not self.remaining)

    def take(self, plan: StepPlan) -> Step:
        """Take one step by `plan`, outside the clock."""
        self.average.require_last("train")
        with named_range("techniques"):
            for hook in self.hooks:
                hook.before_step(plan.step, plan.fraction, plan.multiplier)
        self._inside_step = True
        batches = micro_batches(
            self.batches, plan.lengths, self.plan.micro_batch_tokens, self.device, self.documents, self.plan.packed
        )
        share = self.accumulate(batches)
        with named_range("optimizer"):
            loss, norm = self.optimizers.step(share, plan, self.require_finite)
        self.plan.observe(loss)
        self.number += 1
        with named_range("average"):
            self.average.update(self.number, plan.multiplier)
        self._inside_step = False
        tokens = len(plan.lengths) * self.plan.settings.chunk_tokens * self.world.size
        return Step(self.number, loss, self.clock.ms, plan.rate, plan.momentum, tokens, norm, stopping=False)

    def accumulate(self, batches: Iterable[MicroBatch]) -> Tensor:
        """Leave this rank's share of the gradient in the parameters; return its share of the loss, 0-d."""
        with named_range("bookkeeping"):
            self.optimizers.zero_grad()
            total = torch.zeros((), device=self.device)
        for batch in batches:
            with named_range("forward"):
                loss = self.loss(batch.ids, batch.targets, **batch.arguments) / (self.world.size * batch.parts)
            with named_range("backward"):
                torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def require_finite(self, loss: float, norm: float) -> None:
        """Raise a ConfigError unless loss and gradient norm are numbers; called before any weight changes."""
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise ConfigError(
                    f"the {name} of step {self.number + 1} is {value}; lower the learning rates or check the data"
                )

    def rehearse(self, fractions: Iterable[float]) -> Generator[Step, None, None]:
        """Take a step as at each of these fractions of the run, off the clock; at the end undo what they did.

        Caches and compiled graphs stay: this is warm-up, with `plan.warmup_fractions`.
        """
        with self.undone():
            for fraction in fractions:
                yield self.take(self.plan.rehearsal(fraction, self.number, self.clock.ms))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo whatever steps do inside the block, the clock included."""
        start = self.state()
        try:
            yield
        finally:
            synchronize(self.device)
            self.restore(start)

    def state(self) -> State:
        """Return copies of everything that the next steps depend on. With several ranks, every one must call it."""
        if self._inside_step:
            raise WeightsError(
                f"training was interrupted inside step {self.number + 1}, so its state is inconsistent; resume from "
                "the last checkpoint"
            )
        return State(
            step=self.number,
            clock_ms=self.clock.ms,
            weights={name: tensor.detach().clone() for name, tensor in self.tensors().items()},
            optimizer=self.optimizers.full_state(),
            rng=rng_state(),
            loader=self.batches.state_dict(),
            average=self.average.state(),
            bandit=self.plan.state(),
        )

    def restore(self, state: State) -> None:
        """Go back, or on, to `state`."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state.weights[name])
        self.optimizers.load_state(state.optimizer)
        self.batches.load_state_dict(state.loader)
        self.average.load_state(state.average)
        self.plan.load_state(state.bandit)
        self.number, self.clock.ms, self._inside_step = state.step, state.clock_ms, False
        self.began_ms = state.clock_ms * max(0, state.step - 1) / max(1, state.step)
        set_rng_state(state.rng)

    def send_weights(self) -> None:
        """Send the weights of rank 0 and their average to every rank."""
        for tensor in (*self.tensors().values(), *self.average.tensors()):
            self.world.broadcast_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the model by name, not copied."""
        return tensors_of(self.model)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of `model` by name, not copied."""
    return {**{name: p.data for name, p in model.named_parameters()}, **dict(model.named_buffers())}


def rng_state() -> dict[str, Tensor]:
    """Return the states of torch's random generators: "cpu", and "cuda" where this process uses CUDA.

    To ask a GPU that the run does not use would start CUDA on it, which takes seconds and half a gigabyte.
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: dict[str, Tensor]) -> None:
    """Restore states from `rng_state`; those of CUDA are ignored where this process does not use it."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states["cuda"])
