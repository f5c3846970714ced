"""The pinned tables of `mixing`, made by integer arithmetic alone so that every machine has the same ones.

A logit is a whole number of 1/170 nats, held to ±2,047. A scale is 16 · log2 of a mean magnitude in 1/64 symbols.
"""

from functools import cache
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LIMIT = 2047  # logits
SCALES = 384  # scales 0 … 383: 24 octaves
GAUSSIAN, LOGISTIC, LAPLACE = range(3)  # the priors
CELLS = 4096  # a prior covers ±8 mean magnitudes in steps of 1/256
_ONE = 1 << 96  # fixed point
_PI = 0x3243F6A8885A308D313198A2E  # π · 2**96


class Tables(NamedTuple):
    """What the kernel looks up.

    Attributes:
        squash: (4096,) probability of 65,536 for a logit - 2,048.
        stretch: (4096,) logit of a probability, in 4,096ths.
        log2: (256,) 16 · log2(1 + (2i + 1)/512), rounded.
        power: (384,) 2**(i/16), rounded down.
        inverse: (384,) 2**(22 - i/16), rounded down.
        pace: (1024,) share of 65,536 by which the n-th observation moves a mean: 1 / (n + 1.6).
    """

    squash: NDArray[np.int32]
    stretch: NDArray[np.int32]
    log2: NDArray[np.int64]
    power: NDArray[np.int64]
    inverse: NDArray[np.int64]
    pace: NDArray[np.int64]


@cache
def tables() -> Tables:
    """All tables but the priors."""
    up = _powers_of_e(170, LIMIT + 2)
    squash = np.empty(4096, np.int32)
    for x in range(-2048, 2048):
        # 65,536 / (1 + e^-x), rounded
        over = up[abs(x)] if x >= 0 else _ONE
        squash[x + 2048] = min(max((2 * 65536 * over // (up[abs(x)] + _ONE) + 1) // 2, 8), 65528)
    # The logit whose probability is nearest to the middle of the cell; the upper half mirrors the lower.
    middles = 16 * np.arange(2048) + 8
    last = np.searchsorted(squash, middles, side="right") - 1
    nearer = middles - squash[last] <= squash[last + 1] - middles
    lower = np.where(nearer, last, last + 1) - 2048
    stretch = np.concatenate([lower, -lower[::-1]])
    steps = [sum(1 for k in range(1, 17) if (513 + 2 * i) ** 32 >= 512**32 << (2 * k - 1)) for i in range(256)]
    return Tables(
        squash,
        stretch.astype(np.int32),
        np.array(steps, np.int64),
        np.array([_root16(1 << i) for i in range(SCALES)], np.int64),
        np.array([_root16(1 << max(352 - i, 0)) for i in range(SCALES)], np.int64),
        np.array([655360 // (10 * n + 16) for n in range(1024)], np.int64),
    )


@cache
def prior(kind: int) -> NDArray[np.int64]:
    """Distribution function of a prior of unit mean magnitude: (CELLS + 1,), rising from 0 by at least 1 a cell."""
    half = [0] * (CELLS // 2)
    if kind == GAUSSIAN:
        # density e^(-x²/π) at the middles (2i + 1)/512; the ratios of neighbours form a geometric series
        first, twice = _exp_minus(1, 512 * 512), _exp_minus(8, 512 * 512)
        value, ratio = first, twice
        for i in range(CELLS // 2):
            half[i] = value
            value = value * ratio // _ONE
            ratio = ratio * twice // _ONE
    else:
        # densities e^-x and sech²(x ln 2) at the middles
        step = _exp_of(1, 512) if kind == LAPLACE else _root_of_two(512)
        value, square = step, step * step // _ONE
        for i in range(CELLS // 2):
            inverse = _ONE * _ONE // value
            half[i] = inverse if kind == LAPLACE else _ONE**3 // (value + inverse) ** 2
            value = value * square // _ONE
    density = half[::-1] + half
    total, rising, out = sum(density), 0, []
    for i, mass in enumerate([*density, 0]):
        out.append((rising << 20) // total + i)
        rising += mass
    return np.array(out, np.int64)


def _root16(value: int) -> int:
    """The sixteenth root, rounded down."""
    return isqrt(isqrt(isqrt(isqrt(value))))


def _exp_of(over: int, under: int) -> int:
    """e^(over/under) in fixed point."""
    term, total, k = _ONE, 0, 1
    while term:
        total += term
        term = term * over // (under * k)
        k += 1
    return total


def _exp_minus(over: int, under: int) -> int:
    """e^(-over / (under · π)) in fixed point."""
    return _ONE * _ONE // _exp_of(over * _ONE, under * _PI)


def _root_of_two(under: int) -> int:
    """2^(1/under) in fixed point, `under` a power of two."""
    value = 2 * _ONE
    while under > 1:
        value = isqrt(value * _ONE)
        under //= 2
    return value


def _powers_of_e(under: int, count: int) -> list[int]:
    """e^(i/under) for i < count, in fixed point."""
    step, out = _exp_of(1, under), [_ONE]
    for _ in range(count - 1):
        out.append(out[-1] * step // _ONE)
    return out
