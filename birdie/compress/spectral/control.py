"""The size as a target: how much the rate counts is steered so that the bits follow a line down to their target.

    bits some steps ahead, if they go on as now ──► over the line? λ rises : λ falls ──► task loss + λ · bits

λ is in nats of loss per bit a weight. Bits follow it slowly, so it is where they are heading that counts. The line is
straight in the logarithm of the bits, from where training starts to the target at `settled` of the steps; the rest is
for the task at that size.
"""

import math

import torch
from torch import Tensor, nn

from birdie.compress.spectral.wrap import quantization_loss
from birdie.errors import ConfigError

_FEWEST = 1e-4  # bits a weight
_FIRST, _LEAST, _MOST = 1e-2, 1e-8, 1e4  # λ
# Of a training: the share that is looked ahead; octaves that λ moves over it for each octave off the line, and at most.
_AHEAD, _GAIN, _PACE = 1 / 20, 60.0, 36.0
_MEMORY = 1 / 40  # likewise: the trend is that of so long, for single steps are noisy
_SHORTEST = 400  # steps: in shorter trainings λ and the trend move as in one of so many, for Adam is no quicker


class RateControl:
    """What to add to the loss of each step.

    Attributes:
        weight: λ, nats per bit a weight.
        bits: per spectral weight, when the last penalty was asked for.
        target: bits per spectral weight that are aimed at; may be set anew.
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
        self.done, self.weight, self._trend = 0, _FIRST, 0.0
        self._pace = max(steps, _SHORTEST)

    def measure(self) -> float:
        """Bits per spectral weight now."""
        with torch.no_grad():
            return float(quantization_loss(self.model))

    def line(self, step: float) -> float:
        """Bits there should be after so many steps."""
        share = min(1.0, step / (self.settled * self.steps))
        return float(self.start * (self.target / self.start) ** share)

    def penalty(self) -> Tensor:
        """λ · bits, to be added to the loss; one call a step."""
        rate = quantization_loss(self.model)
        before, self.bits = self.bits, max(float(rate.detach()), _FEWEST)
        self._trend += (math.log2(self.bits / before) - self._trend) / (_MEMORY * self._pace)
        self.done += 1
        ahead = _AHEAD * self._pace
        off = math.log2(self.bits / self.line(self.done + ahead)) + ahead * self._trend
        self.weight *= 2.0 ** (min(max(_GAIN * off, -_PACE), _PACE) / self._pace)
        self.weight = min(max(self.weight, _LEAST), _MOST)
        return self.weight * rate
