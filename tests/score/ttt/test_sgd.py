"""TTT by SGD: it equals a scorer that trains token by token, and training before scoring is refused."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from birdie.errors import ConfigError, RuleError
from birdie.golf.audit import probes
from birdie.golf.audit.rules import CAUSAL
from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime.distributed import World
from birdie.score.accumulator import Accumulator
from birdie.score.ledger import Ledger
from birdie.score.mode import NgramSettings, Scoring, TrainingReport
from birdie.score.modes import SGDSettings
from birdie.score.ngram import NgramBias, NgramScorer
from birdie.score.reference import Scorer, reference_losses
from birdie.score.ttt import sgd
from birdie.score.ttt.sgd import (
    SGDTrainer,
    contiguous_ranges,
    cosine,
    score_chunks,
    split_ranges,
    split_windows,
    train_on_ranges,
)
from birdie.score.windows import Windows, document_begins, non_overlapping, per_document, sliding
from birdie.train.banks import make_banks
from tests.device import DEVICE
from tests.ranks import run_in_process_group
from tests.tiny_run import EVERYTHING

BOS, VOCABULARY, LENGTH = 1, 24, 8
TINY: dict[str, Any] = {"vocab_size": VOCABULARY, "num_layers": 2, "model_dim": 16, "num_heads": 2, "num_kv_heads": 1}
SETTINGS = SGDSettings(lr=0.3, epochs=2, chunk_tokens=20, batch_seqs=2, grad_clip=0.5)


class Bytes:
    """Every token but BOS stands for a byte."""

    def count(self, previous: np.ndarray, targets: np.ndarray) -> np.ndarray:
        counts: np.ndarray = (targets != BOS).astype(np.int64) + 0 * previous
        return counts


def tiny_gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(TINY | changes))).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def text(length: int = 73, seed: int = 0) -> np.ndarray:
    """Documents that count up in steps, so that there is something to learn from earlier ones."""
    draw = np.random.default_rng(seed)
    tokens = (np.arange(length) * 3 + draw.integers(0, 2, length)) % (VOCABULARY - 2) + 2
    tokens[::29] = BOS
    return tokens.astype(np.uint16)


COVERS: dict[str, Callable[[np.ndarray], Windows]] = {
    "non-overlapping": lambda tokens: non_overlapping(len(tokens) - 1, LENGTH),
    "sliding": lambda tokens: sliding(len(tokens) - 1, LENGTH, 3),
    "documents": lambda tokens: per_document(document_begins(tokens, BOS), len(tokens) - 1, LENGTH, 3),
}


def new_scoring(model: GPT, tokens: np.ndarray, **more: Any) -> Scoring:
    accumulator = Accumulator(tokens, Bytes(), BOS, keep_losses=True)
    return Scoring(model, tokens, accumulator, LENGTH, BOS, DEVICE, batch_tokens=64, **more)


def scored(
    model: GPT,
    tokens: np.ndarray,
    windows: Windows,
    settings: SGDSettings = SETTINGS,
    *,
    restore: bool = True,
    **more: Any,
) -> tuple[np.ndarray, TrainingReport, Accumulator]:
    scoring = new_scoring(model, tokens, **more)
    report = score_chunks(scoring, windows, settings, restore=restore)
    assert scoring.accumulator.losses is not None
    return scoring.accumulator.losses, report, scoring.accumulator


def weights(model: GPT) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class ReferenceScorer:
    """Reference: one token at a time, trained on chunks in plain PyTorch.

    Args:
        windows: of the stream; their positions do not depend on its tokens.
        early: trains on a chunk before it is scored: cheating.
        declares: steps are declared to the ledger.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        windows: Windows,
        settings: SGDSettings,
        ledger: Ledger,
        *,
        early: bool = False,
        declares: bool = True,
    ) -> None:
        self.model, self.windows, self.settings, self.ledger = tiny_gpt(), windows, settings, ledger
        self.early, self.declares = early, declares
        self.history: list[int] = list(tokens) if early else []
        self.position = -1
        self.chunks_trained = 0
        self.chunks = -(-int(windows.stops.max()) // settings.chunk_tokens)
        self.velocities = [torch.zeros_like(p) for p in self.model.parameters()]

    def reveal(self, token: int) -> None:
        self.position += 1
        if not self.early:
            self.history.append(token)

    def predict(self) -> Tensor:
        row = min(int(np.searchsorted(self.windows.stops, self.position, side="right")), len(self.windows) - 1)
        chunk = int(self.windows.firsts[row]) // self.settings.chunk_tokens
        while self.chunks_trained < min(chunk + self.early, self.chunks - 1):
            self.train(self.chunks_trained)
            self.chunks_trained += 1
        with torch.no_grad():
            window = self.history[int(self.windows.begins[row]) : self.position + 1]
            logits: Tensor = self.model(torch.tensor([window]).long())[0, -1]
            return logits.log_softmax(0)

    def train(self, chunk: int) -> None:
        size = self.settings.chunk_tokens
        lr = self.settings.lr * 0.5 * (1 + math.cos(math.pi * chunk / (self.chunks - 1)))
        begins = list(range(chunk * size, (chunk + 1) * size, LENGTH))
        for _ in range(self.settings.epochs):
            for i in range(0, len(begins), self.settings.batch_seqs):
                batch = [(b, min(b + LENGTH, (chunk + 1) * size)) for b in begins[i : i + self.settings.batch_seqs]]
                if self.declares:
                    self.ledger.learn(*batch)
                self.model.zero_grad()
                total = torch.zeros(())
                for first, stop in batch:
                    ids, targets = (
                        torch.tensor([self.history[first + a : stop + a]]).long() for a in (0, 1)
                    )  # fmt: skip
                    total = total + self.model.loss(ids, targets, reduction="none").sum()
                (total / sum(stop - first for first, stop in batch)).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
                with torch.no_grad():
                    for p, v in zip(self.model.parameters(), self.velocities, strict=True):
                        assert p.grad is not None
                        v.copy_(self.settings.momentum * v + p.grad)
                        p.sub_(lr * v)


@pytest.mark.parametrize(
    ("cover", "chunk_tokens"), [("non-overlapping", 20), ("sliding", 5), ("sliding", 24), ("documents", 20)]
)
def test_equals_the_reference(cover: str, chunk_tokens: int) -> None:
    """Chunks shorter than windows, across windows, and of whole windows."""
    tokens, settings = text(), dataclasses.replace(SETTINGS, chunk_tokens=chunk_tokens)
    windows = COVERS[cover](tokens)
    nats, report, accumulator = scored(tiny_gpt(), tokens, windows, settings)
    covered = tokens[: windows.scored + 1]
    ledger = Ledger(len(covered) - 1)
    expected = reference_losses(ReferenceScorer(covered, windows, settings, ledger), covered, ledger=ledger)
    np.testing.assert_allclose(nats[: windows.scored], expected, rtol=0, atol=2e-4)
    assert np.isnan(nats[windows.scored :]).all()
    assert (accumulator.ledger.learned, accumulator.ledger.steps) == (ledger.learned, ledger.steps)
    assert (report.tokens, report.steps) == (ledger.learned, ledger.steps)
    plain, untrained, _ = scored(tiny_gpt(), tokens, windows, dataclasses.replace(SETTINGS, chunk_tokens=1000))
    assert untrained.steps == 0
    assert np.nanmax(np.abs(plain - nats)) > 0.1, "the test must be able to see the effect of training"


def test_the_ngram_bias_applies_to_the_trained_model() -> None:
    tokens, windows = text(), sliding(72, LENGTH, 3)
    ngram = NgramSettings(enabled=True, table_bits=8, orders=(3, 2, 1))
    scoring, ledger = new_scoring(tiny_gpt(), tokens), Ledger(72)
    scoring.sink = bias = NgramBias(tokens, ngram)
    score_chunks(scoring, windows, SETTINGS)
    bias.close(scoring.accumulator, World(), DEVICE)
    reference = NgramScorer(ReferenceScorer(tokens, windows, SETTINGS, ledger), ngram)
    expected = reference_losses(reference, tokens, ledger=ledger)
    assert scoring.accumulator.losses is not None
    np.testing.assert_allclose(scoring.accumulator.losses, expected, rtol=0, atol=1e-3)
    assert np.abs(expected - scored(tiny_gpt(), tokens, windows)[0]).max() > 0.1


def test_training_on_earlier_text_lowers_the_loss() -> None:
    tokens = text(401)
    windows = non_overlapping(400, LENGTH)
    settings = dataclasses.replace(SETTINGS, lr=0.1, grad_clip=1.0, chunk_tokens=40)
    without = scored(tiny_gpt(), tokens, windows, dataclasses.replace(settings, lr=0.0))[0]
    assert scored(tiny_gpt(), tokens, windows, settings)[0].mean() < 0.8 * without.mean()


def test_training_before_scoring_is_refused() -> None:
    tokens = text()
    windows = non_overlapping(72, LENGTH)
    ledger = Ledger(72)
    cheat = ReferenceScorer(tokens, windows, SETTINGS, ledger, early=True)
    with pytest.raises(RuleError, match="target 0 "):
        reference_losses(cheat, tokens, ledger=ledger)
    model, initial = tiny_gpt(), weights(tiny_gpt())
    half = Ledger(72)
    half.score(0, 20)
    with pytest.raises(RuleError, match="target 20 "):
        train_on_ranges(model, tokens, [(0, 40)], dataclasses.replace(SETTINGS, chunk_tokens=40), half, length=LENGTH)
    partial = Ledger(72)
    partial.score(0, 16)
    trainer = SGDTrainer(model, dataclasses.replace(SETTINGS, batch_seqs=100))
    with pytest.raises(RuleError, match="target 16 "):
        trainer.train(tokens, [(0, 17)], partial, length=LENGTH)
    assert partial.steps == 0
    assert model.training is False
    assert any(not torch.equal(p, initial[name]) for name, p in model.named_parameters())  # by the first, legal steps


def depends_on_the_future(make: Callable[[np.ndarray], Scorer], tokens: np.ndarray, position: int) -> bool:
    """True if predictions up to `position` change with the tokens after it."""
    other = tokens.copy()
    other[position + 1 :] = (other[position + 1 :] + 7) % (VOCABULARY - 2) + 2
    one, two = make(tokens), make(other)
    for i in range(position + 1):
        one.reveal(int(tokens[i]))
        two.reveal(int(other[i]))
        if not torch.equal(one.predict(), two.predict()):
            return True
    return False


@pytest.mark.parametrize("position", [10, 45])
def test_undeclared_training_shows_in_predictions_that_depend_on_the_future(position: int) -> None:
    tokens = text()
    windows = non_overlapping(72, LENGTH)

    def make(early: bool) -> Callable[[np.ndarray], Scorer]:
        return lambda stream: ReferenceScorer(stream, windows, SETTINGS, Ledger(72), early=early, declares=False)

    assert depends_on_the_future(make(True), tokens, position)
    assert not depends_on_the_future(make(False), tokens, position)


QUICK = dataclasses.replace(SETTINGS, epochs=1, chunk_tokens=8)


def train_then_score(stream: np.ndarray) -> np.ndarray:
    """A cheat with a false ledger: the text counts as scored, is trained on, and only then scored."""
    model, tokens = tiny_gpt(), stream.astype(np.uint16)
    false_ledger = Ledger(len(tokens) - 1)
    false_ledger.score(0, len(false_ledger))
    train_on_ranges(model, tokens, [(0, len(false_ledger))], QUICK, false_ledger, length=LENGTH)
    windows = non_overlapping(len(false_ledger), LENGTH)
    return scored(model, tokens, windows, dataclasses.replace(QUICK, chunk_tokens=1000))[0]


def score_then_train(stream: np.ndarray) -> np.ndarray:
    return scored(tiny_gpt(), stream.astype(np.uint16), non_overlapping(len(stream) - 1, LENGTH), QUICK)[0]


@pytest.mark.parametrize(("score", "legal"), [(score_then_train, True), (train_then_score, False)])
def test_the_audit_passes_it_and_catches_training_before_scoring(
    score: Callable[[np.ndarray], np.ndarray], legal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "BORDERS", ())
    findings = probes.probe_losses(score, VOCABULARY, text(25), positions=2)
    results = {(finding.rule, finding.result) for finding in findings}
    assert ({result for _, result in results} == {"pass"}) == legal, findings
    assert ((CAUSAL, "fail") in results) != legal


def test_later_tokens_change_no_loss() -> None:
    """To the bit."""
    tokens, windows = text(), sliding(72, LENGTH, 3)
    nats = scored(tiny_gpt(), tokens, windows)[0]
    for position in (19, 20, 50):
        other = tokens.copy()
        other[position + 1 :] = (other[position + 1 :] + 5) % (VOCABULARY - 2) + 2
        changed = scored(tiny_gpt(), other, windows)[0]
        assert np.array_equal(changed[:position], nats[:position])
        assert not np.array_equal(changed, nats)


@given(st.integers(1, 300), st.integers(1, 40).flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t))), st.data())
def test_chunks_hold_every_window_once_and_are_scored_when_they_end(
    targets: int, size: tuple[int, int], data: st.DataObject
) -> None:
    begins = np.array(sorted(data.draw(st.sets(st.integers(0, targets)))), dtype=np.int64)
    cover = data.draw(st.sampled_from(["non-overlapping", "sliding", "documents"]))
    windows = {
        "non-overlapping": lambda: non_overlapping(targets, size[0]),
        "sliding": lambda: sliding(targets, *size),
        "documents": lambda: per_document(begins, targets, *size),
    }[cover]()
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
    assert ledger.scored == windows.scored


def test_frozen_blocks_stay_to_the_bit_in_banks_too() -> None:
    tokens, windows = text(), non_overlapping(72, LENGTH)
    settings = dataclasses.replace(SETTINGS, freeze_blocks=1)
    results = []
    for banking in (False, True):
        model = tiny_gpt()
        initial = weights(model)
        banks = []
        if banking:
            matrices = {name: p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2}
            banks = make_banks({name: p for name, p in matrices.items() if "resid_mix" not in name})
            assert len(banks) > 2
        nats, report, _ = scored(model, tokens, windows, settings, restore=False)
        results.append(nats)
        changed = 0
        for name, p in model.named_parameters():
            frozen = name.startswith("blocks.0.")
            assert torch.equal(p, initial[name]) == frozen, name
            changed += int((p != initial[name]).sum())
        for bank in banks:
            for name, part in bank.split(bank.parameter):
                assert torch.equal(part, dict(model.named_parameters())[name])
        frozen_weights = sum(p.numel() for name, p in initial.items() if name.startswith("blocks.0."))
        unchanged = sum(p.numel() for p in initial.values()) - changed
        for count in (changed, unchanged, frozen_weights):
            assert f" {count:,} " in report.diagnostics.replace("(", " ")
        assert all(p.requires_grad for p in model.parameters())
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-4)
    assert not np.array_equal(results[0], scored(tiny_gpt(), tokens, windows)[0])


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"freeze_blocks is 3, .* block 2"):
        SGDTrainer(tiny_gpt(), dataclasses.replace(SETTINGS, freeze_blocks=3))
    with pytest.raises(ConfigError, match=r"torch\.bfloat16"):
        SGDTrainer(tiny_gpt().to(torch.bfloat16), SETTINGS)


def test_every_technique_trains_and_gets_its_weights_back() -> None:
    model = tiny_gpt(**EVERYTHING, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2)
    initial, tokens = weights(model), text()
    windows = non_overlapping(72, LENGTH)
    plain = scored(model, tokens, windows, dataclasses.replace(SETTINGS, chunk_tokens=1000))[0]
    nats, report, _ = scored(model, tokens, windows, dataclasses.replace(SETTINGS, lr=0.02))
    assert np.array_equal(nats[:16], plain[:16])
    assert not np.array_equal(nats[24:32], plain[24:32])
    assert "0 weights changed" not in report.diagnostics
    assert all(torch.equal(p, initial[name]) for name, p in model.named_parameters())
    assert not model.training
    assert model.loss_backend == "eager"


def test_two_runs_agree_and_micro_batches_change_only_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, windows = text(), sliding(72, LENGTH, 3)
    one, two = (scored(tiny_gpt(), tokens, windows)[0] for _ in range(2))
    assert one.tobytes() == two.tobytes()
    monkeypatch.setattr(sgd, "_MAX_TOKENS", {"cpu": LENGTH})
    np.testing.assert_allclose(scored(tiny_gpt(), tokens, windows)[0], one, rtol=0, atol=1e-4)


def test_an_interruption_gives_the_model_its_weights_back() -> None:
    model, initial = tiny_gpt(), weights(tiny_gpt())

    def interrupt(done: float, total: float | None) -> None:
        if total is not None and done > total / 2:
            assert not all(torch.equal(p, initial[name]) for name, p in model.named_parameters())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(model, text(), sliding(72, LENGTH, 3), progress=interrupt)
    assert all(torch.equal(p, initial[name]) for name, p in model.named_parameters())


def test_training_on_ranges_takes_them_in_order_as_one_text() -> None:
    """As between two phases: documents in any order, each target with the input before it."""
    tokens, ledger, model = text(), Ledger(72), tiny_gpt()
    ledger.score(0, 72)
    initial = weights(model)
    trainer = train_on_ranges(model, tokens, [(43, 72), (0, 29)], SETTINGS, ledger, length=LENGTH)
    assert (trainer.tokens, ledger.learned) == (2 * 40, 2 * 40)  # two of three chunks, twice
    assert any(not torch.equal(p, initial[name]) for name, p in model.named_parameters())
    trainer.restore()
    assert all(torch.equal(p, initial[name]) for name, p in model.named_parameters())


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=6), st.integers(1, 30))
def test_splitting_ranges_keeps_positions_and_order(pairs: list[tuple[int, int]], tokens: int) -> None:
    ranges = [(first, first + count) for first, count in pairs]
    positions = [i for span in ranges for i in range(*span)]
    chunks = list(split_ranges(ranges, tokens))
    assert [i for chunk in chunks for span in chunk for i in range(*span)] == positions
    sizes = [sum(stop - first for first, stop in chunk) for chunk in chunks]
    assert all(size == tokens for size in sizes[:-1])
    neighbors = contiguous_ranges(np.array(positions, dtype=np.int64))
    assert [i for span in neighbors for i in range(*span)] == positions


def test_the_learning_rate_falls_from_one_to_zero() -> None:
    assert [cosine(i, 5) for i in range(5)] == pytest.approx([1, 0.8535534, 0.5, 0.1464466, 0])
    assert cosine(0, 1) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"lr": math.nan}, {"epochs": 0}, {"chunk_tokens": 0}, {"momentum": 1.0}, {"freeze_blocks": -1}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is "):
        SGDSettings(**wrong)


def test_a_gradient_that_is_not_finite_stops_it() -> None:
    model = tiny_gpt()
    with torch.no_grad():
        model.tok_emb.weight[5, 0] = math.inf
    with pytest.raises(ConfigError, match="step 1 has norm nan"):
        scored(model, text(), non_overlapping(72, LENGTH))


def score_as_rank(world: World, folder: Path) -> None:
    """Score and train on two ranks."""
    tokens, windows = text(), sliding(72, LENGTH, 3)
    model = tiny_gpt()
    _, report, accumulator = scored(model, tokens, windows, world=world, restore=False)
    score = accumulator.score(windows.scored, 1.0, world)
    accumulator.ledger.close()
    torch.save({"weights": weights(model), "bpb": score.bpb}, folder / f"{world.rank}.pt")
    assert report.steps == accumulator.ledger.steps
    try:
        accumulator.ledger.all_reduce(0, 72, world, DEVICE)
        twice = Ledger(4)
        twice.score(1, 2)
        twice.all_reduce(0, 4, world, DEVICE)
    except RuleError as error:
        (folder / f"{world.rank}.txt").write_text(str(error))


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    run_in_process_group(score_as_rank, 2, tmp_path / "run")
    model, tokens, windows = tiny_gpt(), text(), sliding(72, LENGTH, 3)
    _, _, accumulator = scored(model, tokens, windows, restore=False)
    alone = accumulator.score(windows.scored, 1.0).bpb
    one, two = (torch.load(tmp_path / "run" / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert one["bpb"] == two["bpb"]
    assert one["bpb"] == pytest.approx(alone, rel=1e-6)
    for name, p in model.named_parameters():
        assert torch.equal(one["weights"][name], two["weights"][name])
        torch.testing.assert_close(one["weights"][name], p, rtol=0, atol=1e-4)
    for rank in range(2):
        assert "target 1 is scored on two ranks" in (tmp_path / "run" / f"{rank}.txt").read_text()
