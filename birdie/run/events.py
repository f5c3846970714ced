"""What a run tells while it goes: one value for each thing that happened, for callers to print and keep."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birdie.run.preflight import Check
from birdie.score.bpb import Score
from birdie.train.loop import Step
from birdie.train.profile import Profile


@dataclass(frozen=True, slots=True)
class Started:
    """The facts of a run, known before its first step."""

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
class Validated:
    """A score of the float model, taken outside the training clock.

    Attributes:
        weights: what was scored: "the last weights", or the average that would be exported now.
    """

    step: int
    train_ms: float
    score: Score
    weights: str = "the last weights"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is on disk."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The run was asked to stop; what it had is in the checkpoint saved just before."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Profiled:
    """Steps were profiled, outside the clock; tables and trace are in `folder`."""

    profile: Profile
    folder: Path


@dataclass(frozen=True, slots=True)
class Checked:
    """What could go wrong was looked at, before any time was spent; nothing failed."""

    checks: tuple[Check, ...]


Event = Checked | Started | Profiled | Step | Validated | Saved | Interrupted
