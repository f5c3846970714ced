"""Tables of coder 5 from their definitions (coders.md, "Tables of coder 5"), by decimals of 60 digits."""

from bisect import bisect_right
from decimal import ROUND_HALF_UP, Decimal, localcontext
from functools import cache

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def nearest(value: Decimal) -> int:
    return int(value.to_integral_value(ROUND_HALF_UP))


def power_of_two(exponent: Decimal) -> Decimal:
    return (Decimal(2).ln() * exponent).exp()


@cache
def tables() -> dict[str, list[int]]:
    """Return every table by its name; squash from its lowest argument, -2048."""
    with localcontext() as context:
        context.prec = 60
        squash = [nearest(65536 / (1 + (Decimal(-x) / 170).exp())) for x in range(-2048, 2048)]
        squash = [min(max(odds, 8), 65528) for odds in squash]
        lower = [stretched(squash, 16 * i + 8) for i in range(2048)]
        return {
            "squash": squash,
            "stretch": lower + [-x for x in reversed(lower)],
            "log2": [nearest(16 * (1 + Decimal(2 * i + 1) / 512).ln() / Decimal(2).ln()) for i in range(256)],
            "power": [floored(Decimal(i) / 16) for i in range(384)],
            "inverse": [max(1, floored(22 - Decimal(i) / 16)) for i in range(384)],
            "adaptation": [655360 // (10 * n + 16) for n in range(1024)],
            "Gaussian": prior([(-x * x / PI).exp() for x in middles()]),
            "logistic": prior([(2 / (power_of_two(x) + power_of_two(-x))) ** 2 for x in middles()]),
            "Laplace": prior([(-x).exp() for x in middles()]),
        }


def stretched(squash: list[int], middle: int) -> int:
    last = bisect_right(squash, middle) - 1
    return (last if middle - squash[last] <= squash[last + 1] - middle else last + 1) - 2048


def floored(exponent: Decimal) -> int:
    """Return 2 ** exponent, rounded down."""
    if exponent == exponent.to_integral_value():
        return 2 ** int(exponent) if exponent >= 0 else 0
    return int(power_of_two(exponent))


def middles() -> list[Decimal]:
    return [Decimal(2 * k + 1) / 512 for k in range(2048)]


def prior(half: list[Decimal]) -> list[int]:
    """Return F from the densities right of the middle, rounded to integers so that both halves weigh the same."""
    masses = [int(density * 10**50) for density in half]
    sums = [0]
    for density in [*reversed(masses), *masses]:
        sums.append(sums[-1] + density)
    return [2**20 * part // sums[-1] + i for i, part in enumerate(sums)]
