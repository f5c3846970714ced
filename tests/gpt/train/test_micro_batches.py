"""Micro-batches: any size gives the same gradient, and "auto" takes the fewest micro-steps that fit."""

import functools
from typing import Any

import pytest
import torch

from birdie.gpt.train.measured_batches import _peak_bytes, largest_that_fits
from birdie.gpt.train.training import Training
from tests.tiny_run import (
    STEP_TOKENS,
    TinyBatches,
    tiny_model,
    tiny_settings,
    tiny_training,
)

SIZES = [16, 32, 64, 128]


def start(lines: list[str] | None = None, **changes: Any) -> Training:
    notify = (lines if lines is not None else []).append
    return tiny_training(tiny_model(), TinyBatches(), tiny_settings(**changes), notify=notify)


@functools.cache
def plain_run(**schedule: Any) -> list[tuple[float, int]]:
    """Return losses and tokens of the steps of a run without micro-batches."""
    return [(step.loss, step.tokens) for step in start(**schedule)]


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize(
    "schedule", [{"iterations": 3}, {"iterations": 6, "seq_len_start": 4, "batch_tokens_start": STEP_TOKENS // 4}]
)
def test_any_size_is_the_same_run(tokens: int, schedule: dict[str, Any]) -> None:
    plain = plain_run(**schedule)
    micro = [(step.loss, step.tokens) for step in start(micro_batch_tokens=tokens, **schedule)]
    assert [tokens for _, tokens in micro] == [tokens for _, tokens in plain]
    assert [loss for loss, _ in micro] == pytest.approx([loss for loss, _ in plain], abs=1e-4)


def memory(limit: int) -> Any:
    """Return the needs of a device with `limit` bytes on which each token takes 100 bytes."""

    def needs(tokens: int) -> int:
        if 100 * tokens > limit:
            raise torch.OutOfMemoryError
        return 100 * tokens

    return needs


@pytest.mark.parametrize(
    ("free", "limit", "expected"),
    [(1e9, 1e9, 128), (6400, 1e9, 64), (6399, 1e9, 32), (1e9, 3300, 32), (0, 0, 16)],
)
def test_the_largest_that_fits_is_taken(free: float, limit: float, expected: int) -> None:
    assert largest_that_fits(SIZES, memory(int(limit)), int(free)) == expected


def test_each_measured_size_counts_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that adds to the gradients of the one before allocates none, and would look smaller than a step is."""
    model = tiny_model()

    def allocated(_device: torch.device) -> int:
        tensors = [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", allocated)
    gradients = sum(p.nbytes for p in model.parameters())
    assert [_peak_bytes(model, tokens, 8, torch.device("cpu")) for tokens in (8, 16)] == [gradients, gradients]
