"""Differentiable estimate of the coded bits of coefficients, under scales by row and by column.

    coefficients / steps = q ──► round ──► bits of the symbols          (the value)
                              └─► not rounded ──► their slope           (the gradient)

The entropy coder learns a scale for every row and column and the shape of the distribution of a tensor; this model has
the same parameters. A symbol at (i, j) has a mixture of two distributions, each with a moment (r_i + ε)(c_j + ε) /
(m + ε) from the means over row, column and matrix: a normal distribution of that mean square, integrated over the unit
interval of the symbol, and a two-sided geometric distribution of that mean magnitude, which fits Laplacian weights and
nearly empty rows. The share of the mixture is learned. Moments change with the coefficients, and that is part of the
gradient: a row that is nearly zero becomes cheaper still. The cost of learning the coder's scales is added. On CPUs the
computation is compiled code (`rate_kernel`); on other devices, and while PyTorch traces a model, it is the tensor code
below.

Source: entropy under a learned density as in Ballé et al. 2018 (arXiv 1802.01436), with scales from the symbols.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from birdie.small.spectral import rate_kernel

FLOOR = 2e-4  # added to every moment: a row of zeros has a small cost, and its logarithm is finite
SCALE_BITS = 4.0  # approximate cost for the coder to learn the scale of a row or a column
_CHUNKS = {"cpu": 1 << 18}  # elements worked on at a time: what a cache holds; a GPU would wait for its launches
_LARGE = 1 << 25
_SHEPPARD = 1 / 12  # Sheppard's correction: what rounding adds to a mean square
_LEAST = 2.0**-24  # added to every probability
_ROOT = (2 * math.pi) ** -0.5


def bits_of(coefficients: Tensor, steps: Tensor, tails: Tensor) -> Tensor:
    """Return the bits of a matrix of coefficients (rows, columns) quantized with `steps`, 0-d.

    Args:
        coefficients: (rows, columns).
        steps: positive, of the same shape, or (1, 1).
        tails: (1,): logit of the share of the geometric distribution.
    """
    bits: Tensor = _Bits.apply(coefficients, steps, tails)  # type: ignore[no-untyped-call]
    return bits


class _Bits(torch.autograd.Function):
    """Bits with their gradient computed in the forward pass, which keeps one number per coefficient for backward.

    With a step per coefficient, backward also needs coefficients and steps.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, coefficients: Tensor, steps: Tensor, tails: Tensor) -> Tensor:
        """Return the total bits of the rounded symbols; gradients are taken at the values before rounding."""
        wide, by = coefficients.detach().float(), steps.detach().float()
        wanted = any(ctx.needs_input_grad)  # type: ignore[attr-defined]
        compiled = wide.device.type == "cpu" and wide.numel() > 0 and not torch.compiler.is_compiling()
        value, tail, *slopes = (_compiled if compiled else _in_tensors)(wide, by, tails.detach(), wanted)
        if wanted:
            ctx.save_for_backward(tail.reshape(tails.shape), *slopes, *(() if len(slopes) > 1 else (wide, by)))
        return value

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the gradients by coefficients, steps and tails: a symbol is a coefficient over a step."""
        tail, slopes, *rest = ctx.saved_tensors  # type: ignore[attr-defined]
        to_steps = None
        if len(rest) == 1:
            to_steps = rest[0] * gradients[0]
        elif ctx.needs_input_grad[1]:  # type: ignore[attr-defined]
            to_steps = (slopes * rest[0]).div_(rest[1]).mul_(-gradients[0])
        return slopes * gradients[0], to_steps, tail * gradients[0]


def _compiled(coefficients: Tensor, steps: Tensor, tails: Tensor, wanted: bool) -> tuple[Tensor, ...]:
    """Return bits, their slope by the tails and, if wanted, by the coefficients and by the step (if there is one)."""
    values, by = (array.contiguous().numpy() for array in (coefficients, steps))
    height, width = values.shape
    rows, columns = np.zeros((2, height)), np.zeros((2, width))
    rate_kernel.moments(values, by, rows, columns)
    rows, columns = rows / width, columns / height
    mean = rows.mean(1, keepdims=True) + FLOOR
    rows, columns = rows + FLOOR, columns + FLOOR
    share = float(torch.sigmoid(tails[0]))
    slopes = np.empty(values.shape if wanted else (0, 0), np.float32)
    sums = np.zeros((height + width if wanted else 0, 2))
    factors = (rows / mean).astype(np.float32), columns.astype(np.float32)
    bits, tail = rate_kernel.bits_and_slopes(values, by, *factors, np.float32(share), np.float32(_LEAST), slopes, sums)
    bits += SCALE_BITS * (height + width) + 0 * tail  # NaN must propagate, but the kernel's logarithm of NaN is finite
    tensors = [torch.tensor(array, dtype=torch.float32) for array in (bits, tail * share * (1 - share) / math.log(2))]
    if not wanted:
        return *tensors, torch.empty(0)
    by_rows, by_columns = sums[:height].T, sums[height:].T
    by_rows, total = by_rows / rows / width, by_rows.sum(1, keepdims=True) / mean / values.size
    moved = [array.astype(np.float32) for array in (by_rows - total, by_columns / columns / height)]
    to_step = rate_kernel.finish_slopes(values, by, *moved, slopes)
    one = [torch.full((1, 1), to_step)] if by.size == 1 else []
    return *tensors, torch.from_numpy(slopes), *one


def _in_tensors(coefficients: Tensor, steps: Tensor, tails: Tensor, wanted: bool) -> tuple[Tensor, ...]:
    """Return the same as `_compiled`, computed with tensors on any device, chunk by chunk."""
    q = coefficients / steps
    hard = q.round()
    share = torch.sigmoid(tails[0])
    moments = _Moments.of(hard)
    value = torch.full((), SCALE_BITS * sum(hard.shape), device=q.device)
    tail = torch.zeros_like(value)
    for part in _parts(q):
        mixture = _Mixture.of(hard[part].abs(), *moments.at(part), share)
        value -= mixture.mass.log2().sum()
        tail += ((mixture.normal - mixture.geometric) / mixture.mass).sum()
    tail = tail * share * (1 - share) / math.log(2)
    if not wanted:
        return value, tail, torch.empty(0)
    slopes = _slopes(q, moments, share) / steps
    one = [-(slopes * q).sum().reshape(1, 1)] if steps.numel() == 1 else []
    return value, tail, slopes, *one


class _Moments:
    """Mean squares and mean magnitudes of rows, of columns and of the matrix."""

    def __init__(self, means: list[Tensor]) -> None:
        self.means = means

    @classmethod
    def of(cls, q: Tensor) -> "_Moments":
        size = q.abs()
        return cls([mean for part in (size * size, size) for mean in (part.mean(1), part.mean(0), part.mean())])

    def at(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return (mean square, mean magnitude) at every symbol of some rows."""
        first, second = (
            (rows[part, None] + FLOOR) * (columns + FLOOR) / (mean + FLOOR)
            for rows, columns, mean in (self.means[:3], self.means[3:])
        )
        return first, second


def chunk_elements(device: torch.device) -> int:
    """Return the number of elements to work on at a time on `device`."""
    return _CHUNKS.get(device.type, _LARGE)


def _parts(q: Tensor) -> list[slice]:
    height = max(1, chunk_elements(q.device) // max(1, q.shape[1]))
    return [slice(start, start + height) for start in range(0, len(q), height)]


@dataclass(slots=True)
class _Mixture:
    """Probabilities of |q| and the terms of their slopes; the normal's lower tail is used, which does not cancel."""

    size: Tensor
    inverse: Tensor  # 1 / deviation of the normal
    low: Tensor
    high: Tensor
    fall: Tensor  # log of the geometric's ratio
    ratio: Tensor
    normal: Tensor
    geometric: Tensor
    mass: Tensor

    @classmethod
    def of(cls, size: Tensor, square: Tensor, magnitude: Tensor, share: Tensor) -> "_Mixture":
        inverse = (square - _SHEPPARD).clamp_min(0.25 * square).rsqrt()
        low, high = (0.5 - size) * inverse, (-0.5 - size) * inverse
        normal = torch.special.ndtr(low) - torch.special.ndtr(high)
        # θ^|q| (1 − θ) / (1 + θ) has the mean 2θ / (1 − θ²); these forms are exact for means small and large.
        fall = -torch.asinh(1 / magnitude)
        ratio = fall.exp()
        geometric = 2 * ratio / (magnitude * (1 + ratio) ** 2) * (size * fall).exp()
        mass = normal + share * (geometric - normal) + _LEAST
        return cls(size, inverse, low, high, fall, ratio, normal, geometric, mass)

    def slopes(self, square: Tensor, magnitude: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slopes of the bits by size, and by the logarithms of both moments."""
        low, high = _density(self.low), _density(self.high)
        to_normal, to_geometric = (part / (-math.log(2) * self.mass) for part in (1 - share, share))
        by_size = to_geometric * self.geometric * self.fall - to_normal * self.inverse * (low - high)
        steep = torch.where(square - _SHEPPARD > 0.25 * square, square * self.inverse**2, 1.0)
        by_square = -0.5 * to_normal * (low * self.low - high * self.high) * steep
        # d ln θ / d ln a = 1 / √(1 + a²), and d ln((1 − θ) / (1 + θ)) / d ln θ = −2θ / (1 − θ²) = −a.
        turned = (1 + magnitude * magnitude).rsqrt()
        by_magnitude = to_geometric * self.geometric * (self.size - magnitude) * turned
        return by_size, by_square, by_magnitude


def _density(x: Tensor) -> Tensor:
    density: Tensor = torch.exp(-0.5 * x * x) * _ROOT
    return density


def _slopes(q: Tensor, moments: _Moments, share: Tensor) -> Tensor:
    """Return the gradient of the bits by q. The moments are those of the symbols, and change like those of q."""
    slopes = torch.empty_like(q)
    rows, columns = (torch.zeros(2, count, device=q.device) for count in q.shape)
    for part in _parts(q):
        part_moments = moments.at(part)
        size = q[part].abs()
        slopes[part], *by_moments = _Mixture.of(size, *part_moments, share).slopes(*part_moments, share)
        for index, slope in enumerate(by_moments):
            rows[index, part] = slope.sum(1)
            columns[index] += slope.sum(0)
    # A moment is that of its row times that of its column over that of the matrix: a sum of logarithms.
    for index, power in enumerate((2, 1)):
        of_rows, of_columns, mean = (moment + FLOOR for moment in moments.means[3 * index : 3 * index + 3])
        share_of = rows[index] / of_rows / q.shape[1]
        along = columns[index] / of_columns / q.shape[0]
        moved = share_of[:, None] + along - rows[index].sum() / mean / q.numel()
        slopes += moved if power == 1 else 2 * q.abs() * moved
    signed: Tensor = slopes * q.sign()
    return signed
