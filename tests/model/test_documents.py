"""Documents and windows: what runs equals a plain loop over documents, by masks, by bands and by kernels alike."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birdie.data.batches import Batches
from birdie.data.shards import write_shard
from birdie.errors import ConfigError, DataError
from birdie.model import kernels
from birdie.model.attention import register, softmax
from birdie.model.cache import Cache
from birdie.model.documents import Documents, bounds_of
from birdie.model.evidence import evidence
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.recipe import Recipe
from birdie.train.groups import OptimizerSettings
from birdie.train.loop import Fit, fit
from birdie.train.settings import TrainSettings

BOS, VOCAB = 1, 32
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "num_layers": 3, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2}
CPU = torch.device("cpu")


def masks_only(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax by another name, which has no bands and no kernels: the reference."""
    return softmax(q, k, v, mask)


register("masks only", masks_only)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    made = GPT(GPTConfig(**(SHAPE | changes)))
    for name, parameter in made.named_parameters():
        if name.endswith("proj.weight"):  # these start at zero and would hide attention
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    """A document of about nine tokens after the other."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (rows, length), generator=generator)
    return ids.masked_fill(torch.rand((rows, length), generator=generator) < 0.11, BOS)


def documents(packed: bool = True, told: list[str] | None = None) -> Documents:
    return Documents(BOS, CPU, packed=packed, notify=(told if told is not None else []).append)


def naive_bounds(rows: list[list[int]], longest: int) -> list[int]:
    bounds, place, begin = [], 0, 0
    for row in rows:
        for column, token in enumerate(row):
            if column == 0 or token == BOS or place - begin == longest:
                bounds.append(place)
                begin = place
            place += 1
    return [*bounds, place]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    st.integers(1, 9),
)
def test_bounds_are_rows_documents_and_forced_splits(rows: list[list[int]], longest: int) -> None:
    assert bounds_of(np.array(rows), BOS, longest).tolist() == naive_bounds(rows, longest)


def test_bounds_are_padded_with_the_end_to_few_shapes() -> None:
    told: list[str] = []
    find = documents(told=told)
    few, many = torch.full((1, 640), 5), text(1, 640)
    found = [find(ids, 64) for ids in (few, many, few)]
    assert [len(each.places) for each in found] == [64, 128, 128]  # and never fewer again
    assert all(each.places.dtype == torch.int32 for each in found)
    for each, ids in zip(found, (few, many, few), strict=True):
        real = bounds_of(ids.numpy(), BOS, 64)
        assert np.array_equal(each.places[: len(real)], real)
        assert set(each.places[len(real) :].tolist()) == {640}
    assert told[0] == "documents: 10 segments of at most 64 tokens in 640; room for 63"
    assert len(told) == 2


def one_by_one(q: Tensor, k: Tensor, v: Tensor, places: Tensor, longest: int, window: int) -> Tensor:
    """Segments of flattened (tokens, heads, d), each attended alone."""
    out, k, v = torch.zeros_like(q), *(x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    for begin, end in zip(places[:-1].tolist(), places[1:].tolist(), strict=True):
        if begin == end:
            continue
        assert end - begin <= longest
        qs, ks, vs = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        mask = torch.ones(end - begin, end - begin, dtype=torch.bool).tril().triu(1 - (window or end))
        scores = (qs @ ks.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        out[begin:end] = (scores.softmax(-1) @ vs).transpose(0, 1)
    return out


def flash3() -> kernels.Kernels:
    """With the package's arguments, computed segment by segment."""

    def varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **how: Any) -> Any:
        assert cu_q is cu_k
        assert max_q == max_k
        assert how.pop("causal")
        left, right = how.pop("window_size")
        assert right == (-1 if left == -1 else 0)
        return one_by_one(q, k, v, cu_q, max_q, left + 1), None

    def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]) -> Tensor:
        assert causal
        batch, length = q.shape[:2]
        places = torch.arange(0, (batch + 1) * length, length)
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return one_by_one(*flat, places, length, window_size[0] + 1).view_as(q)

    return kernels.flash3(SimpleNamespace(flash_attn_func=plain, flash_attn_varlen_func=varlen))


def torch_of_today(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert cu_q is cu_k
    assert max_q == max_k
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return one_by_one(query, key, value, cu_q, max_q, window_size[0] + 1)


def torch_of_yesterday(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    assert cu_q is cu_k
    assert max_q == max_k
    assert is_causal
    assert query.shape == key.shape
    return one_by_one(query, key, value, cu_q, max_q, 0)


KERNELS: dict[str, Callable[[], kernels.Kernels]] = {
    "SDPA": kernels.Kernels,
    "FlashAttention-3": flash3,
    "torch varlen": lambda: kernels.torch_varlen(torch_of_today),
    "torch varlen, older": lambda: kernels.torch_varlen(torch_of_yesterday),
}


def nats_and_gradient(made: GPT, ids: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    made.zero_grad()
    nats = made.loss(ids, ids.roll(-1, 1), reduction="none", **more)
    nats.mean().backward()
    gradients = [p.grad.flatten() for p in made.parameters() if p.grad is not None]
    return nats.detach(), torch.cat(gradients)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [0, 5])
def test_packed_attention_is_a_plain_loop_over_documents(kernel: str, window: int) -> None:
    """Each segment alone through the model, without bounds and masks: loss and gradient of the whole model.

    Rotary positions are then counted from the segment's beginning, which attention cannot tell.
    """
    ids, longest = text(1, 150), 16
    made = model(isolate_documents=True, attn_window=window, attn_window_layers=(0, 2) if window else ())
    made.kernels = KERNELS[kernel]()
    nats, gradient = nats_and_gradient(made, ids, bounds=documents()(ids, longest))
    alone = model(attention="masks only", attn_window=window, attn_window_layers=(0, 2) if window else ())
    places = bounds_of(ids.numpy(), BOS, longest).tolist()
    targets = ids.roll(-1, 1)
    parts = [alone.loss(ids[:, a:b], targets[:, a:b], reduction="none") for a, b in pairwise(places)]
    expected = torch.cat(parts, dim=1)
    expected.mean().backward()
    torch.testing.assert_close(nats, expected.detach(), rtol=1e-5, atol=1e-5)
    wanted = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kernel", ["SDPA", "FlashAttention-3", "torch varlen"])
@pytest.mark.parametrize("window", [0, 3, 7])
def test_rows_with_bounds_are_the_masks_that_isolate_documents(kernel: str, window: int) -> None:
    ids = text(3, 24)
    reference = model(isolate_documents=True, attention="masks only", attn_window=window)
    made = model(isolate_documents=True, attn_window=window)
    expected = nats_and_gradient(reference, ids)
    for bounds in ([None] if kernel == "SDPA" else []) + [documents(packed=False)(ids, 24)]:
        made.kernels = KERNELS[kernel]()
        for ours, theirs in zip(nats_and_gradient(made, ids, bounds=bounds), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 5, 11, 12, 30])
@pytest.mark.parametrize("kernel", ["SDPA", "FlashAttention-3"])
def test_a_window_is_its_mask(window: int, kernel: str) -> None:
    ids = text(2, 12)
    made, reference = model(attn_window=window), model(attn_window=window, attention="masks only")
    made.kernels = KERNELS[kernel]()
    torch.testing.assert_close(made(ids), reference(ids), rtol=1e-5, atol=1e-5)
    if window >= 12:
        torch.testing.assert_close(made(ids), model()(ids), rtol=1e-5, atol=1e-5)


def test_a_window_hides_what_is_further_back() -> None:
    """Of one layer; and only windowed layers lose sight of it."""
    ids = text(1, 12)
    other = ids.clone()
    other[0, 0] = ids[0, 0] % 16 + 8
    near, far = (
        model(num_layers=1, attn_window=window, attn_window_layers=(0,) if window else ()) for window in (4, 0)
    )
    changed = (near(ids) - near(other)).abs().amax(-1)[0]
    assert changed[:4].min() > 1e-5
    assert changed[4:].max() == 0
    assert (far(ids) - far(other)).abs().amax(-1)[0, 4:].max() > 1e-6
    assert [block.attn.windowed for block in model(attn_window=4, attn_window_layers=(1,)).blocks] == [
        False,
        True,
        False,
    ]


def test_token_by_token_a_window_is_the_same() -> None:
    made = model(attn_window=4, attn_window_layers=(0, 2), isolate_documents=True).eval()
    ids = text(2, 14)
    step = Cache(made, 2, 14)
    found = torch.cat([step(ids[:, place : place + 1]) for place in range(14)], dim=1)
    torch.testing.assert_close(found, made(ids), rtol=1e-4, atol=1e-5)


def test_nothing_crosses_a_document_in_a_packed_row() -> None:
    ids = text(1, 90)
    place = int((ids[0] == BOS).nonzero()[4])
    other = ids.clone()
    other[0, :place] = text(1, place, seed=9)[0]
    made = model(isolate_documents=True, smear="gated", bigram_vocab_size=17, bigram_dim=8)
    one, two = (made(each, bounds=documents()(each, 16)) for each in (ids, other))
    torch.testing.assert_close(one[:, place:], two[:, place:], rtol=1e-5, atol=1e-5)
    assert (one[:, :place] - two[:, :place]).abs().max() > 0.01


def test_a_compiler_traces_packed_attention_whole() -> None:
    made = model(isolate_documents=True, attn_window=8)
    traced = torch.compile(made.loss, backend="eager", fullgraph=True, dynamic=False)
    find = documents()
    for seed in range(3):
        ids = text(1, 90, seed)
        bounds = find(ids, 16)
        torch.testing.assert_close(traced(ids, ids, bounds=bounds), made.loss(ids, ids, bounds=bounds))


def test_which_kernel_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, half = torch.device("cuda"), torch.bfloat16
    assert kernels.installed(CPU, half).name == "SDPA"
    assert kernels.installed(cuda, torch.float32).name == "SDPA"
    there = {"flash_attn_interface": SimpleNamespace(flash_attn_func=None, flash_attn_varlen_func=None)}
    there["torch.nn.attention.varlen"] = SimpleNamespace(varlen_attn=torch_of_yesterday)
    monkeypatch.setattr(kernels, "_module", there.get)
    for capability, name in (((9, 0), "FlashAttention-3"), ((8, 0), "torch varlen"), ((7, 5), "SDPA")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert kernels.installed(cuda, half).name == name
    there.clear()
    assert kernels.installed(cuda, half).name == "SDPA"


def test_a_package_that_cannot_be_loaded_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('libcudart.so.12: cannot open shared object')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert kernels._module("flash_attn_interface") is None


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    ids = text(1, 3000, seed=4)[0].numpy().astype(np.uint16)
    ids[:5] = 7  # the tail of a document that began in another shard
    ids[5] = BOS
    write_shard(tmp_path / "a_train_0.bin", ids)
    return tmp_path / "a_train_0.bin"


TRAIN: dict[str, Any] = {
    "iterations": 6, "warmdown_iters": 3, "warmup_steps": 0, "train_batch_tokens": 128, "train_seq_len": 16,
    "accumulation": 2, "max_wallclock_seconds": 0, "compute_dtype": "float32",
}  # fmt: skip


def packed_run(shard: Path, made: GPT, told: list[str] | None = None, **changes: Any) -> tuple[Fit, Batches]:
    settings = TrainSettings(**(TRAIN | changes))
    batches = Batches([shard], batch_tokens=128, seq_len=16, accumulation=2, order="packed", bos_id=BOS)
    optimizers = OptimizerSettings(matrix_lr=0.02, newton_schulz_dtype="float32")
    return fit(made, batches, settings, optimizers, documents=documents(told=told)), batches


def test_packed_rows_begin_with_a_document_and_go_on_without_a_gap(shard: Path) -> None:
    batches = Batches([shard], batch_tokens=128, seq_len=16, accumulation=2, order="packed", bos_id=BOS)
    stream = np.memmap(shard, np.uint16, offset=1024)
    for index in range(60):  # round the end, too
        x, y = batches.next()
        span = np.take(stream, range(5 + 65 * index, 5 + 65 * (index + 1)), mode="wrap")
        assert np.array_equal(x, span[None, :-1])
        assert np.array_equal(y, span[None, 1:])
    batches.close()


def test_without_documents_packing_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "a_train_0.bin", np.full(500, 7, np.uint16))
    with pytest.raises(DataError, match="token 1"):
        Batches([tmp_path / "a_train_0.bin"], batch_tokens=128, seq_len=16, accumulation=2, order="packed")
    with pytest.raises(ConfigError, match="data order packed leaves it to attention"):
        Recipe.from_dict({"data": {"order": "packed"}})


@pytest.mark.parametrize("kernel", ["FlashAttention-3", "torch varlen"])
def test_a_packed_run_is_the_same_by_mask_and_by_kernel(shard: Path, kernel: str) -> None:
    def curve(name: str, **changes: Any) -> list[float]:
        made = model(isolate_documents=True)
        made.kernels = KERNELS[name]()
        run, batches = packed_run(shard, made, **changes)
        losses = [step.loss for step in run]
        batches.close()
        return losses

    plain = curve("SDPA")
    assert curve(kernel) == pytest.approx(plain, abs=1e-4)
    assert curve("SDPA", micro_batch_tokens=128) == pytest.approx(plain, abs=1e-4)
    growing = curve("SDPA", seq_len_start=4, seq_schedule_fraction=0.5)
    assert growing != plain
    assert curve(kernel, seq_len_start=4, seq_schedule_fraction=0.5) == pytest.approx(growing, abs=1e-4)


def test_growing_packed_sequences_only_move_the_forced_splits(shard: Path) -> None:
    told: list[str] = []
    run, batches = packed_run(
        shard, model(isolate_documents=True), told, seq_len_start=4, seq_schedule_fraction=0.5, warmup_steps=1
    )
    run.prime()
    assert [line.split(" tokens")[0].split("most ")[1] for line in told] == ["4", "8", "16"]  # all before the clock
    for step in run:
        assert step.tokens == 128
    batches.close()


def test_a_packed_span_is_not_cut_by_micro_batches(shard: Path) -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens 16 would cut a packed span of 64 tokens"):
        packed_run(shard, model(isolate_documents=True), micro_batch_tokens=16)


def test_what_is_at_work_is_told() -> None:
    made = model(isolate_documents=True, attn_window=6, attn_window_layers=(1,))
    made.kernels = flash3()
    lines = evidence(made)
    assert "isolated documents: attention begins anew at each BOS, kernel FlashAttention-3" in lines
    assert "window: layers 1 see 6 places back" in lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_window": -1}, "attn_window is -1"),
        ({"attn_window": 4, "attn_window_layers": (3,)}, "attn_window_layers names layer 3"),
        ({"attn_window_layers": (1,)}, "attn_window_layers need a width"),
    ],
)
def test_windows_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**(SHAPE | change))


def test_the_reference_is_torchs_own() -> None:
    q, k, v = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    ours = one_by_one(*(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 9]), 9, 0)
    torch.testing.assert_close(
        ours.transpose(0, 1)[None], F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    )
