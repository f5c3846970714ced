"""The size as a target: all steps move together so that the bits follow a line, and the loss says what a bit is worth.

    bits over the line? all steps coarser : finer            by the network's one offset, no longer the optimizer's
    slope of the task by that offset ──► λ ──► task loss + λ · bits

The line is straight in the logarithm of the bits, from where training starts to the target at `settled` of the steps;
the rest is for the task at that size. λ, in nats of loss per bit a weight, is the multiplier of the constraint that the
bits lie on the line: where the offset is best, the task's slope by it and λ times the bits' slope cancel. Both slopes
are there after any backward pass, so λ needs no schedule. Steering by λ alone (the bits follow it slowly, so it must be
large to be on time) shrank the weights of networks that were trained already until they were worth nothing.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from birdie.compress.spectral.wrap import distinct, quantization_loss, wrapped
from birdie.errors import ConfigError

_FEWEST = 1e-4  # bits a weight
_DAMPED, _FARTHEST = 0.5, 0.5  # of the way to the line that is taken in a step; octaves at most
_FLATTEST = 0.5  # bits fall by at least so much of themselves an octave, or what is measured is noise
_MEMORY, _SHORTEST = 1 / 20, 20  # of a training, and steps at least: the task's slope is a mean of so many
_LEAN = 2.0  # times that the bits may be off the line as far as λ is concerned, which goes with the square of it


class RateControl:
    """What to add to the loss of each step; it moves the offset of the model's quantization network.

    Attributes:
        weight: λ, nats per bit a weight.
        bits: per spectral weight, when the last penalty was asked for.
        target: bits per spectral weight that are aimed at; may be set anew.
        holding: whether all steps stay where they are but for what the optimizer does.
    """

    def __init__(self, model: nn.Module, bits: float, steps: int, *, settled: float = 0.7) -> None:
        """Aim for `bits` per spectral weight after `settled` of `steps` steps.

        Raises:
            ConfigError: the target is not above 0 and below what the model has, or a setting is out of range.
        """
        self.model = model
        self.start = self.bits = self.measure()
        if not 0 < bits < self.start:
            raise ConfigError(f"a target of {bits} bits is not below the {self.start:.2f} bits a weight there are")
        if steps < 1 or not 0 < settled <= 1:
            raise ConfigError(f"{steps} steps settled at {settled} are out of range; give 1 or more, and up to 1")
        self.target, self.steps, self.settled = bits, steps, settled
        self.done, self.weight, self.holding = 0, 0.0, False
        self.network = next(wrapped(model)).weight.quantizer
        self._by_bits, self._by_task = -1.0, 0.0  # slopes of both by the offset
        self._asking, self._mean = False, 0.0
        self._handle: Any = None

    def measure(self) -> float:
        """Bits per spectral weight now."""
        with torch.no_grad():
            return float(quantization_loss(self.model))

    def line(self, step: float) -> float:
        """Bits there should be after so many steps."""
        share = min(1.0, step / (self.settled * self.steps))
        return float(self.start * (self.target / self.start) ** share)

    def penalty(self) -> Tensor:
        """λ · bits, to be added to the loss; one call a step, after the model has been run."""
        if self._handle is None:
            self._seize()
        rate = quantization_loss(self.model)
        offset = self.network.offset
        self._asking = True
        (slope,) = torch.autograd.grad(rate, offset, retain_graph=True)
        self._asking, self._by_bits = False, float(slope)
        self.bits = max(float(rate.detach()), _FEWEST)
        self.done += 1
        line = self.line(self.done)
        steep = max(-self._by_bits, _FLATTEST * min(1.0, self.bits))
        if not self.holding:
            way = _DAMPED * (self.bits - line) / steep
            drift, self._mean = self._mean, self._mean_now()
            with torch.no_grad():
                offset.add_(min(max(way, -_FARTHEST), _FARTHEST) + drift - self._mean)
        lean = min(max(self.bits / line, 1 / _LEAN), _LEAN)
        self.weight = max(0.0, self._by_task / steep) * lean**2
        return self.weight * rate

    def _seize(self) -> None:
        """From the first penalty on, the offset is this one's."""
        parts = distinct(self.model)
        self.network.centre([each.weight.features for each in parts], [each.coefficients.numel() for each in parts])
        self._mean = self._mean_now()
        hook: Any = self.network.offset.register_hook
        self._handle = hook(_Steered(self))

    def release(self) -> None:
        """Leave the network as it was found: trained by gradients alone, until the next penalty."""
        self.network.centre([], [])
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _mean_now(self) -> float:
        """Where the rest of the network has drifted to, which the offset takes back."""
        with torch.no_grad():
            return float(self.network.mean())

    def taken(self, slope: Tensor) -> Tensor:
        """What the optimizer gets of the loss's slope by the offset: nothing. What is not λ times the bits' is the
        task's."""
        if self._asking or not bool(torch.isfinite(slope)):
            return slope
        memory = 1 / max(_SHORTEST, _MEMORY * self.steps)
        self._by_task += memory * (float(slope) - self.weight * self._by_bits - self._by_task)
        return torch.zeros_like(slope)


class _Steered:
    """A hook that ends with whoever steers: after that the offset is trained as any parameter."""

    def __init__(self, control: RateControl) -> None:
        self.control = weakref.ref(control)

    def __call__(self, slope: Tensor) -> Tensor:
        control = self.control()
        return slope if control is None else control.taken(slope)
