"""Plan of a run: learning rates, momentum, weight decay and sizes of each step, from the steps and the time so far.

    plan.at(step, clock) ──► StepPlan(fraction, multiplier, rate, momentum, decay, lengths)

Rates. Under a wall-clock cap the number of steps is not known in advance, so the warmdown is measured in time: it
begins when the remaining time is what `warmdown_iters` steps take at the mean pace so far. Given as a fraction of the
run it needs no estimate of the pace. Where the last step is forced, only steps count and the clock decides nothing.

Sizes. Short sequences and small batches come first, if `seq_len_start` and `batch_tokens_start` say so. Rows of a chunk
are cut into shorter sequences, so a step keeps its tokens and the loader its position; the length doubles in stages of
equal fractions of the run (SkyLadder, Zhu et al. 2025, arXiv 2503.15450). A small batch is fewer chunks, whose number
doubles likewise. The ternary record of the challenge names the variables; there the only change comes at the fraction
at which the last one comes here.

Lengths of the chunks. With `mixed_seq_lens` the length belongs to the chunk, and ranks take chunks in turn, so the mean
gradient over the ranks is that of one rank with all chunks. A scheduled sequence length is an upper bound.

    index of a chunk in its step      0     1     2     3
    mixed_seq_lens 1024, 256       1024   256  1024   256     with 2 ranks, one has long rows, the other short ones
                   1024 ×2, 256 ×2 1024  1024   256   256     with 2 ranks, each has both

Sources: the challenge's baseline script; the fraction and the floor are those of its later records (#1105, #1787), the
taper of weight decay is of #1729, chunks of several lengths are of #1212.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from birdie.errors import ConfigError
from birdie.gpt.train.settings import OptimizerSettings, TrainSettings


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of the steps in one stage of a run.

    Attributes:
        length: tokens of a sequence.
        chunks: of a step, over all ranks.
    """

    length: int
    chunks: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one step.

    Attributes:
        step: finished steps before it; -1: the step will be undone.
        fraction: of the run that is done.
        multiplier: factor of the schedule on the learning rates.
        rate: factor on the learning rates, which a bandit may set apart from the schedule.
        momentum: of Muon.
        decay: factor on the weight decays.
        lengths: of the sequences into which the rows of each chunk of this rank are cut; 0: rows stay as they are.
    """

    step: int
    fraction: float
    multiplier: float
    rate: float
    momentum: float
    decay: float
    lengths: tuple[int, ...]


class Plan:
    """The plan of a run on one rank.

    Args:
        settings: length and sizes of the run.
        optimizer: momentum and taper of weight decay.
        ranks: number of processes.
        packed: whether rows are longer than a sequence, so that only document bounds cut them.

    Attributes:
        settings, optimizer, ranks, packed: the arguments.
        micro_batch_tokens: that go through the model at once; 0: a chunk.
        staged: whether the sizes have a schedule.
        changes: fractions of the run at which a stage of other sizes begins, without the first.

    Raises:
        ConfigError: the ranks do not divide the chunks of a step, or micro-batches would cut or join what must not be.
    """

    def __init__(
        self, settings: TrainSettings, optimizer: OptimizerSettings, rank: int = 0, ranks: int = 1, packed: bool = False
    ) -> None:
        require_divisible(settings, ranks)
        self.micro_batch_tokens = _micro_batch_tokens(settings, ranks, packed)
        self.settings, self.optimizer, self.ranks, self.packed = settings, optimizer, ranks, packed
        self._rank = rank
        self._cuts_rows = packed or bool(settings.seq_len_start or settings.mixed_seq_lens)
        self._lengths = _doublings(settings.seq_len_start or settings.train_seq_len, settings.train_seq_len)
        self._chunks = _doublings(settings.initial_chunks, settings.accumulation)
        self._length_starts = _stage_starts(len(self._lengths), settings.seq_schedule_fraction)
        self._chunk_starts = _stage_starts(len(self._chunks), settings.batch_schedule_fraction)
        self.staged = len(self._lengths) + len(self._chunks) > 2
        self.changes = tuple(sorted({start for start in (*self._length_starts, *self._chunk_starts) if 0 < start < 1}))

    def at(self, step: int, elapsed_ms: float) -> StepPlan:
        """Return the plan of the step after `step` finished ones, which took `elapsed_ms`."""
        optimizer = self.optimizer
        fraction = fraction_done(self.settings, step, elapsed_ms)
        multiplier = lr_multiplier(self.settings, step, elapsed_ms)
        return StepPlan(
            step=step,
            fraction=fraction,
            multiplier=multiplier,
            rate=multiplier,
            momentum=muon_momentum(
                step,
                start=optimizer.muon_momentum_warmup_start,
                final=optimizer.muon_momentum,
                warmup_steps=optimizer.muon_momentum_warmup_steps,
            ),
            decay=decay_multiplier(fraction, full=optimizer.decay_full, final=optimizer.decay_final),
            lengths=self.lengths(fraction),
        )

    def rehearsal(self, fraction: float, step: int, elapsed_ms: float) -> StepPlan:
        """Return the plan of a step that will be undone: at the rates of `at`, with the sizes at `fraction`."""
        return dataclasses.replace(
            self.at(step, elapsed_ms), step=-1, fraction=fraction, lengths=self.lengths(fraction)
        )

    def ends(self, step: int, elapsed_ms: float) -> bool:
        """Return whether the run is over after `step` steps in `elapsed_ms`."""
        cap_ms = self.settings.cap_ms
        return step >= self.settings.last_step or (cap_ms is not None and elapsed_ms >= cap_ms)

    def observe(self, loss: float) -> None:
        """Take note of the loss of a step; a plan that learns from losses overrides this and the three below."""

    def state(self) -> dict[str, Any]:
        """Return what the plan has learned, as JSON can hold it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a state that `state` returned."""

    def diagnostics(self) -> str | None:
        """Return a line about what was learned."""

    def size(self, fraction: float) -> StepSize:
        """Return the size of the steps when `fraction` of the run is done."""
        return StepSize(
            self._lengths[bisect_right(self._length_starts, fraction) - 1],
            self._chunks[bisect_right(self._chunk_starts, fraction) - 1],
        )

    def lengths(self, fraction: float) -> tuple[int, ...]:
        """Return the sequence length of each chunk of this rank in a step, in the order it takes them; 0: uncut."""
        size = self.size(fraction)
        lengths = chunk_lengths(self.settings, size, self._rank, self.ranks)
        return lengths if self._cuts_rows else (0,) * len(lengths)

    def warmup_fractions(self, changes: tuple[float, ...] = ()) -> list[float]:
        """Return the fractions of the run at which warm-up steps: first, last, and where the sizes or `changes` are."""
        return warmup_fractions((*changes, *self.changes), self.settings.warmup_steps)


def chunk_lengths(settings: TrainSettings, size: StepSize, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the sequence length of each chunk that a rank takes in a step of this size."""
    cycle = settings.mixed_seq_lens or (settings.train_seq_len,)
    return tuple(min(cycle[chunk % len(cycle)], size.length) for chunk in range(rank, size.chunks, ranks))


def differ_within_a_rank(settings: TrainSettings, ranks: int) -> bool:
    """Return whether some rank has chunks of more than one length."""
    cycle = StepSize(settings.train_seq_len, len(settings.mixed_seq_lens) * ranks)  # chunks until the lengths repeat
    return any(len({*chunk_lengths(settings, cycle, rank, ranks)}) > 1 for rank in range(ranks))


def micro_steps(settings: TrainSettings, ranks: int, tokens: int) -> int:
    """Return the number of micro-batches of `tokens` (0: a chunk) in a full step on each rank."""
    chunk, chunks = settings.chunk_tokens, settings.accumulation // ranks
    return chunks * chunk // tokens if 0 < tokens < chunk else -(-chunks // max(1, tokens // chunk))


def fraction_done(settings: TrainSettings, step: int, elapsed_ms: float) -> float:
    """Return the fraction of a run that is done after `step` steps in `elapsed_ms`: in steps or time, the larger."""
    by_steps = step / max(settings.last_step, 1)
    return by_steps if settings.cap_ms is None else max(by_steps, elapsed_ms / settings.cap_ms)


def lr_multiplier(settings: TrainSettings, step: int, elapsed_ms: float) -> float:
    """Return the factor in [0, 1] on every learning rate for the step after `step` finished ones in `elapsed_ms`.

    The fall is linear to zero, over `warmdown_iters` steps or a fraction of the run; 0 keeps the rate constant. It
    stops at the floor `min_lr` and keeps its slope, as in the records.
    """
    return max(settings.min_lr, _warmdown(settings, step, elapsed_ms))


def _warmdown(settings: TrainSettings, step: int, elapsed_ms: float) -> float:
    fraction, steps, cap_ms = settings.warmdown_fraction, settings.warmdown_iters, settings.cap_ms
    if fraction is not None:
        remaining = 1 - fraction_done(settings, step, elapsed_ms)
        return min(1.0, max(0.0, remaining) / fraction) if fraction else 1.0
    if steps == 0:
        return 1.0
    if cap_ms is None:
        return min(1.0, max(0, settings.last_step - step) / steps)
    warmdown_ms = steps * elapsed_ms / max(step, 1)
    remaining_ms = max(0.0, cap_ms - elapsed_ms)
    return 1.0 if remaining_ms >= warmdown_ms else remaining_ms / warmdown_ms


def decay_multiplier(fraction: float, *, full: float = 0.7, final: float = 0.5) -> float:
    """Return the factor on weight decay after `fraction` of the run: 1 until `full` of it, then linear to `final`.

    Values above 1 (the step that passes the cap) count as 1; a `full` of 1 keeps the factor to the end.
    """
    if fraction <= full or full >= 1:
        return 1.0
    return 1 - (1 - final) * min(1.0, (fraction - full) / (1 - full))


def muon_momentum(step: int, *, start: float, final: float, warmup_steps: int) -> float:
    """Return the momentum of the step after `step` finished ones: linear from `start` to `final` in `warmup_steps`."""
    progress = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return (1 - progress) * start + progress * final


def warmup_fractions(changes: tuple[float, ...], steps: int) -> list[float]:
    """Return the fraction of the run that each warm-up step rehearses: first, last, and where something changes.

    There may be more than `steps`, so that each change is visited.
    """
    fractions = sorted({0.0, 1.0, *changes})
    steps = max(steps, len(fractions)) if steps and len(fractions) > 2 else steps
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


def require_divisible(settings: TrainSettings, ranks: int) -> None:
    """Raise ConfigError unless `ranks` divide the chunks of a step, of a first and small one as well."""
    if settings.accumulation % ranks:
        sequences = settings.train_batch_tokens // settings.train_seq_len
        fitting = [chunks for chunks in range(ranks, sequences + 1, ranks) if sequences % chunks == 0]
        chunks = min(fitting, key=lambda chunks: abs(chunks - settings.accumulation), default=None)
        flag = "" if chunks is None else f"give --train.accumulation {chunks}, or "
        raise ConfigError(
            f"{ranks} ranks do not divide accumulation {settings.accumulation}, the chunks of a step; {flag}choose "
            "another number of ranks"
        )
    first, chunk = settings.initial_chunks, settings.chunk_tokens
    if first % ranks:
        raise ConfigError(
            f"batch_tokens_start {settings.batch_tokens_start} is {first} chunks of {chunk} tokens, which {ranks} "
            f"ranks do not divide; choose a multiple of {ranks * chunk}, or a larger accumulation"
        )


def _micro_batch_tokens(settings: TrainSettings, ranks: int, packed: bool) -> int:
    tokens, chunk = settings.micro_batch_tokens, settings.chunk_tokens
    if isinstance(tokens, str):
        raise ConfigError("micro_batch_tokens is 'auto'; a run needs the number that was measured")
    if packed and 0 < tokens < chunk:
        raise ConfigError(
            f"micro_batch_tokens {tokens} would cut a packed chunk of {chunk} tokens; choose a multiple of it, or a "
            "larger accumulation"
        )
    if tokens > chunk and differ_within_a_rank(settings, ranks):
        raise ConfigError(
            f"micro_batch_tokens {tokens} would join chunks of {chunk} tokens that have different mixed_seq_lens; "
            f"choose at most {chunk}, or an order of lengths that gives each rank one"
        )
    return tokens
