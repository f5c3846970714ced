"""Scoring mode `windows`: non-overlapping or sliding windows, over the whole stream or within each document.

`birdie.gpt.score.window_losses` has the layouts, and the losses of windows, which other modes need as well.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from birdie.errors import ConfigError
from birdie.gpt.score.mode import Losses, Scoring, ScoringMode, ScoringSettings, TrainingReport


class WindowedMode(ScoringMode):
    """Base of modes that score the windows which the shared settings ask for."""

    __slots__ = ()

    shared: ClassVar[tuple[str, ...]] = ("stride", "documents", "batch_seqs", "temperature")
    ngram_bias: ClassVar[bool] = True

    def describe(self, scoring: Scoring) -> str:
        settings, length = scoring.settings, f"{scoring.length:,}"
        if settings.documents:
            words = f"windows of {length} in each document, stride {settings.stride or scoring.length:,}"
        elif settings.stride:
            words = f"sliding windows of {length}, stride {settings.stride:,}"
        else:
            words = f"non-overlapping windows of {length}"
        return words + describe_temperature(settings)

    def check(self, settings: ScoringSettings, length: int) -> None:
        if settings.stride > length:
            raise ConfigError(f"stride {settings.stride} is longer than windows of {length}; give 1 to {length}")


@dataclass(frozen=True, slots=True)
class WindowMode(WindowedMode):
    """Score non-overlapping windows, or sliding windows with --stride, in each document with --documents."""

    name: ClassVar[str] = "windows"
    packaged: ClassVar[bool] = True

    def score(self, scoring: Scoring) -> Generator[Losses, None, TrainingReport | None]:
        from birdie.gpt.score.window_losses import score_windows, windows_of

        yield from score_windows(scoring, windows_of(scoring))
        return None


def describe_temperature(settings: ScoringSettings) -> str:
    """Return the temperature in words; empty at 1."""
    return f", temperature {settings.temperature:g}" if settings.temperature != 1.0 else ""
