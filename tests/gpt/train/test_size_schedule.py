"""Sequence-length and batch-size schedules: every token once in every stage; warm-up visits all; resuming is exact."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.data.batches import Batches
from birdie.gpt.data.shards import write_shard
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.train.plan import Plan, StepSize, warmup_fractions
from birdie.gpt.train.training import Training
from birdie.system.callbacks import no_message
from birdie.system.distributed import World
from tests.tiny_run import (
    CHUNKS,
    LENGTH,
    OPTIMIZERS,
    STEP_TOKENS,
    VOCAB,
    TinyBatches,
    tiny_model,
    tiny_settings,
    tiny_training,
)

SCHEDULED: dict[str, Any] = {"seq_len_start": 4, "seq_schedule_fraction": 0.5}
BOTH: dict[str, Any] = {**SCHEDULED, "batch_tokens_start": STEP_TOKENS // 4, "batch_schedule_fraction": 0.7}


def start(
    model: GPT | None = None, world: World | None = None, more: dict[str, Any] | None = None, **to: Any
) -> Training:
    return tiny_training(model or tiny_model(), TinyBatches(world), tiny_settings(**to), world=world, **(more or {}))


def plan_of(**changes: Any) -> Plan:
    return Plan(tiny_settings(**changes), OPTIMIZERS)


class RecordingGPT(GPT):
    """A model that records the arguments of its loss."""

    def __init__(self, **changes: Any) -> None:
        torch.manual_seed(0)
        sizes = {"num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2}
        super().__init__(GPTConfig(vocab_size=VOCAB, **(sizes | changes)))
        self.calls: list[tuple[Tensor, Tensor, bool]] = []

    def loss(self, ids: Tensor, targets: Tensor, *rest: Any) -> Tensor:
        self.calls.append((ids, targets, self.depth_recurrence))
        return super().loss(ids, targets, *rest)

    def shapes(self) -> list[tuple[tuple[int, ...], bool]]:
        return [(tuple(ids.shape), recurrence) for ids, _, recurrence in self.calls]


def test_lengths_double_and_the_last_begins_at_its_fraction() -> None:
    schedule = plan_of(**SCHEDULED)
    lengths = [schedule.size(fraction).length for fraction in (0, 0.24, 0.25, 0.49, 0.5, 1.0)]
    assert lengths == [4, 4, 8, 8, 16, 16]
    assert schedule.changes == (0.25, 0.5)
    assert plan_of().changes == ()
    assert plan_of().size(0) == StepSize(LENGTH, CHUNKS)


@given(
    start=st.integers(1, 12),
    times=st.integers(1, 12),
    first=st.integers(1, 6),
    more=st.integers(1, 6),
    full=st.just(0.0) | st.floats(1e-6, 1),
    fractions=st.lists(st.floats(0, 1), min_size=2, max_size=8),
)
def test_sizes_only_grow_and_divide_evenly(
    start: int, times: int, first: int, more: int, full: float, fractions: list[float]
) -> None:
    length, chunks = start * times, first * more
    settings = tiny_settings(
        train_seq_len=length,
        train_batch_tokens=chunks * length,
        accumulation=chunks,
        seq_len_start=start,
        seq_schedule_fraction=full,
        batch_tokens_start=first * length,
    )
    schedule = Plan(settings, OPTIMIZERS)
    sizes = [schedule.size(fraction) for fraction in sorted(fractions)]
    assert [size.length for size in sizes] == sorted(size.length for size in sizes)
    assert [size.chunks for size in sizes] == sorted(size.chunks for size in sizes)
    assert all(length % size.length == 0 for size in sizes)
    assert schedule.size(0.0) == StepSize(start if full else length, first)
    assert schedule.size(1.0) == StepSize(length, chunks)
    visited = {schedule.size(fraction) for fraction in (0.0, *schedule.changes, 1.0)}
    assert set(sizes) <= visited


@given(st.lists(st.floats(0, 1), max_size=6), st.integers(1, 30))
def test_warm_up_visits_every_change(changes: list[float], steps: int) -> None:
    fractions = warmup_fractions(tuple(changes), steps)
    assert fractions == sorted(fractions)
    assert len(fractions) >= steps
    assert set(changes) <= set(fractions) or not {*changes} - {0.0, 1.0}


def test_a_step_keeps_its_tokens_and_their_order() -> None:
    """Whatever the sequence length, inputs and targets are the same, in the same order."""
    plain, scheduled = RecordingGPT(), RecordingGPT()
    for model, changes in ((plain, {}), (scheduled, SCHEDULED)):
        for step in start(model, iterations=6, **changes):
            assert step.tokens == STEP_TOKENS
    assert {shape for shape, _ in scheduled.shapes()} == {(8, 4), (4, 8), (2, 16)}
    for (ids, targets, _), (same_ids, same_targets, _) in zip(plain.calls, scheduled.calls, strict=True):
        assert torch.equal(ids.flatten(), same_ids.flatten())
        assert torch.equal(targets.flatten(), same_targets.flatten())


def test_full_sizes_are_the_plain_run() -> None:
    plain = [step.loss for step in start(iterations=2)]
    full = start(iterations=2, seq_len_start=LENGTH, batch_tokens_start=STEP_TOKENS)
    assert [step.loss for step in full] == plain


def test_batches_double() -> None:
    tokens = [step.tokens for step in start(batch_tokens_start=STEP_TOKENS // 4, batch_schedule_fraction=0.5)]
    assert tokens == [STEP_TOKENS // 4] * 3 + [STEP_TOKENS // 2] * 3 + [STEP_TOKENS] * 6


def test_warm_up_runs_every_graph_of_the_run() -> None:
    """All shapes, with depth recurrence and without, although the settings ask for one step."""
    model = RecordingGPT(num_loops=1, loop_start=1, loop_end=1, enable_looping_at=0.4)
    lines: list[str] = []
    (hook,) = model.step_hooks(no_message)
    more = {"hooks": [hook], "notify": lines.append}
    run = start(model, more=more, warmup_steps=1, **SCHEDULED)
    run.warm_up()
    warm, model.calls = set(model.shapes()), []
    assert run.number == 0
    for _ in run:
        pass
    assert set(model.shapes()) <= warm
    assert len(warm) == 4
    assert lines[0].startswith("warm-up ran 3 step sizes: 128 tokens as sequences of 4, ")
    assert lines[1:] == [
        f"from step {step} on: sequences of {length}, 128 tokens a step" for step, length in ((1, 4), (4, 8), (7, 16))
    ]


def test_warm_up_leaves_a_full_queue_at_the_first_batch(tmp_path: Path) -> None:
    """The first timed step finds its batches loaded, and they are those of a run without warm-up."""
    write_shard(tmp_path / "a_train_0.bin", np.random.default_rng(0).integers(0, VOCAB, 3000, dtype=np.uint16))
    settings = tiny_settings(warmup_steps=3, iterations=2)

    def loader() -> Batches:
        return Batches([tmp_path / "a_train_0.bin"], batch_tokens=STEP_TOKENS, seq_len=LENGTH, accumulation=CHUNKS)

    batches, indices = loader(), list[int]()
    run = tiny_training(tiny_model(), batches, settings)
    make = batches._make
    batches._make = lambda index: indices.append(index) or make(index)  # type: ignore[assignment]  # a lambda
    run.warm_up()
    ahead = batches._prefetcher
    assert ahead is not None
    assert ahead._queue.full()
    restart = len(indices) - 1 - indices[::-1].index(0)
    assert indices[restart : restart + 2] == [0, 1]
    assert batches.state_dict() == {"spans": 0}
    losses = [step.loss for step in run]
    batches.close()
    plain = loader()
    cold = tiny_training(tiny_model(), plain, tiny_settings(warmup_steps=0, iterations=2))
    assert [step.loss for step in cold] == losses
    plain.close()


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"seq_len_start": 5}, "seq_len_start 5 .* 16; choose 4,"),
        ({"seq_len_start": -4}, "seq_len_start -4 "),
        ({"seq_len_start": 32}, "seq_len_start 32 "),
        ({"batch_tokens_start": 33}, "batch_tokens_start 33 .* 32"),
        ({"batch_tokens_start": 2 * STEP_TOKENS}, "up to 128"),
        ({"seq_schedule_fraction": 1.1}, "seq_schedule_fraction is 1.1"),
        ({"batch_schedule_fraction": -0.1}, "batch_schedule_fraction is -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        tiny_settings(**change)
