"""Bits per byte: the definition, spelled out token by token, and its independence of batches and ranks."""

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import DataError
from birdie.gpt.score import window_losses as windows
from birdie.gpt.score.accumulator import Score, Text
from birdie.gpt.score.evaluator import score as evaluate
from birdie.system.distributed import World
from tests.device import DEVICE

BOS, VOCABULARY = 1, 16


class Bigram:
    """A model whose loss depends on the token before the target alone."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.nats = -torch.log_softmax(torch.randn(VOCABULARY, VOCABULARY, generator=generator), 1)

    def loss(self, ids: Tensor, targets: Tensor, reduction: str) -> Tensor:
        assert reduction == "none"
        return self.nats[ids, targets]


class Table:
    """Token t stands for t mod 4 bytes, one more after an even token; BOS for none."""

    def count(self, previous: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.where(targets == BOS, 0, targets % 4 + (previous % 2 == 0))


def stream(length: int, seed: int = 0) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(2, VOCABULARY, length).astype(np.uint16)
    tokens[:: max(7, length // 5)] = BOS
    return tokens


def score(tokens: np.ndarray, model: Any = None, bytes_: Any = None, **changes: Any) -> Score:
    chosen: dict[str, Any] = {"train_seq_len": 8, "batch_tokens": 32, "device": DEVICE} | changes
    return evaluate(model or Bigram(), Text(tokens, Table() if bytes_ is None else bytes_, BOS), **chosen).score


@settings(max_examples=25)
@given(st.integers(2, 400), st.integers(1, 12), st.integers(1, 200))
def test_equals_the_definition(length: int, seq_len: int, batch_tokens: int) -> None:
    tokens, model, table = stream(length), Bigram(), Table()
    nats = bytes_ = 0.0
    count = (length - 1) // seq_len * seq_len or length - 1
    for i in range(count):
        nats += float(model.nats[int(tokens[i]), int(tokens[i + 1])])
        bytes_ += int(table.count(tokens[i : i + 1], tokens[i + 1 : i + 2])[0])
    if not bytes_:
        return
    result = score(tokens, train_seq_len=seq_len, batch_tokens=batch_tokens)
    assert (result.tokens, result.bytes) == (count, bytes_)
    assert result.val_loss == pytest.approx(nats / result.tokens, rel=1e-6)
    assert result.bpb == pytest.approx(nats / math.log(2) / bytes_, rel=1e-6)


def test_bytes_by_token_count_as_the_table_does() -> None:
    tokens, table = stream(1000), Table()
    counts = np.concatenate(([9], table.count(tokens[:-1], tokens[1:]))).astype(np.uint16)  # the first is no target
    by_token, by_table = score(tokens, bytes_=counts), score(tokens)
    assert (by_token.bytes, by_token.bpb, by_token.ci95) == (by_table.bytes, by_table.bpb, by_table.ci95)
    assert score(tokens, bytes_=2 * counts).bpb == pytest.approx(by_table.bpb / 2, rel=1e-12)
    with pytest.raises(DataError, match=r"990 tokens, .* 993"):
        score(tokens, bytes_=counts[:990])


def test_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = stream(1000)
    expected = score(tokens, batch_tokens=10_000).bpb
    assert score(tokens, batch_tokens=1).bpb == pytest.approx(expected, rel=1e-12)
    monkeypatch.setitem(windows._MAX_INPUTS, "cpu", 8)
    assert score(tokens, batch_tokens=10_000).bpb == pytest.approx(expected, rel=1e-12)


class ThreadedWorld(World):
    """A rank among threads: sums are those of all threads."""

    _sums: list[Tensor]
    _barrier: Barrier

    def __init__(self, rank: int, size: int, sums: list[Tensor], barrier: Barrier) -> None:
        super().__init__(rank, size)
        object.__setattr__(self, "_sums", sums)  # World is frozen
        object.__setattr__(self, "_barrier", barrier)

    def sum_(self, tensor: Tensor) -> Tensor:
        self._sums.append(tensor)
        self._barrier.wait(timeout=30)
        return torch.stack(self._sums).sum(0)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_share_the_windows_and_agree_with_one(size: int) -> None:
    tokens, one = stream(1001), score(stream(1001))
    sums: list[Tensor] = []
    barrier = Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        ranks = [ThreadedWorld(rank, size, sums, barrier) for rank in range(size)]
        for result in pool.map(lambda world: score(tokens, world=world), ranks):
            assert (result.bytes, result.tokens, result.documents) == (one.bytes, one.tokens, one.documents)
            assert result.bpb == pytest.approx(one.bpb, rel=1e-12)
            assert result.ci95 == pytest.approx(one.ci95, rel=1e-9)


def test_interval_shrinks_with_documents_and_covers() -> None:
    few, many = score(stream(500)), score(np.concatenate([stream(500, seed) for seed in range(16)]))
    assert many.documents > few.documents
    assert 0 < many.ci95 < few.ci95
    assert abs(many.bpb - few.bpb) < 3 * few.ci95
    tokens = stream(100)
    tokens[1:] = np.where(tokens[1:] == BOS, 2, tokens[1:])
    assert math.isnan(score(tokens).ci95)  # one document


def test_a_loss_that_is_not_finite_is_refused() -> None:
    model = Bigram()
    model.nats[3] = math.nan
    with pytest.raises(DataError, match="not finite"):
        score(stream(500), model)
