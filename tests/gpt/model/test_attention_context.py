"""Documents and windows: masks, bands and kernels all equal a plain loop over documents."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from birdie.gpt.data.batches import Batches
from birdie.gpt.data.shards import write_shard
from birdie.gpt.model.attention_functions import register, softmax
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.documents import DocumentFinder, segment_offsets
from birdie.gpt.model.gpt import GPT
from birdie.gpt.train.settings import OptimizerSettings, TrainSettings
from birdie.gpt.train.training import Training
from tests.gpt.model.packed_text import BOS, CPU, attentive_model, document_text
from tests.gpt.model.technique_table import blocks_of
from tests.gpt.model.varlen_reference import KERNELS
from tests.tiny_run import tiny_training


def masks_only(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax under another name, for which there are neither bands nor kernels: the reference."""
    return softmax(q, k, v, mask)


register("masks only", masks_only)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def finder(packed: bool = True, lines: list[str] | None = None) -> DocumentFinder:
    return DocumentFinder(BOS, CPU, packed=packed, notify=(lines if lines is not None else []).append)


def nats_and_gradient(model: GPT, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    nats = model.loss(ids, ids.roll(-1, 1), reduction="none", **options)
    nats.mean().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return nats.detach(), torch.cat(gradients)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [0, 5])
def test_packed_attention_is_a_plain_loop_over_documents(kernel: str, window: int) -> None:
    """Each segment alone through a model without bounds and masks: the same loss and gradient.

    Rotary positions then start at the beginning of the segment, which does not change attention.
    """
    ids, longest = document_text(1, 150), 16
    layers = (0, 2) if window else ()
    model = attentive_model(isolate_documents=True, attn_window=window, attn_window_layers=layers)
    model.kernels = KERNELS[kernel]()
    nats, gradient = nats_and_gradient(model, ids, bounds=finder()(ids, longest))
    reference = attentive_model(attention="masks only", attn_window=window, attn_window_layers=layers)
    offsets = segment_offsets(ids.numpy(), BOS, longest).tolist()
    targets = ids.roll(-1, 1)
    parts = [reference.loss(ids[:, a:b], targets[:, a:b], reduction="none") for a, b in pairwise(offsets)]
    expected = torch.cat(parts, dim=1)
    expected.mean().backward()
    torch.testing.assert_close(nats, expected.detach(), rtol=1e-5, atol=1e-5)
    expected_gradient = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kernel", ["SDPA", "FlashAttention-3", "torch varlen"])
@pytest.mark.parametrize("window", [0, 3, 7])
def test_rows_with_bounds_equal_masks_that_isolate_documents(kernel: str, window: int) -> None:
    ids = document_text(3, 24)
    reference = attentive_model(isolate_documents=True, attention="masks only", attn_window=window)
    model = attentive_model(isolate_documents=True, attn_window=window)
    expected = nats_and_gradient(reference, ids)
    for bounds in ([None] if kernel == "SDPA" else []) + [finder(packed=False)(ids, 24)]:
        model.kernels = KERNELS[kernel]()
        for result, wanted in zip(nats_and_gradient(model, ids, bounds=bounds), expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 5, 11, 12, 30])
@pytest.mark.parametrize("kernel", ["SDPA", "FlashAttention-3"])
def test_a_window_equals_its_mask(window: int, kernel: str) -> None:
    ids = document_text(2, 12)
    model, reference = attentive_model(attn_window=window), attentive_model(attn_window=window, attention="masks only")
    model.kernels = KERNELS[kernel]()
    torch.testing.assert_close(model(ids), reference(ids), rtol=1e-5, atol=1e-5)
    if window >= 12:
        torch.testing.assert_close(model(ids), attentive_model()(ids), rtol=1e-5, atol=1e-5)


def test_a_window_hides_earlier_positions() -> None:
    """In a model of one layer; and only windowed layers have the limit."""
    ids = document_text(1, 12)
    other = ids.clone()
    other[0, 0] = ids[0, 0] % 16 + 8
    windowed, full = (
        attentive_model(num_layers=1, attn_window=window, attn_window_layers=(0,) if window else ())
        for window in (4, 0)
    )
    difference = (windowed(ids) - windowed(other)).abs().amax(-1)[0]
    assert difference[:4].min() > 1e-5
    assert difference[4:].max() == 0
    assert (full(ids) - full(other)).abs().amax(-1)[0, 4:].max() > 1e-6
    model = attentive_model(attn_window=4, attn_window_layers=(1,))
    assert [block.attn.windowed for block in blocks_of(model)] == [False, True, False]


def test_the_cache_has_the_same_windows_and_documents() -> None:
    model = attentive_model(attn_window=4, attn_window_layers=(0, 2), isolate_documents=True).eval()
    ids = document_text(2, 14)
    cache = Cache(model, 2, 14)
    logits = torch.cat([cache(ids[:, position : position + 1]) for position in range(14)], dim=1)
    torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-5)


def test_nothing_crosses_a_document_in_a_packed_row() -> None:
    ids = document_text(1, 90)
    begin = int((ids[0] == BOS).nonzero()[4])
    other = ids.clone()
    other[0, :begin] = document_text(1, begin, seed=9)[0]
    model = attentive_model(isolate_documents=True, smear="gated", bigram_vocab_size=17, bigram_dim=8)
    one, two = (model(row, bounds=finder()(row, 16)) for row in (ids, other))
    torch.testing.assert_close(one[:, begin:], two[:, begin:], rtol=1e-5, atol=1e-5)
    assert (one[:, :begin] - two[:, :begin]).abs().max() > 0.01


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write_shard(tmp_path / "a_train_0.bin", document_text(1, 3000, seed=4)[0].numpy().astype(np.uint16))
    return tmp_path / "a_train_0.bin"


TRAIN: dict[str, Any] = {
    "iterations": 6, "warmdown_iters": 3, "warmup_steps": 0, "train_batch_tokens": 128, "train_seq_len": 16,
    "accumulation": 2, "max_wallclock_seconds": 0, "compute_dtype": "float32",
}  # fmt: skip


def packed_run(shard: Path, model: GPT, lines: list[str] | None = None, **changes: Any) -> tuple[Training, Batches]:
    settings = TrainSettings(**(TRAIN | changes))
    batches = Batches([shard], batch_tokens=128, seq_len=16, accumulation=2, order="packed", bos_id=BOS)
    optimizers = OptimizerSettings(matrix_lr=0.02, newton_schulz_dtype="float32")
    return tiny_training(model, batches, settings, optimizers, documents=finder(lines=lines)), batches


@pytest.mark.parametrize("kernel", ["FlashAttention-3", "torch varlen"])
def test_a_packed_run_is_the_same_by_mask_and_by_kernel(shard: Path, kernel: str) -> None:
    def losses(name: str, **changes: Any) -> list[float]:
        model = attentive_model(isolate_documents=True)
        model.kernels = KERNELS[name]()
        run, batches = packed_run(shard, model, **changes)
        curve = [step.loss for step in run]
        batches.close()
        return curve

    plain = losses("SDPA")
    assert losses(kernel) == pytest.approx(plain, abs=1e-4)
    assert losses("SDPA", micro_batch_tokens=128) == pytest.approx(plain, abs=1e-4)
    scheduled = losses("SDPA", seq_len_start=4, seq_schedule_fraction=0.5)
    assert scheduled != plain
    assert losses(kernel, seq_len_start=4, seq_schedule_fraction=0.5) == pytest.approx(scheduled, abs=1e-4)


def test_a_sequence_length_schedule_of_packed_rows_only_moves_forced_splits(shard: Path) -> None:
    lines: list[str] = []
    model = attentive_model(isolate_documents=True)
    run, batches = packed_run(shard, model, lines, seq_len_start=4, seq_schedule_fraction=0.5, warmup_steps=1)
    run.warm_up()
    assert [line.split(" tokens")[0].split("most ")[1] for line in lines] == ["4", "8", "16"]  # before the clock
    for step in run:
        assert step.tokens == 128
    batches.close()
