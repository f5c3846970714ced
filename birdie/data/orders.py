"""In which order training reads its shards: span i is a pure function of (shards, settings, i).

- sequential: on through the shards, as the challenge's own loader does;
- shuffled: blocks of a sequence in a new permutation each epoch, cut at a new phase. In distribution this is
  ShuffledSequenceLoader (#1394), which draws the next sequence from a shard with a probability in proportion to what is
  left of it: a uniform permutation too. There a rank has files of its own, here all ranks share one permutation;
- coprime: each shard is walked by a stride of its own, and a step mixes shards, few at first and more later
  (#726, #1060);
- packed: on through the shards from where the first document begins, a span in one long row, which attention then has
  to cut at documents and sequences (#1530).

Numbers are pull requests of openai/parameter-golf.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from birdie.data.shards import read_shard
from birdie.errors import ConfigError, DataError

Order = Literal["sequential", "shuffled", "coprime", "packed"]
Rows = NDArray[np.int64]

SHARDS, WEIGHT, RISE = (8, 32), (0.9, 0.5), 1800
"""Of coprime: shards in a step and the power of what is left in them, both from first to last over so many steps."""


_CHUNK = 1 << 20  # tokens looked through at once


class Stream:
    """The shards as one endless stream of tokens, wrapping at the end.

    Attributes:
        lengths: tokens of each shard.
        length: tokens of all.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._shards = [read_shard(path).view(np.ndarray) for path in paths]  # np.memmap itself is slow to slice
        self.lengths = [len(shard) for shard in self._shards]
        self._ends = list(accumulate(self.lengths))
        self.length = self._ends[-1]

    def find(self, token: int) -> int:
        """The first place of `token`.

        Raises:
            DataError: it is nowhere.
        """
        for shard, end in zip(self._shards, self._ends, strict=True):
            for start in range(0, len(shard), _CHUNK):
                found = np.flatnonzero(shard[start : start + _CHUNK] == token)
                if len(found):
                    return end - len(shard) + start + int(found[0])
        raise DataError(f"no document begins in the training shards: token {token} is nowhere; set the model's bos_id")

    def take(self, start: int, count: int) -> Rows:
        """`count` tokens from `start`, both in tokens of the endless stream."""
        taken = np.empty(count, np.int64)
        done = 0
        while done < count:
            at = (start + done) % self.length
            index = bisect_right(self._ends, at)
            part = self._shards[index][at - self._ends[index] :][: count - done]
            taken[done : done + len(part)] = part
            done += len(part)
        return taken


class Spans(Protocol):
    """A span by its number; a pure function."""

    def __call__(self, index: int) -> Rows:
        """Rows of tokens (B, T + 1): column t + 1 holds the target of column t."""
        ...


def spans_of(
    order: Order, stream: Stream, *, rows: int, seq_len: int, accumulation: int, seed: int, bos_id: int
) -> Spans:
    """The spans of `order`, each of `rows` rows of `seq_len` targets, or one row of as many; `accumulation` a step.

    Raises:
        ConfigError: there is no such order.
        DataError: there are too few tokens for it.
    """
    if order == "sequential":
        return SequentialSpans(stream, rows, seq_len)
    if order == "shuffled":
        return ShuffledSpans(stream, rows, seq_len, seed)
    if order == "coprime":
        return CoprimeSpans(stream, rows, seq_len, seed, step_rows=rows * accumulation)
    if order == "packed":
        return SequentialSpans(stream, 1, rows * seq_len, start=stream.find(bos_id))
    raise ConfigError(unknown(order))


def unknown(order: str) -> str:
    """What to say of an order there is not."""
    *names, last = get_args(Order)
    return f"data order {order!r} is unknown; choose {', '.join(names)} or {last}"


class SequentialSpans:
    """Contiguous spans of L + 1 tokens, as the challenge's own loader cuts them; their rows overlap by one token."""

    def __init__(self, stream: Stream, rows: int, seq_len: int, start: int = 0) -> None:
        self._stream, self._seq_len, self._targets, self._start = stream, seq_len, rows * seq_len, start
        _require(stream, self._targets)

    def __call__(self, index: int) -> Rows:
        span = self._stream.take(self._start + index * (self._targets + 1), self._targets + 1)
        return np.lib.stride_tricks.sliding_window_view(span, self._seq_len + 1, writeable=True)[:: self._seq_len]


class ShuffledSpans:
    """Blocks of seq_len targets that do not overlap, in a new order each epoch and cut at a new phase."""

    def __init__(self, stream: Stream, rows: int, seq_len: int, seed: int) -> None:
        self._stream, self._rows, self._seq_len, self._seed = stream, rows, seq_len, seed
        self._blocks = stream.length // seq_len - 1  # of every phase alike
        self._epoch: tuple[int, int, NDArray[np.int64]] | None = None  # number, phase, order: the one in use
        if self._blocks < 1:
            raise DataError(_too_few_to_shuffle(stream, seq_len))

    def __call__(self, index: int) -> Rows:
        return np.stack([self._block(index * self._rows + row) for row in range(self._rows)])

    def _block(self, number: int) -> NDArray[np.int64]:
        epoch, place = divmod(number, self._blocks)
        if self._epoch is None or self._epoch[0] != epoch:
            draw = np.random.default_rng([self._seed, epoch])
            self._epoch = epoch, int(draw.integers(self._seq_len)), draw.permutation(self._blocks)
        _, phase, order = self._epoch
        return self._stream.take(phase + int(order[place]) * self._seq_len, self._seq_len + 1)


class CoprimeSpans:
    """Blocks of seq_len targets within a shard, each shard walked by a stride coprime with its number of blocks.

    The walk (start + visit · stride) mod blocks, cut at a phase, is drawn anew for each shard and epoch and meets every
    block once. A group of blocks, as many as a step has, is shared among some shards by the power of what is left in
    them, and their blocks are interleaved. Which and how many follows from the groups before it in the epoch: these
    are replayed once where a run begins, in a fifth of a millisecond each; then each group follows from the last.

    In the records each rank mixes shards of its own, as many as its number of ranks asks for; here a whole step does,
    so that any number of ranks sees the same.
    """

    def __init__(self, stream: Stream, rows: int, seq_len: int, seed: int, step_rows: int) -> None:
        self._stream, self._rows, self._seq_len, self._seed = stream, rows, seq_len, seed
        self._step_rows = step_rows
        lengths = np.array(stream.lengths, np.int64)
        self._begins = np.cumsum(lengths) - lengths
        self._blocks = np.maximum(lengths // seq_len - 1, 0)  # of every phase alike
        self._total = int(self._blocks.sum())
        if self._total < 1:
            raise DataError(_too_few_to_shuffle(stream, seq_len))
        self._epoch, self._group = -1, -1  # the one at hand, by its place in the epoch
        self._walks = np.empty((3, len(lengths)), np.int64)  # phase, start, stride
        self._taken = np.empty(0, np.int64)  # of each shard, after that group
        self._shards = self._visits = np.empty(0, np.int64)  # of each row of that group

    def __call__(self, index: int) -> Rows:
        return np.stack([self._block(index * self._rows + row) for row in range(self._rows)])

    def _block(self, number: int) -> NDArray[np.int64]:
        epoch, place = divmod(number, self._total)
        group, row = divmod(place, self._step_rows)
        if epoch != self._epoch or group < self._group:
            self._begin(epoch)
        while self._group < group:
            self._next_group()
        shard, visit = int(self._shards[row]), int(self._visits[row])
        phase, start, stride = (int(each) for each in self._walks[:, shard])
        block = (start + visit * stride) % int(self._blocks[shard])
        return self._stream.take(int(self._begins[shard]) + phase + block * self._seq_len, self._seq_len + 1)

    def _begin(self, epoch: int) -> None:
        draw = np.random.default_rng([self._seed, epoch])
        least = np.maximum(self._blocks, 1)
        phases, starts, strides = (
            draw.integers(self._seq_len, size=len(least)),
            draw.integers(least),
            draw.integers(least),
        )
        for shard, blocks in enumerate(least.tolist()):
            while math.gcd(int(strides[shard]), blocks) != 1:
                strides[shard] += 1
        self._walks = np.stack((phases, starts, strides))
        self._epoch, self._group, self._taken = epoch, -1, np.zeros_like(self._blocks)

    def _next_group(self) -> None:
        self._group += 1
        counts = self._counts(self._blocks - self._taken)
        some = np.flatnonzero(counts)
        shards, of = np.repeat(some, counts[some]), np.repeat(counts[some], counts[some])
        within = np.arange(len(shards)) - np.repeat(np.cumsum(counts[some]) - counts[some], counts[some])
        order = np.argsort((within + 0.5) / of, kind="stable")  # each shard's blocks evenly over the group
        self._shards, self._visits = shards[order], (self._taken[shards] + within)[order]
        self._taken = self._taken + counts

    def _counts(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many blocks each shard gives to the group at hand, of what is `left`: int64 (shards)."""
        wanted = min(self._step_rows, int(left.sum()))
        steps = (self._epoch * self._total + self._group * self._step_rows) // self._step_rows
        rise = min(1.0, steps / RISE)
        most = round(SHARDS[0] + rise * (SHARDS[1] - SHARDS[0]))
        weights = left ** (WEIGHT[0] + rise * (WEIGHT[1] - WEIGHT[0]))  # of an empty shard 0
        with np.errstate(divide="ignore"):  # Gumbel's noise draws without replacement
            noise = np.random.default_rng([self._seed, self._epoch, self._group]).gumbel(size=len(left))
            drawn = np.argsort(-(np.log(weights) + noise), kind="stable")
        enough = int(np.searchsorted(np.cumsum(left[drawn]), wanted)) + 1
        chosen = drawn[: max(most, enough)]
        ideal = wanted * weights[chosen] / weights[chosen].sum()
        given = np.minimum(np.floor(ideal).astype(np.int64), left[chosen])
        while (rest := wanted - int(given.sum())) > 0:
            room = np.flatnonzero(given < left[chosen])
            first = room[np.argsort((given - ideal)[room], kind="stable")]
            given[first[:rest]] += 1
        counts = np.zeros_like(left)
        counts[chosen] = given
        return counts


def _require(stream: Stream, targets: int) -> None:
    if stream.length <= targets:
        raise DataError(
            f"the training shards hold {stream.length:,} tokens, too few for a span of {targets + 1:,}; "
            "lower the batch tokens or give more text"
        )


def _too_few_to_shuffle(stream: Stream, seq_len: int) -> str:
    return (
        f"the training shards hold {stream.length:,} tokens, too few to shuffle in blocks of {seq_len:,}; "
        "lower the sequence length or give more text"
    )
