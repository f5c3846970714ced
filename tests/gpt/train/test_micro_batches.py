"""Micro-batches: any size gives the same gradient, and "auto" takes the fewest micro-steps that fit."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from birdie.errors import ConfigError
from birdie.gpt.train.measured_batches import _peak_bytes, largest_that_fits
from birdie.gpt.train.micro_batches import micro_batches
from birdie.gpt.train.plan import micro_steps
from birdie.gpt.train.training import Training
from birdie.gpt.train.training_checkpoint import load_checkpoint
from tests.tiny_run import (
    CHUNK_TOKENS,
    CHUNKS,
    STEP_TOKENS,
    TinyBatches,
    save,
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


@pytest.mark.parametrize("tokens", [0, *SIZES])
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_a_step_is_cut_into_all_of_its_tokens(tokens: int, chunks: int) -> None:
    cut = list(micro_batches(TinyBatches(), [0] * chunks, tokens, torch.device("cpu")))
    assert sum(1 / micro.parts for micro in cut) == pytest.approx(1)
    assert max(micro.ids.numel() for micro in cut) <= max(tokens, CHUNK_TOKENS)
    batches = TinyBatches()
    expected = [batches.next() for _ in range(chunks)]
    assert torch.equal(torch.cat([micro.ids for micro in cut]), torch.cat([ids for ids, _ in expected]))
    assert torch.equal(torch.cat([micro.targets for micro in cut]), torch.cat([targets for _, targets in expected]))
    if CHUNKS % chunks == 0 and tokens <= chunks * CHUNK_TOKENS:
        assert len(cut) == micro_steps(tiny_settings(), CHUNKS // chunks, tokens)


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


def test_a_resumed_run_keeps_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birdie.gpt.train.measured_batches.MOST", 64)
    run = start(micro_batch_tokens="auto")
    losses = {}
    for step in run:
        losses[step.number] = step.loss
        if step.number == 5:
            save(run, tmp_path)
    monkeypatch.setattr("birdie.gpt.train.measured_batches.MOST", 16)
    lines: list[str] = []
    settings = tiny_settings(micro_batch_tokens="auto")
    resumed = tiny_training(tiny_model(), TinyBatches(), settings, saved=load_checkpoint(tmp_path), notify=lines.append)
    assert lines == ["micro-batches of 64 tokens, 2 to a step on each rank (as in the checkpoint)"]
    assert {step.number: step.loss for step in resumed} == {n: loss for n, loss in losses.items() if n > 5}


@pytest.mark.parametrize("tokens", [8, 48, 96, -16, "some"])
def test_sizes_that_do_not_cut_chunks_are_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        tiny_settings(train_batch_tokens=4 * 64, micro_batch_tokens=tokens)


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
