"""Growing sequences and batches: every token once whatever the stage, all stages primed, resumed and shared exactly."""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.data.batches import Batches
from birdie.data.shards import write_shard
from birdie.errors import ConfigError
from birdie.model.evidence import Looping
from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime.distributed import World
from birdie.train.checkpoint import load_checkpoint
from birdie.train.growth import Growth, Stage, moments
from birdie.train.loop import Fit, fit
from tests.ranks import start_ranks
from tests.tiny_run import LENGTH, OPTIMIZERS, SEQUENCES, SPANS, VOCAB, TinyBatches, tiny_model, tiny_settings

STEP = SPANS * SEQUENCES * LENGTH
GROWING = {"seq_len_start": 4, "seq_schedule_fraction": 0.5}
BOTH = {**GROWING, "batch_tokens_start": STEP // 4, "batch_schedule_fraction": 0.7}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(model: GPT | None = None, world: World | None = None, more: dict[str, Any] | None = None, **to: Any) -> Fit:
    return fit(model or tiny_model(), TinyBatches(world), tiny_settings(**to), OPTIMIZERS, world=world, **(more or {}))


class Watched(GPT):
    """Keeps what its loss was asked for."""

    def __init__(self, **changes: Any) -> None:
        torch.manual_seed(0)
        sizes = {"num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2}
        super().__init__(GPTConfig(vocab_size=VOCAB, **(sizes | changes)))
        self.asked: list[tuple[Tensor, Tensor, bool]] = []

    def loss(self, ids: Tensor, targets: Tensor, *rest: Any) -> Tensor:
        self.asked.append((ids, targets, self.looping))
        return super().loss(ids, targets, *rest)

    def shapes(self) -> list[tuple[tuple[int, ...], bool]]:
        return [(tuple(ids.shape), looping) for ids, _, looping in self.asked]


def test_lengths_double_and_the_last_is_there_at_its_share() -> None:
    growth = Growth(tiny_settings(**GROWING))
    lengths = [growth.at(share).length for share in (0, 0.24, 0.25, 0.49, 0.5, 1.0)]
    assert lengths == [4, 4, 8, 8, 16, 16]
    assert growth.changes == (0.25, 0.5)
    assert Growth(tiny_settings()).changes == ()
    assert Growth(tiny_settings()).at(0) == Stage(LENGTH, SPANS)


def test_a_share_of_0_is_no_growth() -> None:
    growth = Growth(tiny_settings(seq_len_start=4, seq_schedule_fraction=0))
    assert growth.at(0).length == LENGTH
    assert growth.changes == ()


@given(
    start=st.integers(1, 12),
    times=st.integers(1, 12),
    first=st.integers(1, 6),
    more=st.integers(1, 6),
    full=st.just(0.0) | st.floats(1e-6, 1),
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=8),
)
def test_stages_only_grow_and_cut_evenly(
    start: int, times: int, first: int, more: int, full: float, shares: list[float]
) -> None:
    length, spans = start * times, first * more
    settings = tiny_settings(
        train_seq_len=length,
        train_batch_tokens=spans * length,
        accumulation=spans,
        seq_len_start=start,
        seq_schedule_fraction=full,
        batch_tokens_start=first * length,
    )
    growth = Growth(settings)
    stages = [growth.at(share) for share in sorted(shares)]
    assert [s.length for s in stages] == sorted(s.length for s in stages)
    assert [s.spans for s in stages] == sorted(s.spans for s in stages)
    assert all(length % s.length == 0 for s in stages)
    assert growth.at(0.0) == Stage(start if full else length, first)
    assert growth.at(1.0) == Stage(length, spans)
    met = {growth.at(share) for share in (0.0, *growth.changes, 1.0)}
    assert set(stages) <= met


@pytest.mark.parametrize("steps", range(1, 9))
def test_without_changes_priming_is_half_early_and_half_late(steps: int) -> None:
    assert moments((), steps) == [float(2 * done > steps + 1) for done in range(1, steps + 1)]


@given(st.lists(st.floats(0, 1), max_size=6), st.integers(1, 30))
def test_priming_visits_every_change(changes: list[float], steps: int) -> None:
    shares = moments(tuple(changes), steps)
    assert shares == sorted(shares)
    assert len(shares) >= steps
    assert set(changes) <= set(shares) or not {*changes} - {0.0, 1.0}


def test_a_step_keeps_its_tokens_and_their_order() -> None:
    """Cut shorter or not: inputs and targets are the same, in the same order."""
    plain, growing = Watched(), Watched()
    for model, changes in ((plain, {}), (growing, GROWING)):
        for step in start(model, **changes):
            assert step.tokens == STEP
    assert {shape for shape, _ in growing.shapes()} == {(8, 4), (4, 8), (2, 16)}
    for (ids, targets, _), (same_ids, same_targets, _) in zip(plain.asked, growing.asked, strict=True):
        assert torch.equal(ids.flatten(), same_ids.flatten())
        assert torch.equal(targets.flatten(), same_targets.flatten())


def test_on_is_not_off_and_full_length_is_the_plain_run() -> None:
    plain = [step.loss for step in start()]
    assert [step.loss for step in start(**GROWING)] != plain
    assert [step.loss for step in start(seq_len_start=LENGTH, batch_tokens_start=STEP)] == plain


def test_batches_double() -> None:
    tokens = [step.tokens for step in start(batch_tokens_start=STEP // 4, batch_schedule_fraction=0.5)]
    assert tokens == [STEP // 4] * 3 + [STEP // 2] * 3 + [STEP] * 6


def test_every_graph_of_the_run_is_primed_before_the_clock() -> None:
    """Shapes, and loops off and on, although one priming step was asked for."""
    model = Watched(num_loops=1, loop_start=1, loop_end=1, enable_looping_at=0.4)
    told: list[str] = []
    more = {"prepared": [Looping(model)], "changes": [0.4], "notify": told.append}
    run = start(model, more=more, warmup_steps=1, **GROWING)
    run.prime()
    primed, model.asked = set(model.shapes()), []
    assert run.step == 0
    for _ in run:
        pass
    assert set(model.shapes()) <= primed
    assert len(primed) == 4
    assert told[0].startswith("primed 3 sizes of a step: 128 tokens as sequences of 4, ")
    assert told[1:] == [
        f"from step {step} on: sequences of {length}, 128 tokens a step" for step, length in ((1, 4), (4, 8), (7, 16))
    ]


@pytest.mark.parametrize("stop_after", [2, 3, 5, 7])
def test_a_resumed_run_is_bit_identical(stop_after: int, tmp_path: Path) -> None:
    """Through the middle of a stage and at its end; spans of a smaller batch are counted as they were taken."""
    whole = {step.number: step.loss for step in start(**BOTH, warmup_steps=2)}
    run = start(**BOTH)
    for step in run:
        if step.number == stop_after:
            run.save(tmp_path)
            break
    resumed = fit(
        tiny_model(seed=5), TinyBatches(), tiny_settings(**BOTH), OPTIMIZERS, resume=load_checkpoint(tmp_path)
    )
    assert {step.number: step.loss for step in resumed} == {n: loss for n, loss in whole.items() if n > stop_after}


def as_rank(rank: int, rendezvous: str, results: str) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=wait)
    changes = {**GROWING, "batch_tokens_start": STEP // 2}
    curve = [(step.loss, step.tokens) for step in start(world=World(rank, 2, rank), **changes)]
    if rank == 0:
        torch.save(curve, results)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_grow_as_one(tmp_path: Path) -> None:
    results = tmp_path / "results.pt"
    start_ranks(as_rank, (str(tmp_path / "rendezvous"), str(results)), 2)
    several = torch.load(results, weights_only=True)
    alone = [(step.loss, step.tokens) for step in start(**GROWING, batch_tokens_start=STEP // 2)]
    assert [tokens for _, tokens in several] == [tokens for _, tokens in alone]
    assert [loss for loss, _ in several] == pytest.approx([loss for loss, _ in alone], abs=1e-4)


def test_priming_leaves_a_full_queue_at_the_first_batch(tmp_path: Path) -> None:
    """The first timed step finds what it needs, and it is what an unprimed run would take."""
    write_shard(tmp_path / "a_train_0.bin", np.random.default_rng(0).integers(0, VOCAB, 3000, dtype=np.uint16))
    settings = tiny_settings(warmup_steps=3, iterations=2)

    def loader() -> Batches:
        return Batches([tmp_path / "a_train_0.bin"], batch_tokens=STEP, seq_len=LENGTH, accumulation=SPANS)

    batches, made = loader(), []
    run = fit(tiny_model(), batches, settings, OPTIMIZERS)
    make = batches._make
    batches._make = lambda index: made.append(index) or make(index)  # type: ignore[method-assign, assignment]
    run.prime()
    ahead = batches._prefetcher
    assert ahead is not None
    assert ahead._queue.full()
    again = len(made) - 1 - made[::-1].index(0)
    assert made[again : again + 2] == [0, 1]
    assert batches.state_dict() == {"spans": 0}
    primed = [step.loss for step in run]
    batches.close()
    plain = loader()
    unprimed = fit(tiny_model(), plain, tiny_settings(warmup_steps=0, iterations=2), OPTIMIZERS)
    assert [step.loss for step in unprimed] == primed
    plain.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len_start": 5}, "seq_len_start 5 does not divide train_seq_len 16; choose 4, or 0 for the full length"),
        ({"seq_len_start": -4}, "seq_len_start -4 does not divide"),
        ({"seq_len_start": 32}, "seq_len_start 32 does not divide"),
        ({"batch_tokens_start": 33}, "batch_tokens_start 33 is not a number of spans; choose a multiple of 32"),
        ({"batch_tokens_start": 2 * STEP}, "up to 128"),
        ({"seq_schedule_fraction": 1.1}, "seq_schedule_fraction is 1.1"),
        ({"batch_schedule_fraction": -0.1}, "batch_schedule_fraction is -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_settings(**change)


def test_ranks_must_divide_the_spans_of_the_first_steps() -> None:
    with pytest.raises(
        ConfigError, match="is 1 spans of 32 tokens, which 2 ranks do not divide; choose a multiple of 64"
    ):
        Growth(tiny_settings(batch_tokens_start=32), ranks=2)
