"""*Experimental*: a bandit on the learning rate, which chooses a factor every few steps by the losses that follow.

    loss of a window − loss of the next ──► discounted mean of its factor ──► one draw per factor ──► the largest wins

Measured (LOG.md; docs/techniques.md): worth nothing to the small model of the ablation, +0.017 ± 0.003 bits per byte
when it chooses each step, +0.004 ± 0.007 every 8 steps.

Thompson sampling with a Gaussian posterior. The reward of a choice is the fall of the mean loss from its window of
steps to the next; the noise is the variance of the rewards, and a factor that was not tried yet has the mean of all
rewards as its prior. Rewards are discounted, so the choice follows the run. All factors take equal time, so reward per
step is reward per second.

It looks a few steps ahead and no further. Small learning rates look good at once, because they reduce the noise of the
last updates, and are worse in the long run: the short-horizon bias of Wu et al. 2018 (arXiv 1803.02021). The schedule
stays in charge: the factor multiplies it, and whatever follows the schedule (late QAT, SWA) sees the schedule alone.
`BanditPlan` is a run's plan with these factors.

Decisions are a function of the seed and of the losses, which are equal on all ranks after their reduction; draws do not
use a generator of torch. Sources: Thompson 1933; discounting: Raj & Kalyani 2017 (arXiv 1707.09727).
"""

import dataclasses
import math
import random
from collections.abc import Mapping
from typing import Any

from birdie.errors import WeightsError
from birdie.gpt.train.plan import Plan, StepPlan
from birdie.gpt.train.settings import BanditSettings
from birdie.system.structured import is_number


class Bandit:
    """The choices of one run.

    Attributes:
        settings: the argument, with `every` above 0.
        counts: how often each factor was chosen.
    """

    def __init__(self, settings: BanditSettings, seed: int) -> None:
        self.settings, self._seed = settings, seed
        self._clear()

    def _clear(self) -> None:
        arms = len(self.settings.factors)
        self.counts = [0] * arms
        self._weight, self._sum = [0.0] * arms, [0.0] * arms  # discounted number and sum of the rewards of each factor
        self._squares = 0.0
        self._losses: list[float] = []  # of the current window
        self._previous_mean: float | None = None  # loss of the previous window
        self._arm = self._previous_arm = 0

    def factor(self) -> float:
        """Return the factor for the next step; call it once per step, before `observe`."""
        if not self._losses:
            self._choose()
        return self.settings.factors[self._arm]

    def observe(self, loss: float) -> None:
        """Record the loss of a step, measured before its update."""
        self._losses.append(loss)
        if len(self._losses) < self.settings.every:
            return
        mean = math.fsum(self._losses) / len(self._losses)
        if self._previous_mean is not None:
            self._reward(self._previous_arm, self._previous_mean - mean)
        self._losses, self._previous_mean, self._previous_arm = [], mean, self._arm

    def diagnostics(self) -> str:
        """Return a line with the number of choices and the expected reward of each factor."""
        total, (means, _) = sum(self.counts), self._posterior()
        arms = zip(self.settings.factors, self.counts, means, strict=True)
        parts = ", ".join(f"×{factor:g} {count} times ({1e3 * mean:+.3g} mnat)" for factor, count, mean in arms)
        return f"learning-rate bandit: {total:,} choices of {self.settings.every} steps: {parts}"

    def state(self) -> dict[str, Any]:
        """Return all state, as JSON can hold it."""
        return {
            "factors": list(self.settings.factors),
            "chosen": list(self.counts),
            "weight": list(self._weight),
            "sum": list(self._sum),
            "squares": self._squares,
            "losses": list(self._losses),
            "before": self._previous_mean,
            "arms": [self._previous_arm, self._arm],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; if it is empty or of other factors, start anew."""
        self._clear()
        if list(state.get("factors", ())) != list(self.settings.factors):
            return
        try:
            self.counts, self._weight, self._sum = list(state["chosen"]), list(state["weight"]), list(state["sum"])
            self._squares, self._losses = state["squares"], list(state["losses"])
            self._previous_mean = state["before"]
            self._previous_arm, self._arm = state["arms"]
            means = [] if self._previous_mean is None else [self._previous_mean]
            numbers = (*self.counts, *self._weight, *self._sum, self._squares, *self._losses, *means)
            arms = range(len(self.settings.factors))
            if (
                not all(map(is_number, numbers))
                or not all(type(count) is int and count >= 0 for count in self.counts)
                or min(*self._weight, self._squares) < 0
                or {len(self.counts), len(self._weight), len(self._sum)} != {len(arms)}
                or not all(type(arm) is int and arm in arms for arm in (self._previous_arm, self._arm))
            ):
                raise ValueError("a value is out of range")
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                "the learning-rate bandit in the checkpoint cannot be read; resume from another checkpoint"
            ) from error

    def _choose(self) -> None:
        means, deviations = self._posterior()
        generator = random.Random(f"{self._seed}/{sum(self.counts)}")
        draws = [generator.gauss(mean, deviation) for mean, deviation in zip(means, deviations, strict=True)]
        self._arm = draws.index(max(draws))
        self.counts[self._arm] += 1

    def _reward(self, arm: int, reward: float) -> None:
        discount = self.settings.discount
        self._weight = [discount * weight for weight in self._weight]
        self._sum = [discount * value for value in self._sum]
        self._squares = discount * self._squares + reward**2
        self._weight[arm] += 1
        self._sum[arm] += reward

    def _posterior(self) -> tuple[list[float], list[float]]:
        """Return mean and deviation of each factor's expected reward: its rewards, and one of the mean of all."""
        total = math.fsum(self._weight)
        overall = math.fsum(self._sum) / total if total else 0.0
        variance = max(self._squares / total - overall**2, 0.0) if total else 1.0
        means = [(reward + overall) / (weight + 1) for reward, weight in zip(self._sum, self._weight, strict=True)]
        return means, [math.sqrt(variance / (weight + 1)) for weight in self._weight]


class BanditPlan(Plan):
    """A plan whose learning rates have the factors of a bandit.

    Args:
        settings: of the bandit, with `every` above 0.
    """

    def __init__(self, plan: Plan, settings: BanditSettings) -> None:
        vars(self).update(vars(plan))
        self.bandit = Bandit(settings, plan.settings.seed)

    def at(self, step: int, elapsed_ms: float) -> StepPlan:
        """Return the plan of the next step; call it once per step."""
        plan = super().at(step, elapsed_ms)
        return dataclasses.replace(plan, rate=plan.rate * self.bandit.factor())

    def observe(self, loss: float) -> None:
        """Record the loss of a step, measured before its update."""
        self.bandit.observe(loss)

    def diagnostics(self) -> str:
        """Return a line about the choices."""
        return self.bandit.diagnostics()

    def state(self) -> dict[str, Any]:
        """Return the state of the bandit, as JSON can hold it."""
        return self.bandit.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; if it is empty or of other factors, start anew."""
        self.bandit.load_state(state)
