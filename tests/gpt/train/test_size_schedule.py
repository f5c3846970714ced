"""Sequence-length and batch-size schedules: every token once in every stage; warm-up visits all; resuming is exact."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.train.plan import Plan, StepSize
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
