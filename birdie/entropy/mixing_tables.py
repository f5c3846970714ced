"""Lookup tables of context mixing, pinned by hash in docs/coders.md and computed by integer arithmetic alone.

Floating-point exp and log differ in the last bit between machines, and one differing entry would make a file decode to
noise. So every entry comes from integers of Python: exponential series and nested square roots with 96 binary digits.

A logit is a whole number of 1/170 nats within ±LIMIT. A scale is 16 · log2 of a mean magnitude in 1/64 symbols.
"""

from functools import cache
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LIMIT = 2047  # largest logit
SCALES = 384  # scales 0 … 383: 24 octaves
GAUSSIAN, LOGISTIC, LAPLACE = range(3)  # the priors
CDF_BUCKETS = 4096  # a prior covers ±8 mean magnitudes in buckets of 1/256
_ONE = 1 << 96  # fixed point
_PI = 0x3243F6A8885A308D313198A2E  # π · 2**96


class Tables(NamedTuple):
    """Lookup tables that do not depend on the prior."""

    squash: NDArray[np.int32]  # (4096,) probability in 1/65,536 for a logit + 2,048: the logistic function
    stretch: NDArray[np.int32]  # (4096,) logit of a probability in 1/4,096: the inverse of squash
    # (256,) 16 · log2(1 + (2i + 1)/512), rounded: the fraction of a logarithm, from 8 bits after the leading 1
    log2: NDArray[np.int64]
    power: NDArray[np.int64]  # (384,) 2**(i/16), rounded down
    inverse: NDArray[np.int64]  # (384,) 2**(22 - i/16), rounded down
    # (1024,) share in 1/65,536 by which observation n moves a running mean: 1 / (n + 1.6)
    adaptation: NDArray[np.int64]


@cache
def tables() -> Tables:
    """Return all tables but the priors."""
    exponentials = _powers_of_e(170, LIMIT + 2)
    squash = np.empty(4096, np.int32)
    for x in range(-2048, 2048):
        # 65,536 / (1 + e^-x), rounded
        numerator = exponentials[abs(x)] if x >= 0 else _ONE
        squash[x + 2048] = min(max((2 * 65536 * numerator // (exponentials[abs(x)] + _ONE) + 1) // 2, 8), 65528)
    # The logit whose probability is nearest to the middle of the bucket; the upper half mirrors the lower.
    middles = 16 * np.arange(2048) + 8
    last = np.searchsorted(squash, middles, side="right") - 1
    nearer = middles - squash[last] <= squash[last + 1] - middles
    lower = np.where(nearer, last, last + 1) - 2048
    stretch = np.concatenate([lower, -lower[::-1]])
    # How many of the thresholds 2**((2k - 1)/32) lie below the number is its logarithm, rounded; in exact integers.
    log2 = [sum(1 for k in range(1, 17) if (513 + 2 * i) ** 32 >= 512**32 << (2 * k - 1)) for i in range(256)]
    return Tables(
        squash,
        stretch.astype(np.int32),
        np.array(log2, np.int64),
        np.array([_root16(1 << i) for i in range(SCALES)], np.int64),
        np.array([_root16(1 << max(352 - i, 0)) for i in range(SCALES)], np.int64),
        np.array([655360 // (10 * n + 16) for n in range(1024)], np.int64),
    )


@cache
def prior_cdf(prior: int) -> NDArray[np.int64]:
    """Return the distribution function of a prior of unit mean magnitude, (CDF_BUCKETS + 1,).

    It rises from 0 by at least 1 a bucket, so that no symbol ever has probability 0.
    """
    half = [0] * (CDF_BUCKETS // 2)
    if prior == GAUSSIAN:
        # density e^(-x²/π) at the middles (2i + 1)/512; the ratios of neighbors form a geometric series
        value, ratio_step = _exp_minus(1, 512 * 512), _exp_minus(8, 512 * 512)
        ratio = ratio_step
        for i in range(CDF_BUCKETS // 2):
            half[i] = value
            value = value * ratio // _ONE
            ratio = ratio * ratio_step // _ONE
    else:
        # densities e^-x and sech²(x ln 2) at the middles
        step = _exp(1, 512) if prior == LAPLACE else _root_of_two(512)
        value, square = step, step * step // _ONE
        for i in range(CDF_BUCKETS // 2):
            inverse = _ONE * _ONE // value
            half[i] = inverse if prior == LAPLACE else _ONE**3 // (value + inverse) ** 2
            value = value * square // _ONE
    density = half[::-1] + half
    total, mass_below, cdf = sum(density), 0, []
    for i, mass in enumerate([*density, 0]):
        cdf.append((mass_below << 20) // total + i)
        mass_below += mass
    return np.array(cdf, np.int64)


def _root16(value: int) -> int:
    """Return the sixteenth root, rounded down."""
    return isqrt(isqrt(isqrt(isqrt(value))))


def _exp(numerator: int, denominator: int) -> int:
    """Return e^(numerator/denominator) in fixed point."""
    term, total, k = _ONE, 0, 1
    while term:
        total += term
        term = term * numerator // (denominator * k)
        k += 1
    return total


def _exp_minus(numerator: int, denominator: int) -> int:
    """Return e^(-numerator / (denominator · π)) in fixed point."""
    return _ONE * _ONE // _exp(numerator * _ONE, denominator * _PI)


def _root_of_two(degree: int) -> int:
    """Return 2^(1/degree) in fixed point, `degree` a power of two."""
    value = 2 * _ONE
    while degree > 1:
        value = isqrt(value * _ONE)
        degree //= 2
    return value


def _powers_of_e(denominator: int, count: int) -> list[int]:
    """Return e^(i/denominator) for i < count, in fixed point."""
    step, powers = _exp(1, denominator), [_ONE]
    for _ in range(count - 1):
        powers.append(powers[-1] * step // _ONE)
    return powers
