"""What coefficients will cost, differentiable: bits of their symbols under scales by row and column.

    coefficients / steps = q ──► round ──► bits of the symbols          (the value)
                              └─► not rounded ──► their slope           (the gradient)

The entropy coder learns a scale for every row and column and a shape for the whole; so does this. A symbol at (i, j)
has a mixture of two distributions, each with a moment (r_i + ε)(c_j + ε) / (m + ε) made of means over row, column and
all: a normal one of that mean square, integrated over its unit, and a two-sided geometric one of that mean magnitude,
which is right for Laplacian weights and for whatever is nearly all zero. The mixture's share is learned. Moments change
with the coefficients and that is part of the gradient: a row that is nearly zero gets cheaper still. What the coder
pays to learn its scales is added.

Source: entropy under a learned density as in Ballé et al. 2018 (arXiv 1802.01436), with scales from the symbols.
"""

import torch
from torch import Tensor

FLOOR = 2e-4  # added to every moment: a row of zeros costs next to nothing, not nothing
SCALE_BITS = 4.0  # about what the coder pays before it believes a row or a column
_CHUNK = 1 << 18  # elements worked on at a time
_SHEPPARD = 1 / 12  # what rounding adds to a mean square
_LEAST = 2.0**-24


def bits_of(coefficients: Tensor, steps: Tensor, tails: Tensor) -> Tensor:
    """Bits of a matrix of coefficients (rows, columns) quantized to `steps`, 0-d.

    Args:
        coefficients: (rows, columns).
        steps: positive, of the same shape, or (1, 1).
        tails: (1,): logit of the share of the geometric part.
    """
    found: Tensor = _Bits.apply(coefficients, steps, tails)  # type: ignore[no-untyped-call]
    return found


class _Bits(torch.autograd.Function):
    """Works chunk by chunk and keeps one gradient per coefficient, however long the formula is."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, coefficients: Tensor, steps: Tensor, tails: Tensor) -> Tensor:
        """Total bits of the rounded symbols; the gradients are those at what is not rounded."""
        q = (coefficients.detach().float() / steps).float()
        hard = q.round()
        own, tail = tails.detach().clone().requires_grad_(True), torch.zeros_like(tails)
        value = torch.full((), SCALE_BITS * sum(hard.shape), device=q.device)
        moments = _Moments.of(hard)
        for part in _parts(q):
            with torch.enable_grad():
                total = _bits(hard[part], *moments.at(part), own).sum()
            value += total.detach()
            tail += torch.autograd.grad(total, own)[0]
        if any(ctx.needs_input_grad):  # type: ignore[attr-defined]
            ctx.save_for_backward(q, _slopes(q, moments, own), steps, tail)
        return value

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Symbols are coefficients over steps."""
        q, slopes, steps, tail = ctx.saved_tensors  # type: ignore[attr-defined]
        to_coefficients = slopes / steps * gradients[0]
        to_steps = -(to_coefficients * q)
        if steps.numel() == 1:
            to_steps = to_steps.sum().reshape(steps.shape)
        return to_coefficients, to_steps, tail * gradients[0]


class _Moments:
    """Mean squares and mean magnitudes of rows, columns and all."""

    def __init__(self, means: list[Tensor]) -> None:
        self.means = means

    @classmethod
    def of(cls, q: Tensor) -> "_Moments":
        size = q.abs()
        return cls([mean for part in (size * size, size) for mean in (part.mean(1), part.mean(0), part.mean())])

    def at(self, part: slice) -> tuple[Tensor, Tensor]:
        """(mean square, mean magnitude) at each symbol of some rows."""
        first, second = (
            (rows[part, None] + FLOOR) * (columns + FLOOR) / (mean + FLOOR)
            for rows, columns, mean in (self.means[:3], self.means[3:])
        )
        return first, second


def _parts(q: Tensor) -> list[slice]:
    height = max(1, _CHUNK // max(1, q.shape[1]))
    return [slice(start, start + height) for start in range(0, len(q), height)]


def _bits(q: Tensor, square: Tensor, magnitude: Tensor, tails: Tensor) -> Tensor:
    """−log2 of the mixture's probability of q; the normal's is taken at its lower tail, where differences are exact."""
    share, size = torch.sigmoid(tails[0]), q.abs()
    inverse = (square - _SHEPPARD).clamp_min(0.25 * square).rsqrt()
    normal = torch.special.ndtr((0.5 - size) * inverse) - torch.special.ndtr((-0.5 - size) * inverse)
    ratio = magnitude / (1 + (1 + magnitude * magnitude).sqrt())
    geometric = (1 - ratio) / (1 + ratio) * ratio**size
    return -torch.log2((1 - share) * normal + share * geometric + _LEAST)


def _slopes(q: Tensor, moments: _Moments, tails: Tensor) -> Tensor:
    """Gradient of the bits by q. Moments are those of the symbols, and move as q does."""
    means = [mean.requires_grad_(True) for mean in moments.means]
    slopes = torch.empty_like(q)
    sums = [torch.zeros_like(each) for each in means]
    for part in _parts(q):
        with torch.enable_grad():
            free = q[part].clone().requires_grad_(True)
            total = _bits(free, *moments.at(part), tails.detach()).sum()
            first, *rest = torch.autograd.grad(total, [free, *means])
        slopes[part] = first
        for one, more in zip(sums, rest, strict=True):
            one += more
    rows2, columns2, mean2, rows1, columns1, mean1 = sums
    height, width = q.shape
    slopes += 2 * q * (rows2[:, None] / width + columns2 / height + mean2 / q.numel())
    slopes += q.sign() * (rows1[:, None] / width + columns1 / height + mean1 / q.numel())
    return slopes
