"""Short sequences and small batches first: what a step is made of follows from the share of the run that is done.

Sequences: the rows of a span are cut into shorter ones, so a step keeps its tokens and the loader its position; the
length doubles in stages of equal share (SkyLadder, Zhu et al. 2025). Batches: a step takes fewer spans, their number
doubling likewise. The ternary record's variables name both; there the one change comes at the share at which here the
last one does.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from birdie.errors import ConfigError
from birdie.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Stage:
    """What steps are made of for a while.

    Attributes:
        length: tokens of a sequence.
        spans: of a step, over all ranks.
    """

    length: int
    spans: int


class Growth:
    """The stages of a run.

    Args:
        settings: first and last sizes, and the shares at which they are full.
        ranks: number of processes.
        notify: gets a line for each stage that begins.

    Raises:
        ConfigError: the ranks do not divide the spans of a step.
    """

    def __init__(self, settings: TrainSettings, ranks: int = 1, notify: Callable[[str], None] = lambda _: None) -> None:
        first = settings.spans_start
        if first % ranks:
            span = settings.train_batch_tokens // settings.accumulation
            raise ConfigError(
                f"batch_tokens_start {settings.batch_tokens_start} is {first} spans of {span} tokens, which {ranks} "
                f"ranks do not divide; choose a multiple of {ranks * span}, or a larger accumulation"
            )
        self._lengths = _doubling(settings.seq_len_start or settings.train_seq_len, settings.train_seq_len)
        self._spans = _doubling(first, settings.accumulation)
        self._at_length = _begins(len(self._lengths), settings.seq_schedule_fraction)
        self._at_spans = _begins(len(self._spans), settings.batch_schedule_fraction)
        self._span_tokens = settings.train_batch_tokens // settings.accumulation
        self._up_to = "up to " if settings.mixed_seq_lens else ""
        self._notify = notify
        self._told: Stage | None = None

    @property
    def changes(self) -> tuple[float, ...]:
        """Shares of the run at which a stage begins, the first one left out."""
        return tuple(sorted({at for at in (*self._at_length, *self._at_spans) if 0 < at < 1}))

    def at(self, share: float) -> Stage:
        """The stage when that share of the run is done."""
        return Stage(
            self._lengths[bisect_right(self._at_length, share) - 1],
            self._spans[bisect_right(self._at_spans, share) - 1],
        )

    def begin(self, step: int, share: float) -> Stage:
        """The stage of the step after `step` finished ones (-1: priming, of which nothing is told)."""
        stage = self.at(share)
        if step >= 0 and stage != self._told and len(self._lengths) + len(self._spans) > 2:
            self._told = stage
            tokens = stage.spans * self._span_tokens
            self._notify(
                f"from step {step + 1} on: sequences of {self._up_to}{stage.length:,}, {tokens:,} tokens a step"
            )
        return stage

    def primed(self) -> str:
        """What priming has met, in a line."""
        stages = [self.at(share) for share in (0.0, *self.changes)]
        each = ", ".join(
            f"{s.spans * self._span_tokens:,} tokens as sequences of {self._up_to}{s.length:,}" for s in stages
        )
        return f"primed {len(stages)} sizes of a step: {each}"


def moments(changes: tuple[float, ...], steps: int) -> list[float]:
    """Shares of the run that priming pretends to be at, step by step: first, last, and where something changes."""
    shares = sorted({0.0, 1.0, *changes})
    steps = max(steps, len(shares)) if len(shares) > 2 else steps
    return [shares[step * len(shares) // steps] for step in range(steps)]


def _doubling(first: int, last: int) -> list[int]:
    """first, 2 first, … as far as they divide `last`, and `last`."""
    sizes = []
    while first < last:
        if last % first == 0:
            sizes.append(first)
        first *= 2
    return [*sizes, last]


def _begins(stages: int, full: float) -> list[float]:
    """The share of the run at which each stage begins; the last one at `full`."""
    return [full * stage / max(1, stages - 1) for stage in range(stages)]
