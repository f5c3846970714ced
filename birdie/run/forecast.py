"""The bits per byte a run will end at, from its validations so far.

    ln bpb(t) = u + A · S(t)^−α − C · D(t)^γ        S: thousands of steps, each times its factor on the learning rate
                                                    D: Σ (1 − factor) over all steps of the run, as a share of them

A power law of what was learned, and what the fall of the learning rate brings down on top: the form of Tissue, Wang and
Wang, "Scaling law with learning rate annealing" (arXiv 2408.11029), with the annealed area to a power. α, γ and how A
and C vary from run to run are from published curves of the challenge (`python -m benchmarks.estimate --part curves`
foretells each by the others, too); u is the run's own. The forecast is Bayesian linear regression on the validations
there are: before the learning rate falls, what that will bring is known from other runs alone, and the
interval says so.

Early validations do rank runs, correlation 0.86 at step 1000 with the end over 975 runs of the challenge, but the
learning rate is still high then and the level has far to fall. A run's own curve says more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from birdie.errors import DataError
from birdie.run.history import Entry
from birdie.train.schedule import scheduled_lr_multiplier
from birdie.train.settings import TrainSettings

ALPHA, GAMMA = 0.55, 0.6
FIRST = 200  # steps before which curves do not follow the law
NOISE = 0.003  # standard deviation of ln bpb about the law: what the law misses, and the validation text
STUDENT = 1.77  # deviations of a two-sided 90 % interval by Student's t with 13 degrees of freedom
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean and standard deviation over runs of u, A and C."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]


CHALLENGE = Prior((0.181, 0.147, 0.138), (0.5, 0.028, 0.039))
"""Of thirteen runs of 1,000 to 13,780 steps; u is left wide, as it is another for each model and text."""
LARGE = 131_072  # tokens a step: the fewest of those runs
ELSEWHERE = Prior((0.6, 0.1, 0.14), (0.6, 0.06, 0.08))
"""For smaller batches, where A is smaller and no runs were published: twice as wide, by judgement."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Where a run will end.

    Attributes:
        bpb: expected, of the float model.
        low, high: nine runs in ten should end between them.
        step: of the last validation.
        steps: that the run will have.
        validations: that were used.
    """

    bpb: float
    low: float
    high: float
    step: int
    steps: int
    validations: int


def forecast(
    entries: Sequence[Entry], settings: TrainSettings, prior: Prior | None = None, steps: int | None = None
) -> Forecast:
    """Where the run that validated `entries` and trains by `settings` will end; of a finished run, where it ended.

    Args:
        entries: by step.
        settings: of the run.
        prior: what other runs tell of the law; None: by the size of the batch.
        steps: that the run will have; None: by its settings and its pace so far.

    Raises:
        DataError: there is no validation to go by.
    """
    used = [each for each in entries if each.step >= FIRST]
    if not used:
        raise DataError(
            f"a forecast needs a validation at step {FIRST} or later; "
            + (f"the last is at {entries[-1].step}" if entries else "this run has none yet")
        )
    last = used[-1]
    if not all(0 < each.bpb < math.inf and 0 <= each.train_ms < math.inf for each in used):
        raise DataError(
            "a validation of the run, or its time, is not a positive number; there is nothing to go on from"
        )
    if last.step > settings.last_step:
        raise DataError(
            f"the last validation is of step {last.step}, but the recipe has {settings.last_step} iterations"
        )
    pace = round(last.train_ms / last.step, 6)
    steps = max(last.step, total_steps(settings, pace) if steps is None else steps)
    if steps == last.step:
        return Forecast(last.bpb, last.bpb, last.bpb, last.step, steps, len(used))
    rows = features(settings, pace, steps)
    seen, end = rows[[each.step for each in used]], rows[steps]
    target = np.log([each.bpb for each in used])
    prior = prior or (CHALLENGE if settings.train_batch_tokens >= LARGE else ELSEWHERE)
    mean, spread = np.array(prior.mean), np.diag(np.square(prior.deviation))
    gain = spread @ seen.T @ np.linalg.inv(seen @ spread @ seen.T + NOISE**2 * np.eye(len(used)))
    value = float(end @ (mean + gain @ (target - seen @ mean)))
    reach = STUDENT * math.sqrt(float(end @ (spread - gain @ seen @ spread) @ end) + NOISE**2)
    low, middle, high = (math.exp(value + side * reach) for side in (-1, 0, 1))
    return Forecast(middle, low, high, last.step, steps, len(used))


def total_steps(settings: TrainSettings, step_ms: float) -> int:
    """Steps of a run at `step_ms` milliseconds each, by number or by the cap."""
    cap = settings.cap_ms
    return settings.last_step if cap is None or not step_ms else min(settings.last_step, math.ceil(cap / step_ms))


@lru_cache(maxsize=64)
def features(settings: TrainSettings, step_ms: float, steps: int) -> _Array:
    """(steps + 1, 3): 1, S^−α and −D^γ after each number of steps; S after none is taken as that after one."""
    factors = np.array([scheduled_lr_multiplier(settings, step, step * step_ms) for step in range(steps)])
    learned = np.concatenate(([0.0], np.cumsum(factors))) / 1000
    annealed = np.concatenate(([0.0], np.cumsum(1 - factors))) / steps
    return np.stack((np.ones(steps + 1), np.maximum(learned, 1e-3) ** -ALPHA, -(annealed**GAMMA)), axis=1)
