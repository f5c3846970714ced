"""Significance of a difference between two sets of seeds, by Student's t (scipy).

The challenge asks a record to beat the one before it by 0.005 nats per token with p < 0.01 over seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from birdie.errors import ConfigError

MARGIN_NATS, P = 0.005, 0.01
"""Margin and level that the challenge asks for."""
LEVEL = 0.05
"""Default level of significance of `birdie try`."""


@dataclass(frozen=True, slots=True)
class Test:
    """Result of a one-sided t-test of "`ours` is below `theirs` by more than `margin`".

    Attributes:
        difference: mean of ours minus mean of theirs; negative is better, as for losses.
        error: standard error of the difference; NaN with fewer than two values a side.
        p: probability of a difference as low as this or lower if the true one is −`margin`; NaN if it is unknown.
        seeds: number of values: (ours, theirs).
        paired: whether each value was compared with the one of the same seed.
        margin: improvement to be exceeded.
    """

    difference: float
    error: float
    p: float
    seeds: tuple[int, int]
    paired: bool
    margin: float

    def significant(self, level: float = P) -> bool:
        """Return whether the improvement exceeds the margin at this level."""
        return self.p < level


def compare(
    ours: Sequence[float], theirs: Sequence[float], *, margin: float = 0.0, paired: bool = False, sigma: float = 0.0
) -> Test:
    """Return the one-sided t-test of whether `ours` is below `theirs` by more than `margin`.

    Unpaired it is Welch's test; one value of theirs, as a record states it, counts as exact.

    Args:
        paired: compare value by value; both sides have the same seeds in the same order.
        sigma: known lower bound of the standard deviation of a value, for values that agree by chance.
    """
    if not ours or not theirs or not all(map(math.isfinite, (*ours, *theirs))):
        raise ConfigError("a comparison needs at least one finite score on each side; give more runs")
    if paired and len(ours) != len(theirs):
        raise ConfigError(f"{len(ours)} runs cannot be paired with {len(theirs)}; run both with the same seeds")
    difference, counts = fmean(ours) - fmean(theirs), (len(ours), len(theirs))
    if paired:
        freedom = len(ours) - 1.0
        changes = [left - right for left, right in zip(ours, theirs, strict=True)]
        error = max(stdev(changes), sigma) / math.sqrt(len(changes)) if freedom else math.nan
    else:
        variances = [max(stdev(side), sigma) ** 2 / len(side) if len(side) > 1 else 0.0 for side in (ours, theirs)]
        total = sum(variances)
        error = math.sqrt(total) if len(ours) > 1 else math.nan
        parts = [part**2 / (len(side) - 1) for part, side in zip(variances, (ours, theirs), strict=True) if part]
        freedom = total**2 / sum(parts) if parts and sum(parts) else len(ours) - 1.0
    return Test(difference, error, _p(difference + margin, error, freedom), counts, paired, margin)


def _p(excess: float, error: float, freedom: float) -> float:
    if math.isnan(error):
        return math.nan
    if not error:
        return float(excess >= 0)
    from scipy.stats import t

    return float(t.cdf(excess / error, freedom))
