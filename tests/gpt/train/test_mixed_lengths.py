"""Mixed sequence lengths: a step has its tokens, each once, and ranks compute the gradient of one."""

from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.data.batches import Batches
from birdie.gpt.data.data_order import Order
from birdie.gpt.data.shards import write_shard
from birdie.gpt.model.documents import DocumentFinder
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.train.micro_batches import micro_batches
from birdie.gpt.train.plan import StepSize, chunk_lengths, differ_within_a_rank
from birdie.gpt.train.training import Training
from birdie.system.distributed import World
from tests.tiny_run import (
    CHUNKS,
    LENGTH,
    STEP_TOKENS,
    VOCAB,
    TinyBatches,
    tiny_model,
    tiny_settings,
    tiny_training,
)

CPU, BOS = torch.device("cpu"), 1
MIXED: dict[str, Any] = {"mixed_seq_lens": (16, 4)}


class RecordingGPT(GPT):
    """A model that records the arguments of its loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(GPTConfig(vocab_size=VOCAB, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2))
        self.calls: list[tuple[Tensor, Tensor]] = []

    def loss(self, ids: Tensor, targets: Tensor, *rest: Any, **more: Any) -> Tensor:
        self.calls.append((ids, targets))
        return super().loss(ids, targets, *rest, **more)


def start(
    model: GPT | None = None, world: World | None = None, more: dict[str, Any] | None = None, **to: Any
) -> Training:
    return tiny_training(model or tiny_model(), TinyBatches(world), tiny_settings(**to), world=world, **(more or {}))


def test_a_step_keeps_its_tokens_and_their_order() -> None:
    plain, mixed = RecordingGPT(), RecordingGPT()
    for model, changes in ((plain, {}), (mixed, MIXED)):
        assert {step.tokens for step in start(model, iterations=3, **changes)} == {STEP_TOKENS}
    assert [tuple(ids.shape) for ids, _ in mixed.calls[:CHUNKS]] == [(2, 16), (8, 4), (2, 16), (8, 4)]
    for (ids, targets), (same_ids, same_targets) in zip(plain.calls, mixed.calls, strict=True):
        assert torch.equal(ids.flatten(), same_ids.flatten())
        assert torch.equal(targets.flatten(), same_targets.flatten())


def test_the_gradient_is_the_mean_over_chunks_each_cut_to_its_length() -> None:
    model = tiny_model()
    gradients: dict[str, Tensor] = {}
    for chunk, length in enumerate((16, 4, 16, 4)):
        batches = TinyBatches()
        batches.position = chunk
        ids, targets = (tokens.reshape(-1, length) for tokens in batches.next())
        model.zero_grad()
        torch.autograd.backward(model.loss(ids, targets) / CHUNKS)
        for name, p in model.named_parameters():
            assert p.grad is not None
            gradients[name] = gradients.get(name, torch.zeros(())) + p.grad
    run = start(model, **MIXED)
    run.accumulate(micro_batches(run.batches, run.plan.lengths(0.0), 0, CPU))
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-5, atol=1e-7, msg=name)


def test_the_full_length_alone_is_the_plain_run() -> None:
    plain = [step.loss for step in start(iterations=3)]
    assert [step.loss for step in start(iterations=3, mixed_seq_lens=(16,))] == plain
    assert [step.loss for step in start(iterations=3, mixed_seq_lens=(16, 16))] == plain


@given(
    lengths=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=4),
    repeats=st.integers(1, 3),
    ranks=st.integers(1, 8),
    limit=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_with_any_number_of_ranks_a_step_has_each_length_equally_often(
    lengths: list[int], repeats: int, ranks: int, limit: int
) -> None:
    chunks = len(lengths) * repeats * ranks
    settings = tiny_settings(accumulation=chunks, train_batch_tokens=chunks * LENGTH, mixed_seq_lens=tuple(lengths))
    by_rank = [chunk_lengths(settings, StepSize(limit, chunks), rank, ranks) for rank in range(ranks)]
    in_order = [by_rank[chunk % ranks][chunk // ranks] for chunk in range(chunks)]
    assert in_order == list(chunk_lengths(settings, StepSize(limit, chunks), 0, 1))
    assert Counter(in_order) == Counter(min(length, limit) for length in lengths * (repeats * ranks))
    full = [chunk_lengths(settings, StepSize(LENGTH, chunks), rank, ranks) for rank in range(ranks)]
    assert differ_within_a_rank(settings, ranks) == any(len(set(of_rank)) > 1 for of_rank in full)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Every token is unique, except the BOS of a document every 37."""
    ids = np.arange(2, 4002, dtype=np.uint16)
    ids[3::37] = BOS
    write_shard(tmp_path / "a_train_0.bin", ids)
    return tmp_path / "a_train_0.bin"


@pytest.mark.parametrize("order", get_args(Order))
def test_in_every_data_order_a_step_has_its_tokens_once_and_no_others(shard: Path, order: Order) -> None:
    def targets(lengths: list[int], ranks: int) -> list[list[int]]:
        steps: list[list[int]] = [[] for _ in range(5)]
        for rank in range(ranks):
            batches = Batches(
                [shard], batch_tokens=4 * 64, seq_len=32, accumulation=4, order=order, bos_id=BOS, rank=rank,
                world_size=ranks,
            )  # fmt: skip
            for step in steps:
                for micro in micro_batches(batches, lengths[rank::ranks], 0, CPU, finder(order), order == "packed"):
                    assert micro.ids.numel() == micro.targets.numel() == 64
                    step += micro.targets.flatten().tolist()
            batches.close()
        return steps

    plain, mixed = targets([32] * 4, 1), targets([32, 8, 16, 8], 2)
    for step, of_one_length in zip(mixed, plain, strict=True):
        assert sorted(step) == sorted(of_one_length)
        unique = [token for token in step if token != BOS]
        assert len(unique) == len(set(unique))


def finder(order: Order) -> DocumentFinder | None:
    return DocumentFinder(BOS, CPU, packed=True) if order == "packed" else None


def test_scheduled_lengths_are_upper_bounds_and_warm_up_runs_all() -> None:
    model, lines = RecordingGPT(), list[str]()
    scheduled = {**MIXED, "seq_len_start": 2, "seq_schedule_fraction": 0.6}
    run = start(model, more={"notify": lines.append}, warmup_steps=1, **scheduled)
    run.warm_up()
    warm, model.calls = {tuple(ids.shape) for ids, _ in model.calls}, []
    assert len(list(run)) == 12
    shapes = [tuple(ids.shape) for ids, _ in model.calls]
    assert [shape[1] for shape in shapes[::CHUNKS]] == [2] * 3 + [4] * 2 + [8] * 3 + [16] * 4
    assert [shape[1] for shape in shapes[1::CHUNKS]] == [2] * 3 + [4] * 9
    assert set(shapes) <= warm
    assert "from step 9 on: sequences of up to 16, 128 tokens a step" in lines


def test_micro_batches_do_not_change_the_run() -> None:
    plain = [step.loss for step in start(iterations=4, **MIXED)]
    assert [step.loss for step in start(iterations=4, micro_batch_tokens=16, **MIXED)] == pytest.approx(plain, abs=1e-4)


def test_chunks_of_different_lengths_are_not_joined() -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_tokens 64 .* 32 tokens"):
        start(micro_batch_tokens=64, **MIXED)
    lines: list[str] = []
    start(more={"notify": lines.append}, micro_batch_tokens="auto", **MIXED)
    assert lines[0].startswith("micro-batches of 32 tokens, 4 to a step")
    shapes = [tuple(m.ids.shape) for m in micro_batches(TinyBatches(), [16, 16, 4, 4], 64, CPU)]
    assert shapes == [(4, 16), (16, 4)]


def test_a_run_reports_the_lengths_of_its_ranks_before_and_after() -> None:
    lines: list[str] = []
    run = start(more={"notify": lines.append}, warmup_steps=2, iterations=3, **MIXED)
    assert lines == ["mixed sequence lengths: rank 0: 16 and 4"]
    assert list(run)
    (line,) = run.finish()
    assert line == (
        "mixed sequence lengths: rank 0 took 192 tokens as 12 sequences of 16, 192 tokens as 48 sequences of 4"
    )
    assert start().finish() == []


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (
            {"mixed_seq_lens": (16, 5)},
            "mixed_seq_lens has 5, .* 16; choose 4,",
        ),
        ({"mixed_seq_lens": (32, 16)}, "mixed_seq_lens has 32, .* choose 16"),
        ({"mixed_seq_lens": (0,)}, "mixed_seq_lens has 0"),
        ({"mixed_seq_lens": (16, 8, 4)}, "3 lengths for 4 chunks"),
        ({**MIXED, "batch_tokens_start": 32}, "batch_tokens_start 32 .* 2 mixed_seq_lens .* 64"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        tiny_settings(**change)
