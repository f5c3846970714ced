"""Rate control: training towards a size, with a Lagrange multiplier λ that follows from the slopes of loss and bits.

    bits above the schedule? all steps coarser : finer        by the network's one offset, which leaves the optimizer
    slope of the task by that offset ──► λ ──► task loss + λ · bits

The schedule is linear in the logarithm of the bits, from their number at the start to the target at the share `settled`
of the training steps; the rest of the training is for the task at that size. λ, in nats of loss per bit per weight, is
the multiplier of the constraint that the bits follow the schedule: at the best offset the slope of the task and λ times
the slope of the bits cancel. Every backward pass yields both slopes, so λ needs no schedule of its own. Control by λ
alone was tried: the bits follow it slowly, so it had to be large to be in time, and it shrank the weights of networks
that were already trained until they had lost their function.
"""

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.small.spectral.wrap import distinct, quantization_loss, wrapped

_FEWEST = 1e-4  # smallest number of bits per weight
_DAMPED, _FARTHEST = 0.5, 0.5  # share of the distance to the schedule that one step covers; octaves at most
_FLATTEST = 0.5  # smallest fall of the bits per octave, as a share of the bits: a flatter measurement is noise
_MEMORY, _SHORTEST = 1 / 20, 20  # steps in the running mean of the task's slope: share of the training, and at least
# Weights gather at the boundaries between symbols, where bits fall many times as fast as their gradient says: after a
# step that went too far the next is half as long, and steps grow again while the error keeps its sign.
_SHORTEST_STEP, _GROWTH = 1 / 64, 1.1
# While the offset is held, λ alone keeps the bits: share of the training in which an error of 100 % changes λ by a
# factor e, and the most e-folds.
_PATIENCE, _MOST_HELD = 1 / 200, 4.0
_MAX_RATIO = 2.0  # limit of bits over the schedule (and its inverse), by whose square λ is corrected


class RateControl:
    """Controller of the bits: computes the penalty of each step and moves the offset of the quantization network.

    Attributes:
        weight: λ, in nats per bit per weight.
        bits: bits per spectral weight at the last call of `penalty`.
        target: bits per spectral weight to reach; may be changed.
        holding: True to leave the offset unchanged, so that only the optimizer changes steps.
    """

    def __init__(self, model: nn.Module, bits: float, steps: int, *, settled: float = 0.7) -> None:
        """Control towards `bits` per spectral weight after the share `settled` of `steps` steps."""
        self.model = model
        self.start = self.bits = self.measure()
        if not 0 < bits < self.start:
            raise ConfigError(
                f"a target of {bits} bits is not below the model's {self.start:.2f} bits per weight; give fewer"
            )
        if steps < 1 or not 0 < settled <= 1:
            raise ConfigError(f"steps={steps}, settled={settled} are out of range; give 1 or more, and up to 1")
        self.target, self.steps, self.settled = bits, steps, settled
        self.done, self.weight, self.holding = 0, 0.0, False
        self.network = next(wrapped(model)).weight.quantizer
        self._by_bits, self._by_task = -1.0, 0.0  # slopes of both by the offset
        self._error, self._length, self._held = 0.0, 1.0, 0.0
        self._in_penalty, self._mean = False, 0.0
        self._handle: Any = None

    def measure(self) -> float:
        """Return the current bits per spectral weight."""
        with torch.no_grad():
            return float(quantization_loss(self.model))

    def line(self, step: float) -> float:
        """Return the scheduled bits per spectral weight after `step` steps."""
        share = min(1.0, step / (self.settled * self.steps))
        return float(self.start * (self.target / self.start) ** share)

    def penalty(self) -> Tensor:
        """Return λ · bits, to be added to the loss; call it once per step, after the forward pass."""
        if self._handle is None:
            self._take_offset()
        rate = quantization_loss(self.model)
        offset = self.network.offset
        self._in_penalty = True
        (slope,) = torch.autograd.grad(rate, offset, retain_graph=True)
        self._in_penalty, self._by_bits = False, float(slope)
        self.bits = max(float(rate.detach()), _FEWEST)
        self.done += 1
        line = self.line(self.done)
        # A Newton step on bits(offset) = schedule, damped; the drift of the rest of the network is taken back as well.
        steepness = max(-self._by_bits, _FLATTEST * min(1.0, self.bits))
        error = self.bits - line
        if self.holding:
            held = self._held + error / line / max(1.0, _PATIENCE * self.steps)
            self._held = min(max(held, -_MOST_HELD), _MOST_HELD)
        else:
            self._length *= 0.5 if error * self._error < 0 else _GROWTH
            self._length, self._error = min(max(self._length, _SHORTEST_STEP), 1.0), error
            move = _DAMPED * self._length * error / steepness
            drift, self._mean = self._mean, self._mean_now()
            with torch.no_grad():
                offset.add_(min(max(move, -_FARTHEST), _FARTHEST) + drift - self._mean)
        ratio = min(max(self.bits / line, 1 / _MAX_RATIO), _MAX_RATIO)
        self.weight = max(0.0, self._by_task / steepness) * ratio**2 * math.exp(self._held)
        return self.weight * rate

    def _take_offset(self) -> None:
        """Take control of the offset: from the first penalty on the optimizer no longer moves it."""
        parts = distinct(self.model)
        self.network.center([part.weight.features for part in parts], [part.original.numel() for part in parts])
        self._mean = self._mean_now()
        hook: Any = self.network.offset.register_hook
        self._handle = hook(_OffsetHook(self))

    def release(self) -> None:
        """Return the offset to the optimizer, until the next penalty."""
        self.network.center([], [])
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _mean_now(self) -> float:
        """Return the mean output of the rest of the network, whose drift the offset compensates."""
        with torch.no_grad():
            return float(self.network.mean())

    def record_slope(self, slope: Tensor) -> Tensor:
        """Record the slope of the loss by the offset, and return zeros for the optimizer.

        The slope of the task is that of the loss minus λ times that of the bits.
        """
        if self._in_penalty or not bool(torch.isfinite(slope)):
            return slope
        memory = 1 / max(_SHORTEST, _MEMORY * self.steps)
        self._by_task += memory * (float(slope) - self.weight * self._by_bits - self._by_task)
        return torch.zeros_like(slope)


class _OffsetHook:
    """Gradient hook with a weak reference: once the controller is gone the offset is trained like any parameter."""

    def __init__(self, control: RateControl) -> None:
        self.control = weakref.ref(control)

    def __call__(self, slope: Tensor) -> Tensor:
        control = self.control()
        return slope if control is None else control.record_slope(slope)
