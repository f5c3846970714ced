"""Batches: every world size reads the same tokens in a step, a resumed loader continues at the exact batch, and the
sequential order is the challenge's own.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from birdie.errors import ConfigError, DataError
from birdie.gpt.data.batches import Batches
from birdie.gpt.data.data_order import Order
from birdie.gpt.data.shards import write_shard

EVERY_ORDER = pytest.mark.parametrize("order", get_args(Order))
SEQ, BATCH = 5, 80  # 8 chunks of 2 rows


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Paths of three shards with 1,003 tokens; every token is its own position."""
    names = [tmp_path / f"fineweb_train_{i:06d}.bin" for i in range(3)]
    for name, part in zip(names, np.split(np.arange(1003, dtype=np.uint16), [7, 500]), strict=True):
        write_shard(name, part)
    return names


@pytest.fixture(autouse=True)
def _no_thread_survives() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        assert thread.name != "birdie-batches"


def draw(batches: Batches, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = [batches.next() for _ in range(count)]
    batches.close()
    return drawn


def equal(ours: list[tuple[torch.Tensor, torch.Tensor]], theirs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for ax, bx in zip(ours, theirs, strict=True) for a, b in zip(ax, bx, strict=True))


def test_sequential_is_the_challenges_order(paths: list[Path]) -> None:
    """Chunks of L + 1 tokens one after the other; x drops the last token of a chunk and y the first."""
    drawn = draw(Batches(paths, batch_tokens=BATCH, seq_len=SEQ), 250)  # wraps around more than twice
    tokens = np.arange(1003)
    for i, (x, y) in enumerate(drawn):
        chunk = np.take(tokens, range(i * 11, i * 11 + 11), mode="wrap")
        assert np.array_equal(x, chunk[:-1].reshape(2, SEQ))
        assert np.array_equal(y, chunk[1:].reshape(2, SEQ))
        assert x.dtype == y.dtype == torch.int64
        assert x.is_contiguous()
        assert y.is_contiguous()


@EVERY_ORDER
@pytest.mark.parametrize("world_size", [2, 8])
def test_all_world_sizes_read_the_same_tokens_in_a_step(paths: list[Path], order: Order, world_size: int) -> None:
    settings = {"batch_tokens": BATCH, "seq_len": SEQ, "order": order, "seed": 3}
    alone = draw(Batches(paths, **settings), 5 * 8)  # type: ignore[arg-type]
    steps = 5 * 8 // world_size
    ranks = [
        draw(Batches(paths, rank=r, world_size=world_size, **settings), steps)  # type: ignore[arg-type]
        for r in range(world_size)
    ]
    assert equal([ranks[rank][step] for step in range(steps) for rank in range(world_size)], alone)


@EVERY_ORDER
@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_is_exact(paths: list[Path], order: Order, world_size: int) -> None:
    """The state counts consumed batches, not prefetched ones; it can be saved and loaded at any batch."""

    def fresh() -> Batches:
        return Batches(
            paths, batch_tokens=BATCH, seq_len=SEQ, order=order, seed=1, rank=world_size - 1, world_size=world_size
        )

    expected = draw(fresh(), 230)  # shuffled: crosses the end of an epoch
    first = fresh()
    assert equal([first.next() for _ in range(90)], expected[:90])
    state = first.state_dict()
    assert state == {"spans": 90 * world_size}
    assert equal(draw(first, 20), expected[90:110])  # saving a state changes nothing
    second = fresh()
    second.next()
    second.load_state_dict(state)
    assert equal(draw(second, 140), expected[90:])


def test_an_epoch_reads_every_block_once_and_the_next_in_another_order(paths: list[Path]) -> None:
    blocks = 1003 // SEQ - 1
    inputs = torch.cat([x for x, _ in draw(Batches(paths, batch_tokens=BATCH, seq_len=SEQ, order="shuffled"), blocks)])
    for epoch in (inputs[:blocks], inputs[blocks:]):
        assert len(epoch.unique()) == blocks * SEQ
    assert not torch.equal(inputs[:blocks], inputs[blocks:])
    assert inputs[0, 0] % SEQ != inputs[blocks, 0] % SEQ  # another offset (for this seed)


def test_errors_of_the_thread_are_raised_by_next(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    batches, reference = (Batches(paths, batch_tokens=BATCH, seq_len=SEQ) for _ in range(2))
    make = batches._make

    def fail_once(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 2:
            monkeypatch.undo()
            raise OSError("the disk went away")
        return make(index)

    monkeypatch.setattr(batches, "_make", fail_once)
    drawn = [batches.next() for _ in range(2)]
    with pytest.raises(OSError, match="the disk went away"):
        batches.next()
    assert equal(drawn + draw(batches, 2), draw(reference, 4))  # no batch was skipped


def test_tokens_outside_the_vocabulary_are_refused_with_the_shard(paths: list[Path]) -> None:
    batches = Batches(paths, batch_tokens=BATCH, seq_len=SEQ, vocab_size=400)
    with pytest.raises(DataError, match=f"shard {paths[1]} has token id 4[0-9][0-9], but the model has 400"):
        draw(batches, 100)


def test_batches_are_prefetched_in_another_thread(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(paths, batch_tokens=BATCH, seq_len=SEQ)
    make, threads, third = batches._make, [], threading.Event()

    def spy(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        threads.append(threading.current_thread().name)
        if len(threads) == 3:
            third.set()
        return make(index)

    monkeypatch.setattr(batches, "_make", spy)
    batches.next()
    assert third.wait(10)  # two more than were requested
    assert set(threads) == {"birdie-batches"}
    batches.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 81}, r"batch_tokens=81 must be a multiple of accumulation=8 × seq_len=5 = 40"),
        ({"batch_tokens": 0}, "batch_tokens=0 must be at least 1"),
        ({"world_size": 3}, "world_size=3 must divide accumulation=8"),
        ({"rank": 1}, "rank=1 is not one of world_size=1"),
        ({"order": "random"}, "data order 'random' is unknown; choose sequential, shuffled, coprime or packed"),
        ({"seed": -1}, "seed=-1 must not be negative"),
    ],
)
def test_settings_are_checked(paths: list[Path], changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Batches(paths, **{"batch_tokens": BATCH, "seq_len": SEQ, **changes})  # type: ignore[arg-type]


def test_too_few_tokens_are_refused(paths: list[Path]) -> None:
    with pytest.raises(DataError, match="1,003 tokens, too few for a chunk of 1,004"):
        Batches(paths, batch_tokens=8 * 1003, seq_len=1003)
    draw(Batches(paths, batch_tokens=8 * 1002, seq_len=1002), 2)
    with pytest.raises(DataError, match="1,003 tokens, too few to shuffle in blocks of 502"):
        Batches(paths, batch_tokens=8 * 502, seq_len=502, order="shuffled")
    draw(Batches(paths, batch_tokens=8 * 501, seq_len=501, order="shuffled"), 9)
    with pytest.raises(DataError, match="no training shards"):
        Batches([], batch_tokens=BATCH, seq_len=SEQ)
