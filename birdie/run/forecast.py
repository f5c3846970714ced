"""Forecast of the final bits per byte of a run, from its validations so far.

    ln bpb(t) = u + A · S(t)^−α − C · D(t)^γ        S: thousands of steps, each weighted by its learning-rate multiplier
                                                    D: Σ (1 − multiplier) of the steps so far / all steps of the run

The power law in S is the progress of learning, the term in D the gain from annealing the learning rate: the form of
Tissue, Wang and Wang, "Scaling law with learning rate annealing" (arXiv 2408.11029), with a power of the annealed area.
α, γ and the spread of A and C over runs are fitted to published curves of the challenge (`python -m benchmarks.estimate
--part curves` also forecasts each run from the others); u is free for each run. The forecast is Bayesian linear
regression on the validations. Before the learning rate falls, the gain from annealing is known from other runs only,
which widens the interval.

Early validations do rank runs: at step 1000 their correlation with the end is 0.86 over 975 runs of the challenge. But
the learning rate is still high then and the loss has far to fall, so a forecast from the run's own curve is better.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from birdie.errors import DataError
from birdie.run.history import Entry
from birdie.train.plan import lr_multiplier
from birdie.train.settings import TrainSettings

ALPHA, GAMMA = 0.55, 0.6
FIRST = 200  # first step from which curves follow the law
NOISE = 0.003  # standard deviation of ln bpb about the law, from its misfit and the choice of validation text
STUDENT = 1.77  # half width of a 90 % interval in standard deviations: Student's t with 13 degrees of freedom
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean and standard deviation of u, A and C over runs."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]


CHALLENGE = Prior((0.181, 0.147, 0.138), (0.5, 0.028, 0.039))
"""Prior from thirteen runs of 1,000 to 13,780 steps; wide in u, which depends on model and text."""
LARGE_BATCH_TOKENS = 131_072  # tokens per step: the smallest batch of those runs
SMALL_BATCHES = Prior((0.6, 0.1, 0.14), (0.6, 0.06, 0.08))
"""Prior for smaller batches, where A is smaller and no runs were published: twice as wide, by judgement."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of the end of a run.

    Attributes:
        bpb: expected bits per byte of the float model.
        low: lower bound of the 90 % interval.
        high: upper bound of the 90 % interval.
        step: step of the last validation.
        steps: number of steps of the whole run.
        validations: number of validations that the forecast uses.
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
    """Return the forecast for a run with the validations `entries`; for a finished run, its last validation.

    Args:
        entries: validations, by step.
        settings: training settings of the run.
        prior: of the law's parameters; None: chosen by the batch size.
        steps: number of steps of the whole run; None: from the settings and the time per step so far.
    """
    used = [entry for entry in entries if entry.step >= FIRST]
    if not used:
        raise DataError(
            f"a forecast needs a validation at step {FIRST} or later; "
            + (f"the last is at {entries[-1].step}" if entries else "this run has none yet")
        )
    last = used[-1]
    if not all(0 < entry.bpb < math.inf and 0 <= entry.train_ms < math.inf for entry in used):
        raise DataError("a validation of the run, or its time, is not a positive number; remove it from the history")
    if last.step > settings.last_step:
        raise DataError(
            f"the last validation is of step {last.step}, but the recipe has {settings.last_step} iterations"
        )
    step_ms = round(last.train_ms / last.step, 6)
    steps = max(last.step, total_steps(settings, step_ms) if steps is None else steps)
    if steps == last.step:
        return Forecast(last.bpb, last.bpb, last.bpb, last.step, steps, len(used))
    rows = features(settings, step_ms, steps)
    observed, end = rows[[entry.step for entry in used]], rows[steps]
    target = np.log([entry.bpb for entry in used])
    prior = prior or (CHALLENGE if settings.train_batch_tokens >= LARGE_BATCH_TOKENS else SMALL_BATCHES)
    # posterior of (u, A, C) given the observations; `gain` is the Kalman gain
    mean, spread = np.array(prior.mean), np.diag(np.square(prior.deviation))
    gain = spread @ observed.T @ np.linalg.inv(observed @ spread @ observed.T + NOISE**2 * np.eye(len(used)))
    value = float(end @ (mean + gain @ (target - observed @ mean)))
    half_width = STUDENT * math.sqrt(float(end @ (spread - gain @ observed @ spread) @ end) + NOISE**2)
    low, middle, high = (math.exp(value + side * half_width) for side in (-1, 0, 1))
    return Forecast(middle, low, high, last.step, steps, len(used))


def total_steps(settings: TrainSettings, step_ms: float) -> int:
    """Return the number of steps of a run at `step_ms` milliseconds per step, limited by the wall-clock cap."""
    cap = settings.cap_ms
    return settings.last_step if cap is None or not step_ms else min(settings.last_step, math.ceil(cap / step_ms))


@lru_cache(maxsize=64)
def features(settings: TrainSettings, step_ms: float, steps: int) -> _Array:
    """Return the features 1, S^−α and −D^γ after 0 … steps steps, (steps + 1, 3).

    S is at least 1e-3, its value after one step, because S^−α is infinite after none.
    """
    multipliers = np.array([lr_multiplier(settings, step, step * step_ms) for step in range(steps)])
    learned = np.concatenate(([0.0], np.cumsum(multipliers))) / 1000
    annealed = np.concatenate(([0.0], np.cumsum(1 - multipliers))) / steps
    return np.stack((np.ones(steps + 1), np.maximum(learned, 1e-3) ** -ALPHA, -(annealed**GAMMA)), axis=1)
