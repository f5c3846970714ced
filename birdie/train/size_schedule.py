"""Sequence-length and batch-size schedules: short sequences and small batches first.

Sequence length: rows of a chunk are cut into shorter sequences, so a step keeps its tokens and the loader its position;
the length doubles in stages of equal fractions of the run (SkyLadder, Zhu et al. 2025, arXiv 2503.15450). Batch size: a
step takes fewer gradient-accumulation chunks, whose number doubles likewise. The ternary record of the challenge names
the variables; there the only change comes at the fraction at which the last one comes here.
"""

from bisect import bisect_right
from dataclasses import dataclass

from birdie.errors import ConfigError
from birdie.runtime.callbacks import Notify, no_message
from birdie.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of the steps in one stage of a run.

    Attributes:
        length: tokens of a sequence.
        chunks: of a step, over all ranks.
    """

    length: int
    chunks: int


class SizeSchedule:
    """The stages of a run.

    Args:
        settings: first and last sizes, and the fractions of the run at which they are full.
        ranks: number of processes.
        notify: called with a line when a stage begins.
    """

    def __init__(self, settings: TrainSettings, ranks: int = 1, notify: Notify = no_message) -> None:
        first = settings.initial_chunks
        self._chunk_tokens = settings.chunk_tokens
        if first % ranks:
            raise ConfigError(
                f"batch_tokens_start {settings.batch_tokens_start} is {first} chunks of {self._chunk_tokens} tokens, "
                f"which {ranks} ranks do not divide; choose a multiple of {ranks * self._chunk_tokens}, or a larger "
                "accumulation"
            )
        self._lengths = _doublings(settings.seq_len_start or settings.train_seq_len, settings.train_seq_len)
        self._chunks = _doublings(first, settings.accumulation)
        self._length_starts = _stage_starts(len(self._lengths), settings.seq_schedule_fraction)
        self._chunk_starts = _stage_starts(len(self._chunks), settings.batch_schedule_fraction)
        self._up_to = "up to " if settings.mixed_seq_lens else ""
        self._notify = notify
        self._reported: StepSize | None = None

    @property
    def changes(self) -> tuple[float, ...]:
        """Fractions of the run at which a stage begins, without the first."""
        return tuple(sorted({start for start in (*self._length_starts, *self._chunk_starts) if 0 < start < 1}))

    def at(self, fraction: float) -> StepSize:
        """Return the size of the steps when `fraction` of the run is done."""
        return StepSize(
            self._lengths[bisect_right(self._length_starts, fraction) - 1],
            self._chunks[bisect_right(self._chunk_starts, fraction) - 1],
        )

    def begin_step(self, step: int, fraction: float) -> StepSize:
        """Return the size of the step after `step` finished ones, and report a new stage; step −1 is warm-up."""
        size = self.at(fraction)
        if step >= 0 and size != self._reported and len(self._lengths) + len(self._chunks) > 2:
            self._reported = size
            tokens = size.chunks * self._chunk_tokens
            self._notify(
                f"from step {step + 1} on: sequences of {self._up_to}{size.length:,}, {tokens:,} tokens a step"
            )
        return size

    def warmup_report(self) -> str:
        """Return a line with the step sizes that warm-up has run."""
        sizes = [self.at(fraction) for fraction in (0.0, *self.changes)]
        parts = ", ".join(
            f"{size.chunks * self._chunk_tokens:,} tokens as sequences of {self._up_to}{size.length:,}"
            for size in sizes
        )
        return f"warm-up ran {len(sizes)} step sizes: {parts}"


def warmup_fractions(changes: tuple[float, ...], steps: int) -> list[float]:
    """Return the fraction of the run that each warm-up step pretends: first, last, and where something changes.

    There may be more than `steps`, so that each change is visited.
    """
    fractions = sorted({0.0, 1.0, *changes})
    steps = max(steps, len(fractions)) if len(fractions) > 2 else steps
    return [fractions[step * len(fractions) // steps] for step in range(steps)]


def _doublings(first: int, last: int) -> list[int]:
    """Return first, 2 first, … as far as they divide `last`, and `last`."""
    sizes = []
    while first < last:
        if last % first == 0:
            sizes.append(first)
        first *= 2
    return [*sizes, last]


def _stage_starts(stages: int, full: float) -> list[float]:
    """Return the fraction of the run at which each stage begins; the last one begins at `full`."""
    return [full * stage / max(1, stages - 1) for stage in range(stages)]
