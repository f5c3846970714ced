"""Mixed sequence lengths: sequences of several lengths in one step, with equally many tokens of each length.

    index of a chunk in its step      0     1     2     3
    mixed_seq_lens 1024, 256       1024   256  1024   256     with 2 ranks, one has long rows, the other short ones
                   1024 ×2, 256 ×2 1024  1024   256   256     with 2 ranks, each has both

The length belongs to the chunk, and ranks take chunks in turn. So the mean gradient over the ranks is that of one rank
with all chunks, and a run can resume on another number of ranks. Rows are cut after the loader, as in the
sequence-length schedule: in every data order a step has the tokens it would have without cutting, each once. A
scheduled sequence length is an upper bound.

Where ranks differ in length, a step waits for the rank with the long rows; where each has both, none waits.

Source: openai/parameter-golf #1212, where each GPU has rows of its own length.
"""

from collections import Counter

from birdie.runtime.distributed import World
from birdie.train.settings import TrainSettings
from birdie.train.size_schedule import StepSize


class MixedLengths:
    """Sequence lengths of this rank's chunks, and counts of what it has trained on.

    Args:
        settings: of the run.
        rank: of this process.
        ranks: number of processes.
    """

    def __init__(self, settings: TrainSettings, rank: int = 0, ranks: int = 1) -> None:
        self._cycle = settings.mixed_seq_lens or (settings.train_seq_len,)
        self._mixed, self._rank, self._ranks = bool(settings.mixed_seq_lens), rank, ranks
        self._chunk_tokens = settings.chunk_tokens
        self._trained: Counter[int] = Counter()

    def of_step(self, size: StepSize) -> list[int]:
        """Return the sequence length of each of this rank's chunks in a step, in the order it takes them."""
        chunks = range(self._rank, size.chunks, self._ranks)
        return [min(self._cycle[chunk % len(self._cycle)], size.length) for chunk in chunks]

    def count(self, lengths: list[int]) -> None:
        """Count chunks of these lengths as trained on."""
        self._trained.update(lengths)

    def plan(self, world: World) -> str | None:
        """Return a line with the lengths of each rank; None with one length. Every rank must call it."""
        if not self._mixed:
            return None
        lengths = self.of_step(StepSize(max(self._cycle), len(self._cycle) * self._ranks))
        local = " and ".join(f"{length:,}" for length in sorted(set(lengths), reverse=True))
        ranks = world.all_gather_strings(local)
        return "mixed sequence lengths: " + ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(ranks))

    def diagnostics(self, world: World) -> str | None:
        """Return a line with the tokens of each length on each rank since it started; otherwise as `plan`."""
        if not self._mixed:
            return None
        local = ", ".join(
            f"{count * self._chunk_tokens:,} tokens as {count * self._chunk_tokens // length:,} sequences of {length:,}"
            for length, count in sorted(self._trained.items(), reverse=True)
        )
        ranks = world.all_gather_strings(local or "none")
        return "mixed sequence lengths: " + "; ".join(f"rank {rank} took {text}" for rank, text in enumerate(ranks))


def differ_within_a_rank(settings: TrainSettings, ranks: int) -> bool:
    """Return whether some rank has chunks of more than one length."""
    cycle = settings.mixed_seq_lens
    period = len(cycle) * ranks  # chunks after which the assignment repeats
    return any(len({cycle[n % len(cycle)] for n in range(rank, period, ranks)}) > 1 for rank in range(ranks))
