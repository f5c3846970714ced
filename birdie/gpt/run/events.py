"""Events of a run: `Run.train` yields one value for each thing that happens, for callers to log, show and keep.

This module holds plain values only, so that a caller that reads events imports neither preflight nor calibration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from birdie.gpt.run.recipe_settings import RunSettings
from birdie.gpt.score.accumulator import Score
from birdie.gpt.train.loop import Step
from birdie.system.callbacks import LONGEST_SILENCE

State = Literal["pass", "warn", "fail"]


class LogPace:
    """Choice of the steps that get a line in the log: those that the settings name, and one after each long silence.

    Args:
        clock: seconds.
    """

    def __init__(self, settings: RunSettings, clock: Callable[[], float] = monotonic) -> None:
        self._settings, self._clock, self._last = settings, clock, clock()

    def due(self, step: int) -> bool:
        """Return True if the step gets a line, which ends the silence."""
        now = self._clock()
        silent = self._settings.log_every > 0 and now - self._last >= LONGEST_SILENCE
        if due := silent or self._settings.logs(step):
            self._last = now
        return due


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """Result of one preflight check.

    Attributes:
        state: the result; "fail" ends the run before it starts.
        says: the reason, in one sentence.
    """

    name: str
    state: State
    says: str

    @property
    def line(self) -> str:
        """Line for the log."""
        return f"preflight {self.state}: {self.name}: {self.says}"


@dataclass(frozen=True, slots=True)
class Checked:
    """The preflight checks have run, before the training clock starts; none of them failed."""

    checks: tuple[PreflightCheck, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """Facts of a run that are known before its first step."""

    parameters: int
    world_size: int
    micro_steps: int
    dataset: str
    train_shards: int
    train_tokens: int
    val_tokens: int
    device: str
    attention_kernel: str
    compute_dtype: str
    newton_schulz_dtype: str
    compiled: bool
    groups: Mapping[str, Mapping[str, Any]]
    resumed_at: int


@dataclass(frozen=True, slots=True)
class Profiled:
    """Some steps were profiled, outside the training clock; table and trace are in `folder`."""

    ranges: dict[str, float]  # milliseconds of a mean step by name
    folder: Path


@dataclass(frozen=True, slots=True)
class Validated:
    """Score of the float model, computed outside the training clock.

    Attributes:
        weights: the weights that were scored: "the last weights", or the average that an export would take now.
    """

    step: int
    train_ms: float
    score: Score
    weights: str = "the last weights"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was written to disk."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The run was stopped on request; its state is in the checkpoint that was saved just before this event."""

    step: int
    path: Path


Event = Checked | Started | Profiled | Step | Validated | Saved | Interrupted
