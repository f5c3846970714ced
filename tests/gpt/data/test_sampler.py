"""Samplers: a chunk depends on its index alone, an epoch reads every block once, and a step mixes shards."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import DataError
from birdie.gpt.data.sampler import RAMP_STEPS, STEP_SHARDS, CoprimeSampler, Rows, TokenSequence


class NumberedTokens(TokenSequence):
    """Shards of the lengths passed in, in which every token is its own position."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths, self.length = list(lengths), sum(lengths)
        self._ends = np.cumsum(lengths).tolist()

    def take(self, start: int, count: int) -> Rows:
        return (start + np.arange(count)) % self.length


def coprime(lengths: Sequence[int], rows: int, seq_len: int, step_rows: int, seed: int = 0) -> CoprimeSampler:
    return CoprimeSampler(NumberedTokens(lengths), rows, seq_len, seed, step_rows)


SIZES = {
    "lengths": st.lists(st.integers(1, 90), min_size=1, max_size=12),
    "rows": st.integers(1, 4),
    "chunks": st.integers(1, 4),
    "seq_len": st.integers(1, 7),
    "seed": st.integers(0, 99),
}


@settings(max_examples=25, deadline=None)
@given(**SIZES)
def test_an_epoch_of_coprime_strides_reads_every_block_of_every_shard_once(
    lengths: list[int], rows: int, chunks: int, seq_len: int, seed: int
) -> None:
    blocks = [max(length // seq_len - 1, 0) for length in lengths]
    if not sum(blocks):
        with pytest.raises(DataError, match="too few to shuffle"):
            coprime(lengths, rows, seq_len, rows * chunks)
        return
    sampler = coprime(lengths, rows, seq_len, rows * chunks, seed)
    total, ends = sum(blocks), np.cumsum(lengths)
    count = -(-2 * total // rows)  # two epochs and the rest of a chunk
    tokens = np.concatenate([sampler(index) for index in range(count)])
    assert np.array_equal(tokens, tokens[:, :1] + np.arange(seq_len + 1))  # contiguous
    shards = np.searchsorted(ends, tokens[:, 0], side="right")
    assert np.array_equal(shards, np.searchsorted(ends, tokens[:, -1], side="right"))  # within a shard
    for epoch in (slice(0, total), slice(total, 2 * total)):
        assert np.bincount(shards[epoch], minlength=len(lengths)).tolist() == blocks
        inputs = tokens[epoch, :-1]
        assert len(np.unique(inputs)) == inputs.size


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(40)), **SIZES)
def test_a_chunk_depends_on_its_index_alone(
    order: list[int], lengths: list[int], rows: int, chunks: int, seq_len: int, seed: int
) -> None:
    """Ranks and resumed runs may read the chunks in any order."""
    lengths = [*lengths, 3 * seq_len]
    forward, jumping = (coprime(lengths, rows, seq_len, rows * chunks, seed) for _ in range(2))
    expected = [forward(index) for index in range(40)]
    for index in order:
        assert np.array_equal(jumping(index), expected[index])


def shards_of(sampler: CoprimeSampler, length: int, step: int) -> np.ndarray:
    return sampler(step)[:, 0] // length


def test_a_step_mixes_more_shards_later_and_all_run_out_together() -> None:
    length, shards, rows = 4_000, 60, 64
    sampler = coprime([length] * shards, rows, 1, rows)
    first, late = (len(np.unique(shards_of(sampler, length, step))) for step in (0, RAMP_STEPS))
    assert (first, late) == STEP_SHARDS
    total = (length - 1) * shards
    last = [len(np.unique(shards_of(sampler, length, step))) for step in range(total // rows - 5, total // rows)]
    assert min(last) > STEP_SHARDS[0]  # weighting by the remaining blocks keeps them level
