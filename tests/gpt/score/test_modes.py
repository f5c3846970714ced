"""Laws of every scoring mode: it equals a reference that keeps the rules, looks at no later token, scores all targets
once, shares its work out to ranks, and leaves the model as it was. A new mode is a row of `ROWS`."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from birdie.errors import DataError, RuleError
from birdie.gpt.model.gpt import GPT
from birdie.gpt.score.ledger import Ledger, Range
from birdie.gpt.score.mode import NgramSettings, Scoring
from birdie.gpt.score.modes.streaming import StreamingMode
from birdie.gpt.score.modes.ttt_lora import LoRAMode
from birdie.gpt.score.modes.ttt_multi_phase import MultiPhaseMode
from birdie.gpt.score.modes.ttt_sgd import SGDMode
from birdie.gpt.score.ngram import NgramScorer
from birdie.gpt.score.reference import Scorer, StreamScorer, WindowScorer, reference_losses
from birdie.gpt.score.settings import MODES
from birdie.gpt.score.sgd import SGDTrainer
from birdie.gpt.score.window_losses import document_begins, per_document, sliding
from birdie.system.distributed import World
from tests.device import DEVICE
from tests.gpt.score.references import (
    BOS,
    LENGTH,
    VOCABULARY,
    LoRAScorer,
    SGDScorer,
    documents,
    losses_of,
    same_weights,
    scored,
    tiny_gpt,
    weights,
)
from tests.ranks import run_in_process_group
from tests.tiny_run import EVERYTHING

Reference = Callable[[GPT, NDArray[np.uint16], Ledger], Scorer]
SMEARED: dict[str, Any] = {"smear": "gated", "bigram_vocab_size": 17}
LONGER: dict[str, Any] = {"rope_dims": 4, "rope_train_seq_len": 5}  # windows are longer than those of training
ALL: dict[str, Any] = {**EVERYTHING, "logit_softcap": 5.0, "num_layers": 5, "model_dim": 32, "num_heads": 4}
SGD = SGDMode(lr=0.1, epochs=2, chunk_tokens=20, batch_seqs=2, grad_clip=0.5)
LORA = LoRAMode(rank=3, lr=0.02, chunk=4, batch_docs=3, weight_decay=0.1)
PHASES = MultiPhaseMode(prefix_docs=7, phases=2, lr=0.05, chunk_tokens=16, batch_seqs=2)


@dataclasses.dataclass(frozen=True)
class Row:
    """A mode with settings, the model it scores, and its reference; None where a mode is not one pass."""

    settings: dict[str, Any]
    model: dict[str, Any]
    reference: Reference | None = None
    tolerance: float = 2e-5


def of_windows(stride: int = LENGTH, length: int = LENGTH, **more: Any) -> Reference:
    return lambda model, _tokens, _ledger: WindowScorer(model, length, stride, **more)


def of_stream(chunk: int, **more: Any) -> Reference:
    return lambda model, _tokens, _ledger: StreamScorer(model, LENGTH, chunk, **more)


def of_sgd(settings: SGDMode, stride: int = LENGTH, isolated: bool = False) -> Reference:
    def reference(model: GPT, tokens: NDArray[np.uint16], ledger: Ledger) -> Scorer:
        targets, begins = len(tokens) - 1, document_begins(tokens, BOS)
        windows = per_document(begins, targets, LENGTH, stride) if isolated else sliding(targets, LENGTH, stride)
        return SGDScorer(copy.deepcopy(model), windows, settings, ledger)

    return reference


def sgd(stride: int = 0, isolated: bool = False, **changes: Any) -> Row:
    settings = dataclasses.replace(SGD, **changes)
    shared = {"mode": "ttt-sgd", "ttt_sgd": settings, "stride": stride, "documents": isolated}
    return Row(shared, SMEARED, of_sgd(settings, stride or LENGTH, isolated), 2e-4)


def lora(model: dict[str, Any], **changes: Any) -> Row:
    settings = dataclasses.replace(LORA, **changes)
    shared = {"mode": "ttt-lora", "ttt_lora": settings}
    return Row(shared, model, lambda model, _tokens, ledger: LoRAScorer(model, settings, ledger), 3e-4)


def stream(mode: StreamingMode, reference: Reference, model: dict[str, Any], **shared: Any) -> Row:
    return Row({"mode": "streaming", "streaming": mode, **shared}, model, reference)


ROWS: dict[str, Row] = {
    "windows": Row({}, SMEARED, of_windows()),
    "shorter windows": Row({"seq_len": 8}, SMEARED, of_windows(8, 8)),
    "sliding": Row({"stride": 5, "temperature": 0.7}, LONGER, of_windows(5, temperature=0.7)),
    "stride 1": Row({"stride": 1}, SMEARED, of_windows(1)),
    "one window": Row({"seq_len": 80, "stride": 3}, LONGER, of_windows(3, 80)),
    "documents": Row({"documents": True, "stride": 4}, LONGER, of_windows(4, bos_id=BOS)),
    "stream": stream(StreamingMode(chunk=5), of_stream(5, temperature=0.8), LONGER, temperature=0.8),
    "stream, sinks": stream(StreamingMode(chunk=5, sinks=2), of_stream(5, sinks=2), SMEARED),
    "stream of tokens": stream(StreamingMode(chunk=1, sinks=2), of_stream(1, sinks=2), LONGER),
    "stream, full chunks": stream(StreamingMode(chunk=12), of_stream(12), SMEARED),
    "stream in documents": stream(StreamingMode(chunk=5), of_stream(5, bos_id=BOS), LONGER, documents=True),
    "exact stream": stream(StreamingMode(5, exact=True), of_windows(), LONGER),
    "exact, documents": stream(StreamingMode(5, exact=True), of_windows(bos_id=BOS), SMEARED, documents=True),
    "SGD": sgd(),
    "SGD, short chunks": sgd(stride=3, chunk_tokens=5),
    "SGD, two windows": sgd(stride=3, chunk_tokens=24),
    "SGD in documents": sgd(stride=3, isolated=True),
    "LoRA": lora({}),
    "LoRA, every technique": lora(ALL),
    "LoRA, longer windows": lora(LONGER, batch_docs=64),
    "LoRA of some parts": lora({}, parts=("k", "o", "mlp", "head"), alpha=4.5, batch_docs=1),
    "LoRA of the first record": lora({}, parts=("head", "q", "v"), beta1=0.9, beta2=0.95, weight_decay=0.0),
    "segments": Row({"mode": "streaming", "streaming": StreamingMode(5, segments=3)}, SMEARED),
    "warm A": Row({"mode": "ttt-lora", "ttt_lora": dataclasses.replace(LORA, warm_a=True)}, {}),
    "phases": Row({"mode": "ttt-multi-phase", "ttt_lora": LORA, "ttt_multi_phase": PHASES}, {}),
}
DAILY = (
    *("windows", "sliding", "documents", "stream, sinks", "exact, documents", "segments", "SGD in documents"),
    *("LoRA, every technique", "warm A", "phases"),
)
"""A row of each mode and way, for the laws that do not depend on sizes; all rows nightly."""


def of_each(table: dict[str, Row]) -> pytest.MarkDecorator:
    """Return the mark that runs a test on rows, those that are not `DAILY` nightly."""
    cells = [row if name in DAILY else pytest.param(row, marks=pytest.mark.nightly) for name, row in table.items()]
    return pytest.mark.parametrize("row", cells, ids=table)


references = {name: row for name, row in ROWS.items() if row.reference}
TRAINING = {name: row for name, row in ROWS.items() if row.settings.get("mode", "").startswith("ttt")}
training = pytest.mark.parametrize("row", TRAINING.values(), ids=TRAINING)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from two threads, which wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_mode_has_rows() -> None:
    assert {row.settings.get("mode", "windows") for row in ROWS.values()} == set(MODES)


@pytest.mark.parametrize("row", references.values(), ids=references)
def test_it_equals_the_reference(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole distributions, each before its token, and learned from it only afterwards: C1 to C4 by construction."""
    model, tokens, learned = tiny_gpt(**row.model), documents(), []
    assert row.reference is not None
    ledger = Ledger(len(tokens) - 1)
    expected = reference_losses(row.reference(model, tokens, ledger), tokens, ledger=ledger)
    learn = Ledger.learn
    monkeypatch.setattr(Ledger, "learn", lambda self, *spans: learned.extend(spans) or learn(self, *spans))
    result = scored(model, tokens, **row.settings)
    assert result.losses is not None
    np.testing.assert_allclose(result.losses, expected, rtol=row.tolerance, atol=row.tolerance)
    tokens_learned = sum(stop - first for first, stop in learned)
    assert tokens_learned == ledger.learned == (result.report.tokens if result.report else 0)


@pytest.mark.parametrize(
    ("name", "beta"), [("sliding", None), ("sliding", 2.0), ("stream", None), ("SGD, two windows", None)]
)
def test_the_ngram_bias_equals_its_reference_over_that_of_the_mode(name: str, beta: float | None) -> None:
    row, model, tokens = ROWS[name], tiny_gpt(**ROWS[name].model), documents()
    assert row.reference is not None
    ngram, ledger = NgramSettings(enabled=True, table_bits=8, orders=(3, 2, 1), beta=beta), Ledger(len(tokens) - 1)
    expected = reference_losses(NgramScorer(row.reference(model, tokens, ledger), ngram), tokens, ledger=ledger)
    losses = losses_of(model, tokens, **row.settings, ngram=ngram)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-3 if row in TRAINING.values() else 2e-5)
    assert np.abs(losses - losses_of(model, tokens, **row.settings)).max() > 0.1


def looks_ahead(row: Row, mode: Any = None) -> bool:
    """Return whether a loss depends on a later token, or on where its document ends."""
    model, tokens, position = tiny_gpt(**row.model), documents(), 33
    other = tokens.copy()
    other[position + 1 :] = (other[position + 1 :] + 7) % (VOCABULARY - 2) + 2
    other[position + 2 :: 7] = BOS
    one, two = (losses_of(model, text, mode, **row.settings) for text in (tokens, other))
    assert not np.allclose(one, two, atol=1e-3)
    return bool(np.abs(one[:position] - two[:position]).max() > row.tolerance)


@of_each(references)
def test_later_tokens_change_no_loss(row: Row) -> None:
    assert not looks_ahead(row)


class TrainsFirst(SGDMode):
    """Trains on all of the text before it is scored, and hides that from the ledger."""

    def score(self, scoring: Scoring) -> Any:
        hidden, trainer = Ledger(len(scoring.tokens) - 1), SGDTrainer(scoring.model, self)
        hidden.score(0, len(hidden))
        trainer.train(scoring.tokens, [(0, len(hidden))], hidden, length=scoring.length)
        try:
            return (yield from SGDMode(lr=0.0).score(scoring))
        finally:
            trainer.restore()


def test_the_law_catches_a_mode_that_trains_first() -> None:
    assert looks_ahead(ROWS["SGD"], TrainsFirst(**dataclasses.asdict(SGD)))


@of_each(ROWS)
def test_it_scores_the_targets_of_all_modes_each_once(row: Row) -> None:
    """They are those of non-overlapping windows; all of a text that is shorter than one; none is one error."""
    model, longest = tiny_gpt(**row.model), max(LENGTH, row.settings.get("seq_len", 0))
    for count in (1, LENGTH - 1, 3 * LENGTH - 1):
        expected = count // longest * longest or count
        assert scored(model, documents((60,))[: count + 1], **row.settings).score.tokens == expected
    for count in (0, 1):
        with pytest.raises(DataError, match=rf"the text has {count} tokens?, and the first is not scored"):
            scored(model, documents()[:count], **row.settings)


@of_each(ROWS)
def test_the_model_stays_as_it_is_even_if_interrupted(row: Row) -> None:
    model, done_before, changed = tiny_gpt(**row.model), [0.0], []
    initial = weights(model)

    def interrupt(done: float, total: float | None) -> None:
        assert total is not None
        assert done_before[-1] < done <= total
        done_before.append(done)
        changed.append(not same_weights(model, initial))
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored(model, documents(), **row.settings, progress=interrupt)
    assert changed[-1] == (row.settings.get("mode") in ("ttt-sgd", "ttt-multi-phase"))
    assert done_before[-1] == len(documents()) - 1
    assert same_weights(model, initial)
    assert not model.training
    assert model.loss_backend == "eager"
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@training
def test_learning_before_scoring_is_refused(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each step learned from one target more."""
    learn = Ledger.learn

    def early(ledger: Ledger, *spans: Range) -> None:
        first = int(np.flatnonzero(~ledger.scored_mask)[0])
        learn(ledger, *spans, (first, first + 1))

    monkeypatch.setattr(Ledger, "learn", early)
    with pytest.raises(RuleError, match=r"learn from target \d+ before"):
        scored(tiny_gpt(**row.model), documents(), **row.settings)


SHARED = ("sliding", "documents", "stream", "segments", "SGD, two windows", "LoRA", "phases")


def as_rank(world: World, folder: Path) -> None:
    results = {}
    for name, row in ((name, ROWS[name]) for name in SHARED):
        result = scored(tiny_gpt(**row.model), documents(), world=world, **row.settings)
        results[name] = (result.losses, result.score.bpb, result.report and result.report.tokens)
    torch.save(results, folder / f"{world.rank}.pt")
    twice = Ledger(4)
    twice.score(1, 2)
    with pytest.raises(RuleError, match="target 1 is scored on two ranks"):
        twice.all_reduce(0, 4, world, DEVICE)


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Each target is scored on one of them, and both know the score of all."""
    run_in_process_group(as_rank, 2, tmp_path / "run")
    ranks = [torch.load(tmp_path / "run" / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for name, row in ((name, ROWS[name]) for name in SHARED):
        alone = scored(tiny_gpt(**row.model), documents(), **row.settings)
        assert alone.losses is not None
        parts = np.array([rank[name][0] for rank in ranks])
        assert (np.isnan(parts).sum(0) == 1).all(), name
        np.testing.assert_allclose(np.nansum(parts, 0), alone.losses, rtol=5e-4, atol=5e-4, err_msg=name)
        assert ranks[0][name][1:] == ranks[1][name][1:]
        assert ranks[0][name][1] == pytest.approx(alone.score.bpb, rel=1e-4)
        assert ranks[0][name][2] == (alone.report and alone.report.tokens)
