"""A bandit on the learning rate: every few steps it picks a factor, and learns from the losses which one pays.

    loss of a window − loss of the next ──► discounted mean of its factor ──► a draw for each ──► the largest wins

Thompson sampling with a Gaussian posterior: the reward of a choice is how far the mean loss falls from its window of
steps to the next; the noise is the rewards' own variance, and a factor that was not tried yet expects what all have
got. Rewards are discounted, so that the choice follows the run. All factors take equal time, so that reward per step is
reward per second.

It sees a few steps ahead and no further. Small rates look good at once, because they calm the noise of the last
updates, and are worse in the long run: the short-horizon bias of Wu et al. 2018 (arXiv 1803.02021). LOG.md has what it
was worth here. The schedule stays in charge: it is multiplied, and what goes by it (late QAT, SWA) sees it alone.

Decisions are a function of the seed and the losses, which all ranks hold alike after their reduction; drawing touches
no generator of torch. Source of the rule: Thompson 1933; discounting: Raj & Kalyani 2017 (arXiv 1707.09727).
"""

import dataclasses
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from birdie.errors import ConfigError, WeightsError


@dataclass(frozen=True, slots=True)
class BanditSettings:
    """Factors on the learning rates among which a bandit chooses while training; off by default.

    Raises:
        ConfigError: a value is out of range.
    """

    every: Annotated[int, Parameter(help="Steps between two choices of a factor on the learning rates; 0: never.")] = 0
    factors: Annotated[tuple[float, ...], Parameter(negative=(), help="To choose from.")] = (0.7, 1.0, 1.4)
    discount: Annotated[float, Parameter(help="What a choice keeps of the weight of all before it.")] = 0.98

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"bandit every is {self.every}; it must be 0 (never) or a number of steps")
        if len(self.factors) < 2 or len(set(self.factors)) < len(self.factors):
            raise ConfigError(f"bandit factors are {self.factors}; give two or more different ones")
        if not all(0 < factor < math.inf for factor in self.factors):
            raise ConfigError(f"bandit factors are {self.factors}; each must be finite and above 0")
        if not 0 < self.discount <= 1:
            raise ConfigError(f"bandit discount is {self.discount}; it must be above 0, up to 1")

    def plain(self) -> dict[str, Any]:
        """The settings as JSON gives them back."""
        return {**dataclasses.asdict(self), "factors": list(self.factors)}


class Bandit:
    """One run's choices; of settings that are off it always says 1.

    Attributes:
        chosen: how often each factor was.
    """

    def __init__(self, settings: BanditSettings, seed: int) -> None:
        self.settings, self._seed = settings, seed
        self._begin()

    def _begin(self) -> None:
        arms = len(self.settings.factors)
        self.chosen = [0] * arms
        self._weight, self._sum = [0.0] * arms, [0.0] * arms  # discounted, of the rewards of each factor
        self._squares = 0.0
        self._losses: list[float] = []  # of the window so far
        self._before: float | None = None  # mean loss of the window before
        self._arm = self._arm_before = 0

    def factor(self) -> float:
        """For the step to come."""
        if not self.settings.every:
            return 1.0
        if not self._losses:
            self._choose()
        return self.settings.factors[self._arm]

    def observe(self, loss: float) -> None:
        """Told the loss of each step, measured before its update, after `factor`."""
        if not self.settings.every:
            return
        self._losses.append(loss)
        if len(self._losses) < self.settings.every:
            return
        mean = math.fsum(self._losses) / len(self._losses)
        if self._before is not None:
            self._reward(self._arm_before, self._before - mean)
        self._losses, self._before, self._arm_before = [], mean, self._arm

    def evidence(self) -> str | None:
        """What was chosen how often, and what each factor is expected to bring; None where it is off."""
        if not self.settings.every:
            return None
        total, (means, _) = sum(self.chosen), self._posterior()
        arms = zip(self.settings.factors, self.chosen, means, strict=True)
        told = ", ".join(f"×{factor:g} {count} times ({1e3 * mean:+.3g} mnat)" for factor, count, mean in arms)
        return f"learning-rate bandit: {total:,} choices of {self.settings.every} steps: {told}"

    def state(self) -> dict[str, Any]:
        """All it remembers, as JSON can hold it; empty where it is off."""
        if not self.settings.every:
            return {}
        return {
            "factors": list(self.settings.factors),
            "chosen": list(self.chosen),
            "weight": list(self._weight),
            "sum": list(self._sum),
            "squares": self._squares,
            "losses": list(self._losses),
            "before": self._before,
            "arms": [self._arm_before, self._arm],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; of other factors, or empty, it begins anew.

        Raises:
            WeightsError: it is no state of a bandit.
        """
        self._begin()
        if not self.settings.every or list(state.get("factors", ())) != list(self.settings.factors):
            return
        try:
            self.chosen, self._weight, self._sum = list(state["chosen"]), list(state["weight"]), list(state["sum"])
            self._squares, self._losses, self._before = state["squares"], list(state["losses"]), state["before"]
            self._arm_before, self._arm = state["arms"]
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError("the checkpoint's learning-rate bandit cannot be read; start from another") from error

    def _choose(self) -> None:
        means, deviations = self._posterior()
        draws = random.Random(f"{self._seed}/{sum(self.chosen)}")
        drawn = [draws.gauss(mean, deviation) for mean, deviation in zip(means, deviations, strict=True)]
        self._arm = drawn.index(max(drawn))
        self.chosen[self._arm] += 1

    def _reward(self, arm: int, reward: float) -> None:
        keep = self.settings.discount
        self._weight = [keep * weight for weight in self._weight]
        self._sum = [keep * value for value in self._sum]
        self._squares = keep * self._squares + reward**2
        self._weight[arm] += 1
        self._sum[arm] += reward

    def _posterior(self) -> tuple[list[float], list[float]]:
        """Mean and deviation of each factor's expected reward: its own rewards, and one of what all have got."""
        total = math.fsum(self._weight)
        overall = math.fsum(self._sum) / total if total else 0.0
        variance = max(self._squares / total - overall**2, 0.0) if total else 1.0
        means = [(own + overall) / (weight + 1) for own, weight in zip(self._sum, self._weight, strict=True)]
        return means, [math.sqrt(variance / (weight + 1)) for weight in self._weight]
