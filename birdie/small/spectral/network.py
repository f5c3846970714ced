"""Quantization network: predicts the quantization step at a position; one network for the complete model.

    (tensor, class along each axis) ─► sines and cosines ─► 32 ─► 32 ─► + ─► log2 of the step in the tensor's deviations
                                                                        ▲
                                            one offset for all positions

Classes are those of `Transform.classes`: frequencies within a block, wavelet bands, or nothing. So the network is
evaluated once per tensor and combination of classes, never per weight. Its last layer starts at zero: all steps start
equal, and no tensor starts with all coefficients rounded to zero. A file stores the steps, not the network.

Source: the shared network of positions of AnimatedRNG/lsc (2020), with log-steps instead of fractional bits.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from birdie.compress.log_scales import HIGHEST, LOWEST, PER_OCTAVE, scales_of

AXES = 5  # axes of a 3-D convolution; positions along further axes are not distinguished
OCTAVES = 4  # sines of 1, 2, 4 and 8 half periods along each axis
_HIDDEN = 32
_STEPS: dict[torch.device, Tensor] = {}


class QuantizationNetwork(nn.Module):
    """Network from positions to log2 of steps, and the shape of each tensor's coefficient distribution.

    Attributes:
        offset: (), log2 of the initial step in standard deviations, added at all positions.
        tails: (tensors, 1): logit of the share of heavy tails in the distribution of each tensor (`rate`).
    """

    centered_features: Tensor
    shares: Tensor

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))
        self.tails = nn.Parameter(torch.zeros(tensors, 1))
        self.register_buffer("everywhere", torch.zeros(0, 2 * OCTAVES * (AXES + 1)), persistent=False)
        self.register_buffer("shares", torch.zeros(0), persistent=False)
        self.body = nn.Sequential(
            nn.Linear(2 * OCTAVES * (AXES + 1), _HIDDEN),
            nn.SiLU(),
            nn.Linear(_HIDDEN, _HIDDEN),
            nn.SiLU(),
            nn.Linear(_HIDDEN, 1),
        )
        last = self.body[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    @property
    def trained(self) -> bool:
        """True if steps differ by position, which they do not before training."""
        last = self.body[-1]
        assert isinstance(last, nn.Linear)
        return bool(last.weight.detach().any())

    def forward(self, features: Tensor) -> Tensor:
        """Return log2 of the steps in deviations, (positions,), for features (positions, 48)."""
        log2: Tensor = self._outputs(features)
        if len(self.shares):
            mean = self.mean()
            log2 = log2 - (mean - mean.detach())
        return self.offset + log2

    def mean(self) -> Tensor:
        """Return the mean output without the offset, 0-d, over all weights of the tensors passed to `center`."""
        return torch.dot(self.shares, self._outputs(self.centered_features))

    def _outputs(self, features: Tensor) -> Tensor:
        """Return the output for each position, in float32 under autocast as well: the file has steps of these bits."""
        with torch.autocast(features.device.type, enabled=False):
            outputs: Tensor = self.body(features).squeeze(-1)
        return outputs

    def center(self, positions: Sequence[Tensor], weights: Sequence[int]) -> None:
        """Remove the mean output from the gradient, so that only the offset moves all steps; values do not change.

        A controller that sets the offset needs this: otherwise the gradient that would move all steps together moves
        the rest of the network instead, without limit.

        Args:
            positions: features of each tensor's classes; an empty list ends the centering.
        """
        if not positions:
            self.shares = self.shares[:0]
            return
        self.centered_features = torch.cat(list(positions))
        shares = [torch.full((len(part),), count / len(part)) for part, count in zip(positions, weights, strict=True)]
        self.shares = (torch.cat(shares) / sum(weights)).to(self.centered_features)


def features(tensor: int, tensors: int, classes: Sequence[int]) -> Tensor:
    """Return the input of the network, (positions, 48), for all positions of a grid of `classes` classes per axis."""
    along = [torch.arange(count).add(0.5).div(count) for count in classes[:AXES]]
    grid = torch.stack(torch.meshgrid(*along, indexing="ij"), -1) if along else torch.zeros(0)
    positions = grid.reshape(math.prod(classes[:AXES]), len(along))
    which = torch.full((len(positions), 1), (tensor + 0.5) / tensors)
    missing = torch.full((len(positions), AXES - len(along)), 0.5)
    turns = torch.cat([which, positions, missing], 1)[..., None] * (math.pi * 2.0 ** torch.arange(OCTAVES))
    return torch.cat([turns.sin(), turns.cos()], -1).flatten(1)


def stepped(log2: Tensor) -> tuple[Tensor, Tensor]:
    """Return (steps float32, indices int64) rounded to the file's table of steps, with straight-through gradients."""
    table = _STEPS.get(log2.device)
    if table is None:
        table = torch.from_numpy(scales_of(torch.arange(LOWEST, HIGHEST + 1).numpy())).to(log2.device)
        _STEPS[log2.device] = table
    index = (log2.detach() * PER_OCTAVE).round().clamp(LOWEST, HIGHEST).long()
    exact = table[index - LOWEST]
    return _ExactStep.apply(log2, exact), index  # type: ignore[no-untyped-call]


class _ExactStep(torch.autograd.Function):
    """Step that equals an entry of the table exactly, with the gradient of 2 to the power of its logarithm."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, _: Tensor, exact: Tensor) -> Tensor:
        """Return the exact step for (log2, step)."""
        ctx.save_for_backward(exact)
        return exact.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient by the logarithm l: d 2^l = 2^l ln 2 dl."""
        (exact,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0] * exact * math.log(2), None
