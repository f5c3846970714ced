"""Sequences of several lengths in a step: the tokens it would have had, each once; ranks' gradient is that of one."""

import datetime
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.data.batches import Batches
from birdie.data.orders import Order
from birdie.data.shards import write_shard
from birdie.errors import ConfigError
from birdie.model.documents import Documents
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.recipe import load_recipe
from birdie.runtime.distributed import World
from birdie.train.checkpoint import load_checkpoint
from birdie.train.growth import Stage
from birdie.train.lengths import Lengths, differ_in_a_rank
from birdie.train.loop import Fit, fit
from birdie.train.micro import micro_batches
from tests.ranks import start_ranks
from tests.tiny_run import LENGTH, OPTIMIZERS, SEQUENCES, SPANS, VOCAB, TinyBatches, tiny_model, tiny_settings

CPU, BOS = torch.device("cpu"), 1
MIXED = {"mixed_seq_lens": (16, 4)}
SPAN = SEQUENCES * LENGTH


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Watched(GPT):
    """Keeps what its loss was asked for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(GPTConfig(vocab_size=VOCAB, num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2))
        self.asked: list[tuple[Tensor, Tensor]] = []

    def loss(self, ids: Tensor, targets: Tensor, *rest: Any, **more: Any) -> Tensor:
        self.asked.append((ids, targets))
        return super().loss(ids, targets, *rest, **more)


def start(model: GPT | None = None, world: World | None = None, more: dict[str, Any] | None = None, **to: Any) -> Fit:
    return fit(model or tiny_model(), TinyBatches(world), tiny_settings(**to), OPTIMIZERS, world=world, **(more or {}))


def test_a_step_keeps_its_tokens_and_their_order() -> None:
    plain, mixed = Watched(), Watched()
    for model, changes in ((plain, {}), (mixed, MIXED)):
        assert {step.tokens for step in start(model, **changes)} == {SPANS * SPAN}
    assert [tuple(ids.shape) for ids, _ in mixed.asked[:SPANS]] == [(2, 16), (8, 4), (2, 16), (8, 4)]
    for (ids, targets), (same_ids, same_targets) in zip(plain.asked, mixed.asked, strict=True):
        assert torch.equal(ids.flatten(), same_ids.flatten())
        assert torch.equal(targets.flatten(), same_targets.flatten())


def test_the_gradient_is_the_mean_over_spans_each_cut_to_its_length() -> None:
    model = tiny_model()
    gradients: dict[str, Tensor] = {}
    for place, length in enumerate((16, 4, 16, 4)):
        batches = TinyBatches()
        batches.position = place
        ids, targets = (each.reshape(-1, length) for each in batches.next())
        model.zero_grad()
        torch.autograd.backward(model.loss(ids, targets) / SPANS)
        for name, p in model.named_parameters():
            assert p.grad is not None
            gradients[name] = gradients.get(name, torch.zeros(())) + p.grad
    run = start(model, **MIXED)
    run._accumulate(Stage(LENGTH, SPANS), counts=True)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-5, atol=1e-7, msg=name)


def test_on_is_not_off_and_the_full_length_alone_is_the_plain_run() -> None:
    plain = [step.loss for step in start()]
    assert [step.loss for step in start(**MIXED)] != plain
    assert [step.loss for step in start(mixed_seq_lens=(16,))] == plain
    assert [step.loss for step in start(mixed_seq_lens=(16, 16))] == plain


@given(
    lengths=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=4),
    each=st.integers(1, 3),
    ranks=st.integers(1, 8),
    at=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_whatever_the_ranks_a_step_has_each_length_as_often(lengths: list[int], each: int, ranks: int, at: int) -> None:
    spans = len(lengths) * each * ranks
    settings = tiny_settings(accumulation=spans, train_batch_tokens=spans * LENGTH, mixed_seq_lens=tuple(lengths))
    own = [Lengths(settings, rank, ranks).of(Stage(at, spans)) for rank in range(ranks)]
    in_turn = [own[place % ranks][place // ranks] for place in range(spans)]
    assert in_turn == Lengths(settings).of(Stage(at, spans))
    assert Counter(in_turn) == Counter(min(length, at) for length in lengths * (each * ranks))
    full = [Lengths(settings, rank, ranks).of(Stage(LENGTH, spans)) for rank in range(ranks)]
    assert differ_in_a_rank(settings, ranks) == any(len(set(of_rank)) > 1 for of_rank in full)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """No place of it is like another but for the begin of a document every 37."""
    ids = np.arange(2, 4002, dtype=np.uint16)
    ids[3::37] = BOS
    write_shard(tmp_path / "a_train_0.bin", ids)
    return tmp_path / "a_train_0.bin"


@pytest.mark.parametrize("order", get_args(Order))
def test_in_every_order_a_step_has_each_of_its_tokens_once_and_none_other(shard: Path, order: Order) -> None:
    def targets(lengths: list[int], ranks: int) -> list[list[int]]:
        steps: list[list[int]] = [[] for _ in range(5)]
        for rank in range(ranks):
            batches = Batches(
                [shard], batch_tokens=4 * 64, seq_len=32, accumulation=4, order=order, bos_id=BOS, rank=rank,
                world_size=ranks,
            )  # fmt: skip
            for step in steps:
                for micro in micro_batches(batches, lengths[rank::ranks], 0, CPU, finder(order)):
                    assert micro.ids.numel() == micro.targets.numel() == 64
                    step += micro.targets.flatten().tolist()
            batches.close()
        return steps

    whole, mixed = targets([32] * 4, 1), targets([32, 8, 16, 8], 2)
    for step, of_one_length in zip(mixed, whole, strict=True):
        assert sorted(step) == sorted(of_one_length)
        places = [token for token in step if token != BOS]
        assert len(places) == len(set(places))


def finder(order: Order) -> Documents | None:
    return Documents(BOS, CPU, packed=True) if order == "packed" else None


def test_a_packed_span_is_cut_by_its_own_bounds(shard: Path) -> None:
    batches = Batches([shard], batch_tokens=256, seq_len=32, accumulation=4, order="packed", bos_id=BOS)
    for length, micro in zip(
        (32, 8, 32, 8), micro_batches(batches, [32, 8] * 2, 0, CPU, finder("packed")), strict=True
    ):
        bounds = micro.more["bounds"]
        assert bounds.longest == length
        assert micro.ids.shape == (1, 64)
        assert np.diff(bounds.places.numpy()).max() <= length
        assert np.diff(bounds.places.numpy()).sum() == 64
    batches.close()


def test_growing_sequences_stay_below_their_stage_and_all_are_primed() -> None:
    model, told = Watched(), list[str]()
    growing = {**MIXED, "seq_len_start": 2, "seq_schedule_fraction": 0.6}
    run = start(model, more={"notify": told.append}, warmup_steps=1, **growing)
    run.prime()
    primed, model.asked = {tuple(ids.shape) for ids, _ in model.asked}, []
    assert len(list(run)) == 12
    met = [tuple(ids.shape) for ids, _ in model.asked]
    assert [shape[1] for shape in met[::SPANS]] == [2] * 3 + [4] * 2 + [8] * 3 + [16] * 4
    assert [shape[1] for shape in met[1::SPANS]] == [2] * 3 + [4] * 9
    assert set(met) <= primed
    assert "from step 9 on: sequences of up to 16, 128 tokens a step" in told


@pytest.mark.parametrize("tokens", [16, 32])
def test_micro_batches_do_not_change_the_run(tokens: int) -> None:
    plain = [step.loss for step in start(**MIXED)]
    assert [step.loss for step in start(micro_batch_tokens=tokens, **MIXED)] == pytest.approx(plain, abs=1e-4)


def test_spans_of_unlike_length_are_not_joined() -> None:
    with pytest.raises(ConfigError, match="would join spans of 32 tokens that are cut to unlike mixed_seq_lens"):
        start(micro_batch_tokens=64, **MIXED)
    told: list[str] = []
    start(more={"notify": told.append}, micro_batch_tokens="auto", **MIXED)
    assert told[0].startswith("micro-batches of 32 tokens, 4 to a step")
    shapes = [tuple(m.ids.shape) for m in micro_batches(TinyBatches(), [16, 16, 4, 4], 64, CPU)]
    assert shapes == [(4, 16), (16, 4)]


def test_a_run_says_what_its_ranks_take_and_what_they_took() -> None:
    told: list[str] = []
    run = start(more={"notify": told.append}, warmup_steps=2, iterations=3, **MIXED)
    assert told == ["sequences of several lengths: rank 0: 16 and 4"]
    assert list(run)
    (line,) = run.finish()
    assert line == (
        "sequences of several lengths: rank 0 took 192 tokens as 12 sequences of 16, 192 tokens as 48 sequences of 4"
    )
    assert start().finish() == []


def test_a_resumed_run_is_bit_identical_and_finds_its_setting_unchanged(tmp_path: Path) -> None:
    whole = {step.number: step.loss for step in start(**MIXED)}
    run = start(**MIXED)
    for step in run:
        if step.number == 5:
            run.save(tmp_path)
            break
    told: list[str] = []
    more = {"resume": load_checkpoint(tmp_path), "notify": told.append}
    resumed = {step.number: step.loss for step in start(tiny_model(seed=5), more=more, **MIXED)}
    assert resumed == {n: loss for n, loss in whole.items() if n > 5}
    assert not [line for line in told if "resuming with" in line]
    start(more=more)
    assert "resuming with mixed_seq_lens = []; the checkpoint was trained with [16, 4]" in told


def as_rank(rank: int, ranks: int, rendezvous: str, results: str) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=wait)
    model, told = Watched(), list[str]()
    run = start(model, World(rank, ranks, rank), {"notify": told.append}, **MIXED)
    losses = [step.loss for step in run]
    lengths = torch.tensor([ids.shape[1] for ids, _ in model.asked])
    every = [torch.empty_like(lengths) for _ in range(ranks)]
    dist.all_gather(every, lengths)
    if rank == 0:
        torch.save({"losses": losses, "weights": model.state_dict(), "lengths": every, "told": told}, results)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_of_unlike_length_train_as_one_process_with_both(tmp_path: Path) -> None:
    results = tmp_path / "results.pt"
    start_ranks(as_rank, (2, str(tmp_path / "rendezvous"), str(results)), 2)
    several = torch.load(results, weights_only=True)
    assert [set(each.tolist()) for each in several["lengths"]] == [{16}, {4}]
    assert several["told"] == ["sequences of several lengths: rank 0: 16, rank 1: 4"]
    alone = Watched()
    assert several["losses"] == pytest.approx([step.loss for step in start(alone, **MIXED)], abs=1e-4)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(several["weights"][name], value, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mixed_seq_lens": (16, 5)},
            "mixed_seq_lens has 5, which does not divide train_seq_len 16; choose 4, or make",
        ),
        ({"mixed_seq_lens": (32, 16)}, "mixed_seq_lens has 32, which does not divide train_seq_len 16; choose 16"),
        ({"mixed_seq_lens": (0,)}, "mixed_seq_lens has 0"),
        ({"mixed_seq_lens": (16, 8, 4)}, "has 3 lengths for 4 spans of a step, which cannot have them equally often"),
        ({**MIXED, "batch_tokens_start": 32}, "is 1 spans, too few for each of the 2 mixed_seq_lens .* multiple of 64"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_settings(**change)


def test_it_is_a_setting_of_file_flag_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").write_text("[train]\nmixed_seq_lens = [1024, 256]\n")
    assert load_recipe(tmp_path / "recipe.toml").train.mixed_seq_lens == (1024, 256)
    flags = ["--train.mixed-seq-lens", "512", "--train.mixed-seq-lens", "128"]
    assert load_recipe(flags=flags).train.mixed_seq_lens == (512, 128)
    monkeypatch.setenv("MIXED_SEQ_LENS", "1024, 512")
    assert load_recipe().train.mixed_seq_lens == (1024, 512)
