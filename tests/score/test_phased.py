"""A stream by documents, in phases: equal to scoring and learning by turns, by hand; to any ranks; to one stopped."""

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

from birdie.errors import ConfigError, RuleError, WeightsError
from birdie.golf.audit import probes
from birdie.golf.audit.rules import CAUSAL
from birdie.model.gpt import GPT
from birdie.runtime.distributed import SharedCounter, World
from birdie.score.adapt import learn
from birdie.score.chunks import Adapted, Keeping
from birdie.score.lora import DocumentLearner, LoraSettings
from birdie.score.phased import PhasedSettings, score_documents
from birdie.score.queue import queue
from birdie.score.tally import Tally
from tests.model.technique_table import randomized
from tests.ranks import start_ranks
from tests.score.test_lora import BOS, CONTEXT, DOCUMENTS, SETTINGS, TINY, StepFirstInSilence, Table, scored, stream

CPU = torch.device("cpu")
PHASED = PhasedSettings(prefix_docs=7, phases=2, lr=0.05, chunk_tokens=16, batch_seqs=2)
CASES: dict[str, tuple[LoraSettings, PhasedSettings | None]] = {
    "documents": (SETTINGS, None),
    "phased": (SETTINGS, PHASED),
    "claimed, phased": (dataclasses.replace(SETTINGS, order="claimed"), PHASED),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model() -> GPT:
    return randomized(TINY).eval()


def by_documents(
    settings: LoraSettings = SETTINGS, phased: PhasedSettings | None = None, *, made: GPT | None = None, **more: Any
) -> tuple[NDArray[np.float64], Adapted, Tally]:
    """Nats of this rank's places, NaN elsewhere."""
    tokens = stream()
    tally = Tally(tokens, Table(), BOS, keep=True)
    told = score_documents(
        made or model(),
        tokens,
        tally,
        settings,
        **({"context": CONTEXT, "bos_id": BOS, "device": CPU, "phased": phased} | more),
    )
    assert tally.nats is not None
    return tally.nats, told, tally


def test_without_phases_it_is_the_batches() -> None:
    seen: list[tuple[float, float | None]] = []
    nats, told, tally = by_documents(progress=lambda *each: seen.append(each))
    assert np.array_equal(nats, scored(model(), stream()))
    tally.ledger.close()
    assert seen[-1] == (len(nats), len(nats))
    assert told.tokens == tally.ledger.learned
    assert told.chunks == 3
    assert f"{len(DOCUMENTS)} documents" in told.evidence
    assert by_documents(dataclasses.replace(SETTINGS, order="claimed"))[0].tobytes() == nats.tobytes()


def test_phases_are_score_learn_score() -> None:
    """The prefix of 7 documents in batches of 3: documents 1 to 3 are learned after batch 1, 1 to 7 after batch 3."""
    made, tokens, phased = model(), stream(), dataclasses.replace(PHASED, phases=2, prefix_docs=7)
    tally, found = Tally(tokens, Table(), BOS, keep=True), queue(tokens, BOS, 2)
    settings = dataclasses.replace(SETTINGS, batch_docs=2)
    nats, told, own = by_documents(settings, phased)
    for batch in range(len(found)):
        DocumentLearner(made, tokens, tally, settings, CONTEXT, 2).score(*found.batch(batch))
        documents = {1: 3, 3: 7}.get(batch)
        if documents is not None:
            ranges = list(zip(found.begins[:documents], found.stops[:documents], strict=True))
            learn(made, tokens, ranges, phased.sgd(), tally.ledger, length=CONTEXT)
    assert tally.nats is not None
    np.testing.assert_allclose(nats, tally.nats, rtol=1e-5, atol=1e-5)
    plain = by_documents(settings)[0]
    first = np.concatenate([np.arange(*each) for each in zip(found.begins[:4], found.stops[:4], strict=True)])
    later = np.setdiff1d(np.arange(len(nats)), first)
    assert np.array_equal(nats[first], plain[first])
    assert np.abs(nats[later] - plain[later]).max() > 1e-3
    assert "2 phases, the last adapted by SGD" in told.evidence
    assert told.tokens == own.ledger.learned


def test_the_model_gets_its_weights_back_unless_not_wanted() -> None:
    made = model()
    by_documents(SETTINGS, PHASED, made=made)
    assert all(torch.equal(p, q) for p, q in zip(made.parameters(), model().parameters(), strict=True))
    by_documents(SETTINGS, PHASED, made=made, restore=False)
    assert not all(torch.equal(p, q) for p, q in zip(made.parameters(), model().parameters(), strict=True))


def test_phases_end_where_they_should() -> None:
    assert PhasedSettings(prefix_docs=2500, phases=3).ends(50_000) == [833, 1666, 2500]
    assert PhasedSettings(prefix_docs=2500, phases=3).ends(2) == [1, 2]
    assert PhasedSettings(prefix_docs=1, phases=3).ends(9) == [1]
    with pytest.raises(ConfigError, match="phased phases is 0"):
        PhasedSettings(phases=0)
    with pytest.raises(ConfigError, match=r"momentum is 1\.0"):
        PhasedSettings(momentum=1.0)


def test_a_phase_that_learns_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from birdie.score import phased

    real = phased._phase
    monkeypatch.setattr(
        phased, "_phase", lambda learner, found, documents, *more: real(learner, found, documents + 3, *more)
    )
    with pytest.raises(RuleError, match=r"would learn from target .* before it is scored"):
        by_documents(SETTINGS, PHASED)


class Stopped:
    """Says stop after so many rounds."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize(
    ("settings", "phased"),
    [(SETTINGS, None), (SETTINGS, PHASED), (dataclasses.replace(SETTINGS, warm_a=True), PHASED)],
    ids=["documents", "phased", "warm"],
)
def test_what_was_stopped_goes_on(
    settings: LoraSettings, phased: PhasedSettings | None, after: int, tmp_path: Path
) -> None:
    whole, told, whole_tally = by_documents(settings, phased)
    made, file = model(), tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        by_documents(settings, phased, made=made, keeping=Keeping(file, every=0), stop=Stopped(after))
    assert all(torch.equal(p, q) for p, q in zip(made.parameters(), model().parameters(), strict=True))
    nats, again, tally = by_documents(settings, phased, made=made, keeping=Keeping(file, every=0, resume=True))
    assert nats.tobytes() == whole.tobytes()
    assert (again.steps, again.tokens) == (told.steps, told.tokens)
    assert again.evidence.split(";")[0] == told.evidence.split(";")[0]
    assert tally.score(len(nats), 1.0) == whole_tally.score(len(nats), 1.0)
    tally.ledger.close()


def test_only_its_own_scoring_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "state"
    by_documents(keeping=Keeping(file, every=1))
    whole = by_documents()[0]
    resuming = Keeping(file, resume=True)
    assert by_documents(keeping=resuming)[0].tobytes() == whole.tobytes()
    for change, words in (
        ({"lr": 0.1}, "lr 0.02 and not 0.1"),
        ({"parts": ("q",)}, "parts"),
        ({"warm_a": True}, "warm_a"),
    ):
        with pytest.raises(WeightsError, match=words):
            by_documents(dataclasses.replace(SETTINGS, **change), keeping=resuming)
    with pytest.raises(WeightsError, match="phases"):
        by_documents(SETTINGS, PHASED, keeping=resuming)
    warm = dataclasses.replace(SETTINGS, warm_a=True)
    with pytest.raises(ConfigError, match="As of its own"):
        by_documents(warm, keeping=resuming, world=World(0, 2))


def losses(kind: type[DocumentLearner], phased: PhasedSettings | None) -> Callable[[NDArray[np.int64]], Any]:
    """Of a small vocabulary, as an audit asks for them."""

    def score(stream: NDArray[np.int64]) -> NDArray[np.float64]:
        made, tokens = randomized(dataclasses.replace(TINY, vocab_size=12)).eval(), stream.astype(np.uint16)
        settings = dataclasses.replace(SETTINGS, batch_docs=1)
        if phased is None:
            return scored(made, tokens, settings, kind=kind)
        tally = Tally(tokens, Table(), BOS, keep=True)
        ways = {"context": CONTEXT, "bos_id": BOS, "device": CPU, "phased": phased}
        score_documents(made, tokens, tally, settings, **ways)
        assert tally.nats is not None
        return tally.nats

    return score


EARLY = PhasedSettings(prefix_docs=1, phases=1, lr=0.3, chunk_tokens=16, batch_seqs=2)


@pytest.mark.parametrize(
    ("kind", "phased", "verdict"),
    [(DocumentLearner, None, "pass"), (StepFirstInSilence, None, "fail"), (DocumentLearner, EARLY, "fail")],
    ids=["legal", "learns first", "phased"],
)
def test_our_own_audit_passes_documents_and_tells_what_phases_do(
    kind: type[DocumentLearner], phased: PhasedSettings | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short document, then a long one. In phases the long one is learned before the short one is scored: legal by the
    ledger, but no pass from left to right."""
    monkeypatch.setattr(probes, "BORDERS", ())
    tokens = np.array([BOS, 3, 5, 2, 7, BOS, *range(2, 12), *range(2, 8)])
    found = {each.rule: each.result for each in probes.probe_losses(losses(kind, phased), 12, tokens, positions=3)}
    assert found.pop(CAUSAL) == verdict
    assert verdict == "fail" or set(found.values()) == {"pass"}


def test_claims_are_counted_without_ranks() -> None:
    claims = SharedCounter(World())
    assert [claims.next() for _ in range(3)] == [0, 1, 2]


def as_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for name, (settings, phased) in CASES.items():
        nats, told, tally = by_documents(settings, phased, world=World(rank, 2))
        score = tally.score(len(nats), 1.0, World(rank, 2), CPU)
        found[name] = {"nats": nats.tolist(), "bpb": score.bpb, "tokens": told.tokens if phased is None else None}
    state, world = Path(folder) / "state", World(rank, 2)
    settings = dataclasses.replace(SETTINGS, batch_docs=1)
    try:
        by_documents(settings, PHASED, world=world, keeping=Keeping(state, every=0), stop=Stopped(1))
    except KeyboardInterrupt:
        dist.barrier()
        nats = by_documents(settings, PHASED, world=world, keeping=Keeping(state, resume=True))[0]
        found["stopped"] = {"nats": nats.tolist()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_give_the_score_of_one(tmp_path: Path) -> None:
    start_ranks(as_rank, (str(tmp_path),), 2)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name, (settings, phased) in CASES.items():
        nats, told, tally = by_documents(settings, phased)
        parts = np.array([rank[name]["nats"] for rank in ranks])
        assert (np.isnan(parts).sum(0) == 1).all(), name  # each place on one rank
        np.testing.assert_allclose(np.nansum(parts, 0), nats, rtol=5e-4, atol=5e-4)
        for rank in ranks:
            assert rank[name]["bpb"] == pytest.approx(tally.score(len(nats), 1.0).bpb, rel=1e-4)
            assert rank[name]["tokens"] in (None, told.tokens)
    whole = by_documents(dataclasses.replace(SETTINGS, batch_docs=1), PHASED)[0]
    stopped = np.nansum([rank["stopped"]["nats"] for rank in ranks], 0)
    np.testing.assert_allclose(stopped, whole, rtol=5e-4, atol=5e-4)
