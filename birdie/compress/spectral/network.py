"""The quantization network: a position in, the step there out; one for the whole model.

    (tensor, class along each axis) ─► sines and cosines ─► 32 ─► 32 ─► + ─► log2 of the step in the tensor's deviations
                                                                        ▲
                                        one number for all: where the bits start

Classes are what `Transform.classes` says: frequencies within a block, bands, or nothing. So it is evaluated once per
tensor and place in a block, never per weight. Its last layer starts at zero: all steps start alike, and none can start
dead. In a file it is folded into the steps.

Source: the shared network of positions of AnimatedRNG/lsc (2020), with log-steps instead of fractional bits.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from birdie.compress.log_scales import HIGHEST, LOWEST, PER_OCTAVE, scales_of

AXES = 5  # as many as a 3-D convolution has; further ones do not tell positions apart
OCTAVES = 4  # sines of 1, 2, 4 and 8 half turns along each axis
_STEPS: dict[torch.device, Tensor] = {}


class QuantizationNetwork(nn.Module):
    """log2 of steps by position, and by tensor the shape of the distribution that coefficients are coded under.

    Attributes:
        offset: (), log2 of the step in standard deviations that everything starts from.
        tails: (tensors, 1): logit of the share of heavy tails in the distribution that each is coded under (`rate`).
    """

    everywhere: Tensor
    shares: Tensor

    def __init__(self, tensors: int, hidden: int = 32) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))
        self.tails = nn.Parameter(torch.zeros(tensors, 1))
        self.register_buffer("everywhere", torch.zeros(0, 2 * OCTAVES * (AXES + 1)), persistent=False)
        self.register_buffer("shares", torch.zeros(0), persistent=False)
        self.body = nn.Sequential(
            nn.Linear(2 * OCTAVES * (AXES + 1), hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 1),
        )
        last = self.body[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    @property
    def trained(self) -> bool:
        """Whether steps differ by position, which they do not at first."""
        last = self.body[-1]
        assert isinstance(last, nn.Linear)
        return bool(last.weight.detach().any())

    def forward(self, features: Tensor) -> Tensor:
        """features (positions, 48) → log2 of steps in deviations, (positions,)."""
        found: Tensor = self.body(features).squeeze(-1)
        if len(self.shares):
            mean = self.mean()
            found = found - (mean - mean.detach())
        return self.offset + found

    def mean(self) -> Tensor:
        """What the rest adds to the offset, averaged over all weights of the tensors it was centred on, 0-d."""
        return torch.dot(self.shares, self.body(self.everywhere).squeeze(-1))

    def centre(self, positions: Sequence[Tensor], weights: Sequence[int]) -> None:
        """From now on the rest learns only how steps differ, and the offset alone moves them all; nothing else changes.

        Whoever sets the offset needs that: else the rest is pushed by what pushes all steps, and nothing holds it.

        Args:
            positions: the features of each tensor's classes; none ends it.
            weights: of each tensor, how many there are.
        """
        if not positions:
            self.shares = self.shares[:0]
            return
        self.everywhere = torch.cat(list(positions))
        shares = [torch.full((len(each),), count / len(each)) for each, count in zip(positions, weights, strict=True)]
        self.shares = (torch.cat(shares) / sum(weights)).to(self.everywhere)


def features(tensor: int, tensors: int, classes: Sequence[int]) -> Tensor:
    """What the network is told of every position of a grid of `classes` places along each axis, (positions, 48)."""
    along = [torch.arange(count).add(0.5).div(count) for count in classes[:AXES]]
    grid = torch.stack(torch.meshgrid(*along, indexing="ij"), -1) if along else torch.zeros(0)
    places = grid.reshape(math.prod(classes[:AXES]), len(along))
    which = torch.full((len(places), 1), (tensor + 0.5) / tensors)
    missing = torch.full((len(places), AXES - len(along)), 0.5)
    turns = torch.cat([which, places, missing], 1)[..., None] * (math.pi * 2.0 ** torch.arange(OCTAVES))
    return torch.cat([turns.sin(), turns.cos()], -1).flatten(1)


def stepped(log2: Tensor) -> tuple[Tensor, Tensor]:
    """(steps float32, indices int64) of the table a file names steps by; gradients pass as if nothing was rounded."""
    table = _STEPS.get(log2.device)
    if table is None:
        table = torch.from_numpy(scales_of(torch.arange(LOWEST, HIGHEST + 1).numpy())).to(log2.device)
        _STEPS[log2.device] = table
    index = (log2.detach() * PER_OCTAVE).round().clamp(LOWEST, HIGHEST).long()
    exact = table[index - LOWEST]
    return _Exact.apply(log2, exact), index  # type: ignore[no-untyped-call]


class _Exact(torch.autograd.Function):
    """A step that is exactly the table's, with the gradient of 2 to the power of its logarithm."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, _: Tensor, exact: Tensor) -> Tensor:
        """(log2, step) → step."""
        ctx.save_for_backward(exact)
        return exact.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        """d 2^l = 2^l ln 2 dl."""
        (exact,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0] * exact * math.log(2), None
