"""Sequences of several lengths in one step, each length with as many tokens as another.

    place of a span in its step       0     1     2     3
    mixed_seq_lens 1024, 256       1024   256  1024   256     of 2 ranks one has long rows, the other short ones
                   1024 ×2, 256 ×2 1024  1024   256   256     of 2 ranks each has both

The length belongs to the span, and ranks take spans in turn: so the ranks' mean gradient is that of one rank with all
spans, and a run goes on with another number of ranks. Rows are cut as growing sequences are, after the loader: in every
order a step has the tokens it would have had, each once. A growing sequence is never longer than its stage is.

Where ranks differ in length, the step waits for the rank with the long rows; where each has both, none waits.

Source: openai/parameter-golf #1212, where each GPU has rows of its own length.
"""

from collections import Counter

from birdie.runtime.distributed import World
from birdie.train.growth import Stage
from birdie.train.settings import TrainSettings


class Lengths:
    """The lengths of this rank's spans, and how much of each it has trained on.

    Args:
        settings: of the run.
        rank: this one.
        ranks: of all.
    """

    def __init__(self, settings: TrainSettings, rank: int = 0, ranks: int = 1) -> None:
        self._cycle = settings.mixed_seq_lens or (settings.train_seq_len,)
        self._mixed, self._rank, self._ranks = bool(settings.mixed_seq_lens), rank, ranks
        self._span = settings.train_batch_tokens // settings.accumulation
        self._taken: Counter[int] = Counter()

    def of(self, stage: Stage) -> list[int]:
        """Of the sequences of each of this rank's spans in a step of `stage`, in the order it takes them."""
        places = range(self._rank, stage.spans, self._ranks)
        return [min(self._cycle[place % len(self._cycle)], stage.length) for place in places]

    def took(self, lengths: list[int]) -> None:
        """This rank has trained on spans of these lengths."""
        self._taken.update(lengths)

    def told(self, world: World) -> str | None:
        """What the ranks say of themselves, in a line; None where there is but one length. Every rank must call it."""
        if not self._mixed:
            return None
        own = self.of(Stage(max(self._cycle), len(self._cycle) * self._ranks))
        every = world.all_gather_strings(" and ".join(f"{each:,}" for each in sorted(set(own), reverse=True)))
        return "sequences of several lengths: " + ", ".join(f"rank {n}: {own}" for n, own in enumerate(every))

    def evidence(self, world: World) -> str | None:
        """How much of each length the ranks have trained on since they started; else as `told`."""
        if not self._mixed:
            return None
        own = ", ".join(
            f"{count * self._span:,} tokens as {count * self._span // length:,} sequences of {length:,}"
            for length, count in sorted(self._taken.items(), reverse=True)
        )
        every = world.all_gather_strings(own or "none")
        return "sequences of several lengths: " + "; ".join(f"rank {n} took {own}" for n, own in enumerate(every))


def differ_in_a_rank(settings: TrainSettings, ranks: int) -> bool:
    """Whether some rank's spans are of more than one length."""
    cycle = settings.mixed_seq_lens
    spans = len(cycle) * ranks  # after so many all begins anew
    return any(len({cycle[n % len(cycle)] for n in range(rank, spans, ranks)}) > 1 for rank in range(ranks))
