"""Order in which training reads its shards: chunk i is a pure function of (shards, settings, i).

A chunk is what one rank reads for one micro-step of gradient accumulation, rows × seq_len targets.

- sequential: contiguous tokens through all shards, as the challenge's own loader reads them.
- shuffled: blocks of one sequence, in a new permutation and with a new offset in each epoch. The distribution is that
  of ShuffledSequenceLoader (parameter-golf#1394), which draws the next sequence from a shard with a probability
  proportional to what is left of it: a uniform permutation as well. There each rank has its own files, here all ranks
  share one permutation.
- coprime: each shard is read with its own stride, and a step mixes several shards, few at first and more later
  (parameter-golf#726, #1060).
- packed: contiguous tokens from the first BOS on, each chunk as one long row, in which attention must be masked at the
  boundaries of documents and sequences (parameter-golf#1530).

Numbers are pull requests of github.com/openai/parameter-golf.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from birdie.errors import ConfigError, DataError
from birdie.gpt.data.data_order import Order, unknown_order
from birdie.gpt.data.shards import MAX_VOCAB, ShardReader

Rows = NDArray[np.int64]

STEP_SHARDS, WEIGHT_POWER, RAMP_STEPS = (8, 32), (0.9, 0.5), 1800
"""Coprime order: number of shards in a step, and power of a shard's remaining blocks that weights the choice. Both
change linearly from the first value to the second over `RAMP_STEPS` steps."""

_SEARCH_TOKENS = 1 << 20  # tokens compared at a time by `TokenSequence.find`


class TokenSequence:
    """All shards as one endless sequence of tokens; after the last shard it starts again.

    Args:
        vocab_size: every token id is below it.

    Attributes:
        lengths: tokens of each shard.
    """

    def __init__(self, paths: Sequence[Path], vocab_size: int = MAX_VOCAB) -> None:
        self._shards, self._vocab_size = [ShardReader(path) for path in paths], vocab_size
        self.lengths = [shard.length for shard in self._shards]
        self._ends = list(accumulate(self.lengths))
        self.length = self._ends[-1]

    def find(self, token: int) -> int:
        """Return the first position of `token`."""
        for shard, end in zip(self._shards, self._ends, strict=True):
            for start in range(0, shard.length, _SEARCH_TOKENS):
                matches = np.flatnonzero(shard.read(start, _SEARCH_TOKENS) == token)
                if len(matches):
                    return end - shard.length + start + int(matches[0])
        raise DataError(
            f"the training shards have no BOS (token {token}), so no document begins; set the model's bos_id"
        )

    def take(self, start: int, count: int) -> Rows:
        """Return `count` tokens from position `start` of the endless sequence."""
        tokens = np.empty(count, np.int64)
        done = 0
        while done < count:
            position = (start + done) % self.length
            index = bisect_right(self._ends, position)
            part = self._shards[index].read(position - (self._ends[index] - self.lengths[index]), count - done)
            if (largest := int(part.max())) >= self._vocab_size:
                raise DataError(
                    f"shard {self._shards[index].path} has token id {largest}, but the model has {self._vocab_size:,}; "
                    "it is damaged or of another tokenizer, so prepare it again"
                )
            tokens[done : done + len(part)] = part
            done += len(part)
        return tokens


class Sampler(Protocol):
    """Pure function from the index of a chunk to its tokens."""

    def __call__(self, index: int) -> Rows:
        """Return the rows of chunk `index`, (B, T + 1): column t + 1 holds the target of column t."""
        ...


def make_sampler(
    order: Order, tokens: TokenSequence, *, rows: int, seq_len: int, accumulation: int, seed: int, bos_id: int
) -> Sampler:
    """Return the sampler of `order`, whose chunks have `rows` rows of `seq_len` targets; packed, one row of as many.

    Args:
        tokens: the training shards.
        seq_len: targets of a row.
        accumulation: chunks of a step, over all ranks.
        bos_id: first token of every document.
    """
    if order == "sequential":
        return SequentialSampler(tokens, rows, seq_len)
    if order == "shuffled":
        return ShuffledSampler(tokens, rows, seq_len, seed)
    if order == "coprime":
        return CoprimeSampler(tokens, rows, seq_len, seed, step_rows=rows * accumulation)
    if order == "packed":
        return SequentialSampler(tokens, 1, rows * seq_len, start=tokens.find(bos_id))
    raise ConfigError(unknown_order(order))


class SequentialSampler:
    """Contiguous chunks of L + 1 tokens, as the challenge's own loader cuts them; rows overlap by one token."""

    def __init__(self, tokens: TokenSequence, rows: int, seq_len: int, start: int = 0) -> None:
        self._tokens, self._seq_len, self._targets, self._start = tokens, seq_len, rows * seq_len, start
        if tokens.length <= self._targets:
            raise DataError(
                f"the training shards hold {tokens.length:,} tokens, too few for a chunk of {self._targets + 1:,}; "
                "lower the batch tokens or add training text"
            )

    def __call__(self, index: int) -> Rows:
        chunk = self._tokens.take(self._start + index * (self._targets + 1), self._targets + 1)
        return np.lib.stride_tricks.sliding_window_view(chunk, self._seq_len + 1, writeable=True)[:: self._seq_len]


class ShuffledSampler:
    """Non-overlapping blocks of seq_len targets, in a new permutation and with a new offset in each epoch."""

    def __init__(self, tokens: TokenSequence, rows: int, seq_len: int, seed: int) -> None:
        self._tokens, self._rows, self._seq_len, self._seed = tokens, rows, seq_len, seed
        self._blocks = tokens.length // seq_len - 1  # one less than fits, so that every offset has as many
        self._epoch: tuple[int, int, NDArray[np.int64]] | None = None  # index, offset and permutation of the last epoch
        if self._blocks < 1:
            raise DataError(_too_few_to_shuffle(tokens, seq_len))

    def __call__(self, index: int) -> Rows:
        return np.stack([self._block(index * self._rows + row) for row in range(self._rows)])

    def _block(self, number: int) -> NDArray[np.int64]:
        epoch, index = divmod(number, self._blocks)
        if self._epoch is None or self._epoch[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._epoch = epoch, int(rng.integers(self._seq_len)), rng.permutation(self._blocks)
        _, offset, permutation = self._epoch
        return self._tokens.take(offset + int(permutation[index]) * self._seq_len, self._seq_len + 1)


class CoprimeSampler:
    """Blocks of seq_len targets within one shard, each shard read with a stride coprime to its number of blocks.

    The walk through a shard, (start + visit · stride) mod blocks at an offset, is drawn for each shard and epoch; as
    the stride is coprime, it visits every block once. A group has as many blocks as a step. It is divided among some
    shards by a power of what is left in them, and their blocks are interleaved. Which shards, and how many blocks of
    each, depends on the earlier groups of the epoch. So a resumed run replays those groups, a fifth of a millisecond
    each; afterwards each group follows from the previous one.

    In the record scripts each rank mixes its own shards, and their number depends on the number of ranks. Here one
    mixture belongs to the whole step, so any number of ranks reads the same tokens.
    """

    def __init__(self, tokens: TokenSequence, rows: int, seq_len: int, seed: int, step_rows: int) -> None:
        self._tokens, self._rows, self._seq_len, self._seed = tokens, rows, seq_len, seed
        self._step_rows = step_rows
        lengths = np.array(tokens.lengths, np.int64)
        self._begins = np.cumsum(lengths) - lengths
        self._blocks = np.maximum(lengths // seq_len - 1, 0)  # one less than fits, so that every offset has as many
        self._total = int(self._blocks.sum())
        if self._total < 1:
            raise DataError(_too_few_to_shuffle(tokens, seq_len))
        self._epoch, self._group = -1, -1  # the current group, counted within its epoch
        self._walks = np.empty((3, len(lengths)), np.int64)  # offset, start and stride of each shard
        self._used = np.empty(0, np.int64)  # blocks of each shard that the epoch has used, current group included
        self._shards = self._visits = np.empty(0, np.int64)  # of each row of the current group

    def __call__(self, index: int) -> Rows:
        return np.stack([self._block(index * self._rows + row) for row in range(self._rows)])

    def _block(self, number: int) -> NDArray[np.int64]:
        epoch, index = divmod(number, self._total)
        group, row = divmod(index, self._step_rows)
        if epoch != self._epoch or group < self._group:
            self._begin_epoch(epoch)
        while self._group < group:
            self._next_group()
        shard, visit = int(self._shards[row]), int(self._visits[row])
        offset, start, stride = (int(value) for value in self._walks[:, shard])
        block = (start + visit * stride) % int(self._blocks[shard])
        return self._tokens.take(int(self._begins[shard]) + offset + block * self._seq_len, self._seq_len + 1)

    def _begin_epoch(self, epoch: int) -> None:
        rng = np.random.default_rng([self._seed, epoch])
        bounds = np.maximum(self._blocks, 1)
        offsets, starts, strides = (
            rng.integers(self._seq_len, size=len(bounds)),
            rng.integers(bounds),
            rng.integers(bounds),
        )
        for shard, blocks in enumerate(bounds.tolist()):
            while math.gcd(int(strides[shard]), blocks) != 1:
                strides[shard] += 1
        self._walks = np.stack((offsets, starts, strides))
        self._epoch, self._group, self._used = epoch, -1, np.zeros_like(self._blocks)

    def _next_group(self) -> None:
        self._group += 1
        counts = self._divide(self._blocks - self._used)
        active = np.flatnonzero(counts)
        shards, sizes = np.repeat(active, counts[active]), np.repeat(counts[active], counts[active])
        rank = np.arange(len(shards)) - np.repeat(np.cumsum(counts[active]) - counts[active], counts[active])
        order = np.argsort((rank + 0.5) / sizes, kind="stable")  # spread each shard's blocks evenly over the group
        self._shards, self._visits = shards[order], (self._used[shards] + rank)[order]
        self._used = self._used + counts

    def _divide(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many blocks each shard contributes to the current group, int64 (shards).

        Args:
            left: unused blocks of each shard.
        """
        wanted = min(self._step_rows, int(left.sum()))
        steps = (self._epoch * self._total + self._group * self._step_rows) // self._step_rows
        ramp = min(1.0, steps / RAMP_STEPS)
        most = round(STEP_SHARDS[0] + ramp * (STEP_SHARDS[1] - STEP_SHARDS[0]))
        weights = left ** (WEIGHT_POWER[0] + ramp * (WEIGHT_POWER[1] - WEIGHT_POWER[0]))  # 0 for an empty shard
        with np.errstate(divide="ignore"):  # Gumbel top-k: a weighted draw without replacement
            noise = np.random.default_rng([self._seed, self._epoch, self._group]).gumbel(size=len(left))
            drawn = np.argsort(-(np.log(weights) + noise), kind="stable")
        enough = int(np.searchsorted(np.cumsum(left[drawn]), wanted)) + 1
        chosen = drawn[: max(most, enough)]
        ideal = wanted * weights[chosen] / weights[chosen].sum()
        shares = np.minimum(np.floor(ideal).astype(np.int64), left[chosen])
        while (rest := wanted - int(shares.sum())) > 0:  # largest remainder first, among shards with blocks left
            open_shards = np.flatnonzero(shares < left[chosen])
            first = open_shards[np.argsort((shares - ideal)[open_shards], kind="stable")]
            shares[first[:rest]] += 1
        counts = np.zeros_like(left)
        counts[chosen] = shares
        return counts


def _too_few_to_shuffle(tokens: TokenSequence, seq_len: int) -> str:
    return (
        f"the training shards hold {tokens.length:,} tokens, too few to shuffle in blocks of {seq_len:,}; "
        "lower the sequence length or add training text"
    )
