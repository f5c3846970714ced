"""Multi-phase TTT: it equals scoring and training in turns by hand, on any ranks."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from birdie.errors import ConfigError, RuleError
from birdie.golf.audit import probes
from birdie.golf.audit.rules import CAUSAL
from birdie.model.gpt import GPT
from birdie.runtime.distributed import World
from birdie.score.accumulator import Accumulator
from birdie.score.mode import Scoring, TrainingReport
from birdie.score.modes import LoRAMode, MultiPhaseMode
from birdie.score.ttt.lora import DocumentTrainer, document_queue, score_documents
from birdie.score.ttt.multi_phase import SGDPhases
from birdie.score.ttt.sgd import train_on_ranges
from tests.device import DEVICE
from tests.model.technique_table import randomized
from tests.ranks import start_ranks
from tests.score.ttt.documents import (
    BOS,
    CONTEXT,
    DOCUMENTS,
    SETTINGS,
    TINY,
    TrainFirstUndeclared,
    new_accumulator,
    one_thread,
    scored,
    stream,
)

PHASES = MultiPhaseMode(prefix_docs=7, phases=2, lr=0.05, chunk_tokens=16, batch_seqs=2)
CASES: dict[str, tuple[LoRAMode, MultiPhaseMode | None]] = {
    "documents": (SETTINGS, None),
    "phases": (SETTINGS, PHASES),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def tiny_gpt() -> GPT:
    return randomized(TINY).eval()


def by_documents(
    settings: LoRAMode = SETTINGS,
    phases: MultiPhaseMode | None = None,
    *,
    model: GPT | None = None,
    tokens: NDArray[np.uint16] | None = None,
    restore: bool = True,
    **more: Any,
) -> tuple[NDArray[np.float64], TrainingReport, Accumulator]:
    """Losses of this rank's targets, NaN elsewhere."""
    tokens = stream() if tokens is None else tokens
    scoring = Scoring(model or tiny_gpt(), tokens, new_accumulator(tokens), CONTEXT, BOS, DEVICE, **more)
    sgd = None if phases is None else SGDPhases(phases)
    report = score_documents(scoring, settings, context=CONTEXT, phases=sgd, restore=restore)
    assert scoring.accumulator.losses is not None
    return scoring.accumulator.losses, report, scoring.accumulator


def test_without_phases_it_is_the_batches() -> None:
    seen: list[tuple[float, float | None]] = []
    nats, report, accumulator = by_documents(progress=lambda *update: seen.append(update))
    assert np.array_equal(nats, scored(tiny_gpt(), stream()))
    accumulator.ledger.close()
    done, total = seen[-1]
    assert done == total == len(nats)
    assert report.tokens == accumulator.ledger.learned
    assert report.chunks == 3
    assert f" {len(DOCUMENTS)} documents" in report.diagnostics


def test_phases_are_score_train_score() -> None:
    """A prefix of 7 documents in batches of 2: documents 1 to 3 are trained on after batch 2, 1 to 7 after batch 4."""
    model, tokens, phases = tiny_gpt(), stream(), dataclasses.replace(PHASES, phases=2, prefix_docs=7)
    accumulator, queue = new_accumulator(tokens), document_queue(tokens, BOS, 2)
    settings = dataclasses.replace(SETTINGS, batch_docs=2)
    nats, report, recorded = by_documents(settings, phases)
    for batch in range(len(queue)):
        DocumentTrainer(model, tokens, accumulator, settings, CONTEXT, 2).score(*queue.batch(batch))
        documents = {1: 3, 3: 7}.get(batch)
        if documents is not None:
            ranges = list(zip(queue.begins[:documents], queue.stops[:documents], strict=True))
            train_on_ranges(model, tokens, ranges, phases, accumulator.ledger, length=CONTEXT)
    assert accumulator.losses is not None
    np.testing.assert_allclose(nats, accumulator.losses, rtol=1e-5, atol=1e-5)
    plain = by_documents(settings)[0]
    first = np.concatenate([np.arange(*span) for span in zip(queue.begins[:4], queue.stops[:4], strict=True)])
    later = np.setdiff1d(np.arange(len(nats)), first)
    assert np.array_equal(nats[first], plain[first])
    assert np.abs(nats[later] - plain[later]).max() > 1e-3
    assert " 2 phases" in report.diagnostics
    assert report.tokens == recorded.ledger.learned


def test_the_model_gets_its_weights_back_unless_told_otherwise() -> None:
    model = tiny_gpt()
    by_documents(SETTINGS, PHASES, model=model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), tiny_gpt().parameters(), strict=True))
    by_documents(SETTINGS, PHASES, model=model, restore=False)
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), tiny_gpt().parameters(), strict=True))


def test_phases_end_at_equal_shares_of_the_prefix() -> None:
    assert MultiPhaseMode(prefix_docs=2500, phases=3).ends(50_000) == [833, 1666, 2500]
    assert MultiPhaseMode(prefix_docs=2500, phases=3).ends(2) == [1, 2]
    assert MultiPhaseMode(prefix_docs=1, phases=3).ends(9) == [1]
    with pytest.raises(ConfigError, match="phases is 0"):
        MultiPhaseMode(phases=0)
    with pytest.raises(ConfigError, match=r"momentum is 1\.0"):
        MultiPhaseMode(momentum=1.0)


def test_a_phase_on_unscored_documents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SGDPhases.run
    monkeypatch.setattr(SGDPhases, "run", lambda self, documents, *more: run(self, documents + 3, *more))
    with pytest.raises(RuleError, match=r"learn from target \d+"):
        by_documents(SETTINGS, PHASES)


def test_an_interruption_gives_the_model_its_weights_back() -> None:
    model = tiny_gpt()

    def interrupt(done: float, total: float | None) -> None:
        if done == total:
            assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), tiny_gpt().parameters(), strict=True))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        by_documents(SETTINGS, PHASES, model=model, progress=interrupt)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), tiny_gpt().parameters(), strict=True))


def losses(kind: type[DocumentTrainer], phases: MultiPhaseMode | None) -> Callable[[NDArray[np.int64]], Any]:
    """Scorer of a small vocabulary, as an audit probes it."""

    def score(text: NDArray[np.int64]) -> NDArray[np.float64]:
        model, tokens = randomized(dataclasses.replace(TINY, vocab_size=12)).eval(), text.astype(np.uint16)
        settings = dataclasses.replace(SETTINGS, batch_docs=1)
        if phases is None:
            return scored(model, tokens, settings, kind=kind)
        return by_documents(settings, phases, model=model, tokens=tokens)[0]

    return score


EARLY = MultiPhaseMode(prefix_docs=1, phases=1, lr=0.3, chunk_tokens=16, batch_seqs=2)


@pytest.mark.parametrize(
    ("kind", "phases", "result"),
    [(DocumentTrainer, None, "pass"), (TrainFirstUndeclared, None, "fail"), (DocumentTrainer, EARLY, "fail")],
    ids=["legal", "trains first", "phases"],
)
def test_the_audit_passes_documents_and_reports_what_phases_do(
    kind: type[DocumentTrainer], phases: MultiPhaseMode | None, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short document, then a long one. In phases the model trains on the long one before the short one is scored:
    allowed by the ledger, but no pass from left to right."""
    monkeypatch.setattr(probes, "BORDERS", ())
    tokens = np.array([BOS, 3, 5, 2, 7, BOS, *range(2, 12), *range(2, 8)])
    findings = probes.probe_losses(losses(kind, phases), 12, tokens, positions=3)
    results = {finding.rule: finding.result for finding in findings}
    assert results.pop(CAUSAL) == result
    assert result == "fail" or set(results.values()) == {"pass"}


def as_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    world, results = World(rank, 2), {}
    for name, (settings, phases) in CASES.items():
        nats, report, accumulator = by_documents(settings, phases, world=world)
        score = accumulator.score(len(nats), 1.0, world, DEVICE)
        tokens = report.tokens if phases is None else None
        results[name] = {"nats": nats.tolist(), "bpb": score.bpb, "tokens": tokens}
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    start_ranks(as_rank, (str(tmp_path),), 2)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name, (settings, phases) in CASES.items():
        nats, report, accumulator = by_documents(settings, phases)
        parts = np.array([rank[name]["nats"] for rank in ranks])
        assert (np.isnan(parts).sum(0) == 1).all(), name  # each target on one rank
        np.testing.assert_allclose(np.nansum(parts, 0), nats, rtol=5e-4, atol=5e-4)
        for rank in ranks:
            assert rank[name]["bpb"] == pytest.approx(accumulator.score(len(nats), 1.0).bpb, rel=1e-4)
            assert rank[name]["tokens"] in (None, report.tokens)
