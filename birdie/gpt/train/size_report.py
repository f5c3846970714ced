"""Lines about the sizes of the steps: stages of their schedule, and what mixed sequence lengths have trained on.

The sizes themselves are the plan's (`gpt.train.plan`). Where ranks differ in length, a step waits for the rank with
the long rows; where each has both, none waits. Rows are cut after the loader: in every data order a step has the tokens
it would have without cutting, each once.

Source of the mixed lengths: openai/parameter-golf #1212, where each GPU has rows of its own length.
"""

from collections import Counter

from birdie.gpt.train.plan import Plan, StepSize, chunk_lengths
from birdie.system.context import Context


class SizeReport:
    """A `StepHook` that reports when a stage of other sizes begins, and counts chunks by their length.

    Args:
        context: ranks and log.
    """

    def __init__(self, plan: Plan, context: Context) -> None:
        self._plan, self._world, self._notify = plan, context.world, context.notify
        self._settings = plan.settings
        self._up_to = "up to " if self._settings.mixed_seq_lens else ""
        self._trained: Counter[int] = Counter()
        self._reported: StepSize | None = None

    def before_step(self, step: int, fraction: float, multiplier: float) -> None:  # noqa: ARG002  the hook's signature
        """Count and report the next step, unless it will be undone."""
        if step < 0:
            return
        size = self._plan.size(fraction)
        self._trained.update(chunk_lengths(self._settings, size, self._world.rank, self._world.size))
        if size != self._reported and self._plan.staged:
            self._reported = size
            tokens = size.chunks * self._settings.chunk_tokens
            self._notify(
                f"from step {step + 1} on: sequences of {self._up_to}{size.length:,}, {tokens:,} tokens a step"
            )

    def warmup(self) -> str:
        """Return a line with the step sizes that warm-up has run."""
        sizes = [self._plan.size(fraction) for fraction in (0.0, *self._plan.changes)]
        parts = ", ".join(
            f"{size.chunks * self._settings.chunk_tokens:,} tokens as sequences of {self._up_to}{size.length:,}"
            for size in sizes
        )
        return f"warm-up ran {len(sizes)} step sizes: {parts}"

    def mixed_lengths(self) -> str:
        """Return a line with the sequence lengths of each rank. Every rank must call it."""
        cycle = self._settings.mixed_seq_lens
        size = StepSize(max(cycle), len(cycle) * self._world.size)
        lengths = {*chunk_lengths(self._settings, size, self._world.rank, self._world.size)}
        ranks = self._world.all_gather_strings(" and ".join(f"{length:,}" for length in sorted(lengths, reverse=True)))
        return "mixed sequence lengths: " + ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(ranks))

    def trained(self) -> str:
        """Return a line with the tokens of each length on each rank since it started. Every rank must call it."""
        tokens = {length: count * self._settings.chunk_tokens for length, count in self._trained.items()}
        local = ", ".join(
            f"{total:,} tokens as {total // length:,} sequences of {length:,}"
            for length, total in sorted(tokens.items(), reverse=True)
        )
        ranks = self._world.all_gather_strings(local or "none")
        return "mixed sequence lengths: " + "; ".join(f"rank {rank} took {text}" for rank, text in enumerate(ranks))
