"""Errors of rounded weights in units that people know: decibels, and the integers by row that err as much."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

INTEGER_BITS = range(2, 17)
"""Bits of the integers with which errors are compared."""
_WITHIN = 0.1  # bits of whole ones, about half a decibel


def decibels(signal: float, error: float) -> float:
    """Return 10 log₁₀(‖signal‖² / ‖error‖²) of squares: the signal-to-quantization-noise ratio (SQNR)."""
    if not error:
        return math.inf
    return 10 * math.log10(signal / error) if signal else -math.inf


def integer_errors(weight: Tensor) -> Tensor:
    """Return Σ error² of a matrix in integers of each of `INTEGER_BITS`, rounded to a scale by row.

    The scale is max |row| / (2^(bits − 1) − 1), of whose square an error is a twelfth; the row itself, at most.
    """
    if not weight.numel():
        return torch.zeros(len(INTEGER_BITS), dtype=torch.float64)
    rows = weight.detach().reshape(len(weight) if weight.ndim > 1 else 1, -1).double()
    levels = 2.0 ** (torch.tensor(INTEGER_BITS) - 1) - 1
    scales = rows.abs().amax(1, keepdim=True) / levels
    return torch.minimum(rows.shape[1] * scales.square() / 12, rows.square().sum(1, keepdim=True)).sum(0)


def integer_bits(error: float, errors: Sequence[float]) -> float:
    """Return the bits of integers by row that err as much as something does, by interpolation.

    Args:
        error: of it.
        errors: what `integer_errors` returned, of the same weights and in the same unit.

    Returns:
        A number of bits within `INTEGER_BITS`, which ends at its ends.
    """
    for bits, coarse, fine in zip(INTEGER_BITS, errors, errors[1:], strict=False):
        if error > fine:
            share = math.log(coarse / error) / math.log(coarse / fine) if coarse > fine > 0 else 0.0
            return bits + min(max(share, 0.0), 1.0)
    return float(INTEGER_BITS[-1])


def as_near_as(bits: float) -> str:
    """Return the integers that err about as much, such as "int6" or "int5–int6"."""
    if bits <= INTEGER_BITS[0] or bits >= INTEGER_BITS[-1]:
        return f"below int{INTEGER_BITS[0]}" if bits <= INTEGER_BITS[0] else f"int{INTEGER_BITS[-1]} or finer"
    nearest = round(bits)
    return f"int{nearest}" if abs(bits - nearest) < _WITHIN else f"int{math.floor(bits)}–int{math.ceil(bits)}"
