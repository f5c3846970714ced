"""Test-time training: chunks, steps, queues and phases; `test_modes` has what all modes have in common."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.errors import ConfigError, RuleError
from birdie.gpt.score import sgd
from birdie.gpt.score.accumulator import Accumulator, Text
from birdie.gpt.score.ledger import Ledger
from birdie.gpt.score.mode import Scoring
from birdie.gpt.score.modes.ttt_lora import LoRAMode
from birdie.gpt.score.modes.ttt_multi_phase import MultiPhaseMode
from birdie.gpt.score.modes.ttt_sgd import SGDMode, SGDSettings
from birdie.gpt.score.sgd import SGDTrainer, cosine, split_windows, train_on_ranges
from birdie.gpt.score.ttt_documents import DocumentTrainer, RowAdamW, balanced_batches, document_queue
from birdie.gpt.score.window_losses import per_document, sliding
from birdie.gpt.train.banks import make_banks
from tests.device import DEVICE
from tests.gpt.score.references import (
    BOS,
    LENGTH,
    TwoBytes,
    documents,
    losses_of,
    same_weights,
    scored,
    tiny_gpt,
    weights,
)
from tests.gpt.score.test_modes import ALL, LORA, PHASES, SGD, SMEARED, _one_thread  # noqa: F401

few = settings(max_examples=25)


def by_sgd(model: Any, tokens: np.ndarray, mode: SGDMode = SGD, **more: Any) -> np.ndarray:
    return losses_of(model, tokens, mode=mode.name, ttt_sgd=mode, **more)


def by_lora(model: Any, tokens: np.ndarray, mode: LoRAMode = LORA, **more: Any) -> np.ndarray:
    return losses_of(model, tokens, mode=mode.name, ttt_lora=mode, **more)


def test_training_on_earlier_text_lowers_the_loss() -> None:
    tokens, settings = documents((29,) * 10), dataclasses.replace(SGD, grad_clip=1.0, chunk_tokens=40)
    trained = by_sgd(tiny_gpt(), tokens, settings)
    assert trained.mean() < 0.9 * by_sgd(tiny_gpt(), tokens, dataclasses.replace(settings, lr=0.0)).mean()


def test_steps_learn_from_scored_targets_alone() -> None:
    """A legal chunk is trained on, an illegal batch is refused before anything of it is computed."""
    model, initial, tokens, half = tiny_gpt(), weights(tiny_gpt()), documents(), Ledger(60)
    half.score(0, 30)
    with pytest.raises(RuleError, match="target 30 "):
        train_on_ranges(model, tokens, [(0, 40)], dataclasses.replace(SGD, chunk_tokens=40), half, length=LENGTH)
    trainer = SGDTrainer(model, dataclasses.replace(SGD, batch_seqs=100))
    legal = weights(model)
    with pytest.raises(RuleError, match="target 30 "):
        trainer.train(tokens, [(0, 31)], half, length=LENGTH)
    assert same_weights(model, legal)
    assert not same_weights(model, initial)
    assert model.training is False


@few
@given(st.integers(1, 300), st.integers(1, 40).flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t))), st.data())
def test_chunks_hold_every_window_once_and_are_scored_when_they_end(
    targets: int, size: tuple[int, int], data: st.DataObject
) -> None:
    begins = np.array(sorted(data.draw(st.sets(st.integers(0, targets)))), dtype=np.int64)
    windows = per_document(begins, targets, *size) if data.draw(st.booleans()) else sliding(targets, *size)
    tokens = data.draw(st.integers(1, 100))
    ledger, end = Ledger(targets), 0
    for (first, stop), part in split_windows(windows, tokens):
        assert first == end
        assert stop - first == tokens or stop == windows.stops.max()
        for window in range(len(part)):
            assert first <= part.firsts[window] < stop
            ledger.score(int(part.firsts[window]), int(part.stops[window]))
        ledger.learn((first, stop))
        end = stop
    ledger.close()


def test_frozen_blocks_stay_to_the_bit_in_banks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, mode, results = documents(), dataclasses.replace(SGD, freeze_blocks=1), []
    monkeypatch.setattr(SGDTrainer, "restore", lambda _: None)
    for banking in (False, True):
        model = tiny_gpt()
        initial, banks = weights(model), []
        if banking:
            matrices = {name: p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2}
            banks = make_banks({name: p for name, p in matrices.items() if "resid_mix" not in name})
            assert len(banks) > 2
        result = scored(model, tokens, mode="ttt-sgd", ttt_sgd=mode)
        assert result.losses is not None
        results.append(result.losses)
        changed = 0
        for name, p in model.named_parameters():
            assert torch.equal(p, initial[name]) == name.startswith("blocks.0."), name
            changed += int((p != initial[name]).sum())
        for bank in banks:
            for name, part in bank.split(bank.parameter):
                assert torch.equal(part, dict(model.named_parameters())[name])
        frozen = sum(p.numel() for name, p in initial.items() if name.startswith("blocks.0."))
        assert result.report is not None
        for count in (changed, sum(p.numel() for p in initial.values()) - changed, frozen):
            assert f" {count:,} " in result.report.diagnostics.replace("(", " ")
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-4)


def test_every_technique_trains() -> None:
    model, tokens = tiny_gpt(**ALL), documents()
    plain, trained = (by_sgd(model, tokens, dataclasses.replace(SGD, lr=lr)) for lr in (0.0, 0.02))
    assert np.array_equal(trained[:20], plain[:20])
    assert not np.array_equal(trained[24:36], plain[24:36])


def test_two_runs_agree_and_micro_batches_change_only_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (by_sgd(tiny_gpt(**SMEARED), documents()) for _ in range(2))
    assert one.tobytes() == two.tobytes()
    monkeypatch.setattr(sgd, "_MAX_TOKENS", {"cpu": LENGTH})
    np.testing.assert_allclose(by_sgd(tiny_gpt(**SMEARED), documents()), one, rtol=0, atol=1e-4)


def test_training_on_ranges_takes_them_in_order_as_one_text() -> None:
    """As between two phases: documents in any order, each target with the input before it."""
    ledger, model = Ledger(60), tiny_gpt()
    ledger.score(0, 60)
    initial = weights(model)
    trainer = train_on_ranges(model, documents(), [(31, 60), (0, 29)], SGD, ledger, length=LENGTH)
    assert (trainer.tokens, ledger.learned) == (2 * 40, 2 * 40)  # two of three chunks, twice
    assert not same_weights(model, initial)
    trainer.restore()
    assert same_weights(model, initial)


def test_the_learning_rate_falls_from_one_to_zero() -> None:
    assert [cosine(i, 5) for i in range(5)] == pytest.approx([1, 0.8535534, 0.5, 0.1464466, 0])
    assert cosine(0, 1) == 1


@pytest.mark.parametrize(
    ("kind", "wrong", "reason"),
    [
        *((SGDSettings, wrong, f"{next(iter(wrong))} is ") for wrong in ({"lr": -1.0}, {"lr": math.nan})),
        *((SGDSettings, {name: 0}, f"{name} is 0") for name in ("epochs", "chunk_tokens")),
        (SGDSettings, {"momentum": 1.0}, r"momentum is 1\.0"),
        (SGDSettings, {"freeze_blocks": -1}, "freeze_blocks is -1"),
        (LoRAMode, {"rank": 0}, "rank is 0"),
        (LoRAMode, {"lr": -1.0}, r"lr is -1\.0"),
        (LoRAMode, {"eps": 0.0}, r"eps is 0\.0"),
        (LoRAMode, {"beta2": 1.0}, r"beta2 is 1\.0"),
        (LoRAMode, {"parts": ()}, "parts are"),
        (LoRAMode, {"parts": ("q", "gate")}, "q, gate"),
        (LoRAMode, {"chunk": 48, "context": 32}, "48 tokens .* 32"),
        (LoRAMode, {"seed": -1}, "seed is -1"),
        (MultiPhaseMode, {"phases": 0}, "phases is 0"),
        (MultiPhaseMode, {"momentum": 1.0}, r"momentum is 1\.0"),
    ],
)
def test_settings_out_of_range_are_refused(kind: type, wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        kind(**wrong)


def test_settings_that_do_not_fit_the_model_or_its_gradients_stop_it() -> None:
    with pytest.raises(ConfigError, match=r"freeze_blocks is 3, .* block 2"):
        SGDTrainer(tiny_gpt(), dataclasses.replace(SGD, freeze_blocks=3))
    with pytest.raises(ConfigError, match=r"torch\.bfloat16"):
        SGDTrainer(tiny_gpt().to(torch.bfloat16), SGD)
    with pytest.raises(ConfigError, match=r"4 tokens .* 3"):
        by_lora(tiny_gpt(), documents(), train_seq_len=3)
    model = tiny_gpt()
    with torch.no_grad():
        model.tok_emb.weight[5, 0] = math.inf
    with pytest.raises(ConfigError, match="step 1 has norm nan"):
        by_sgd(model, documents())


@pytest.mark.parametrize("size", [1, 64])
def test_the_sizes_of_batches_and_passes_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = tiny_gpt(), by_lora(tiny_gpt(), documents())
    monkeypatch.setattr("birdie.gpt.score.ttt_documents._MAX_INPUTS", {"cpu": size})
    losses = by_lora(model, documents(), dataclasses.replace(LORA, batch_docs=size))
    np.testing.assert_allclose(losses, expected, rtol=2e-4, atol=2e-4)
    assert np.abs(expected - by_lora(model, documents(), dataclasses.replace(LORA, lr=0.0))).max() > 0.01


def test_learning_rate_zero_scores_the_plain_model() -> None:
    model, tokens = tiny_gpt(), documents()
    queue = document_queue(tokens, BOS, 1)
    expected = np.empty(len(tokens) - 1)
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        for begin, stop in zip(queue.begins.tolist(), queue.stops.tolist(), strict=True):
            for position in range(begin, stop):
                chunk_end = (position - begin) // LORA.chunk * LORA.chunk + LORA.chunk
                window = ids[begin + max(0, chunk_end - LENGTH) : position + 1]
                expected[position] = -float(model(window[None])[0, -1].log_softmax(0)[ids[position + 1]])
    losses = by_lora(model, tokens, dataclasses.replace(LORA, lr=0.0))
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-4)


def test_a_warm_a_continues_from_the_document_before_in_its_row() -> None:
    """Equal in the first batch and different in the others; with B at zero A has no effect before the first step."""
    model, tokens = tiny_gpt(), documents()
    warm, cold = by_lora(model, tokens, dataclasses.replace(LORA, warm_a=True)), by_lora(model, tokens)
    same, queue = np.isclose(warm, cold, rtol=1e-6, atol=1e-6), document_queue(tokens, BOS, LORA.batch_docs)
    for number in range(2):
        for begin, stop in zip(*queue.batch(number), strict=True):
            assert same[begin : begin + LORA.chunk].all()
            assert same[begin:stop].all() == (number == 0 or stop - begin <= LORA.chunk)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_steps_are_those_of_torch(beta1: float) -> None:
    settings = dataclasses.replace(LORA, beta1=beta1)
    ours, torchs = ([torch.randn(3, 5, generator=torch.Generator().manual_seed(0))] for _ in range(2))
    torchs[0].requires_grad_()
    optimizer = RowAdamW(ours, settings)
    expected = torch.optim.AdamW(torchs, settings.lr, (beta1, settings.beta2), settings.eps, settings.weight_decay)
    for number in range(1, 6):
        torchs[0].grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(number))
        for rows in (slice(0, 2), slice(2, 3)):
            optimizer.step(number, rows, [ours[0][rows]], [torchs[0].grad[rows]])
        expected.step()
    torch.testing.assert_close(ours[0], torchs[0].detach())
    optimizer.reset()
    fresh = RowAdamW(ours, settings)
    one, other = ours[0].clone(), ours[0].clone()
    gradient = torchs[0].grad
    assert gradient is not None
    for adamw, tensor in ((optimizer, one), (fresh, other)):
        adamw.step(1, slice(0, 3), [tensor], [gradient])
    torch.testing.assert_close(one, other)


@few
@given(st.lists(st.integers(1, 4), min_size=1, max_size=80), st.integers(1, 9))
def test_every_position_is_in_one_document_of_the_queue(drawn: list[int], size: int) -> None:
    tokens = np.array(drawn, np.uint16)
    queue = document_queue(tokens, BOS, size)
    batches = (zip(*queue.batch(number), strict=True) for number in range(len(queue)))
    positions = [position for batch in batches for document in batch for position in range(*document)]
    assert sorted(positions) == list(range(len(tokens) - 1))
    lengths = queue.stops - queue.begins
    assert (lengths > 0).all()
    assert (np.diff(lengths) <= 0).all()
    for begin, stop in zip(queue.begins, queue.stops, strict=True):
        assert begin == 0 or tokens[begin] == BOS
        assert BOS not in tokens[begin + 1 : stop]
        assert stop == len(tokens) - 1 or tokens[stop] == BOS


@few
@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 9))
def test_batches_are_shared_out_once_and_evenly(costs: list[int], size: int) -> None:
    costs.sort(reverse=True)
    shares = [balanced_batches(costs, rank, size) for rank in range(size)]
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    loads = [sum(costs[number] for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_phases_are_score_train_score() -> None:
    """A prefix of 7 documents in batches of 2: documents 1 to 3 are trained on after batch 2, 1 to 7 after batch 4."""
    model, tokens, lora = tiny_gpt(), documents(), dataclasses.replace(LORA, batch_docs=2)
    result = scored(tiny_gpt(), tokens, mode="ttt-multi-phase", ttt_lora=lora, ttt_multi_phase=PHASES)
    text, queue = Text(tokens, TwoBytes(), BOS), document_queue(tokens, BOS, 2)
    accumulator = Accumulator(text, keep_losses=True)
    for batch in range(len(queue)):
        trainer = DocumentTrainer(Scoring(model, text, accumulator.ledger, LENGTH, DEVICE), lora, queue)
        for firsts, nats, _ in trainer.score(batch):
            accumulator.add(firsts, nats)
        if count := {1: 3, 3: 7}.get(batch):
            ranges = list(zip(queue.begins[:count].tolist(), queue.stops[:count].tolist(), strict=True))
            train_on_ranges(model, tokens, ranges, PHASES, accumulator.ledger, length=LENGTH)
    assert result.losses is not None
    assert accumulator.losses is not None
    np.testing.assert_allclose(result.losses, accumulator.losses, rtol=1e-5, atol=1e-5)
    plain = by_lora(tiny_gpt(), tokens, lora)
    first = np.concatenate([np.arange(*span) for span in zip(queue.begins[:4], queue.stops[:4], strict=True)])
    later = np.setdiff1d(np.arange(len(plain)), first)
    assert np.array_equal(result.losses[first], plain[first])
    assert np.abs(result.losses[later] - plain[later]).max() > 1e-3
    assert result.report is not None
    assert " 2 phases" in result.report.diagnostics
    assert result.report.tokens == accumulator.ledger.learned


def test_phases_end_at_equal_shares_of_the_prefix() -> None:
    assert MultiPhaseMode(prefix_docs=2500, phases=3).ends(50_000) == [833, 1666, 2500]
    assert MultiPhaseMode(prefix_docs=2500, phases=3).ends(2) == [1, 2]
    assert MultiPhaseMode(prefix_docs=1, phases=3).ends(9) == [1]


def test_a_phase_on_unscored_documents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    train: Callable[..., Any] = train_on_ranges
    monkeypatch.setattr(sgd, "train_on_ranges", lambda m, t, _, *more, **named: train(m, t, [(0, 60)], *more, **named))
    with pytest.raises(RuleError, match=r"learn from target \d+"):
        scored(tiny_gpt(), documents(), mode="ttt-multi-phase", ttt_lora=LORA, ttt_multi_phase=PHASES)
